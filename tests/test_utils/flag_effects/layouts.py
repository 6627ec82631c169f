"""Layouts of several ranks: groups, shapes of a rank's part, messages, buckets, schedules."""

from unittest import mock

from tests.test_utils.flag_effects.rows import (
    LAYERS,
    Probe,
    changes,
    finished,
    gives,
    keeps,
    keeps_to_rounding,
    row,
    says,
    shape,
    stops,
)

FC1 = LAYERS + "0.mlp.linear_fc1.weight"
TP, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
CP, PP = "--context-parallel-size 2", "--pipeline-model-parallel-size 2"
VARLEN = "--use-varlen-dataset --attention-dropout 0 --micro-batch-size 1"
VPP = f"{PP} --num-layers 4 --micro-batch-size 1"
ZERO = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 3000"
HALF_SUMS = f"{ZERO} --bf16 --grad-reduce-in-bf16"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BUFFER = "megatron.core.distributed.param_and_grad_buffer:"
SCHEDULE = ("megatron.core.pipeline_parallel.choose:choose_schedule",)


def group(axis, *ranks):
    """The ranks that share this axis with rank 0; other ranks have other groups."""

    def has(_, run):
        finished(run)
        assert run.rank or run.groups[axis] == ranks, run.groups

    return has


def layers(*per_rank):
    """Layers on each pipeline rank; one of two branches counts half."""

    def are(_, run):
        finished(run)
        attention, mlp = (run.modules.get(name, 0) for name in ("SelfAttention", "MLP"))
        assert (attention + mlp) / 2 == per_rank[run.rank], run.modules

    return are


def stream(*sizes):
    """Hidden states that a layer gives on each rank: sequence, batch, width."""
    return gives(lambda run: run.outputs["TransformerLayer"], sizes)


def sends(name, kind="float32"):
    return gives(lambda run: run.collectives[name, kind] > 0, True)


def calls(name, expected=True):
    return gives(lambda run: any(called.endswith(name) and count for called, count in run.called.items()), expected)


def share_of_moments(share):
    """This rank keeps about so much of the moments of all parameters."""

    def keeps_share(base, run):
        finished(base, run)
        retained, full = (sum(moment.numel() for moment in seen.moments["exp_avg"].values()) for seen in (run, base))
        assert abs(retained / full - share) < 0.1, retained / full

    return keeps_share


def padded_buckets(base, run):
    finished(run)
    assert all(size % 65536 == 0 for size, _ in run.buckets), run.buckets


def started(name):
    """A function of settings: the argument ``name`` that ``init_process_group`` receives."""

    def ask(cfg):
        import torch.distributed as dist

        from megatron.training import initialize

        launched = mock.patch.dict("os.environ", RANK="0", WORLD_SIZE="1")
        with launched, mock.patch.object(dist, "init_process_group") as start:
            initialize.start_distributed(cfg, store=mock.Mock())
        return start.call_args.args[0] if name == "backend" else start.call_args.kwargs[name].total_seconds()

    return ask


def uses_copy_engines(cfg):
    """Whether the groups of two ranks over NCCL ask for copy engines."""
    from megatron.core import parallel_state
    from megatron.training import initialize

    with mock.patch.object(parallel_state, "initialize_model_parallel") as build, mock.patch.object(
        parallel_state, "get_process_groups"
    ):
        initialize.initialize_megatron(cfg)
    return build.call_args.kwargs["copy_engines"]


def attention_kernel(cfg):
    """The kernel of a machine with a Hopper GPU and both versions of the flash-attn package."""
    import dataclasses

    from megatron.core.attention.choose import build_request, choose_kernel

    config = cfg.model
    request = build_request(config, config.window_size)
    return choose_kernel(dataclasses.replace(request, capability=(9, 0), flash_packages=(2, 3))).kernel


def norm_kernel(cfg):
    """Return the name of the class that computes norms if apex is installed."""
    import pytest

    from megatron.core.groups.process_groups import SINGLE_PROCESS
    from megatron.core.transformer.norm import build_norm
    from tests.test_utils import fake_apex

    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_apex.install(monkeypatch)
        norm = build_norm(cfg.model, 32, 1e-5, groups=SINGLE_PROCESS)
        return type(norm.normalize).__name__


