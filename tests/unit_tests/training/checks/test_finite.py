"""A NaN stops a run without the host ever waiting for the device: nothing is read in a step that logs nothing, and what
comes after the NaN changes no weight and reaches no file."""

import json
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.config.errors import UserError
from megatron.training.checks.finite import FiniteCheck, named_by_origin
from megatron.training.observe.metrics import NonFiniteError
from tests.test_utils.gpt_runs import train_resolved
from tests.test_utils.layout_table import row
from tests.test_utils.layouts import VOCAB_SIZE, configure

FLAGS = ["--micro-batch-size", "4", "--train-iters", "6", "--log-interval", "100"]


TOKENS = torch.tensor(4.0, dtype=torch.float64)


def pair(value):
    return {"lm loss": torch.tensor([value, 4.0], dtype=torch.float64)}


def test_the_host_hears_one_iteration_later_and_the_device_at_once():
    check = FiniteCheck(rank=3)
    assert not check.skip_update(pair(1.0), TOKENS)
    check.note(1, 0, named_by_origin({}, pair(1.0)), TOKENS, torch.tensor(False))
    check.read(keep=1)
    assert check.skip_update(pair(float("nan")), TOKENS)
    check.note(2, 8, named_by_origin(pair(2.0), pair(float("nan"))), TOKENS, torch.tensor(True))
    check.read(keep=1)
    assert check.skip_update(pair(1.0), TOKENS), "every later update is held back too"
    check.note(3, 16, named_by_origin(pair(1.0), pair(1.0)), TOKENS, torch.tensor(True))
    words = r"rank 3, iteration 2 \(samples from 8 on\): lm loss \(of another rank\) is nan. The weights have not been"
    with pytest.raises(NonFiniteError, match=words):
        check.read(keep=1)


def test_an_iteration_without_tokens_in_the_loss_holds_its_update_back_and_is_named():
    check, none = FiniteCheck(rank=0), torch.zeros((), dtype=torch.float64)
    assert check.skip_update(pair(0.0), none)
    check.note(4, 24, pair(0.0), none, torch.tensor(True))
    with pytest.raises(UserError, match=r"iteration 4 \(samples from 24 on\): no token contributes to the loss"):
        check.read()


def test_gradient_is_distinguished_from_a_loss():
    check = FiniteCheck(rank=0)
    check.note(7, 56, pair(1.0), TOKENS, torch.tensor(True))
    with pytest.raises(NonFiniteError, match=r"iteration 7 \(samples from 56 on\): the gradient norm is not finite"):
        check.read()


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


class HostReads(TorchDispatchMode):
    """Notes every operation that would make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if any(word in name for word in ("_local_scalar_dense", "aten.nonzero", "aten.equal", "is_nonzero")):
            self.note(name)
        return function(*args, **(kwargs or {}))

    def note(self, name):
        place = next(f for f in reversed(traceback.extract_stack()) if "/megatron/" in f.filename)
        if place.name != "check_ids":  # on a GPU a device assertion
            self.found.append(f"{name} in {place.filename}:{place.lineno}")


def counting(reads, name):
    original = getattr(torch.Tensor, name)

    def method(tensor, *arguments, **keywords):
        if not any(frame.filename.endswith("checks/finite.py") for frame in traceback.extract_stack()[-3:]):
            reads.note(name)  # the check reads what has come to the host
        return original(tensor, *arguments, **keywords)

    return mock.patch.object(torch.Tensor, name, method)


def steady_state(rank, world_size, argv):
    """Return this rank's host reads in two steps after the first two."""
    from contextlib import ExitStack

    from megatron.core.random import philox
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.step import TrainStep
    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    cfg = configure(argv, world_size, "fp32")
    parts = build_components(cfg, with_synthetic_data(GPTTask, VOCAB_SIZE)(cfg), initialize_megatron(cfg))
    train_step = TrainStep(cfg, parts)
    for _ in range(2):
        train_step.run()
    with ExitStack() as stack:
        reads = stack.enter_context(HostReads())
        stack.enter_context(mock.patch.object(philox, "_array", lambda values: values))  # in torch, as on a device
        for name in READS:
            stack.enter_context(counting(reads, name))
        for _ in range(2):
            train_step.run()
    return reads.found


