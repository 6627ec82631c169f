"""BERT: an encoder trained on masked tokens and, optionally, on the order of two text segments.

Legend: s sequence, b batch, h hidden, v vocabulary entries of this rank (stored, padding included)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron.core.attention.packed_seq_params import PackedSeqParams, mask_lengths
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.bert.description import describe_bert
from megatron.core.models.bert.heads import BertLMHead, Pooler
from megatron.core.models.common.language_module import LanguageModule
from megatron.core.models.common.settings import LanguageModelSettings
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.transformer.initial_values import weight_init
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules


class LabelsAt(NamedTuple):
    """``labels`` int64 [b, k] at the sequence positions ``places`` int64 [b, k]; the LM head is computed only there."""

    labels: Tensor
    places: Tensor


class BertModel(LanguageModule):
    """BERT model: returns logits, or per-token losses if labels are passed, and the logits of the binary head.

    ``num_tokentypes=0`` builds no token-type embedding."""

    def __init__(
        self,
        config: TransformerConfig,
        settings: LanguageModelSettings,
        num_tokentypes: int,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        add_binary_head: bool = True,
    ) -> None:
        """Build this stage's embedding, encoder layers and heads."""
        super().__init__(config, settings)
        self.add_binary_head = add_binary_head
        branches, length = settings.branches, settings.max_sequence_length
        if branches is None:
            described = describe_bert(
                config, settings.vocabulary, seq_length=length, max_sequence_length=length, spec=transformer_layer_spec
            )
            branches = self.stage_branches(described)
        with self.construction(num_tokentypes=num_tokentypes):
            self.encoder = TransformerBlock(
                config, transformer_layer_spec, branches=branches, post_layer_norm=self.post_process, groups=self.groups
            )
            if self.post_process:
                self._build_heads()

    def _build_heads(self) -> None:
        """Create the masked-token head, the output layer (with a bias; shares the embedding's weight if tied) and, with
        ``add_binary_head``, pooler and sentence-order classifier [2, h]; else these two are None."""
        config = self.config
        self.lm_head = BertLMHead(config, self.groups)
        self.output_layer = self.build_output_layer(bias=True)
        self.pooler, self.binary_head = None, None
        if self.add_binary_head:
            self.pooler = Pooler(config, self.groups)
            self.binary_head = ReplicatedLinear(
                config.hidden_size,
                2,
                config=config,
                init_method=weight_init(config),
                whole_input=True,
                groups=self.groups,
            )

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | LabelsAt | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        sample_index: Tensor | None = None,
        position_ids: Tensor | None = None,
        first_tokens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return (LM output, binary logits). The LM output is logits [b, s, v] (-inf for padded entries) or, with
        labels, losses fp32 [b, s] of every label. Binary logits are [b, 2], or None without that head. Pipeline stages
        other than the last return only hidden states [s, b, h]. ``attention_mask`` replaces ``packed_seq_params``.

        Args:
            input_ids: int64 [b, s]. With context parallelism s counts this rank's tokens, here and below. None on later
                pipeline stages.
            attention_mask: int or bool [b, s] of *full* sequences: 1 for tokens, 0 for the padding after them. None: no
                padding, or ``packed_seq_params`` describes it (:meth:`PackedSeqParams.of_lengths`).
            tokentype_ids: int64 [b, s].
            lm_labels: int64 [b, s]; must be a valid id even where the loss is masked. :class:`LabelsAt`: losses are [b,
                k], and the head is computed at these positions only.
            sample_index: int64 [b], indices of the samples in the run; dropout masks depend on them.
            position_ids: int64 [1, s], position of each token in its sample if ``packed_seq_params`` packs samples into
                one row; ``sample_index`` is then [1, s]. None: each row is a sample.
            first_tokens: int64 [n], index of each sample's first token in that row (this rank's tokens). The binary
                head then returns n rows.

        Raises:
            ValueError: padding is not after all tokens; :class:`LabelsAt` with sequence parallelism."""
        if attention_mask is not None:
            packed_seq_params = PackedSeqParams.of_lengths(mask_lengths(attention_mask), attention_mask.shape[1])
        context = self.forward_context(input_ids, sample_index, packed_seq_params, position_ids)
        if self.pre_process:
            assert input_ids is not None
            if position_ids is None:
                position_ids = context.layout.positions(input_ids.shape[1], input_ids.device).expand(input_ids.shape)
            hidden_states = self.embedding(input_ids, position_ids, context.dropout, tokentype_ids)
        else:
            hidden_states = self.received
        hidden_states = self.encoder(hidden_states, context)
        if not self.post_process:
            return hidden_states
        binary_logits = None
        if self.pooler is not None and self.binary_head is not None:
            binary_logits = self.binary_head(self.pooler(hidden_states, first_tokens))[0]
        if isinstance(lm_labels, LabelsAt):
            if self.config.sequence_parallel:
                raise ValueError("LabelsAt: under sequence parallelism ranks hold parts of rows; give labels [b, s]")
            places = lm_labels.places.transpose(0, 1)[..., None].expand(-1, -1, hidden_states.shape[-1])
            hidden_states, lm_labels = hidden_states.gather(0, places), lm_labels.labels
        return self.outputs(self.lm_head(hidden_states), lm_labels), binary_logits
