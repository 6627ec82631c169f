"""An update rule that owns matrices, which no file under ``megatron/`` refers to: momentum, orthogonalized per matrix.

A matrix is the last two logical dims of a parameter: stacked weights (gate and up, key-value groups, experts) hold
several. The step of each is nearly the orthogonal factor U V^T of its momentum, by five Newton-Schulz iterations (Muon,
Jordan et al. 2024).
"""

import torch

from megatron.core.sharding.placement import declare


def orthogonalized(matrices):
    """[..., m, n] with singular values close to 1; smooth, so that rounding noise stays small."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


class Orthogonalized:
    owns = "matrices"

    def __init__(self, config, storages):
        self.momentum = config.sgd_momentum
        self.moment_dtypes = {"matrix_momentum": torch.float32}

    def update(self, entries, conditions):
        keep = 1.0 - conditions.skip
        for entry in entries:
            (momentum,) = entry.moments
            gradient = entry.gradient if conditions.factor is None else entry.gradient * conditions.factor
            changed = self.momentum * momentum + gradient.to(momentum.dtype)
            momentum.copy_(torch.where(keep.bool(), changed, momentum))
            step = entry.local(orthogonalized(entry.full(momentum)))
            master = entry.storage.read()
            entry.storage.write(master - entry.lr * keep * (step + entry.weight_decay * master))


def declare_matrices(model):
    """Give the weights of linear layers in the stack the rule; embeddings, biases and norms keep theirs."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".layers." in name and parameter.spec.part is None:
            declare(parameter, update_rule=Orthogonalized)
    return model


def with_matrices(task_class):
    """A task whose model declares the rule."""

    class WithMatrices(task_class):
        def model_provider(self, pre_process=True, post_process=True, vp_stage=None):
            return declare_matrices(super().model_provider(pre_process, post_process, vp_stage))

    return WithMatrices
