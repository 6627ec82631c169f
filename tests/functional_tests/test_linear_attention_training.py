"""Gated delta nets, Kimi delta attention, hybrid models: layouts equal one rank, planted errors are found; resuming."""

import dataclasses

import numpy as np
import pytest

from tests.test_utils.gpt_runs import losses, train_with_errors
from tests.test_utils.layout_table import CP2, CP4, DROPOUT, FSDP, GATHER, LLAMA, PP2, SP, TP2, VPP, ZB
from tests.test_utils.layouts import FEW_STEPS, Layout

HEADS = "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 6 --linear-value-head-dim 4"
VARIANT = f"--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --attention-output-gate {HEADS}"
DELTA = f"{LLAMA} --num-layers 4 {VARIANT}"
PACKED = f"{DELTA} --reset-position-ids --reset-attention-mask"
EXPERTS = (
    f"{PACKED} --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    " --moe-router-load-balancing-type none"
)
MAMBA = "--mamba-num-heads 8 --mamba-head-dim 6 --mamba-num-groups 4 --mamba-state-dim 5"
HYBRID = (
    f"{LLAMA} --num-layers 6 --hybrid-layer-pattern MG-M*- {HEADS} {MAMBA} --reset-position-ids --reset-attention-mask"
)
MIXED_EXPERTS = (
    f"{LLAMA} --hybrid-layer-pattern MEM* {MAMBA} --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2"
    " --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
)
KIMI_HEADS = "--linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 4"
LATENT = "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 6"
KIMI = (  # as in Kimi Linear: latent attention without positions, the first layer dense
    f"{LLAMA.replace('--position-embedding-type rope', '--position-embedding-type none')} --num-layers 4"
    f" --experimental-attention-variant kda --linear-attention-freq 4 {KIMI_HEADS} {LATENT} --qk-layernorm"
    " --rope-type none --reset-position-ids --reset-attention-mask"
)
KIMI_FP8 = (
    f"{LLAMA} --num-layers 2 --hybrid-layer-pattern K- --linear-num-key-heads 32 --linear-num-value-heads 32"
    " --linear-key-head-dim 4 --linear-value-head-dim 16 --micro-batch-size 1 --fp8-format hybrid"
    " --fp8-recipe tensorwise"
)
KIMI_EXPERTS = (
    f"{KIMI} --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    " --moe-router-load-balancing-type none --moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 24"
)
DEPTHS = MIXED_EXPERTS.replace("MEM*", "MG*-/ME/ME") + f" {HEADS}"
FP8 = (  # projections of multiples of 16 on two ranks
    f"{LLAMA} --num-layers 6 --hybrid-layer-pattern MG-M*- --linear-num-key-heads 16 --linear-num-value-heads 16"
    " --linear-key-head-dim 4 --linear-value-head-dim 4 --mamba-num-heads 32 --mamba-head-dim 4 --mamba-num-groups 8"
    " --mamba-state-dim 8 --micro-batch-size 1 --fp8-format hybrid --fp8-recipe"
)
OFFLOADED = (
    "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules delta_rule gdn_norm_out"
    " ssm mamba_norm_out core_attn"
)
OLMO = f"{DELTA} --linear-allow-neg-eigval --norm-placement mixed --qk-layernorm --qk-layernorm-across-heads"
RECOMPUTED = "--recompute-granularity selective --recompute-modules core_attn delta_rule gdn_norm_out layernorm"
LAYOUTS = {
    "tp2": Layout(DELTA, TP2, 2),
    "tp4-sp-packed": Layout(PACKED, f"{TP2} {SP} --tensor-model-parallel-size 4", 4),
    "tp2-sp-overlap": Layout(DELTA, f"{TP2} {SP} --micro-batch-size 2 --tp-comm-overlap", 2),
    "pp2-vpp-zero-bubble": Layout(PACKED, f"{PP2} {VPP} {ZB}", 2),
    "zero2-gather": Layout(PACKED, f"--micro-batch-size 2 {GATHER}", 2),
    "fsdp2": Layout(DELTA, f"--micro-batch-size 2 {FSDP}", 2),
    "cp2": Layout(DELTA, CP2, 2),
    "cp2-heads-packed": Layout(PACKED, f"{CP2} --cp-comm-type a2a", 2),
    "cp4-packed": Layout(PACKED, CP4, 4),
    "cp4-chunks-shorter-than-a-convolution": Layout(f"{PACKED} --seq-length 16", CP4, 4),
    "cp2-tp2-sp-packed": Layout(PACKED, f"{CP2} {TP2} {SP}", 4),
    "ep2-tp2-sp": Layout(EXPERTS, f"{TP2} {SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 2),
    "hybrid-tp4-sp": Layout(HYBRID, f"{TP2} {SP} --tensor-model-parallel-size 4", 4),
    "hybrid-cp4": Layout(HYBRID, CP4, 4),
    "hybrid-cp2-heads-tp2": Layout(HYBRID, f"{CP2} {TP2} --cp-comm-type a2a", 4),
    "hybrid-pp2-by-pattern": Layout(HYBRID.replace("MG-M*-", "MG-|M*-"), PP2, 2),
    "hybrid-depths-pp2-tp2": Layout(DEPTHS.replace("MG*-", "MG|*-"), f"{PP2} {TP2} {SP}", 4),
    "hybrid-depths-repeated-cp2": Layout(f"{DEPTHS} --mtp-use-repeated-layer", CP2, 2),
    "hybrid-ep2": Layout(MIXED_EXPERTS, "--micro-batch-size 2 --expert-model-parallel-size 2", 2),
    "hybrid-recompute": Layout(
        HYBRID,
        "--micro-batch-size 4 --recompute-granularity selective --recompute-modules ssm mamba_norm_out delta_rule",
        1,
    ),
    "hybrid-dropout-tp2-sp": Layout(f"{HYBRID} {DROPOUT}", f"{TP2} {SP}", 2),
    "hybrid-offload": Layout(HYBRID, f"--micro-batch-size 4 {OFFLOADED}", 1),
    "hybrid-fp8-tp2-sp": Layout(f"{FP8} tensorwise", f"--tensor-model-parallel-size 2 {SP}", 2),
    "hybrid-fp8-delayed-pp2": Layout(f"{FP8} delayed --fp8-amax-history-len 3", "--pipeline-model-parallel-size 2", 2),
    "olmo-cp2-tp2-sp": Layout(OLMO.replace("--attention-output-gate", ""), f"{CP2} {TP2} {SP}", 4),
    "kimi-fp8-tp2-sp": Layout(KIMI_FP8, f"--tensor-model-parallel-size 2 {SP}", 2),
    "kimi-tp2-sp": Layout(KIMI, f"{TP2} {SP}", 2),
    "kimi-cp4": Layout(KIMI, CP4, 4),
    "kimi-cp2-heads-tp2": Layout(KIMI, f"{CP2} {TP2} --cp-comm-type a2a", 4),
    "kimi-pp2": Layout(KIMI, PP2, 2),
    "kimi-ep2": Layout(KIMI_EXPERTS, "--micro-batch-size 2 --expert-model-parallel-size 2", 2),
    "kimi-fsdp2": Layout(KIMI, f"--micro-batch-size 2 {FSDP}", 2),
    "kimi-muon-tp2-zero": Layout(f"{KIMI} --optimizer muon", f"{TP2} --use-distributed-optimizer", 4),
    "kimi-recompute": Layout(KIMI, f"--micro-batch-size 4 {RECOMPUTED}", 1),
    "muon-tp2-zero": Layout(f"{DELTA} --optimizer muon", f"{TP2} --use-distributed-optimizer", 4),
    "recompute": Layout(PACKED, f"--micro-batch-size 4 {RECOMPUTED}", 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(matrix, name):
    verdict = matrix.verdict(dataclasses.replace(LAYOUTS[name], steps=3 if "delayed" in name else FEW_STEPS))
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))


@pytest.mark.parametrize(
    "name, fault",
    [
        ("tp4-sp-packed", "norm_gradients_not_summed"),
        ("cp4-packed", "documents_unknown_to_linear_attention"),
        ("cp2", "states_begin_at_zero_on_every_rank"),
        ("kimi-cp4", "documents_unknown_to_linear_attention"),
        ("kimi-cp4", "gradients_of_states_lost_on_all_but_the_last_rank"),
        ("cp2", "gradients_of_states_lost_on_all_but_the_last_rank"),
    ],
)
def test_planted_error_is_found(matrix, name, fault):
    assert not matrix.verdict(dataclasses.replace(LAYOUTS[name], steps=1), fault).equal


def train(pool, world_size, dataset, save, *flags):
    argv = [*DELTA.split(), "--split", "80,10,10", "--save-interval", "4", "--data-path", str(dataset)]
    return pool.run(train_with_errors, world_size, [*argv, "--save", str(save), *map(str, flags)], True)


def test_a_run_resumes_bit_for_bit_and_continues_in_another_layout(gloo_pool, dataset, tmp_path):
    full, parts, other = (tmp_path / name for name in ("whole", "parts", "other"))
    sizes = ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2]
    layout = [*sizes, "--sequence-parallel", "--use-distributed-optimizer", "--ckpt-step", 4]
    runs = [
        train(gloo_pool, 1, dataset, full),
        train(gloo_pool, 1, dataset, parts, "--exit-interval", 4),
        train(gloo_pool, 1, dataset, parts, "--load", parts),
        train(gloo_pool, 4, dataset, other, "--load", full, *layout),
    ]
    assert [code for ranks in runs for code, _ in ranks] == [0] * 7, runs
    assert (parts / "metrics.jsonl").read_bytes() == (full / "metrics.jsonl").read_bytes()
    np.testing.assert_allclose(losses(other), losses(full)[4:], rtol=1e-11)
    ((code, text),) = train(gloo_pool, 1, dataset, tmp_path / "changed", "--load", full, "--linear-conv-kernel-dim", 3)
    assert code and "linear_conv_kernel_dim is 3, the checkpoint has 4" in text
