"""Settings that contradict samples of different lengths are named with their fix."""

import pytest

from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.config.variable_lengths import model_cost, plan_ranks, token_limit
from megatron.training.rules.run_all import check

BASE = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 48 --max-position-embeddings 48"
    " --micro-batch-size 1 --global-batch-size 24 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 64 --eval-iters 0 --attention-dropout 0"
)
ON = "--use-varlen-dataset"
DYNAMIC = f"{ON} --hybrid-context-parallel"
LIMIT = "--max-seqlen-per-dp-cp-rank"
EXPERTS = f"{DYNAMIC} --num-experts 4 --moe-router-topk 2"
NONE = "--moe-router-load-balancing-type none"


def configure(text, world_size=4):
    return resolve(parse_args(f"{BASE} {text}".split()), world_size)


@pytest.mark.parametrize("text, ranks, expected", [
    ("--hybrid-context-parallel", 2, "--hybrid-context-parallel: requires --use-varlen-dataset; add it"),
    (f"{LIMIT} 16", 2, f"{LIMIT} 16: requires --use-varlen-dataset"),
    ("--varlen-mock-dataset-config-json {}", 1, "--varlen-mock-dataset-config-json {}: requires --use-varlen-dataset"),
    (f"{ON} --reset-attention-mask", 1, "--reset-attention-mask: contradicts --use-varlen-dataset, whose samples"),
    (f"{ON} --reset-position-ids", 1, "--reset-position-ids: contradicts --use-varlen-dataset"),
    (f"{ON} --micro-batch-size 2", 1, "--micro-batch-size 2: must be 1 with --use-varlen-dataset"),
    (f"{ON} --cuda-graph-impl local", 1, "--cuda-graph-impl local: is not supported with --use-varlen-dataset: the"),
    (f"{DYNAMIC} {LIMIT} 8", 4, f"{LIMIT}: a sample of --seq-length 48 does not fit 4 ranks of 8 tokens; at least 12"),
    (f"{DYNAMIC} {LIMIT} 8", 6, f"{LIMIT}: a sample of --seq-length 48 does not fit 4 ranks of 8 tokens; at least 12"),
    (f"{ON} --context-parallel-size 2 {LIMIT} 16", 2, f"{LIMIT}: a sample of --seq-length 48 does not fit 2 ranks"),
    (f"{DYNAMIC} {LIMIT} 48", 3, "--hybrid-context-parallel: requires an even number of data- and context-par"),
    (f"{ON} --min-dynamic-context-parallel-size 2", 2, "--min-dynamic-context-parallel-size 2: requires --hybrid-"),
    ("--min-dynamic-context-parallel-size 2", 2, "--min-dynamic-context-parallel-size 2: requires --hybrid-context"),
    (f"{DYNAMIC} {LIMIT} 48 --min-dynamic-context-parallel-size 3", 6, "--min-dynamic-context-parallel-size 3: must"),
    (f"{DYNAMIC} {LIMIT} 48 --min-dynamic-context-parallel-size 4", 6, "--min-dynamic-context-parallel-size 4: must"),
    (f"{DYNAMIC} {LIMIT} 25", 2, f"{LIMIT} 25: is not a multiple of 2, by which context"),
    (f"{DYNAMIC} --cp-comm-type a2a --num-attention-heads 6", 4, "--num-attention-heads 6: is not a multiple of --ten"),
    (EXPERTS, 2, "--moe-router-load-balancing-type aux_loss: depends on the tokens of a micro-batch"),
    (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", 2, "--moe-router-load-balancing-type sinkhorn: depends"),
    (f"{EXPERTS} {NONE} --moe-expert-capacity-factor 1", 2, "--moe-expert-capacity-factor 1.0: depends on the tokens"),
])  # fmt: skip
def test_a_contradiction_is_named_with_its_fix(text, ranks, expected):
    actual = [str(problem) for problem in check(configure(text, ranks))]
    assert any(item.startswith(expected) for item in actual), actual
    assert all("; " in item for item in actual), "a fix"


@pytest.mark.parametrize("text, ranks", [
    (ON, 1), (f"{ON} --context-parallel-size 2", 4), (f"{DYNAMIC} {LIMIT} 12", 4), (f"{DYNAMIC} {LIMIT} 12", 6),
    (f"{EXPERTS} {NONE}", 2), (f"{ON} --attention-dropout 0.1 --qk-clip", 2),
    (f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1"
     " --moe-z-loss-coeff 0.1", 2),
    (f"{ON} --dynamic-context-parallel {LIMIT} 24 --min-dynamic-context-parallel-size 2", 4),
    (f"{DYNAMIC} --pipeline-model-parallel-size 2", 8),
])  # fmt: skip
def test_supported_settings_pass(text, ranks):
    assert check(configure(text, ranks)) == []


def test_a_limit_of_zero_is_out_of_range():
    with pytest.raises(ValueError, match=f"{LIMIT} 0: must be"):
        configure(f"{DYNAMIC} {LIMIT} 0")


def test_the_default_limit_is_a_rank_s_part_of_the_longest_sample():
    assert token_limit(configure(ON, 1)) == 48
    assert token_limit(configure(f"{ON} --context-parallel-size 2", 2)) == 24
    parallel = "--tensor-model-parallel-size 3 --sequence-parallel"
    assert token_limit(configure(f"{ON} --context-parallel-size 4 {parallel}", 12)) == 12
    assert token_limit(configure(f"{DYNAMIC} --seq-length 44 --context-parallel-size 4 {parallel}", 12)) == 12


@pytest.mark.parametrize("text, ranks, expected", [
    (ON, 4, (4, 1, 1, 0)), (f"{ON} --context-parallel-size 2", 4, (4, 2, 2, 0)), (DYNAMIC, 4, (4, 1, None, 0)),
    (f"{DYNAMIC} --min-dynamic-context-parallel-size 2", 4, (4, 2, None, 0)),
    (f"{DYNAMIC} --pipeline-model-parallel-size 2", 8, (4, 1, None, 1)),
    (f"{DYNAMIC} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 8, (4, 1, None, 2)),
    (f"{DYNAMIC} --use-torch-fsdp2", 2, (2, 1, None, 1)),
    (f"{EXPERTS} {NONE} --expert-model-parallel-size 2", 2, (2, 1, None, 1)), (f"{EXPERTS} {NONE}", 2, (2, 1, None, 0)),
])  # fmt: skip
def test_ranks_that_communicate_in_every_step_run_the_same_number(text, ranks, expected):
    actual = plan_ranks(configure(text, ranks))
    assert (actual.count, actual.smallest, actual.largest, actual.aligned) == expected


def test_attention_costs_as_many_flops_as_described():
    cfg = configure(ON, 1)
    description = cfg.describe(64)
    cost = model_cost(cfg, description)
    flops = cost.token * 48 + cost.square * 48**2 * 0.65
    assert flops == pytest.approx(description.flops_per_sample)
