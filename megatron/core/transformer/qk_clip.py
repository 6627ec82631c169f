"""QK-Clip (Kimi K2, arXiv 2507.20534): scale query and key weights of heads whose attention logits grow too large.

    S = maximum logit of a head in the global batch          eta = min(1, threshold / S)
    W_q <- eta^alpha W_q,  W_k <- eta^(1 - alpha) W_k        after the optimizer step; biases too, moments not

Heads that share a key (a group) use the group's maximum. Latent attention: rows without rotary embedding as above; the
rotary key is shared by all heads and stays, so that rotary query rows are scaled by eta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.attention.dot_product_attention import CoreAttention
from megatron.core.attention.max_logits import MaxLogits
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

ScaleRows = Callable[[nn.Parameter, Tensor], None]
"""(parameter, factors [rows]) -> None: multiply the rows of a local parameter and its master, in place."""


class QKClip:
    """Maximum attention logits of a model's layers, and their clipping with ``config.qk_clip``. The constructor adds
    accumulators to core attentions and is collective over the pipeline. Raises UserError for an attention module of
    another kind.

    Args:
        modules: this rank's chunks.
        config: model configuration.
        groups: this rank's process groups."""

    def __init__(self, modules: Iterable[nn.Module], config: TransformerConfig, groups: ProcessGroups) -> None:
        self.config, self.groups = config, groups
        self.attentions = [mixer for module in modules for mixer in _attentions(module)]
        self.maxima = [_add_accumulator(mixer.core_attention) for mixer in self.attentions]
        self.heads = config.num_attention_heads // groups.tp.size
        self.logged: dict[str, Tensor] = {}
        """Maximum logit of each layer in the last global batch, by ``layer N/max_attention_logit``; 0-d tensors. Empty
        if no log wants them."""
        labels = [f"layer {each.layer_number}/max_attention_logit" for each in self.maxima]
        every: list[list[str]] = [labels]
        if groups.pp.size > 1:
            every = [[]] * groups.pp.size
            dist.all_gather_object(every, labels, group=groups.pp.handle)
        self.names = [*dict.fromkeys(name for stage in every for name in stage)]
        self._places = [self.names.index(name) for name in labels]
        self.prepare(False)

    def prepare(self, measures_layers: bool) -> None:
        """Compute maxima in the forward passes of the next step if a flag or ``measures_layers`` asks for them. All
        ranks must agree. Not within a captured CUDA graph."""
        self._logs = self.config.log_max_attention_logit or measures_layers
        self._is_active = self._logs or self.config.qk_clip
        for attention, maxima in zip(self.attentions, self.maxima):
            attention.core_attention.max_logits = maxima if self._is_active else None

    def __call__(self, scale_rows: ScaleRows, skipped: Tensor) -> None:
        """Take the maxima of the global batch, and scale the weights unless ``skipped`` (0-d bool). Collective over
        data-parallel ranks and the world. No host sync."""
        self.logged = {}
        if not self._is_active:
            return
        maxima = [maximum.take(skipped, self.heads) for maximum in self.maxima]
        of_heads = torch.stack(maxima) if maxima else skipped.new_zeros((0, self.heads), dtype=torch.float32)
        if maxima and self.groups.dp_cp.size > 1:
            dist.all_reduce(of_heads, dist.ReduceOp.MAX, group=self.groups.dp_cp.handle)
        of_layers = torch.full((len(self.names),), -torch.inf, device=of_heads.device)
        for place, row in zip(self._places, of_heads):
            of_layers[place] = torch.maximum(of_layers[place], row.max())
        if self.groups.world.size > 1:
            dist.all_reduce(of_layers, dist.ReduceOp.MAX, group=self.groups.world.handle)
        if self._logs:
            self.logged = dict(zip(self.names, of_layers))
        if not self.config.qk_clip:
            return
        eta = (self.config.qk_clip_threshold / of_heads).clamp(max=1.0)
        eta = torch.where(skipped | ~of_heads.isfinite() | (of_heads <= 0), 1.0, eta)
        for attention, row in zip(self.attentions, eta):
            for linear, factors in self._factors(attention, row):
                for name, parameter in linear.named_parameters():
                    if name in ("weight", "bias"):
                        scale_rows(parameter, factors)

    def _factors(self, attention: SelfAttention | MLASelfAttention, eta: Tensor) -> Iterator[tuple[nn.Module, Tensor]]:
        """Yield the linear layers of queries and keys, each with the factors of its local rows."""
        alpha = self.config.qk_clip_alpha
        if isinstance(attention, SelfAttention):
            per_group = attention.heads_per_group
            of_group = eta.unflatten(0, (-1, per_group)).amin(1, keepdim=True)
            query, key = of_group**alpha, of_group ** (1.0 - alpha)
            heads = torch.cat([query.expand(-1, per_group), key, torch.ones_like(key)], dim=1)
            yield attention.linear_qkv, heads.flatten().repeat_interleave(attention.channels)
        else:
            nope, rope, value = self.config.qk_head_dim, self.config.qk_pos_emb_head_dim, self.config.v_head_dim
            column = eta[:, None]
            query = torch.cat([(column**alpha).expand(-1, nope), column.expand(-1, rope)], dim=1)
            key = torch.cat([(column ** (1.0 - alpha)).expand(-1, nope), torch.ones_like(column).expand(-1, value)], 1)
            yield attention.linear_query, query.flatten()
            yield attention.linear_kv_up_proj, key.flatten()


def _attentions(module: nn.Module) -> Iterator[SelfAttention | MLASelfAttention]:
    """Yield the self-attentions of ``module``."""
    for name, mixer in module.named_modules():
        core = getattr(mixer, "core_attention", None)
        if core is None:
            continue
        if not isinstance(core, CoreAttention) or not isinstance(mixer, SelfAttention | MLASelfAttention):
            raise UserError(
                f"--qk-clip, --log-max-attention-logit: {name} ({type(mixer).__name__}) gives no logits; "
                "remove the flags, or use self-attention of --transformer-impl local"
            )
        yield mixer


def _add_accumulator(core: nn.Module) -> MaxLogits:
    assert isinstance(core, CoreAttention)
    core.max_logits = MaxLogits(core.scale, core.layer_number)
    return core.max_logits
