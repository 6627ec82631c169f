"""The model.

Legend: s sequence (this rank's positions), b batch, n vectors of numbers, f features, e encoder width, h hidden.
"""

import torch

from megatron.core.models.backends import get_backend
from megatron.core.models.common.language_module import LanguageModule
from megatron.core.models.common.layer_specs import encoder_spec, layer_spec
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.operators import scatter_to_sequence
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import weight_init
from megatron.core.transformer.transformer_block import TransformerBlock


class NumbersModel(LanguageModule):
    """Losses or logits of tokens, given numbers. ``configs``: the encoder's and the decoder's configuration."""

    def __init__(self, configs, features, settings):
        numbers, config, backend = configs["numbers"], configs["decoder"], get_backend("local")
        super().__init__(config, settings)
        groups = self.groups
        with self.construction():
            if self.pre_process:
                common = {"bias": False, "groups": groups}
                self.numbers_in = ReplicatedLinear(
                    features, numbers.hidden_size, config=numbers, init_method=weight_init(numbers), **common
                )
                spec = encoder_spec(backend, numbers.num_layers)
                first = config.num_layers + 1  # dropout masks are addressed by layer number
                self.numbers = TransformerBlock(numbers, spec, first_number=first, groups=groups)
                self.numbers_out = ReplicatedLinear(
                    numbers.hidden_size, config.hidden_size, config=numbers, init_method=weight_init(config), **common
                )
            self.decoder = TransformerBlock(
                config, layer_spec(backend), branches=settings.branches, post_layer_norm=self.post_process,
                groups=groups,
            )  # fmt: skip
            if self.post_process:
                self.output_layer = self.build_output_layer()

    def forward(self, tokens, position_ids, numbers, *, labels=None, sample_index=None):
        """Map int64 ids [b, s] and numbers [b, n, f] to losses [b, s], logits [b, s, v], or hidden states [s, b, h]."""
        context = self.forward_context(tokens, sample_index)
        if self.pre_process:
            hidden = self.embedding(tokens, position_ids, context.dropout)
            added = self._encoded(numbers, sample_index).expand(tokens.shape[1], -1, -1)
            sharded = self.embedding.sequence_parallel
            hidden = hidden + (scatter_to_sequence(added, self.groups.tp) if sharded else added)
        else:
            hidden = self.received
        hidden = self.decoder(hidden, context)
        return self.outputs(hidden, labels) if self.post_process else hidden

    def _encoded(self, numbers, sample_index):
        """Map [b, n, f] to [1, b, h]."""
        context = ForwardContext()
        if self.training:
            samples = self.samples(len(numbers), sample_index, numbers.device)
            positions = torch.arange(numbers.shape[1], device=numbers.device)
            context = ForwardContext(dropout=DropoutCoordinates(self.dropout_stream, samples, positions))
        x_nbe, _ = self.numbers_in(numbers.transpose(0, 1).to(self.config.params_dtype))
        return self.numbers_out(self.numbers(x_nbe, context).mean(0, keepdim=True))[0]
