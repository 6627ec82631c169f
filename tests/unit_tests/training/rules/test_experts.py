"""Impossible mixtures of experts are rejected before the start, with all problems at once and a fix for each; expert
settings of a dense model are accepted with one notice."""

import pytest

from megatron.core.config.moe import has_side_losses
from megatron.core.config.transformer_config import TransformerConfig
from megatron.training.arguments import parse_args, validate_args
from megatron.training.notices import notices
from tests.unit_tests.training.rules.test_run_all import TINY, problems

MOE = "--num-experts 8 "
GROUPS = MOE + "--moe-router-num-groups 4 --moe-router-group-topk 2 "
QUANTILES = "--moe-router-load-balancing-type quantile_balancing "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "
SHARED = "--moe-shared-expert-intermediate-size 48 "


RECORDED = (
    "--cuda-graph-impl local: records one micro-batch as a CUDA graph, which here reads the rows of each expert on the "
    "host "
)


@pytest.mark.parametrize(
    "text",
    [
        MOE, MOE + "--expert-model-parallel-size 4", MOE + TP2 + "--expert-model-parallel-size 2",
        MOE + TP2 + "--expert-tensor-parallel-size 1 --expert-model-parallel-size 4", GROUPS + "--moe-router-topk 4",
        MOE + "--moe-layer-freq [0,1] --moe-ffn-hidden-size 40 --expert-tensor-parallel-size 4",
        MOE + "--moe-router-topk 1 --moe-router-pre-softmax", MOE + "--moe-router-topk 8",
        MOE + "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
        MOE + QUANTILES + "--moe-router-score-function sigmoid --moe-z-loss-coeff 1e-3",
        MOE + "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-3",
        MOE + "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk 1",
        MOE + "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity --moe-token-drop-policy position",
        MOE + SHARED + "--moe-shared-expert-gate --moe-shared-expert-overlap",
        MOE + "--expert-model-parallel-size 2 --use-distributed-optimizer --num-distributed-optimizer-instances 2",
        MOE + "--moe-layer-freq 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
    ],
)  # fmt: skip
def test_possible_experts_are_accepted(text):
    assert problems(text, 4) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2: needs experts; --num-experts N"),
        (MOE + "--moe-layer-freq [0,1,1]", "--moe-layer-freq 0 1 1: has 3 entries for 2 layers"),
        ("--num-experts 6 --expert-model-parallel-size 4",
         "--num-experts 6: is not a multiple of --expert-model-parallel-size 4; nearest: 4 or 8; or an"
         " --expert-model-parallel-size of 1, 2, 3, 6"),
        (MOE + "--moe-ffn-hidden-size 30 --expert-tensor-parallel-size 4",
         "--moe-ffn-hidden-size 30: is not a multiple of the 4 expert-tensor-parallel ranks; nearest: 28"),
        (MOE + TP2 + "--moe-ffn-hidden-size 31", "--moe-ffn-hidden-size 31: is not a multiple of the 2 expert-tensor"),
        (MOE + TP2 + "--moe-shared-expert-intermediate-size 5",
         "--moe-shared-expert-intermediate-size 5: is not a multiple of --tensor-model-parallel-size 2; nearest: 4"),
        (MOE + TP2 + "--moe-shared-expert-intermediate-size 5 --expert-tensor-parallel-size 1",
         "--moe-shared-expert-intermediate-size 5: is not a multiple of --tensor-model-parallel-size 2; nearest: 4"),
        (MOE + "--expert-model-parallel-size 8",
         "--expert-model-parallel-size 8: x expert-tensor-parallel 1 x pipeline 1 does not divide the world size 4;"
         " sizes that do: 1, 2, 4"),
        (MOE + "--expert-model-parallel-size 2 --use-distributed-optimizer --num-distributed-optimizer-instances 4",
         "--num-distributed-optimizer-instances 4: do not divide the 2 data-parallel ranks of experts"),
        (MOE + "--tensor-model-parallel-size 2",
         "--num-experts 8: with --tensor-model-parallel-size > 1 requires --sequence-parallel; add"),
        (MOE + "--moe-router-topk 9", "--moe-router-topk 9: is more than --num-experts 8"),
        (MOE + "--moe-router-topk 1",
         "--moe-router-topk 1: gives the router no gradient: the softmax over one selected expert is always 1; add"),
        (MOE + "--moe-router-enable-expert-bias",
         "--moe-router-enable-expert-bias: requires scores that are independent per expert; --moe-router"),
        (MOE + "--moe-router-load-balancing-type sinkhorn --moe-router-score-function sigmoid",
         "--moe-router-load-balancing-type sinkhorn: sinkhorn does not support expert groups"),
        (GROUPS + QUANTILES, QUANTILES.strip() + ": quantile_balancing does not support"),
        (MOE + QUANTILES + "--moe-expert-capacity-factor 1",
         QUANTILES.strip() + ": quantile_balancing does not support"),
        (MOE + QUANTILES + "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
         QUANTILES.strip() + ": quantile_balancing does not support"),
        (MOE + QUANTILES + "--moe-router-topk 8",
         "--moe-router-topk 8: selects all experts, so that quantile_balancing has no choice; at most 7"),
        ("--num-experts 5 " + QUANTILES, "--num-experts 5: does not divide the"),
        (MOE + "--moe-router-num-groups 2",
         "--moe-router-num-groups 2: requires --moe-router-group-topk; give both or none"),
        (MOE + "--moe-router-group-topk 2",
         "--moe-router-group-topk 2: requires --moe-router-num-groups; give both or none"),
        (MOE + "--moe-router-num-groups 3 --moe-router-group-topk 1",
         "--moe-router-num-groups 3: does not divide --num-experts 8; divisors: 1, 2, 4, 8"),
        (MOE + "--moe-router-num-groups 2 --moe-router-group-topk 4",
         "--moe-router-group-topk 4: is more than --moe-router-num-groups 2"),
        (GROUPS + "--moe-router-topk 3",
         "--moe-router-group-topk 2: does not divide --moe-router-topk 3 evenly among groups of 2"),
        (GROUPS + "--moe-router-topk 6",
         "--moe-router-group-topk 2: does not divide --moe-router-topk 6 evenly among groups of 2"),
        (GROUPS + "--moe-router-topk 5 --moe-router-group-score-topk 2",
         "--moe-router-group-topk 2: does not divide --moe-router-topk 5 evenly among groups of 2"),
        (MOE + "--moe-router-group-score-topk 2",
         "--moe-router-group-score-topk 2: requires --moe-router-num-groups; remove it"),
        (GROUPS + "--moe-router-group-score-topk 3",
         "--moe-router-group-score-topk 3: must be at most 2, the number of experts per group"),
        (MOE + "--moe-aux-loss-coeff 0.1 0.2",
         "--moe-aux-loss-coeff 0.1 0.2: has 2 values for 1 balancing type (--moe-router-load-balancing-type); give"),
        (MOE + "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
         "--moe-aux-loss-coeff 0.1: applies only to auxiliary losses; 0 for sinkhorn"),
        (MOE + "--moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 0.1 0",
         "--moe-router-load-balancing-type aux_loss none: may list several auxiliary losses, each once, but not"),
        (MOE + "--moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.1",
         "--moe-router-load-balancing-type aux_loss aux_loss: may list several auxiliary losses, each once"),
        (MOE + "--moe-pad-expert-input-to-capacity",
         "--moe-pad-expert-input-to-capacity: needs --moe-expert-capacity-factor: without it no token is dropped"),
        (MOE + "--moe-expert-capacity-factor 1 --moe-router-load-balancing-type sinkhorn",
         "--moe-expert-capacity-factor 1.0: contradicts sinkhorn, which has no capacity"),
        (MOE + "--moe-static-rows --moe-token-dispatcher-type alltoall",
         "--moe-static-rows: requires the allgather dispatcher: others need token counts on the host; --moe"),
        (MOE + "--moe-shared-expert-overlap",
         "--moe-shared-expert-overlap: needs a shared expert; --moe-shared-expert-intermediate-size N, or remove it"),
        (MOE + "--moe-shared-expert-gate", "--moe-shared-expert-gate: needs a shared expert; --moe-shared-expert-inte"),
        (MOE + "--cuda-graph-impl local",
         RECORDED + "(without"),
        (MOE + "--cuda-graph-impl local --bf16 --no-moe-fusion",
         RECORDED + "(--no"),
        (MOE + "--cuda-graph-impl local --bf16 --moe-ffn-hidden-size 100",
         RECORDED + "(width"),
    ],
)  # fmt: skip
def test_impossible_experts_are_named(text, problem):
    result = problems(text, 4)
    assert any(item.startswith(problem) for item in result), result


