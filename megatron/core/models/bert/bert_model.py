"""BERT: an encoder trained on masked tokens and, optionally, on the order of two text segments.

Legend: s sequence, b batch, h hidden, v vocabulary entries of this rank (stored, padding included).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron.core.attention.packed_seq_params import PackedSeqParams, mask_lengths
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.bert.description import describe_bert
from megatron.core.models.bert.heads import BertLMHead, Pooler
from megatron.core.models.common.language_module import LanguageModule, PositionEmbeddingType, Positions, Vocabulary
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

    ``num_tokentypes=0`` builds no token-type embedding. The other arguments are as in :class:`GPTModel`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_tokentypes: int,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbeddingType = "learned_absolute",
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        add_binary_head: bool = True,
        vp_stage: int | None = None,
        *,
        rotary_base: float = 10000,
        make_vocab_size_divisible_by: int = 128,
        seed: int | None = None,
        groups: ProcessGroups | None = None,
        branches: range | None = None,
    ) -> None:
        """Build this stage's embedding, encoder layers and heads. ``branches`` (None: by balance of the pipeline ranks)
        is the range over all branches. ``fp16_lm_cross_entropy`` is ignored."""
        super().__init__(
            config,
            Vocabulary(vocab_size, share_embeddings_and_output_weights, make_vocab_size_divisible_by),
            Positions(
                max_sequence_length, position_embedding_type, rotary_percent, rotary_base, seq_len_interpolation_factor
            ),
            pre_process=pre_process, post_process=post_process, seed=seed, groups=groups, vp_stage=vp_stage,
        )  # fmt: skip
        self.add_binary_head, self.parallel_output = add_binary_head, parallel_output
        if branches is None:
            described = describe_bert(
                config, self.vocabulary, seq_length=max_sequence_length, max_sequence_length=max_sequence_length,
                spec=transformer_layer_spec,
            )  # fmt: skip
            branches = self.stage_branches(described)
        with self.construction(num_tokentypes=num_tokentypes):
            self.encoder = TransformerBlock(
                config, transformer_layer_spec, branches=branches, post_layer_norm=post_process, groups=self.groups
            )
            if post_process:
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
                config.hidden_size, 2, config=config, init_method=weight_init(config), whole_input=True,
                groups=self.groups,
            )  # fmt: skip

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
            ValueError: padding is not after all tokens; :class:`LabelsAt` with sequence parallelism.
        """
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
