"""Batches, duration, exits, checks and recomputation on one rank; the program's own flags."""

from types import SimpleNamespace
from unittest import mock

from tests.test_utils.flag_effects.rows import (
    Probe,
    accepts,
    changes,
    finished,
    gives,
    keeps,
    keeps_to_rounding,
    row,
    says,
    stops,
)


def sizes(*values):
    """Sequences per iteration, as recorded and as read."""

    def are(_, run):
        finished(run)
        assert run.column("global_batch_size") == list(values), run.column("global_batch_size")
        assert len(run.samples) == sum(values)

    return are


def stops_at_nan(base, run):
    """The run with injected errors stops in its first iteration."""
    finished(base)
    assert run.code != 0 and "rank 0, iteration 1 " in run.errors and "lm loss is nan" in run.errors, run.errors


def logs_only(base, run):
    """The run logs each injected error, and trains."""
    finished(run)
    assert base.code != 0 and run.log.count("injecting error type correct_result") == 2


def iterations(*numbers):
    return gives(lambda run: run.column("iteration"), list(numbers))


def micro_batches(count):
    return gives(lambda run: len([batch for batch in run.batches if batch.training]), count)


def calls(name, count):
    return gives(lambda run: run.called[name], count)


def compares_calls(name, *, more):
    def are(base, run):
        finished(run)
        assert run.called[name] and base.called[name], (base.called, run.called)
        assert (run.called[name] > base.called[name]) is more and run.called[name] != base.called[name]

    return are


OFFLOADED = "--fine-grained-activation-offloading --offload-modules"
COPIES = ("megatron.core.transformer.offload:Offloaded.__init__",)


def forwards(name, count):
    """Forward passes of the modules of this class in one iteration of two micro-batches."""
    return gives(lambda run: run.forwards[name], count)


def synchronizations(cfg):
    """Waits for a GPU between the first four iterations."""
    import torch

    from megatron.training.trainer import Trainer

    with mock.patch.object(torch.cuda, "synchronize") as wait, mock.patch.object(torch.cuda, "empty_cache"):
        for iteration in range(1, 5):
            state, step = SimpleNamespace(iteration=iteration), SimpleNamespace(device=torch.device("cuda"))
            trainer = SimpleNamespace(cfg=cfg, state=state, step=step, collect_garbage=lambda force: None)
            Trainer.between_steps(trainer)
    return wait.call_count


def memory_returned(cfg):
    """Return how often one iteration empties the GPU memory cache: before the optimizer step, and in total."""
    import torch

    from megatron.training.step import return_memory

    with mock.patch.object(torch.cuda, "empty_cache") as empty:
        return_memory(cfg, torch.device("cuda"), 1)
        before = empty.call_count
        return_memory(cfg, torch.device("cuda"), 2)
    return before, empty.call_count


def graphs(cfg):
    """Return the class that runs the micro-batches on a GPU, and the iterations before a graph is recorded."""
    import torch

    from megatron.training.start import cuda_graphs

    with mock.patch.object(torch.cuda, "Stream"):
        chosen = cuda_graphs.make_forward_backward(cfg, torch.device("cuda"))
    return type(chosen).__name__, getattr(chosen, "remaining_warmup", None)


