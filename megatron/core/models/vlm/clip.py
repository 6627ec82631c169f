"""Vision towers of CLIP and SigLIP with LLaVA's projector: a bidirectional transformer over images of a fixed size.

    x = [class; W patch (+ b)] + learned positions;  CLIP: norm(x);  L pre-norm layers
    token = W_2 gelu(W_1 x), without CLIP's class token if --disable-vision-class-token

Sources: arXiv 2103.00020 (CLIP), 2303.15343 (SigLIP), 2310.03744 (LLaVA 1.5). Replicated as Qwen's tower.

Legend: i images, n patches of all images, p values of a patch, v width of the tower, t image tokens, h hidden size of
the language model."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.fusions.activations import quick_gelu
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.backends import get_backend
from megatron.core.models.common.language_model_embedding import FullEmbedding
from megatron.core.models.common.layer_specs import encoder_spec
from megatron.core.models.vlm import tower
from megatron.core.models.vlm.grids import Grids
from megatron.core.models.vlm.towers import class_tokens, num_positions, patch_values, tower_config, tower_kind
from megatron.core.transformer.context import NO_CONTEXT
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.transformer_block import TransformerBlock


class ClipTower(nn.Module):
    """Patches [n, p] of images, row by row -> embeddings [t, h]."""

    merge = 1

    def __init__(self, language: TransformerConfig, vision: VisionConfig) -> None:
        """Build the tower for the hidden size of ``language``."""
        super().__init__()
        config, is_clip = tower_config(language, vision), tower_kind(vision).is_clip
        config = replace(config, params_dtype=language.params_dtype)
        width, groups = config.hidden_size, SINGLE_PROCESS
        self.class_tokens = class_tokens(vision)
        self.patch_embed = tower.build_linear(config, patch_values(vision), width, bias=not is_clip)
        self.class_embedding = FullEmbedding(config, 1, groups) if is_clip else None
        self.position_embeddings = FullEmbedding(config, num_positions(vision), groups)
        self.first_norm = build_norm(config, width, config.norm_epsilon, groups=groups) if is_clip else nn.Identity()
        spec = encoder_spec(get_backend("local"), config.num_layers)
        self.blocks = TransformerBlock(config, spec, post_layer_norm=False, groups=groups)
        for layer in self.blocks.layers if is_clip else ():
            mlp = layer.get_submodule("mlp")
            assert isinstance(mlp, MLP)
            mlp.activation = quick_gelu
        self.merger = Projector(config, width, language.hidden_size)
        tower.declare_partial(self)

    def forward(self, patches: Tensor, grids: Grids) -> Tensor:
        """Return the embeddings [t, h] of image tokens, image by image; all images have the same size."""
        count = int(grids.patches[0])
        x = self.patch_embed(patches.to(self.patch_embed.weight.dtype))[0].unflatten(0, (-1, count))
        numbers = torch.arange(count + (self.class_embedding is not None), device=patches.device)
        if self.class_embedding is not None:
            x = torch.cat((self.class_embedding(numbers[:1]).expand(len(x), 1, -1), x), dim=1)
        x = self.first_norm(x + self.position_embeddings(numbers))
        x = self.blocks(x.transpose(0, 1).contiguous(), NO_CONTEXT).transpose(0, 1)
        return self.merger(x[:, x.shape[1] - count - self.class_tokens :].flatten(0, 1))


class Projector(nn.Module):
    """LLaVA's two layers, [t, v] -> [t, h]."""

    def __init__(self, config: TransformerConfig, width: int, hidden_size: int) -> None:
        super().__init__()
        self.linear_fc1 = tower.build_linear(config, width, hidden_size)
        self.linear_fc2 = tower.build_linear(config, hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x)[0]))[0]