def test_all_problems_of_experts_are_reported_at_once():
    text = "--num-experts 6 --moe-router-topk 7 --tensor-model-parallel-size 2 --expert-model-parallel-size 4"
    text += " --moe-router-num-groups 4 --moe-shared-expert-overlap --moe-pad-expert-input-to-capacity"
    assert [problem.split()[0].rstrip(":") for problem in problems(text, 4)] == [
        "--num-experts", "--moe-router-topk", "--moe-router-num-groups", "--moe-pad-expert-input-to-capacity",
        "--moe-shared-expert-overlap", "--expert-model-parallel-size", "--num-experts",
    ]  # fmt: skip


def said(text):
    inputs = parse_args(f"{TINY} {text}".split())
    reported = notices(inputs, validate_args(inputs, 1))
    return [item for item in reported if any(word in item for word in ("--num-experts", "flex", "upcycling", "coeff"))]


def test_settings_of_experts_without_experts_get_one_notice():
    assert said("--moe-router-topk 2 --moe-layer-freq [0,1,1] --expert-tensor-parallel-size 1 --no-moe-fusion") == [
        "expert_tensor_parallel_size, moe_fusion, moe_layer_freq, moe_router_topk: no effect without --num-experts N"
    ]
    assert said("") == [] and said("--num-experts 4 --moe-router-topk 2") == []


