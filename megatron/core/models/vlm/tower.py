"""Vision tower of Qwen3-VL and Qwen3.5: a bidirectional transformer over the patches of packed images.

    x = W patch + b + learned positions (resampled to the image);  L pre-norm layers, rotary by row and column
    token = W_2 gelu(W_1 [norm(x) of the m x m patches of a square]), also of the outputs of k deep layers (Qwen3-VL)

It is replicated: every rank computes some of the images (``spread.py``), so that its gradients are partial sums.

Legend: n patches, p values of a patch (channels x frames x rows x columns), v width of the tower, m merge size,
t image tokens, h hidden size of the language model, d channels of a head."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import RotaryTables
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.host_memory import copied
from megatron.core.models.backends import get_backend
from megatron.core.models.common.language_model_embedding import FullEmbedding
from megatron.core.models.common.layer_specs import encoder_spec
from megatron.core.models.vlm.grids import Grids
from megatron.core.models.vlm.towers import patch_values, tower_config
from megatron.core.sharding.placement import Partial, declare
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.initial_values import weight_init
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.transformer_block import TransformerBlock

ROTARY_BASE = 10000.0


class QwenTower(nn.Module):
    """Patches [n, p] of images -> embeddings [t, (1 + k) h], k of deep layers after the first h."""

    class_tokens = 0

    def __init__(self, language: TransformerConfig, vision: VisionConfig) -> None:
        """Build the tower for the hidden size of ``language``."""
        super().__init__()
        config, groups = replace(tower_config(language, vision), params_dtype=language.params_dtype), SINGLE_PROCESS
        width, joined = config.hidden_size, config.hidden_size * vision.vision_merge_size**2
        self.merge, self.side = vision.vision_merge_size, math.isqrt(vision.vision_num_positions)
        self.patch_embed = build_linear(config, patch_values(vision), width)
        self.position_embeddings = FullEmbedding(config, vision.vision_num_positions, groups)
        spec = encoder_spec(get_backend("local"), config.num_layers)
        self.blocks = TransformerBlock(config, spec, post_layer_norm=False, groups=groups)
        self.merger = Merger(config, width, joined, language.hidden_size)
        deep = vision.vision_deepstack_layers or ()
        self.deep_mergers = nn.ModuleList(Merger(config, joined, joined, language.hidden_size) for _ in deep)
        self._deep: list[Tensor] = []
        for number in deep:
            self.blocks.layers[number].register_forward_hook(self._note)
        self.frequencies: Tensor
        self.register_buffer("frequencies", _frequencies(config.kv_channels), persistent=False)
        declare_partial(self)

    def forward(self, patches: Tensor, grids: Grids) -> Tensor:
        """Return the embeddings [t, (1 + k) h] of image tokens, image by image."""
        device = patches.device
        entries, weights = (copied(x, device) for x in grids.resampled(self.side))
        x = self.patch_embed(patches.to(self.patch_embed.weight.dtype))[0]
        positions = (self.position_embeddings(entries) * weights.to(x.dtype).unsqueeze(-1)).sum(1)
        context = ForwardContext(layout=self._layout(grids, device), rotary_pos_emb=self._rotary(grids, device))
        self._deep = []
        output = self.merger(self.blocks((x + positions).unsqueeze(1), context).squeeze(1))
        deep = [merger(x.squeeze(1)) for merger, x in zip(self.deep_mergers, self._deep)]
        return torch.cat((output, *deep), dim=1)

    def _note(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._deep.append(output)

    def _layout(self, grids: Grids, device: torch.device) -> TokenLayout:
        """Every image is a document."""
        bounds, longest = grids.bounds, int(grids.patches.max())
        places = copied(bounds, device)
        return TokenLayout().with_documents(
            PackedSeqParams(
                cu_seqlens_q=places,
                cu_seqlens_kv=places,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
                bounds=tuple(bounds.tolist()),
            )
        )

    def _rotary(self, grids: Grids, device: torch.device) -> RotaryTables:
        """Half of the pairs of channels turn by the row, half by the column."""
        coordinates = copied(grids.coordinates, device)
        angles = (coordinates.unsqueeze(-1) * self.frequencies).flatten(1)[:, None, None]
        wide = torch.promote_types(self.patch_embed.weight.dtype, torch.float32)
        return RotaryTables(angles.cos().to(wide), angles.sin().to(wide))


class Merger(nn.Module):
    """Norm of every patch (``normed`` = v) or square (m m v), then a network on each square: [n, v] -> [t, h]."""

    def __init__(self, config: TransformerConfig, normed: int, joined: int, hidden_size: int) -> None:
        super().__init__()
        self.normed = normed
        self.norm = build_norm(config, normed, config.norm_epsilon, groups=SINGLE_PROCESS)
        self.linear_fc1 = build_linear(config, joined, joined)
        self.linear_fc2 = build_linear(config, joined, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        squares = self.norm(x.reshape(-1, self.normed)).reshape(-1, self.linear_fc1.weight.shape[1])
        return self.linear_fc2(F.gelu(self.linear_fc1(squares)[0]))[0]


def build_linear(
    config: TransformerConfig, input_size: int, output_size: int, *, bias: bool = True
) -> ReplicatedLinear:
    """Return a linear layer that every rank holds."""
    init = weight_init(config)
    return ReplicatedLinear(input_size, output_size, config=config, init_method=init, bias=bias, groups=SINGLE_PROCESS)


def declare_partial(tower: nn.Module) -> None:
    """Declare that each rank has the gradients of the images that it computed."""
    for param in tower.parameters():
        declare(param, mesh={}, grad={"tp": Partial()})


def _frequencies(channels: int) -> Tensor:
    pairs = torch.arange(0, channels // 2, 2, dtype=torch.float64) / (channels // 2)
    return ROTARY_BASE**-pairs
