"""One run of the real program on a rank of the pool, and every effect that is visible from outside.

:func:`observe` is ``pretrain_gpt.py`` with a tiny model on real ``.bin/.idx`` data. It reports what came out (losses,
weights, gradients, moments, rates, samples, files, calls, collectives, the log), never an input setting.
"""

import contextlib
import io
import json
import os
import pkgutil
from pathlib import Path
from unittest import mock

from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.evaluation import TASK, TEST, VALID
from tests.test_utils.flag_effects.run import Batch, Run

VOCAB_SIZE = 64
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
    " --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 2"
    " --lr-decay-style constant --eval-iters 0 --num-workers 0 --log-interval 1 --data-path {data}"
    f" --split 80,10,10 --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 4"
    " --adam-eps 1e-5"
)
"""Flags of every run; a later flag of the same name wins."""
COLLECTIVES = (
    "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "all_to_all", "all_gather",
    "broadcast", "batch_isend_irecv", "isend", "irecv", "send", "recv",
)  # fmt: skip
SAID_ONCE = (
    "megatron.core.models.backends:_local_with_engine_names",
    "megatron.core.attention.kernels.torch_sdpa:_log_once",
)
"""Cached functions that log at their first call of a process; a rank of the pool runs many programs."""


def observe(rank, world_size, argv, out, count=(), pretend=None):
    """A task of the pool: runs ``argv``, which may write to the folder ``out``.

    Args:
        count: functions to count calls of, as ``module:attribute``.
        pretend: name of a function of ``pretences.py``: what is different around the run.
    """
    from megatron.training import run as program
    from tests.test_utils.flag_effects import pretences

    run = Run(rank=rank)
    for where in SAID_ONCE:
        pkgutil.resolve_name(where).cache_clear()
    with contextlib.ExitStack() as stack:
        errors, log = stack.enter_context(_captured())
        stack.enter_context(getattr(pretences, pretend or "nothing")())
        _watch(stack, run, count)
        from megatron.training.arguments import exit_on_config_error, parse_args

        try:
            with exit_on_config_error("pretrain_gpt.py"):
                run.code = program.run(parse_args(argv), _task_class(run))
        except SystemExit as left:
            run.code = int(left.code or 0)
    run.errors, run.log = errors.getvalue(), log.getvalue()
    folder = Path(out)
    run.files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    run.timings = _lines(folder, "timing.jsonl")
    run.saved = _checkpoints(folder)
    return run


def _checkpoints(folder):
    from megatron.core.dist_checkpointing.reader import CheckpointReader

    result = [path.parent for path in sorted(folder.rglob("iter_*/metadata.json"))]
    return {int(path.name[5:]): set(CheckpointReader(str(path)).names) for path in result}


def _lines(folder, name):
    return [json.loads(line) for path in sorted(folder.rglob(name)) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def _captured():
    """stderr and stdout; what a run changes in this process is put back."""
    import gc
    import signal

    import torch

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    errors, log = io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ), contextlib.redirect_stderr(errors), contextlib.redirect_stdout(log):
        try:
            yield errors, log
        finally:
            gc.enable()
            torch.use_deterministic_algorithms(False)
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _task_class(run):
    from megatron.training.tasks.gpt import GPTTask

    class Observed(GPTTask):
        """Notes every batch."""

        def get_batch(self, data_iterator):
            import torch

            batch = super().get_batch(data_iterator)
            of = {name: value.tolist() for name, value in batch.items() if isinstance(value, torch.Tensor)}
            run.batches.append(
                Batch(self._training(), of["sample_index"], of["tokens"], of["labels"], of["loss_mask"],
                      of["position_ids"], batch["documents"] and list(batch["documents"].document_bounds()))
            )  # fmt: skip
            return batch

        def _training(self):
            return run.model[0].training

    return Observed


def _watch(stack, run, count):
    """Install the recorders of builds, steps, collectives and counted calls while the program runs."""
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.training import run as program

    build = program.build_components

    def noting_build(*arguments):
        # hooks of torch run for every module; they go when the stack is left
        parts = build(*arguments)
        run.model = parts.model
        _note_build(run, parts)
        stack.enter_context(_noting_steps(run, parts))
        stack.callback(_note_end, run, parts)
        parts.hooks = [*parts.hooks, _Recorder(run)]
        return parts

    stack.enter_context(mock.patch.object(program, "build_components", noting_build))
    stack.enter_context(mock.patch.object(program.initialize, "shut_down", lambda: None))
    stack.callback(lambda: run.__dict__.pop("model", None))
    stack.callback(parallel_state.destroy_model_parallel)
    for name in COLLECTIVES:
        noting = _noting_collective(run, name, getattr(dist, name))
        for module in (dist, dist.distributed_c10d):  # P2POp checks its operation against the latter
            stack.enter_context(mock.patch.object(module, name, noting))
    for where in count:
        module, _, attribute = where.partition(":")
        stack.enter_context(_counting(run, module, attribute))