FULL = "--recompute-granularity full --recompute-num-layers"
SELECTIVE = "--recompute-granularity selective"
DRY = "--dry-run"
GC = ("gc:collect", "gc:disable")
ROWS = [
    row("--micro-batch-size 4", micro_batches(2), keeps("samples"), keeps_to_rounding("gradients")),
    row("--global-batch-size 8", sizes(8, 8), micro_batches(8)),
    row("--rampup-batch-size 2 2 4", sizes(2, 2, 4), base="--train-iters 3"),
    row("--step-batch-size-schedule '0:2 32:4'", sizes(2, 4), drop="--global-batch-size"),
    row("--decrease-batch-size-if-needed", accepts, sizes(4, 4), base="--global-batch-size 5"),
    row("--train-iters 3", iterations(1, 2, 3)),
    row("--train-samples 12", iterations(1, 2, 3), drop="--train-iters"),
    # documents of 80 and 56 tokens: (2 * 136 - 1) // 16 = 16 samples
    row("--num-epochs 2", iterations(1, 2, 3, 4), drop="--train-iters", base="--data-path {tinier} --split 1,0,0"),
    row("--exit-interval 1", iterations(1)),
    row("--exit-duration-in-mins 1", iterations(1, 2), base="--train-iters 5", pretend="clock_of_half_minutes"),
    row("--exit-signal-handler", iterations(1), pretend="sigterm"),
    row("--no-save-on-signal", iterations(1, 2), pretend="sigterm_of_a_terminal"),
    row("--exit-signal SIGUSR2", iterations(1), base="--exit-signal-handler", pretend="sigusr2"),
    row("--iterations-to-skip 1", gives(lambda run: run.column("skipped"), [True, False])),
    row("--no-check-for-nan-in-loss-and-grad", accepts, gives(lambda run: run.column("nan")[-1], True),
        base="--lr 1e30 --clip-grad 0 --train-iters 3"),
    row("--error-injection-rate 1", stops_at_nan),
    row("--error-injection-type correct_result", logs_only, base="--error-injection-rate 1"),
    row("--manual-gc", calls("disable", 1), count=GC),
    row("--manual-gc-interval 1", calls("collect", 3), base="--manual-gc", count=GC),
    row("--no-manual-gc-eval", calls("collect", 1), base="--manual-gc --eval-iters 1", count=GC),
    row("--recompute-activations", forwards("CoreAttention", 16), keeps("weights")),
    row("--recompute-granularity selective", forwards("CoreAttention", 16), forwards("MLP", 8), keeps("weights")),
    row("--recompute-modules mlp", forwards("MLP", 16), forwards("CoreAttention", 8), keeps("weights"), base=SELECTIVE),
    row("--fine-grained-activation-offloading", stops("requires --offload-modules", code=2)),
    row("--offload-modules attn_norm mlp_norm core_attn", compares_calls("Offloaded.__init__", more=True),
        keeps("weights"), base=f"{OFFLOADED} attn_norm --min-offloaded-tensor-size 512", count=COPIES),
    row("--min-offloaded-tensor-size 2000", calls("Offloaded.__init__", 0), keeps("weights"),
        base=f"{OFFLOADED} attn_norm mlp_norm core_attn --min-offloaded-tensor-size 512", count=COPIES),
    row("--activation-offload-fraction 0.5", compares_calls("Offloaded.__init__", more=False), keeps("weights"),
        base=f"{OFFLOADED} attn_norm mlp_norm core_attn --min-offloaded-tensor-size 512", count=COPIES),
    row("--recompute-num-layers 1", forwards("TransformerLayer", 12), keeps("weights"),
        base="--recompute-granularity full --recompute-method block --recompute-num-layers 2"),
    row("--recompute-method block", forwards("TransformerLayer", 12), keeps("weights"),
        base=f"{FULL} 1 --recompute-method uniform"),
    row("--model llama2-7b", changes("losses")),
    row("--yaml-cfg {settings}", changes("losses"), keeps("initial")),
    row("--dry-run", says("the settings are consistent"), gives(lambda run: run.records, [])),
    row("--gpu-memory 80", says("fits the GPU               yes, "), base=DRY),
    row("--dry-run-world-size 4", says("4 = tensor 1 x pipeline 1 x context 1 x data 4"),
        base=f"{DRY} --global-batch-size 8"),
    row("--cuda-graph-impl local", stops("requires an NVIDIA GPU", code=2)),
    Probe("--cuda-graph-warmup-steps 5", graphs, ("GraphedForwardBackward", 5), base=f"{DRY} --cuda-graph-impl local"),
    Probe("--cuda-graph-impl local", graphs, ("GraphedForwardBackward", 3), base=DRY),
    Probe("--train-sync-interval 2", synchronizations, 2),
    Probe("--empty-unused-memory-level 1", memory_returned, (1, 1)),
    Probe("--empty-unused-memory-level 2", memory_returned, (1, 2)),
]  # fmt: skip