def test_coefficient_of_routing_without_a_loss_gets_one_notice_and_adds_no_loss():
    text = "--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.001"
    assert said(text) == ["--moe-aux-loss-coeff 0.001: no effect with --moe-router-load-balancing-type none"]
    assert problems(text) == [] and said(text.replace("0.001", "0")) == []
    assert not has_side_losses(validate_args(parse_args(f"{TINY} {text}".split()), 1).model)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 4}
    config = TransformerConfig(**sizes, moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.001)
    assert not has_side_losses(config) and config.moe_aux_loss_coeff == [0.001]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--moe-use-upcycling --load x", "--moe-use-upcycling: needs experts; --num-experts N"),
        ("--moe-use-upcycling --num-experts 4", "--moe-use-upcycling: needs the dense model's checkpoint"),
        ("--moe-use-upcycling --load x --num-experts 6 --moe-upcycling-granularity 4",
         "--moe-upcycling-granularity 4: does not divide --num-experts 6; divisors: "),
    ],
)  # fmt: skip
def test_upcycling_needs_a_dense_model_and_slices_that_fit(text, problem):
    assert [item[: len(problem)] for item in problems(text, 1)] == [problem]


def test_slices_without_upcycling_get_a_notice():
    assert said("--num-experts 4 --moe-upcycling-granularity 2") == [
        "--moe-upcycling-granularity: no effect without --moe-use-upcycling"
    ]


def test_latent_attention_with_learned_positions_gets_a_notice():
    inputs = parse_args(f"{TINY} --multi-latent-attention --kv-lora-rank 16".split())
    reported = [notice for notice in notices(inputs, validate_args(inputs, 1)) if "learned_absolute" in notice]
    assert len(reported) == 1 and "--position-embedding-type rope removes them" in reported[0]


def test_the_flex_dispatcher_is_all_to_all_with_one_notice():
    flex = "--num-experts 4 --moe-token-dispatcher-type flex"
    reported = "--moe-token-dispatcher-type flex: uses the alltoall dispatcher, with the same results"
    assert said(flex) == [reported]
    assert not problems(f"{flex} --moe-enable-deepep --moe-flex-dispatcher-backend hybridep --moe-deepep-num-sms 8", 1)