class _Recorder(Hook):
    """A hook that notes what ``metrics.jsonl`` holds, wherever that is written."""

    kinds = (VALID, TEST, TASK)

    def __init__(self, run):
        self.run = run

    def on_step(self, state, metrics):
        from megatron.training.observe.kinds.train import TRAIN, train_values
        from megatron.training.observe.metrics import materialize

        materialize([metrics])
        record = TRAIN.record(state.iteration, state.consumed_train_samples, train_values(metrics))
        self.run.records.append(record)

    def on_record(self, kind, record):
        self.run.records.append(record)


def _counting(run, module, attribute):
    import importlib

    owner = importlib.import_module(module)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    correct = getattr(owner, name)

    def counted(*arguments, **keywords):
        run.called[attribute] += 1
        run.arguments += [str(item) for item in (*arguments, *keywords.values())]
        return correct(*arguments, **keywords)

    return mock.patch.object(owner, name, counted)


def _noting_collective(run, name, correct):
    def noting(*arguments, **keywords):
        if "model" in run.__dict__:
            tensors = [argument for argument in arguments if hasattr(argument, "dtype")]
            kind = _format(tensors[0]) if tensors else ""
            run.collectives[name, kind] += 1
            run.order.append((name, kind))
        return correct(*arguments, **keywords)

    return noting


def _note_build(run, parts):
    from megatron.core.attention.dot_product_attention import CoreAttention
    from megatron.core.distributed import unwrapped

    run.initial = _weights(parts)
    for chunk in parts.model:
        for module in unwrapped(chunk).modules():
            kernel = module.kernel if isinstance(module, CoreAttention) else None
            for name in (type(item).__name__ for item in (module, kernel) if item is not None):
                run.modules[name] = run.modules.get(name, 0) + 1
            values = [*vars(module).values(), *vars(getattr(module, "split", module)).values()]
            run.kernels |= {kernel for value in values if (kernel := _kernel(value))}
        run.stored |= {name: tuple(item.shape) for name, item in unwrapped(chunk).named_parameters()}
        for buffer in getattr(chunk, "grad_buffers", ()):
            run.buckets += [(bucket.grads.numel(), _format(bucket.grads)) for bucket in buffer.buckets]
        rotary = getattr(unwrapped(chunk), "rotary_pos_emb", None)
        run.rotary = None if rotary is None else [item.squeeze().tolist() for item in rotary(8)]
    run.groups = {
        axis: tuple(getattr(parts.groups, axis).ranks)
        for axis in ("tp", "pp", "cp", "dp", "cp_a2a", "dp_cp_shard", "ep", "etp")
    }
    run.loaded_moments = _moments(parts)


def _format(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def _kernel(value):
    """The name of the kernel that a module would run on a GPU, if ``value`` is the choice of one."""
    from megatron.core.fusions.dispatch import ByDevice

    if not isinstance(value, ByDevice):
        return None
    kernel = getattr(value.kernel, "func", value.kernel)
    return kernel.__name__


def _moments(parts):
    moments = getattr(parts.optimizer, "moments", {})
    return {kind: {name: item.detach().clone() for name, item in of.items()} for kind, of in moments.items()}


def _weights(parts):
    from megatron.training.verify.layout_trace import weight_shards

    return {shard.name: shard.local.detach().clone() for shard in weight_shards(parts)}


def _note_end(run, parts):
    run.weights, run.moments = _weights(parts), _moments(parts)
    run.kept = {name: storage.kept for name, storage in getattr(parts.optimizer, "storage", {}).items()}


@contextlib.contextmanager
def _noting_steps(run, parts):
    import torch

    from megatron.core.attention.dropout import WeightDropout
    from megatron.core.distributed import unwrapped

    update = parts.optimizer.update

    def noting_update(skip_update=None):
        factor = 1.0 / parts.optimizer.get_loss_scale()
        run.gradients.append({item.name: item.local.detach() * factor for item in parts.optimizer.gradient_shards()})
        run.rates.append(
            {(group["lr"], group["weight_decay"]): list(group["names"]) for group in parts.optimizer.param_groups}
        )
        return update(skip_update)

    def noting_start(module, arguments):
        # at the start: recomputation breaks off as soon as it has what backward asks for
        if chunk.training:
            run.forwards[type(module).__name__] += 1
            run.order.append((type(module).__name__, getattr(module, "layer_number", 0)))

    def noting_forward(module, arguments, output):
        if not chunk.training:
            return
        name = type(module).__name__
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, torch.Tensor):
            return
        run.formats.setdefault(name, set()).add(_format(first))
        run.outputs.setdefault(name, tuple(first.shape))
        if len(arguments) < 3 or arguments[2] is None:  # dropout that adds no residual
            run.zeros.setdefault(name, float((first == 0).double().mean()))

    chunk = unwrapped(parts.model[0])
    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(noting_start), hooks.register_module_forward_hook(noting_forward),
    ]  # fmt: skip
    parts.optimizer.update = noting_update
    drawn = WeightDropout.keep

    def noting_keep(dropout, *arguments):
        keep = drawn(dropout, *arguments)
        run.zeros.setdefault("WeightDropout", 1.0 - float(keep.double().mean()))
        return keep

    try:
        with mock.patch.object(WeightDropout, "keep", noting_keep):
            yield
    finally:
        for handle in handles:
            handle.remove()
