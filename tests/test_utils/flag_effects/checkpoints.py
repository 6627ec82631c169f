"""Saving, loading, logging, profiling, self-checks."""

from tests.test_utils.flag_effects.optimizer import rates
from tests.test_utils.flag_effects.rows import (
    Probe,
    accepts,
    changes,
    finished,
    gives,
    keeps,
    modules,
    row,
    says,
    shape,
    stops,
)
from tests.test_utils.flag_effects.training import iterations

LOAD = "--load {checkpoint} --train-iters 3"
SAVE = "--save {out}"
BASE = "--pretrained-checkpoint {checkpoint}"
ADAPTERS = f"{BASE} --lora-rank 2"
QKV = "decoder.layers.0.self_attention.linear_qkv.adapter"
ARCHITECTURE = "--num-layers --hidden-size --num-attention-heads --max-position-embeddings"
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    " --untie-embeddings-and-output-weights"
)
TENSORBOARD = "--tensorboard-dir {out}"
POINTS = ("torch.utils.tensorboard.writer:SummaryWriter.add_scalar",)
FAST = "--save {out}/run --train-iters 3 --non-persistent-save-interval 1"
TWO_CHECKPOINTS = f"{SAVE} --save-interval 1 --train-iters 3"


def holds(*kinds):
    """The kinds of state that the last checkpoint has."""

    def has(_, run):
        finished(run)
        names = run.saved[max(run.saved)]
        assert {name.split(".")[0] for name in names} == set(kinds), sorted(names)

    return has


def fast_in(folder):
    """The checkpoint of --non-persistent-save-interval lies there."""
    return gives(lambda run: any(f"{folder}/iter_0000002/metadata.json" in name for name in run.files), True)


def behind(base, run):
    """Every save except the last is written in the background, and the log reports it in Megatron-LM's words."""
    finished(base, run)
    assert [timing["background"] for timing in run.timings if timing["kind"] == "save"] == [True, True, False]
    assert "scheduled an async checkpoint save at iteration       1" in run.log


def gives_up_after(count):
    """Training ends with exit code 75 after ``count`` iterations."""

    def gives_up(_, run):
        assert run.code == 75 and run.num_iterations == count, (run.code, run.num_iterations)

    return gives_up


def fresh_moments(base, run):
    """The optimizer moments are zero after loading; without the flag they are restored."""
    finished(base, run)
    assert not any(item.any() for kind in run.loaded_moments.values() for item in kind.values())
    assert any(item.any() for kind in base.loaded_moments.values() for item in kind.values())


def tag(name, other=True):
    return gives(lambda run: name in run.arguments, other)


def lines(start):
    """Lines of the log that hold ``start``."""
    return lambda run: sum(start in line for line in run.log.splitlines())


def profiled(cfg):
    """Iterations between which a profiler ran on GPUs, of 13: torch's, or one outside of the program."""
    from unittest import mock

    from megatron.training.hooks import profiler
    from megatron.training.hooks.build import profilers
    from megatron.training.observe.records import RunInfo
    from megatron.training.train_state import TrainState

    events = []

    class Noted:
        def __init__(self, kind="start"):
            self.kind = kind

        def start(self):
            events.append((self.kind, state.iteration))

        def export_chrome_trace(self, path):
            pass

        def stop(self):
            events.append(("stop", state.iteration))

    torchs = mock.patch.object(profiler, "torch_profiler", lambda: Noted("start torch's"))
    with torchs, mock.patch.object(profiler, "CudaRange", Noted):
        for rank in range(2):
            state = TrainState()
            info = RunInfo(state=state, train_iters=13, rank=rank, world_size=2, device="cuda")
            hooks = profilers(cfg, info)
            for hook in hooks:
                hook.on_start(info)
            for state.iteration in range(1, 14):
                for hook in hooks:
                    hook.on_step(state, None)
            if hooks:
                events.append(("rank", rank))
    return events


def snapshot(cfg):
    """The file of the memory history on a GPU; None without one."""
    from megatron.training.hooks.build import profilers
    from megatron.training.observe.records import RunInfo
    from megatron.training.train_state import TrainState

    hooks = profilers(cfg, RunInfo(state=TrainState(), train_iters=8, device="cuda"))
    return [hook.path for hook in hooks]


def on_gpu(cfg):
    """Iterations after which there is a line about the memory of a GPU."""
    from types import SimpleNamespace
    from unittest import mock

    from megatron.core.timers import Timers
    from megatron.training.hooks import console
    from megatron.training.hooks.build import build_hooks
    from megatron.training.hooks.console import MemoryHook
    from megatron.training.observe.records import RunInfo
    from megatron.training.train_state import TrainState

    reported = []
    info = RunInfo(state=TrainState(), train_iters=8, rank=0, world_size=2, device="cuda")
    (hook,) = (build_hook for build_hook in build_hooks(cfg, info, Timers(0)) if isinstance(build_hook, MemoryHook))
    with mock.patch.object(console, "cuda_memory_megabytes", dict):
        hook.lines = SimpleNamespace(info=reported.append)
        for iteration in range(1, 5):
            hook.on_step(SimpleNamespace(iteration=iteration), None)
    return len(reported)


