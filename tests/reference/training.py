"""A training run: data in, one record per iteration and evaluation out, and the weights.

One process, one micro-batch, fp64 for every precision of the run. Optimizers: Loshchilov and Hutter 2019 (AdamW),
Sutskever et al. 2013 (momentum, torch's form, the decay in the gradient). Clipping: Pascanu et al. 2013. Loss
scaling: Micikevicius et al. 2018, with Megatron-LM's hysteresis. Schedules: Megatron-LM's, in samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.reference import muon
from tests.reference.data import Corpus, batch_of, cut, samples_of
from tests.reference.experts import Router
from tests.reference.fp8 import Histories
from tests.reference.model import Model
from tests.reference.settings import Settings
from tests.reference.weights import Weights, initial_weights


@dataclass(frozen=True)
class Recipe:
    """The parts of a run that depend on the model family."""

    cut: Callable = cut
    """(settings, documents, wanted) -> samples of a data set, in training order."""
    batch_of: Callable = batch_of
    model: type[Model] = Model
    initial_weights: Callable = initial_weights


@dataclass
class Run:
    """The results of a run."""

    initial: Weights
    final: Weights
    steps: list[dict] = field(default_factory=list)
    evaluations: dict[tuple, dict] = field(default_factory=dict)
    """(kind, iteration, name of the set or None) -> mean of each loss over what it counts."""
    routers: dict[str, Router] = field(default_factory=dict)
    histories: Histories = field(default_factory=dict)


GPT = Recipe()


# ---- batch sizes


def steps_of(c: Settings) -> list[tuple[float, int]]:
    """(tokens from which on, batch size) of "0:16 2.4B:320"."""
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    pairs = [entry.split(":") for entry in c.step_batch_size_schedule.replace(",", " ").split()]
    return [(float(tokens.rstrip("KMBT")) * units.get(tokens[-1], 1), int(size)) for tokens, size in pairs]


def final_batch_size(c: Settings) -> int:
    return steps_of(c)[-1][1] if c.step_batch_size_schedule else c.global_batch_size or c.micro_batch_size


def lowered(c: Settings, size: int) -> int:
    return size // c.micro_batch_size * c.micro_batch_size if c.decrease_batch_size_if_needed else size


def batch_size(c: Settings, consumed: int) -> int:
    """Size of the iteration that begins after ``consumed`` samples."""
    size = final_batch_size(c)
    if c.step_batch_size_schedule:
        size = [step for tokens, step in steps_of(c) if consumed * c.seq_length >= tokens][-1]
    elif c.rampup_batch_size:
        start, increment, samples = c.rampup_batch_size
        size = min(size, start + int(consumed / (samples / ((size - start) // increment))) * increment)
    return lowered(c, size)


def all_batches(c: Settings) -> list[tuple[int, int]]:
    """(samples consumed before, size) of every iteration."""
    batches, consumed = [], 0
    while len(batches) < c.train_iters if c.train_iters else consumed + batch_size(c, consumed) <= c.train_samples:
        batches.append((consumed, batch_size(c, consumed)))
        consumed += batches[-1][1]
    return batches


# ---- learning rate and weight decay after n samples, or in units of the final size after that many iterations


def in_samples(c: Settings, name: str, default: float) -> float:
    """A length given in iterations or in samples, whichever the run counts."""
    value = getattr(c, f"{name}_iters") if c.train_iters else getattr(c, f"{name}_samples")
    return default if value is None else value * (final_batch_size(c) if c.train_iters else 1)


def moment(c: Settings, n: int) -> int:
    """The place in a schedule of the iteration that begins after ``n`` samples."""
    return n if c.train_samples else [begin for begin, _ in all_batches(c)].index(n) * final_batch_size(c)


def learning_rate(c: Settings, n: int, peak: float, low: float) -> float:
    n = moment(c, n)
    end = in_samples(c, "lr_decay", in_samples(c, "train", 0))
    warmup = in_samples(c, "lr_warmup", 0) if c.lr_warmup_fraction is None else c.lr_warmup_fraction * end
    if warmup > 0 and n <= warmup:
        return c.lr_warmup_init + (peak - c.lr_warmup_init) * n / warmup
    if c.lr_decay_style == "constant":
        return peak
    if n > end:
        return low
    if c.lr_decay_style == "inverse-square-root":
        return max(low, peak * math.sqrt(max(warmup, 1) / max(n, 1)))
    share, style = (n - warmup) / (end - warmup), c.lr_decay_style
    if style == "WSD":
        length = in_samples(c, "lr_wsd_decay", 0)
        share, style = max(0.0, 1 - (end - n) / length), c.lr_wsd_decay_style
    height = {
        "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2, "exponential": 2 * 0.5**share - 1,
        "minus_sqrt": 1 - math.sqrt(share),
    }[style]  # fmt: skip
    return low + height * (peak - low)


def weight_decay(c: Settings, n: int) -> float:
    if c.weight_decay_incr_style == "constant":
        return c.weight_decay
    share = min(1.0, moment(c, n) / in_samples(c, "train", 0))
    if c.weight_decay_incr_style == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return c.start_weight_decay + share * (c.end_weight_decay - c.start_weight_decay)


# ---- loss scale


class LossScale:
    """Constant, or dynamic: ``hysteresis`` overflows since the last growth halve it, and so does each further one; a
    window of clean iterations in a row doubles it."""

    def __init__(self, c: Settings) -> None:
        self.c, self.dynamic = c, c.fp16 and c.loss_scale is None
        self.value = c.initial_loss_scale if self.dynamic else c.loss_scale or 1.0
        self.clean, self.patience = 0, c.hysteresis

    def update(self, overflow: bool) -> None:
        self.clean = 0 if overflow else self.clean + 1
        self.patience -= overflow
        if self.dynamic and overflow and self.patience <= 0:
            self.value = max(self.value / 2, self.c.min_loss_scale)
        if self.dynamic and self.clean == self.c.loss_scale_window:
            self.value, self.clean, self.patience = 2 * self.value, 0, self.c.hysteresis


# ---- updates


class Optimizer:
    """AdamW, SGD with momentum, or Muon with AdamW. Decayed are matrices, and the weights of query and key norms if
    asked for."""

    def __init__(self, c: Settings, weights: Weights) -> None:
        self.c, self.weights, self.step = c, weights, 0
        self.first, self.second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))

    def update(self, gradients: Weights, n: int) -> None:
        """With the rates of an iteration that begins after ``n`` samples."""
        c, self.step = self.c, self.step + 1
        for name, weight in self.weights.items():
            rate, g, m, v = learning_rate(c, n, c.lr, c.min_lr), gradients[name], self.first[name], self.second[name]
            if c.decoupled_lr is not None and name.endswith(("word_embeddings.weight", "output_layer.weight")):
                low = c.min_lr if c.decoupled_min_lr is None else c.decoupled_min_lr
                rate = learning_rate(c, n, c.decoupled_lr, low)
            of_heads = name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
            is_matrix = weight.dim() > 1 and not name.endswith("bias")  # a bias of many experts is none
            is_decayed = is_matrix or c.apply_wd_to_qk_layernorm and of_heads
            decay = weight_decay(c, n) if is_decayed else 0.0
            if c.optimizer in muon.KINDS and muon.is_updated(name, weight):
                muon.update_weight(name, weight, g, m, v, c, rate, decay)
                continue
            if c.optimizer == "sgd":
                m.mul_(c.sgd_momentum).add_(g + decay * weight)
                weight -= rate * m
                continue
            if "lion" in (c.optimizer, c.muon_scalar_optimizer if c.optimizer in muon.KINDS else ""):
                weight -= rate * ((c.lion_beta1 * m + (1 - c.lion_beta1) * g).sign() + decay * weight)
                m.mul_(c.lion_beta2).add_((1 - c.lion_beta2) * g)
                continue
            m.mul_(c.adam_beta1).add_((1 - c.adam_beta1) * g)
            v.mul_(c.adam_beta2).add_((1 - c.adam_beta2) * g * g)
            m_hat, v_hat = m / (1 - c.adam_beta1**self.step), v / (1 - c.adam_beta2**self.step)
            weight -= rate * (m_hat / (v_hat.sqrt() + c.adam_eps) + decay * weight)


def clip_factor(c: Settings, size: float) -> float:
    return min(1.0, c.clip_grad / (size + 1e-6)) if c.clip_grad > 0 else 1.0


# ---- the run


def gradients_of(c: Settings, recipe: Recipe, run: Run, samples: list, first: int) -> tuple[dict, Weights]:
    """Return the means that a global batch logs, and the gradients of the minimized sum: the mean of each loss over its
    tokens in the batch; the multi-token losses, where a sequence has the same weight as in the main loss; and the
    losses of layers with experts."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in run.final.items()}
    batch, routers = recipe.batch_of(c, samples, first), run.routers
    model = recipe.model(c, leaves, batch, routers, c.micro_batch_size, training=True)
    model.histories = run.histories
    valid = torch.from_numpy(batch.loss_mask).sum(dim=1)
    count = valid.sum().item()
    terms = model.terms()
    objective = sum(total / size.clamp(min=1) for total, size in terms.values())
    record = {name: (total / size).item() for name, (total, size) in terms.items()} | {"num_tokens": count}
    for depth, (totals, tokens) in enumerate(model.later_losses, start=1):
        record[f"mtp_{depth} loss"] = (totals.sum() / tokens.sum()).item()
        mean = (totals / tokens.clamp(min=1) * valid).sum() / count
        objective = objective + c.mtp_loss_scaling_factor / len(model.later_losses) * mean
    for name, terms in model.aux_losses.items():
        record[name] = sum(term.item() for _, term in terms) / len(terms)
        objective = objective + sum(coefficient * term for coefficient, term in terms)
    objective.backward()
    for router in routers.values():
        router.end_batch(c)
    for history in run.histories.values():
        history.end_step(c)
    return record, {name: leaf.grad for name, leaf in leaves.items()}


