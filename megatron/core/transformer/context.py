"""Inputs of a model's branches besides the hidden states, in one object that passes through all layers.

To give branches a new input, add a field here and fill it where the model builds the context (``GPTModel.forward``); no
signature in between changes.

Legend: s sequence (local; e: of the encoder), b batch, h hidden, r rotated channels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from megatron.core.attention.context import AttentionContext
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import RotaryTables
from megatron.core.pipeline_parallel.loss_weights import AuxLossWeights

if TYPE_CHECKING:
    from megatron.core.transformer.layer_losses import LayerTargets


@dataclass(frozen=True)
class ForwardContext(AttentionContext):
    """Inputs shared by all layers for one micro-batch next to core attention's; defaults: not used."""

    rotary_pos_emb: RotaryTables | None = None
    """Rotary tables of queries and keys; None without rotary positions."""
    aux_losses: AuxLossWeights | None = None
    """Weights of auxiliary losses; None without them, as in evaluation."""
    layer_targets: LayerTargets | None = None
    """Outputs of a teacher's layers for the losses between layers; None without them."""
    rotary_pos_emb_local: RotaryTables | None = None
    """Rotary tables of sliding-window layers; None: ``rotary_pos_emb``."""
    encoder_output: Tensor | None = None
    """[e, b, h], from which cross-attention computes keys and values."""
    overlap: bool = False
    """Whether the other half of the micro-batch is interleaved: collectives may stay in flight across a yield."""

    @property
    def packed_seq_params(self) -> PackedSeqParams | None:
        """Boundaries of packed documents that do not attend to each other, in the flattened order [b * s] of full
        sequences; None: each sequence is one document."""
        return self.layout.documents

    @property
    def can_be_halved(self) -> bool:
        """Whether the batch may be split in two. Packed documents prevent it: they are numbered over the full
        micro-batch. Layers in two halves run without the hooks that ``layer_targets`` needs."""
        return self.layout.documents is None and self.encoder_documents is None and self.layer_targets is None

    def halves(self, batch: int) -> tuple[ForwardContext, ForwardContext]:
        """Return the contexts of the two halves of ``batch`` (even) sequences. Per-sequence fields are split into
        views; tensors whose batch dim has another size (broadcast) and all others are shared. ``overlap`` is set;
        ``position_bias`` and documents are not split."""

        def part(x: Tensor, half: int, dim: int = 0) -> Tensor:
            return x.chunk(2, dim)[half] if x.shape[dim] == batch else x

        def context(half: int) -> ForwardContext:
            mask, dropout, side = self.attention_mask, self.dropout, self.aux_losses
            rotary, rotary_local = (
                None if tables is None else RotaryTables(*(part(table, half, 1) for table in tables))
                for tables in (self.rotary_pos_emb, self.rotary_pos_emb_local)
            )
            return replace(
                self,
                attention_mask=None if mask is None else part(mask, half),
                rotary_pos_emb=rotary,
                rotary_pos_emb_local=rotary_local,
                dropout=None if dropout is None else replace(dropout, sample_b=part(dropout.sample_b, half)),
                encoder_output=None if self.encoder_output is None else part(self.encoder_output, half, 1),
                aux_losses=None if side is None else side._replace(tokens_b=part(side.tokens_b, half)),
                overlap=True,
            )

        return context(0), context(1)


NO_CONTEXT = ForwardContext()