def wandb(name):
    def ask(cfg):
        from megatron.training.hooks.build import wandb_options

        return wandb_options(cfg)[name]

    return ask


def patience(cfg):
    from megatron.training.watchdog.watchdog import Watchdog

    return Watchdog(cfg).timeout


WANDB = "--wandb-save-dir here --wandb-exp-name run"
PROFILE = "--profile --profile-step-start 1 --profile-step-end 4"
CHECKPOINTS = [
    row("--save {out}", gives(lambda run: list(run.saved), [2]), holds("model", "optimizer", "rng")),
    row("--save-interval 1", gives(lambda run: list(run.saved), [1, 2]), base=SAVE),
    row("--save-retain-interval 2", gives(lambda run: list(run.saved), [2, 3]), base=TWO_CHECKPOINTS),
    row("--keep-last-checkpoints 2", gives(lambda run: list(run.saved), [3, 4]),
        base=f"{SAVE} --save-interval 1 --train-iters 4"),
    row("--non-persistent-save-interval 1", gives(lambda run: sorted(run.saved), [2, 3]), keeps("weights"),
        gives(lambda run: "non_persistent/iter_0000002/metadata.json" in "".join(run.files), True),
        base=f"{SAVE} --train-iters 3"),
    row("--non-persistent-global-ckpt-dir {out}/quick", fast_in("quick"), base=FAST),
    row("--non-persistent-ckpt-type local", fast_in("near"),
        base=f"{FAST} --non-persistent-local-ckpt-dir {{out}}/near"),
    row("--non-persistent-local-ckpt-dir {out}/near", fast_in("near"),
        base=f"{FAST} --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {{out}}/other"),
    row("--async-save", behind, gives(lambda run: list(run.saved), [1, 2, 3]), base=TWO_CHECKPOINTS),
    row("--async-save-staging-gb 0.3", gives(lambda run: "300000000.0" in run.arguments, True),
        base=f"{TWO_CHECKPOINTS} --async-save",
        count=("megatron.core.dist_checkpointing.staging:Staging.__init__",)),
    row("--start-over", accepts, iterations(1, 2), base="--save {used}"),
    row("--max-failed-saves 2", gives_up_after(2), base=f"{SAVE} --save-interval 1 --train-iters 5",
        pretend="full_disk"),
    row("--no-save-optim", holds("model", "rng"), base=SAVE),
    row("--no-save-rng", holds("model", "optimizer"), base=SAVE),
    row("--load {checkpoint}", iterations(3), changes("initial"), base="--train-iters 3"),
    row("--ckpt-step 1", iterations(2, 3), changes("initial"), base=LOAD),
    row("--finetune", iterations(1, 2, 3), fresh_moments, keeps("initial"), base=LOAD),
    row("--pretrained-checkpoint {checkpoint}", iterations(1, 2), changes("initial")),
    row("--lora-rank 2", gives(shape(f"{QKV}.lora_a"), (3, 2, 32)), gives(shape(f"{QKV}.lora_b"), (4, 24, 2)),
        base=BASE),
    row("--lora-alpha 8", changes("weights"), keeps("initial"), base=ADAPTERS),
    row("--lora-target-modules linear_proj", gives(shape(f"{QKV}.lora_a"), None), base=ADAPTERS),
    row("--lora-dropout 0.5", changes("weights"), keeps("initial"), base=ADAPTERS),
    row("--lora-use-rslora", changes("weights"), keeps("initial"), base=ADAPTERS),
    row("--lora-use-dora", gives(shape(f"{QKV}.lora_magnitude"), (4, 24)), base=ADAPTERS),
    row("--export-quant-cfg fp8", changes("losses", "gradients"), keeps("initial")),
    row("--load-hf {hf}", accepts, gives(modules("TransformerLayer"), 2), says("loaded 22688 parameters"),
        without=ARCHITECTURE),
    row("--save-hf-interval 2", says("iter_0000002 in Hugging Face's format"),
        base=f"{SAVE} --save-interval 1 {LLAMA}"),
    row("--moe-use-upcycling", accepts, iterations(1, 2, 3), gives(modules("MoELayer"), 2),
        base=f"{LOAD} --num-experts 4"),
    row("--moe-upcycling-granularity 2", accepts, iterations(1, 2, 3),
        base=f"{LOAD} --num-experts 4 --moe-use-upcycling --moe-ffn-hidden-size 64"),
    row("--no-load-optim", iterations(3), fresh_moments, keeps("initial"), base=LOAD),
    row("--no-load-rng", gives(lambda run: run.called["set_rng_state"], 0), base=LOAD,
        count=("megatron.training.checkpoint.loading:set_rng_state",)),
    row("--use-checkpoint-args", accepts, gives(modules("TransformerLayer"), 2), base=LOAD, without=ARCHITECTURE),
    row("--no-use-tokenizer-model-from-checkpoint-args", stops("--tokenizer-type: is required"),
        base=f"{LOAD} --use-checkpoint-args --vocab-size 65", without="--tokenizer-type"),
    row("--use-mp-args-from-checkpoint-args", gives(lambda run: len(run.groups["dp"]), 2),
        base=f"{LOAD} --use-checkpoint-args --tensor-model-parallel-size 2", ranks=2),
    row("--dist-ckpt-strictness log_all", says("stored names are loaded, none is missing"), accepts, base=LOAD),
    row("--exit-on-missing-checkpoint", stops("--exit-on-missing-checkpoint", code=2), base="--load {out}"),
    row("--override-opt_param-scheduler", accepts, rates(5e-3), base=f"{LOAD} --lr 5e-3"),
    row("--use-checkpoint-opt_param-scheduler", accepts, rates(1e-2), base=f"{LOAD} --lr 5e-3"),
]  # fmt: skip
LOGS = [
    row("--log-interval 2", gives(lines("] iteration"), 3), base="--train-iters 4"),
    row("--log-throughput", says("throughput per GPU (TFLOP/s/GPU)")),
    row("--log-params-norm", gives(lambda run: None in run.column("params_norm"), False), keeps("weights")),
    row("--log-num-zeros-in-grad", gives(lambda run: None in run.column("num_zeros"), False), keeps("weights")),
    row("--log-layer-statistics-interval 2", keeps("weights"),
        gives(lambda run: ["layer 2/update_norm" in record.get("statistics", ()) for record in run.records],
              [False, True])),
    row("--no-report", gives(lambda run: "report.html" in run.files, False), keeps("weights"), base=SAVE),
    row("--console live", gives(lines("] iteration"), 0), keeps("weights")),
    row("--log-progress", gives(lambda run: "progress.txt" in run.files, True), base=SAVE),
    row("--timing-log-level 1", says("forward-backward")),
    row("--timing-log-option all", says("rank  0:"), base="--timing-log-level 1"),
    row("--no-barrier-with-level-1-timing", gives(lambda run: run.called["barrier"], 0), base="--timing-log-level 1",
        count=("torch.distributed:barrier",)),
    row("--logging-level 40", gives(lines("number of parameters"), 0), keeps("weights")),
    row("--tensorboard-dir {out}", gives(lambda run: any("tfevents" in name for name in run.files), True)),
    row("--tensorboard-log-interval 2", gives(lambda run: run.arguments.count("grad-norm"), 1), base=TENSORBOARD,
        count=POINTS),
    row("--tensorboard-queue-size 3", gives(lambda run: "3" in run.arguments, True), base=TENSORBOARD,
        count=("torch.utils.tensorboard.writer:SummaryWriter.__init__",)),
    row("--log-timers-to-tensorboard", tag("forward-backward-time"), base=f"{TENSORBOARD} --timing-log-level 1",
        count=POINTS),
    row("--no-log-loss-scale-to-tensorboard", tag("loss-scale", False), base=TENSORBOARD, count=POINTS),
    row("--log-validation-ppl-to-tensorboard", tag("lm loss validation ppl"), base=f"{TENSORBOARD} --eval-iters 1",
        count=POINTS),
    row("--log-memory-to-tensorboard", changes("arguments"), base=TENSORBOARD, count=POINTS),
    row("--log-world-size-to-tensorboard", tag("world-size"), base=TENSORBOARD, count=POINTS),
    Probe("--log-memory-interval 2", on_gpu, 3),
    Probe("--wandb-project mine", wandb("project"), "mine", base=WANDB),
    Probe("--wandb-exp-name walk", wandb("name"), "walk", base=WANDB),
    Probe("--wandb-entity team", wandb("entity"), "team", base=WANDB),
    Probe("--wandb-save-dir there", wandb("dir"), "there", base=WANDB),
    Probe("--profile", profiled, [("start", 10), ("stop", 12), ("rank", 0)]),
    Probe("--profile-step-start 2", profiled, [("start", 2), ("stop", 4), ("rank", 0)], base=PROFILE),
    Probe("--profile-step-end 3", profiled, [("start", 1), ("stop", 3), ("rank", 0)], base=PROFILE),
    Probe("--profile-ranks 1", profiled, [("start", 1), ("stop", 4), ("rank", 1)], base=PROFILE, ranks=2),
    Probe("--use-pytorch-profiler", profiled, [("start torch's", 1), ("stop", 4), ("rank", 0)],
          base=f"{SAVE} {PROFILE}"),
    Probe("--record-memory-history", snapshot, ["snapshot.pickle"]),
    Probe("--memory-snapshot-path m.pickle", snapshot, ["m.pickle"], base="--record-memory-history"),
    Probe("--watchdog-timeout-seconds 7", patience, 7.0),
    row("--check-replicas 1", gives(lambda run: run.called["check_replicas"], 4), base="--train-iters 4",
        ranks=2, count=("megatron.training.checks.self_checks:check_replicas",)),
]  # fmt: skip
ROWS = [*CHECKPOINTS, *LOGS]
