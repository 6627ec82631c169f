"""Muon, written from its papers: momentum, Newton-Schulz, scale by shape. One function per step of the definition."""

import torch

POLAR_EXPRESS = [
    (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.8750, -1.25, 0.375),
]  # fmt: skip

KINDS = ("muon", "adaptive_muon")
SIMPLE = [(3.4445, -4.7750, 2.0315)]
# of p(x / 1.01): without the divisor it diverges in bf16
CANS = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in [
    (8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630), (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
]]  # fmt: skip
QUINTIC = [
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]  # fmt: skip
CUBIC = [(3.3656576, -3.3420992, 0), (2.5744352, -1.4957376, 0), (2.5368962, -1.4312570, 0),
         (2.4418906, -1.2764040, 0), (2.2230472, -0.9630650, 0)]  # fmt: skip


def triples(c):
    result = {
        "simple": SIMPLE, "cans": CANS, "quintic": QUINTIC, "cubic5": CUBIC, "polar_express": POLAR_EXPRESS,
        "deepseekv4": SIMPLE * 8 + [(2.0, -1.5, 0.5)],
    }[c.muon_coefficient_type]  # fmt: skip
    steps = int(c.muon_num_ns_steps)
    if c.muon_coefficient_type in ("cans", "polar_express", "deepseekv4"):
        return (result + result[-1:] * steps)[:steps]
    return (result * steps)[:steps]


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


def adapted(factor, second, c):
    """Return the factor of adaptive Muon and its next second moment, [rows, columns] for both kinds."""
    squares = factor**2
    if c.adaptive_muon_moment2_method == "adamuon":
        second = c.adaptive_muon_beta2 * second + (1 - c.adaptive_muon_beta2) * squares
        return factor / (second.sqrt() + c.adaptive_muon_eps), second
    along = 1 if factor.shape[0] >= factor.shape[1] else 0
    mean = squares.sum(along, keepdim=True) / factor.shape[along]
    second = c.adaptive_muon_beta2 * second + (1 - c.adaptive_muon_beta2) * mean
    update = factor / second.clamp(min=c.adaptive_muon_eps) ** 0.5
    return update * (squares.sum() / (update**2).sum().clamp(min=c.adaptive_muon_eps**2)) ** 0.5, second


def muon_step(weight, gradient, momentum, c, lr=None, decay=None, second=None):
    """Return the next weight and momentum of one matrix, in fp64; with a ``second`` moment also this."""
    lr, decay = c.lr if lr is None else lr, c.weight_decay if decay is None else decay
    if not getattr(c, "decoupled_weight_decay", True):
        gradient, decay = gradient + decay * weight, 0.0
    direction, momentum = direction_of(gradient, momentum, c)
    factor = newton_schulz(direction, c)
    if second is not None:
        factor, second = adapted(factor, second, c)
    moments = (momentum,) if second is None else (momentum, second)
    return weight - lr * decay * weight - lr * scale(*weight.shape, c) * factor, *moments


# ---- the matrices of a model's weights


def is_updated(name, weight):
    """Matrices, of experts a stack of them; not embeddings, the output layer and biases."""
    return weight.dim() > 1 and not any(part in name for part in ("embedding", "output_layer", "bias"))


def rows_of_matrices(name, rows, c):
    """Return the row numbers of each matrix in a weight with this number of rows."""
    every = torch.arange(rows)
    heads, groups = c.num_attention_heads, c.num_query_groups if c.group_query_attention else c.num_attention_heads
    if name.endswith("linear_fc1.weight") and (c.swiglu or c.geglu or c.quick_geglu) and c.muon_split_gate_up:
        return every.chunk(2)
    if c.muon_split_qkv_per_head and name.endswith(("linear_q_proj.weight", "linear_q_up_proj.weight")):
        return every.chunk(heads)
    if c.muon_split_qkv_per_head and name.endswith("linear_kv_up_proj.weight"):
        pairs = every.view(heads, -1)
        return [half for head in pairs for half in (head[: c.qk_head_dim], head[c.qk_head_dim :])]
    if not name.endswith("linear_qkv.weight") or c.muon_no_split_qkv:
        return [every]
    stored = every.view(groups, heads // groups + 2, -1)  # per group: its query heads, its key, its value
    if c.muon_split_qkv_per_head:
        return list(stored.flatten(0, 1))
    return [stored[:, :-2].flatten(), stored[:, -2].flatten(), stored[:, -1].flatten()]


def update_weight(name, weight, gradient, momentum, second, c, lr, decay):
    """Update one weight and its moments in place: [rows, columns], or such a matrix per expert. Adaptive Muon has a
    second moment."""
    if weight.dim() == 3:
        for parts in zip(weight, gradient, momentum, second):
            update_weight(name, *parts, c, lr, decay)
        return
    moments = (momentum, second) if c.optimizer == "adaptive_muon" else (momentum,)
    for rows in rows_of_matrices(name, len(weight), c):
        old = dict(zip(("momentum", "second"), (item[rows] for item in moments)))
        weight[rows], *new = muon_step(weight[rows], gradient[rows], c=c, lr=lr, decay=decay, **old)
        for moment, value in zip(moments, new):
            moment[rows] = value
