"""The policies of a stack of layers, in their order. Each attaches to sites (``sites.py``); layers do not know them.

Recompute   repeated calls and discarded outputs (``recompute.py``)
Fp8Casts    norms and activations write fp8 copies for the layers that read them
Offload     saved tensors move to host memory (``offload.py``); outermost, as recomputed calls save their arguments"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fp8.gemms import target_of_reader, targets_between
from megatron.core.fp8.recipe import Fp8Stack, install_fp8
from megatron.core.fusions.activations import select_gated_cast
from megatron.core.fusions.fp8_cast import CastTarget
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.transformer.branch import Branch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.offload import Offload
from megatron.core.transformer.overlap import input_reader
from megatron.core.transformer.recompute import Recompute
from megatron.core.transformer.sites import Run, Sited, install


def install_policies(
    stack: nn.Module, config: TransformerConfig, num_layers: int, groups: ProcessGroups
) -> Fp8Stack | None:
    """Attach the policies of ``config`` to a built ``stack`` of a model with ``num_layers`` layers; return its fp8
    state. Raises UserError for unknown sites."""
    fp8 = install_fp8(stack, config, num_layers, groups)
    install(stack, [Recompute(config, stack, groups), Fp8Casts(config), Offload(config)])
    return fp8


class Fp8Casts:
    """Policy for delayed scales: producers write fp8 copies in place of values that only one layer reads."""

    def __init__(self, config: TransformerConfig) -> None:
        # a shared norm has several readers, and halves are gathered before the layer: both would lose the copies
        self.norms = config.fp8 is not None and config.fp8_recipe == "delayed" and not config.share_parallel_norm
        self.norms &= not config.tp_comm_overlap
        self.gated_cast = select_gated_cast(config)

    def attach(self, owner: Sited) -> None:
        """Wrap the norm of a branch, and the activation of a feed-forward network."""
        # a recomputed mixer gets its input as another tensor object, without the copies
        if self.norms and isinstance(owner, Branch) and owner.at.is_plain(owner.name):
            run = partial(_norm_and_cast, owner, getattr(owner.at, owner.norm_site))
            setattr(owner.at, owner.norm_site, run)
        if self.gated_cast is not None and isinstance(owner, MLP):
            run = partial(_activate_and_cast, owner, self.gated_cast, owner.at._activation)
            owner.at._activation = run


def _norm_and_cast(branch: Branch, run: Run, norm: Any, hidden: Tensor, *output: Tensor | None) -> Any:
    """Return the norm's result; the normalized stream carries copies for the mixer's first layer, if it has a scale."""
    target = _target_of_mixer(branch, norm, hidden)
    return run(norm if target is None else partial(norm, target=target), hidden, *output)


def _target_of_mixer(branch: Branch, norm: Any, hidden: Tensor) -> CastTarget | None:
    reader = input_reader(branch.mixer) if hidden.is_cuda and branch.norm_adds and norm.casts else None
    return None if reader is None else target_of_reader(reader, hidden.device)


def _activate_and_cast(mlp: MLP, gated_cast: Callable, run: Run, activation: Callable, x: Tensor) -> Tensor:
    """Return the activation of ``x`` with copies for fc2 and, in backward, for fc1, if both have scales."""
    targets = targets_between(mlp.linear_fc1, mlp.linear_fc2, x.device) if x.is_cuda else None
    return run(activation, x) if targets is None else gated_cast(x, *targets)
