"""Kernels of linear recurrences equal the recurrences in fp64, with all gradients: documents, states, shared heads,
extreme decays."""

import importlib.util
import inspect
import math
import sys

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions import channel_decays, linear_attention_gradients, triangular_inverse
from megatron.core.fusions import linear_attention as module
from megatron.core.fusions.linear_attention import CANDIDATES, TILINGS, linear_attention
from megatron.core.transformer.ssm.delta_rule import delta_rule
from megatron.core.transformer.ssm.state_space import state_space
from tests.test_utils.kernels import DEVICE
from tests.unit_tests.core.transformer.ssm.recurrences import delta_rule_by_token, state_space_by_token

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
NAMES = "outputs", "state", "query", "key", "value", "log_decay", "beta", "initial state"
BY_TOKEN = {"delta": delta_rule_by_token, "channels": delta_rule_by_token, "states": state_space_by_token}
"""The gated delta rule, with decays per channel (Kimi delta attention), and Mamba-2."""
BY_CHUNK = {"delta": delta_rule, "channels": delta_rule, "states": state_space}


def tolerance(name, strength):
    """Relative error in the norm. Chunks add decays of 500 per token to sums of 16,000, whose last bit in fp32 is 1e-3.
    Operands rounded to bf16 give errors of 2e-3 to 4e-3."""
    if DEVICE == "cpu":
        return 1e-5 * max(1, strength)
    return 2e-2 if name in ("log_decay", "beta") else 1e-2


def random_inputs(shape, kind, strength, documents):
    """``shape``: s, b, a, h, k, v. Keys of length 1, beta in [0, 2), values that DTYPE holds exactly. Of decays per
    channel, some forget at once and others nothing."""
    length, batch, keys, heads, width, channels = shape
    generator = torch.Generator().manual_seed(length)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    query, value = normal(length, batch, keys, width) / math.sqrt(width), normal(length, batch, heads, channels)
    key = torch.nn.functional.normalize(normal(length, batch, keys, width), dim=-1)
    decay, beta = -strength * torch.rand(length, batch, heads, generator=generator), normal(length, batch, heads)
    if kind == "channels":
        decay = -strength * torch.rand(length, batch, heads, width, generator=generator) ** 4
    inputs = [x.to(DTYPE).to(DEVICE) for x in (query, key, value)] + [decay.to(DEVICE)]
    if kind != "states":
        inputs.append((2 * beta.sigmoid()).to(DEVICE))
    follows = (torch.rand(length, batch, generator=generator) < 1 - 3 / length).to(DEVICE) if documents else None
    return inputs, follows, normal(batch, heads, width, channels).to(DEVICE)


def results(rule, inputs, follows, state, dtype=None):
    """Outputs, last state, and the gradients of a random weighted sum of both. ``dtype``: of all inputs."""
    leaves = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in (*inputs, state)]
    outputs = rule(*leaves[:-1], follows, leaves[-1])
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(x.shape, generator=generator).to(DTYPE).to(x) for x in outputs]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, upstream))]


def by_kernels(kind, tilings=TILINGS, function=linear_attention):
    def rule(*arguments):
        *inputs, follows, state = arguments
        beta = None if kind == "states" else inputs.pop()
        return function(*inputs, beta, follows, state, tilings)

    return rule


def errors(actual, expected, kind):
    """Relative errors by name."""
    names = [name for name in NAMES if kind != "states" or name != "beta"]
    ratios = [((x.double() - y).norm() / (y.norm() + 1e-12)).item() for x, y in zip(actual, expected, strict=True)]
    return dict(zip(names, ratios, strict=True))


def check(shape, kind, strength, documents, tilings=TILINGS, reference=BY_TOKEN):
    case = random_inputs(shape, kind, strength, documents)
    expected = results(reference[kind], *case, torch.float64)
    actual = results(by_kernels(kind, tilings), *case)
    assert actual[0].dtype == DTYPE and actual[1].dtype == torch.float32
    for name, error in errors(actual, expected, kind).items():
        assert error < tolerance(name, strength), f"{name}: {error:.1e}"
    return case, actual


