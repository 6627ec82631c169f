"""Muon, written from its papers: momentum, Newton-Schulz, scale by shape. One function per step of the definition."""

import torch

SIMPLE = [(3.4445, -4.7750, 2.0315)]
CANS = [
    (8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630), (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
]  # fmt: skip
QUINTIC = [
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]  # fmt: skip
CUBIC = [(3.3656576, -3.3420992, 0), (2.5744352, -1.4957376, 0), (2.5368962, -1.4312570, 0),
         (2.4418906, -1.2764040, 0), (2.2230472, -0.9630650, 0)]  # fmt: skip


def triples(c):
    found = {"simple": SIMPLE, "cans": CANS, "quintic": QUINTIC, "cubic5": CUBIC}[c.muon_coefficient_type]
    steps = int(c.muon_num_ns_steps)
    if c.muon_coefficient_type == "cans":
        return (found + found[-1:] * steps)[:steps]
    return (found * steps)[:steps]


def newton_schulz(matrix, c):
    """By singular values: the iteration acts on each singular value s as s <- a s + b s^3 + c s^5."""
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    size = values.square().sum().sqrt()
    values = values / size if size > 0 else values
    for a, b, third in triples(c):
        values = a * values + b * values**3 + third * values**5
    return u @ torch.diag(values) @ vt


def scale(rows, columns, c):
    by_mode = {
        "spectral": max(rows, columns) ** 0.5,
        "unit_rms_norm": (rows / columns) ** 0.5,
        "shape_scaling": max(1.0, rows / columns) ** 0.5,
    }
    return by_mode[c.muon_scale_mode] * c.muon_extra_scale_factor


def direction_of(gradient, momentum, c):
    """Return (direction, next momentum): means of past gradients, with Nesterov one gradient ahead."""
    mu = c.muon_momentum
    momentum = mu * momentum + (1 - mu) * gradient
    return ((1 - mu) * gradient + mu * momentum if c.muon_nesterov else momentum), momentum


def muon_step(weight, gradient, momentum, c, lr=None, decay=None):
    """Return the next weight and momentum of one matrix, in fp64."""
    lr, decay = c.lr if lr is None else lr, c.weight_decay if decay is None else decay
    if not getattr(c, "decoupled_weight_decay", True):
        gradient, decay = gradient + decay * weight, 0.0
    direction, momentum = direction_of(gradient, momentum, c)
    return weight - lr * decay * weight - lr * scale(*weight.shape, c) * newton_schulz(direction, c), momentum
