"""Facts that the branches of a model take besides the hidden states, in one object that travels through them.

A fact that a branch newly needs is a field here, filled where a model makes the context (``GPTModel.forward``); every
signature in between stays as it is.

Legend: s sequence (local; e: of the encoder), b batch, h hidden, r rotated channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import RotaryTables
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.transformer.side_losses import SideLosses


@dataclass(frozen=True)
class ForwardContext:
    """Facts about one micro-batch. Every field has a value that says nothing."""

    attention_mask: Tensor | None = None
    """Bool, True where hidden, broadcast to [b, heads, queries, keys]; adds to what attention hides by itself."""
    rotary_pos_emb: RotaryTables | None = None
    """Rotations of queries and keys; None: positions are told otherwise."""
    packed_seq_params: PackedSeqParams | None = None
    """Bounds of documents that do not see each other, in the flattened order [b * s]."""
    dropout: DropoutCoordinates | None = None
    """Where the tokens stand in the training run; None: nothing is dropped."""
    side_losses: SideLosses | None = None
    """Weight of losses in the middle of the model; None: there are none, as in evaluation."""
    rotary_pos_emb_local: RotaryTables | None = None
    """Rotations in layers with a sliding window; None: those of all layers."""
    position_bias: Tensor | None = None
    """[heads, distances]: added to the scores of self-attention (``attention/position_bias.py``)."""
    encoder_output: Tensor | None = None
    """[e, b, h], of which cross-attention makes keys and values."""
    encoder_documents: PackedSeqParams | None = None
    """Which of these keys are real (:meth:`PackedSeqParams.of_keys`); None: all."""
    overlap: bool = False
    """Whether another half of the micro-batch computes in between: collectives may then be left under way."""

    @property
    def can_be_halved(self) -> bool:
        """Whether sequences may go apart: packed documents are numbered through the whole micro-batch."""
        return self.packed_seq_params is None and self.encoder_documents is None

    def halves(self, batch: int) -> tuple[ForwardContext, ForwardContext]:
        """Contexts of the two halves of ``batch`` sequences; what is the same for all of them goes to both."""

        def part(x: Tensor, half: int, dim: int = 0) -> Tensor:
            return x.chunk(2, dim)[half] if x.shape[dim] == batch else x

        def context(half: int) -> ForwardContext:
            mask, dropout, side = self.attention_mask, self.dropout, self.side_losses
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
                side_losses=None if side is None else side._replace(tokens_b=part(side.tokens_b, half)),
                overlap=True,
            )

        return context(0), context(1)


NO_CONTEXT = ForwardContext()