@pytest.mark.parametrize("kind, shape, strength, documents", [
    ("delta", (70, 2, 1, 2, 16, 48), 0.1, True),
    ("delta", (130, 1, 1, 1, 32, 16), 3.0, False),
    ("delta", (100, 1, 2, 2, 16, 16), 500.0, True),
    ("delta", (1, 1, 1, 1, 16, 16), 1.0, False),
    ("channels", (70, 1, 1, 2, 16, 48), 0.1, True),
    ("channels", (130, 2, 1, 1, 32, 16), 3.0, True),
    ("channels", (100, 1, 1, 1, 16, 16), 12.0, False),  # blocks of 16 tokens
    ("channels", (70, 1, 1, 1, 16, 16), 60.0, True),  # of 4
    ("channels", (100, 1, 1, 1, 16, 16), 500.0, False),  # of one
    ("channels", (1, 1, 1, 1, 16, 16), 1.0, False),
    ("delta", (66, 1, 1, 2, 128, 16), 0.1, True),  # two parts of the channels of keys
    ("channels", (66, 1, 1, 2, 128, 16), 0.1, True),
    ("states", (66, 1, 1, 2, 128, 16), 0.1, True),
    ("states", (130, 1, 1, 2, 16, 32), 0.1, True),
    ("states", (100, 2, 1, 1, 16, 16), 500.0, False),
])  # fmt: skip
def test_the_kernels_equal_the_recurrence(kind, shape, strength, documents):
    check(shape, kind, strength, documents)


@pytest.mark.parametrize("choose", [min, max])
def test_all_widths_of_tiles_equal_the_recurrence(choose):
    """Kernels with decays per channel, with the smallest and the largest tiles."""
    candidates = {name: tilings for name, tilings in CANDIDATES.items() if name not in ("pairs", "gradients")}
    assert all(len({width for width, *_ in tilings}) <= 2 for tilings in candidates.values())
    tilings = {**TILINGS, **{name: choose(tilings) for name, tilings in candidates.items()}}
    check((66, 1, 1, 1, 64, 64), "channels", 0.2, True, tilings)


def constant_decay(length, decay):
    """Decays per channel that are ``decay`` in every second channel, else 0."""
    inputs, follows, state = random_inputs((length, 1, 1, 1, 16, 16), "channels", 0.0, False)
    inputs[3][..., ::2] = decay
    return inputs, follows, state


@pytest.mark.parametrize("decay", [-50.0, -1e4])
def test_channels_that_forget_everything_do_not_change_the_others(decay):
    """exp(3200), which would undo the decay of 64 tokens, is beyond fp32."""
    case = constant_decay(66, decay)
    expected = results(delta_rule_by_token, *case, torch.float64)
    for name, error in errors(results(by_kernels("channels"), *case), expected, "channels").items():
        assert error < tolerance(name, 0.0), f"{name}: {error:.1e}"


@pytest.mark.parametrize("kind", ["delta", "channels"])
def test_inputs_may_be_views(kind):
    """Query, key and value that one projection wrote, and any strides of decays, beta and state."""
    inputs, _, state = random_inputs((66, 2, 2, 2, 16, 16), kind, 1.0, False)
    right = by_kernels(kind)(*inputs, None, state)
    joined = torch.cat(inputs[:3], -1).split(16, -1)
    strided = [torch.stack((x, -x), -1)[..., 0] for x in (*inputs[3:], state)]
    result = by_kernels(kind)(*joined, *strided[:2], None, strided[2])
    assert all(torch.equal(*pair) for pair in zip(result, right, strict=True))


MUTANTS = {
    "documents are ignored by pairs": ("(begun_i[:, None] == begun_j[None, :])", "True"),
    "documents are ignored by the state": ("start = tl.where((number == 0)[:, None], start, 0.0)", "start = start"),
    "decay after the correction": ("beta * (u - start * tl.dot(k, low))", "beta * (u - tl.dot(k, low))"),
    "the last row of a block of T": ("tl.static_range(15, 0, -1)", "tl.static_range(14, 0, -1)"),
    "blocks of T below the diagonal": ("tl.static_range(4, 6)", "tl.static_range(4, 5)"),
    "beta is not in the gradient of the state": ("(-beta * start * du)", "(-start * du)"),
    "the state's total decay has no gradient": ("of_last = total *", "of_last = 0.0 *"),
    "decays at the end have no gradient": ("else tl.sum(tl.sum(k", "else 0 * tl.sum(tl.sum(k"),
    "a token's score for itself has no gradient": ("right + tl.load(small", "right + 0 * tl.load(small"),
    "A's gradient has no beta": ("(beta[:, None] * k).to(k.dtype)", "k"),
}
CHANNEL_MUTANTS = {
    "keys do not decay until the middle": ("(k * tl.exp(-since))", "(k * 1.0)"),
    "keys at the end of a chunk do not decay": ("(end * k)", "(1.0 * k)"),
    "keys at the begin of a chunk do not decay": ("(start * k)", "(1.0 * k)"),
    "a token has no score for itself": ("together, tl.dot((q *", "together & (i != j), tl.dot((q *"),
    "the state has no gradient of beta": ("left *= -start", "left *= -0.0 * start"),
    "decays until a token have no gradient": ("rise -= k * right", "rise -= 0 * k * right"),
    "pairs have no decays in gradients": ("total += tl.exp(since) * tl.dot(matrix", "total += tl.dot(matrix"),
}
STRONG_MUTANTS = {
    "factors overflow": ("> 40.0", "> 1e9"),
    "the middle is another token": ("* 2 + 1) << level) >> 1", "* 2 + 1) << level) >> 2"),
    "pairs of halves have no gradient": ("near * tl.dot(halves", "0 * tl.dot(halves"),
    "pairs within blocks have no gradient": ("tl.exp(since) * tl.dot(within", "0 * tl.dot(within"),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="about the test, not about the device")