@pytest.mark.parametrize(
    ("layout", "extra"),
    [("plain", ["--bf16"]), ("zero2-tp2", ["--log-params-norm", "--log-num-zeros-in-grad"]), ("pp2-uneven", [])],
)
def test_a_step_that_logs_nothing_reads_nothing(gloo_pool, layout, extra):
    one = row("dp2").reference if layout == "plain" else row(layout)
    for actual in gloo_pool.run(steady_state, one.world_size, [*one.argv, *FLAGS[2:], *extra]):
        assert set(actual) == set()


@pytest.mark.gpu
def test_a_step_that_logs_nothing_waits_for_nothing_on_a_gpu(tmp_path):
    """torch itself raises at every synchronizing call."""
    import os
    import subprocess
    import sys

    program = f"""
import torch
from tests.unit_tests.training.checks.test_finite import FLAGS
from tests.test_utils.layouts import MODEL, VOCAB_SIZE, configure
from megatron.training.initialize import initialize_megatron
from megatron.training.verify.layout_trace import with_synthetic_data
from megatron.training.run import build_components
from megatron.training.step import TrainStep
from megatron.training.tasks.gpt import GPTTask

cfg = configure([*MODEL, *FLAGS, "--bf16"], 1, "bf16")
parts = build_components(cfg, with_synthetic_data(GPTTask, {VOCAB_SIZE})(cfg), initialize_megatron(cfg))
train_step = TrainStep(cfg, parts)
for _ in range(3):
    train_step.run()
torch.cuda.set_sync_debug_mode("error")
for _ in range(2):
    train_step.run()
"""
    root = Path(__file__).resolve().parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def train_into_a_nan(rank, world_size, folder, place, log_interval, name="dp2"):
    """(message, iterations in metrics.jsonl, whether the weights equal the last good step's, and differ from the
    first's, files, the last iteration that began)."""
    from megatron.training.step import TrainStep
    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    class Spoiled(with_synthetic_data(GPTTask, VOCAB_SIZE)):
        steps = 0

        def loss_func(self, batch, output):
            self.steps += 1
            if self.steps == 3 and place == "gradient":
                output.register_hook(lambda grad: grad * float("inf"))
            if self.steps == 3 and place == "loss":
                output = output * float("nan")
            return super().loss_func(batch, output)

    weights, started = [], []

    def noting_step(steps):
        started.append(steps.state.iteration + 1)
        if place == "router" and started[-1] == 3:
            from megatron.core.distributed import unwrapped

            with torch.no_grad():  # in a cell of one expert
                unwrapped(steps.parts.model[0]).decoder.layers[1].mlp.router.weight[2, 5] = float("nan")
        metrics = step(steps)
        weights.append({name: p.detach().clone() for name, p in steps.parts.model[0].named_parameters()})
        return metrics

    one = row(name) if world_size > 1 else row(name).reference
    argv = [*one.argv, *FLAGS[2:-1], str(log_interval), "--save", folder]
    cfg = configure(argv, world_size, "fp32")
    step = TrainStep.run
    with mock.patch.object(TrainStep, "run", noting_step):
        try:
            train_resolved(cfg, lambda resolved, tokenizer: Spoiled(resolved))
        except NonFiniteError as error:
            message = str(error)
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    last = weights[-1]
    same = all(torch.equal(value, last[name]) for name, value in weights[1].items())
    moved = any(not torch.equal(value, last[name]) for name, value in weights[0].items())
    iterations = [record["iteration"] for record in records]
    return message, iterations, same, moved, sorted(path.name for path in Path(folder).iterdir()), started[-1]


@pytest.mark.parametrize(("place", "log_interval"), [("loss", 100), ("gradient", 3), ("gradient", 1)])
def test_nothing_after_a_nan_is_learned_saved_or_logged(gloo_pool, tmp_path, place, log_interval):
    [actual] = gloo_pool.run(train_into_a_nan, 1, str(tmp_path), place, log_interval)
    message, iterations, same, moved, files, last = actual
    words = {"loss": "lm loss is nan. The weights", "gradient": "the gradient norm is not finite though the loss is"}
    assert "iteration 3 (samples from 16 on)" in message and words[place] in message
    assert iterations == [1, 2] and same and moved
    assert not any(name.startswith("iter_") for name in files)
    assert last == (4 if log_interval == 100 else 3), "what is logged is checked before, anything else one step later"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_router_without_numbers_stops_the_run_and_the_layer_is_named(gloo_pool, tmp_path, ranks):
    name = "experts" if ranks == 1 else "ep2"
    for message, *_ in gloo_pool.run(train_into_a_nan, ranks, str(tmp_path), "router", 100, name):
        assert "iteration 3 (samples from 16 on): a router logit of layer 2 is nan. The weights have not" in message