def norm(tensors) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


@torch.no_grad()
def evaluate(c: Settings, recipe: Recipe, run: Run, sets: dict[str, list], iteration: int, which: str) -> None:
    """Evaluate each set separately: all samples, without dropout; sums first, one division at the end."""
    size = c.eval_micro_batch_size or c.micro_batch_size
    step = max(16 // size, 1) * size
    for index, samples in enumerate(sets[which]):
        samples = samples if c.full_validation else samples[: samples_of_evaluation(c)]
        sums: dict[str, list] = {}
        for first in range(0, len(samples), step):
            batch = recipe.batch_of(c, samples[first : first + step], first)
            model = recipe.model(c, run.final, batch, run.routers, size, training=False)
            model.histories = run.histories
            for loss, term in model.terms().items():
                sums.setdefault(loss, []).append(term)
        name = (c.validation_set_names or ["0", "1", "2", "3"])[index] if len(sets[which]) > 1 else None
        run.evaluations[which, iteration, name] = {
            loss: (sum(total for total, _ in terms) / sum(count for _, count in terms)).item()
            for loss, terms in sums.items()
        }


def samples_of_evaluation(c: Settings) -> int:
    return c.eval_iters * (c.eval_global_batch_size or lowered(c, final_batch_size(c)))


def num_evaluations(c: Settings, iterations: int) -> int:
    """Evaluations that Megatron-LM prepares validation samples for: the shuffle depends on the number of samples."""
    if not c.eval_interval:
        return 1
    return max(iterations // c.eval_interval - c.start_eval_at_iter // c.eval_interval + 1, 1)


def train(c: Settings, corpora: dict[str, Corpus], overflows: Collection[int] = (), recipe: Recipe = GPT) -> Run:
    """The whole run. Which iterations overflow in fp16 depends on kernels: it is given, what follows from it is not."""
    batches = all_batches(c)
    stream = samples_of(c, corpora, 0, c.train_samples or sum(batches[-1]), recipe.cut)[0]
    one = samples_of_evaluation(c)
    counts = {"valid": one * num_evaluations(c, len(batches)), "test": one}
    sets = {
        kind: samples_of(c, corpora, which, None if c.full_validation else counts[kind], recipe.cut)
        for which, kind in ((1, "valid"), (2, "test"))
    }
    weights = recipe.initial_weights(c)
    run = Run({name: weight.clone() for name, weight in weights.items()}, weights)
    optimizer, scale = Optimizer(c, weights), LossScale(c)
    skipped = c.iterations_to_skip if isinstance(c.iterations_to_skip, list) else [c.iterations_to_skip]
    for iteration, (n, size) in enumerate(batches, start=1):
        samples = [stream[place_of(c, i, len(stream))] for i in range(n, n + size)]
        record = {"consumed_samples": n + size, "learning_rate": learning_rate(c, n, c.lr, c.min_lr)}
        record |= {"global_batch_size": size, "skipped": iteration in skipped or iteration in overflows}
        if c.weight_decay_incr_style != "constant":
            record["weight_decay"] = weight_decay(c, n)
        if iteration not in skipped:
            means, gradients = gradients_of(c, recipe, run, samples, n)
            record |= means
            if not record["skipped"]:
                record["grad_norm"] = norm(gradients.values())
                factor = clip_factor(c, record["grad_norm"])
                optimizer.update({name: factor * gradient for name, gradient in gradients.items()}, n)
            scale.update(iteration in overflows)
            record["params_norm"] = norm(weights.values())
        run.steps.append(record | {"loss_scale": scale.value})
        if c.eval_interval and iteration % c.eval_interval == 0 and iteration >= c.start_eval_at_iter:
            evaluate(c, recipe, run, sets, iteration, "valid")
    for which in sets:
        evaluate(c, recipe, run, sets, len(batches), which)
    return run


def place_of(c: Settings, position: int, length: int) -> int:
    """Return the sample index at a position of the stream; cyclic: one permutation of the data set per epoch."""
    if c.dataloader_type != "cyclic":
        return position
    epoch, offset = divmod(position, length)
    return int(np.random.RandomState(c.seed + epoch).permutation(length)[offset])