@pytest.mark.parametrize("kind, strength, right, wrong", [
    *(pytest.param("delta", 0.1, *change, id=name) for name, change in MUTANTS.items()),
    *(pytest.param("channels", 0.1, *change, id=name) for name, change in CHANNEL_MUTANTS.items()),
    *(pytest.param("channels", 12.0, *change, id=name) for name, change in STRONG_MUTANTS.items()),
])  # fmt: skip
def test_planted_errors_are_detected(kind, strength, right, wrong, tmp_path, monkeypatch):
    files = (module, linear_attention_gradients, channel_decays, triangular_inverse)
    source = next(text for text in map(inspect.getsource, files) if right in text)
    assert source.count(right) == 1
    (tmp_path / "mutant.py").write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("mutant", tmp_path / "mutant.py")
    mutant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutant", mutant)
    spec.loader.exec_module(mutant)
    for file in (module, linear_attention_gradients):
        for name in vars(mutant):
            if name.startswith("_") and not name.startswith("__") and hasattr(file, name):
                monkeypatch.setattr(file, name, getattr(mutant, name))
    function = getattr(mutant, "linear_attention", linear_attention)
    case = random_inputs((66, 1, 1, 1, 16, 16), kind, strength, True)
    expected = results(delta_rule, *case, torch.float64)
    differences = errors(results(by_kernels(kind, function=function), *case), expected, kind)
    assert any(not error <= 1e-3 * max(1, strength) for error in differences.values())  # or not finite


@pytest.mark.gpu
@pytest.mark.parametrize("kind, shape", [
    ("channels", (8192, 1, 32, 32, 128, 128)),
    ("channels", (3001, 2, 4, 4, 128, 256)),
    ("channels", (1000, 2, 2, 4, 64, 48)),
    ("channels", (1000, 1, 2, 2, 64, 64)),
    ("delta", (8192, 1, 16, 32, 128, 128)),
    ("delta", (3001, 2, 4, 4, 128, 256)),  # the width of states under context parallelism
    ("delta", (2048, 2, 2, 8, 64, 64)),
    ("delta", (1000, 1, 1, 2, 64, 48)),
    ("states", (8192, 1, 8, 64, 128, 64)),
    ("states", (3001, 2, 2, 4, 128, 192)),
    ("states", (1000, 1, 1, 2, 64, 128)),
])  # fmt: skip
@pytest.mark.parametrize("strength, documents", [(0.05, True), (1.0, False), (500.0, True)])
def test_the_kernels_equal_chunks_in_fp64_at_real_sizes(kind, shape, strength, documents):
    """A second run gives the same bits: there are no atomics."""
    case, actual = check(shape, kind, strength, documents, reference=BY_CHUNK)
    assert all(torch.equal(*pair) for pair in zip(actual, results(by_kernels(kind), *case), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name, tiling", [(name, tiling) for name in CANDIDATES for tiling in CANDIDATES[name]])
@pytest.mark.parametrize("kind, width, channels", [
    ("delta", 128, 128), ("delta", 64, 64), ("delta", 128, 256), ("states", 128, 64),
    ("channels", 128, 128), ("channels", 64, 64), ("channels", 128, 256),
])  # fmt: skip
def test_every_tiling_equals_the_recurrence(name, tiling, kind, width, channels):
    check((450, 2, 2, 4, width, channels), kind, 0.2, True, {**TILINGS, name: tiling})


@pytest.mark.gpu
def test_layers_choose_the_kernels():
    inputs, follows, state = random_inputs((200, 1, 2, 4, 64, 64), "delta", 1.0, True)
    channels, *_ = random_inputs((200, 1, 2, 4, 64, 64), "channels", 1.0, True)
    for rule, arguments in ((delta_rule, inputs), (delta_rule, channels), (state_space, inputs[:-1])):
        outputs, last = rule(*arguments, follows, state)
        assert outputs.dtype == torch.bfloat16 and last.dtype == torch.float32
        exact, _ = rule(*(x.double() for x in arguments), follows, state.double())
        assert exact.dtype == torch.float64 and (outputs - exact).norm() < 1e-2 * exact.norm()