TENSOR_AND_CONTEXT = [
    row("--tensor-model-parallel-size 2", gives(shape(FC1), (64, 32)), group("tp", 0, 1), ranks=2),
    row("--sequence-parallel", stream(8, 2, 32), changes("collectives"), base=TP, ranks=2),
    row("--tp-comm-overlap", changes("order"), keeps_to_rounding("weights"), base=f"{TP} {SP}", ranks=2),
    row("--context-parallel-size 2", stream(8, 2, 32), group("cp", 0, 1), ranks=2),
    row("--cp-comm-type a2a", says("AllToAllAttention"), changes("collectives"), base=CP, ranks=2),
    row("--hierarchical-context-parallel-sizes 4 1", group("cp_a2a", 0, 1, 2, 3), ranks=4,
        base="--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
    row("--use-varlen-dataset", changes("losses"), base="--attention-dropout 0 --micro-batch-size 1"),
    row("--max-seqlen-per-dp-cp-rank 64", changes("outputs"), keeps_to_rounding("losses"), base=VARLEN),
    row("--hybrid-context-parallel", changes("collectives"), keeps_to_rounding("losses"), ranks=2,
        base=f"{VARLEN} {CP} --max-seqlen-per-dp-cp-rank 16"),
    row("--min-dynamic-context-parallel-size 2", changes("collectives"), keeps_to_rounding("losses"), ranks=2,
        base=f"{VARLEN} --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 16"),
    row('--varlen-mock-dataset-config-json \'{{"p50": 4, "p95": 9, "max_seq_len": 16}}\'', changes("losses"),
        base=f"{VARLEN} --mock-data", without="--data-path"),
    row("--distribute-saved-activations", calls("split_along_first_dim"), keeps("weights"), base=f"{TP} {FULL}",
        ranks=2, count=("megatron.core.transformer.recompute:split_along_first_dim",)),
    row("--no-gradient-accumulation-fusion", calls("accumulate_product", False), keeps_to_rounding("gradients"),
        count=("megatron.core.tensor_parallel.layers:accumulate_product",)),
    row("--cross-entropy-chunk-tokens 7", calls("linear_cross_entropy"), keeps_to_rounding("losses", "gradients"),
        gives(lambda run: "7" in run.arguments, True),
        count=("megatron.core.tensor_parallel.layers:linear_cross_entropy",)),
]  # fmt: skip
PIPELINE = [
    row("--pipeline-model-parallel-size 2", group("pp", 0, 1), layers(1, 1), ranks=2),
    row("--num-layers-per-virtual-pipeline-stage 1", gives(lambda run: run.modules["GPTModel"], 2), base=VPP, ranks=2),
    row("--num-virtual-stages-per-pipeline-rank 2", gives(lambda run: run.modules["GPTModel"], 2), base=VPP, ranks=2),
    row("--microbatch-group-size-per-virtual-pipeline-stage 4", changes("order"), keeps_to_rounding("weights"),
        base=f"{VPP} --num-virtual-stages-per-pipeline-rank 2", ranks=2),
    row("--no-overlap-p2p-communication", changes("order"), keeps("weights"), base=f"{PP} --micro-batch-size 1",
        ranks=2),
    row("--decoder-first-pipeline-num-layers 1", layers(1, 3), base=f"{PP} --num-layers 4", ranks=2),
    row("--decoder-last-pipeline-num-layers 1", layers(3, 1), base=f"{PP} --num-layers 4", ranks=2),
    row("--account-for-embedding-in-pipeline-split", layers(1, 2), base=f"{PP} --num-layers 3", ranks=2),
    row("--account-for-loss-in-pipeline-split", layers(2, 1), base=f"{PP} --num-layers 3", ranks=2),
    row("--whole-layers-in-pipeline-split", layers(2, 1), base=f"{PP} --num-layers 3", ranks=2),
    row("--pipeline-model-parallel-layout Ettt|L", layers(3, 0), base=f"{PP} --num-layers 3", ranks=2),
    row("--pipeline-schedule zero-bubble", gives(lambda run: "zero-bubble" in run.arguments, True), keeps("weights"),
        base=PP, ranks=2, count=SCHEDULE),
    row("--delay-wgrad-compute", gives(lambda run: "zero-bubble" in run.arguments, True), keeps("weights"),
        base=PP, ranks=2, count=SCHEDULE),
    row("--use-tp-pp-dp-mapping", group("pp", 0, 1), group("dp", 0, 2), base=PP, ranks=4),
]  # fmt: skip
DATA_PARALLEL = [
    row("--use-distributed-optimizer", share_of_moments(0.5), calls("reduce_scatter"), keeps("losses"), ranks=2,
        count=("megatron.core.distributed.reductions:reduce_scatter",)),
    row("--num-distributed-optimizer-instances 2", group("dp_cp_shard", 0, 1), base=f"{ZERO} --micro-batch-size 1",
        ranks=4),
    row("--overlap-grad-reduce", calls("gradient_is_ready"), keeps("weights"), base="--ddp-bucket-size 3000", ranks=2,
        count=(BUFFER + "ParamAndGradBuffer.gradient_is_ready",)),
    row("--overlap-param-gather", calls("_gather_hooks"), keeps("weights"), base=f"{ZERO} {OVERLAP}", ranks=2,
        count=("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._gather_hooks",)),
    row("--ddp-num-buckets 3", gives(lambda run: len(run.buckets), 3), keeps("weights"), ranks=2),
    row("--ddp-bucket-size 3000", gives(lambda run: len(run.buckets) > 4, True), keeps("weights"), ranks=2),
    row("--ddp-pad-buckets-for-high-nccl-busbw", padded_buckets, keeps("weights"), base=ZERO, ranks=2),
    row("--ddp-reduce-scatter-with-fp32-accumulation", sends("all_to_all_single", "bfloat16"), base=HALF_SUMS, ranks=2),
    row("--use-torch-fsdp2", gives(shape(FC1), (64, 32)), keeps_to_rounding("losses"), ranks=2),
    row("--torch-fsdp2-no-reshard-after-forward", gives(lambda run: run.arguments.count("True"), 0), keeps("losses"),
        base="--use-torch-fsdp2", ranks=2,
        count=("megatron.core.distributed.torch_fully_sharded_data_parallel:fully_shard",)),
    row("--nccl-communicator-config-path {nccl}", calls("read_nccl_settings"), ranks=2,
        count=("megatron.core.parallel_state:read_nccl_settings",)),
    Probe("--distributed-backend nccl", started("backend"), "nccl"),
    Probe("--distributed-timeout-minutes 3", started("timeout"), 180.0),
    Probe("--no-copy-engines", uses_copy_engines, False),
]  # fmt: skip
KERNELS = [
    row("--apex-parts norm", stops("apex", code=2)),
    Probe("--apex-parts norm", norm_kernel, "ApexNormalize", base="--dry-run"),
    Probe("--flash-attention-version 2", attention_kernel, "flash-attn 2", base="--dry-run --bf16"),
    Probe("--attention-backend flash", attention_kernel, "flash-attn 3", base="--dry-run --bf16"),
]  # fmt: skip
ROWS = [*TENSOR_AND_CONTEXT, *PIPELINE, *DATA_PARALLEL, *KERNELS]
