"""Patterns of hybrid models: kinds, prediction depths, problems."""

from types import SimpleNamespace

import pytest

from megatron.core.config.hybrid import check_hybrid_pattern
from megatron.core.config.layer_kinds import norm_places, recurrent_kinds
from megatron.training.arguments import parse_args, validate_args

SIZES = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 "
    "--mamba-num-heads 8 --lr 1 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"
)


KDA = "--experimental-attention-variant kda --linear-num-value-heads 16"


def resolved(line):
    return validate_args(parse_args(f"{SIZES} {line}".split()), 2)


@pytest.mark.parametrize(("pattern", "message"), [
    ("", "has no layers"), ("|", "has no layers"), ("/M", "has no layers"), ("MX", "has 'X'; symbols are"),
    ("M*/M/*", "depths that differ"), ("M*/", "depths that differ, are empty"), ("M*/M|M", "are empty or have |"),
])  # fmt: skip
def test_invalid_pattern_is_rejected(pattern, message):
    with pytest.raises(ValueError, match=message):
        check_hybrid_pattern(pattern)


@pytest.mark.parametrize(("line", "layout", "num_layers", "num_depths"), [
    ("--hybrid-layer-pattern M-M-|M-M*-/MM/MM --pipeline-model-parallel-size 2", "Et*4|t*5mmL", 9, 2),
    ("--hybrid-layer-pattern M-|M* --pipeline-model-parallel-size 2", "Et*2|t*2L", 4, None),
    ("--hybrid-layer-pattern M-M*/M- --pipeline-model-parallel-size 2", None, 4, 1),
    ("--hybrid-layer-pattern M-|M*/M", None, 4, 1),
])  # fmt: skip
def test_pattern_sets_layers_depths_and_stages(line, layout, num_layers, num_depths):
    model = resolved(line).model
    assert (model.pipeline_model_parallel_layout, model.num_layers, model.mtp_num_layers) == (
        layout, num_layers, num_depths
    )  # fmt: skip


@pytest.mark.parametrize(("line", "message"), [
    ("--hybrid-layer-pattern M*/M --mtp-num-layers 2", "2: contradicts --hybrid-layer-pattern, which has 1"),
    ("--hybrid-layer-pattern M* --mtp-num-layers 1", "which has 0 prediction depths"),
    ("--hybrid-layer-pattern M*/E", "has E exactly if there are --num-experts"),
    ("--hybrid-layer-pattern */+", "has \\+ exactly if --multi-latent-attention"),
    ("--hybrid-layer-pattern K*", "--linear-num-value-heads 32: differs from --linear-num-key-heads 16"),
    (f"--num-layers 2 {KDA} --linear-value-head-dim 8 --bf16 --fp8-format hybrid", "decays and gates, 8 per rank"),
    (f"--num-layers 2 {KDA} --norm-placement mixed --apply-residual-connection-post-layernorm", "mixed"),
    ("--num-layers 2 --norm-placement mixed", "mixed: is the same as post without linear attention"),
    ("--multi-latent-attention --kv-lora-rank 8 --num-layers 2 --rope-type none", "requires --position-embedding-type"),
    ("--hybrid-layer-pattern */M --mamba-num-groups 3", "--mamba-num-groups 3: does not divide 8 heads"),
])  # fmt: skip
def test_contradicting_flags_are_rejected(line, message):
    with pytest.raises(Exception, match=message):
        resolved(line)


def test_prediction_depths_count_as_layers():
    assert recurrent_kinds(resolved("--hybrid-layer-pattern *-/M").model) == {"mamba"}
    assert recurrent_kinds(resolved("--hybrid-layer-pattern *-/G").model) == {"gated_delta_net"}


def test_prediction_depth_has_the_norms_of_the_last_layer():
    config = SimpleNamespace(norm_placement="mixed", num_layers=2, experimental_attention_variant="gated_delta_net",
                             linear_attention_freq=2)  # fmt: skip
    assert [norm_places(config, number) for number in (1, 2, 3)] == [(True, False), (False, True), (False, True)]
