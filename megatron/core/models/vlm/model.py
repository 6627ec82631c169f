"""Decoder-only models that read images: embeddings of image tokens come from a vision tower.

Legend: s sequence (of this rank), b batch, h hidden, i images, n patches, p values of a patch, t image tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.host_memory import copied
from megatron.core.inference.images import StepImages
from megatron.core.models.common.settings import LanguageModelSettings
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.vlm.grids import Grids
from megatron.core.models.vlm.positions import axes_tables
from megatron.core.models.vlm.spread import GatherImages, gathering, share_images
from megatron.core.models.vlm.towers import tower_kind
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


@dataclass(frozen=True, eq=False)
class Images:
    """Images of a micro-batch, equal on all ranks that share it."""

    patches: Tensor
    """[n, p] of all images in the order of :class:`Grids`, on the host or the device."""
    sizes: Tensor
    """Height and width of each image in patches, int64 [i, 2] on the host."""
    numbers: Tensor
    """Number among all image tokens of each of this rank's tokens, int64 [b, s]; -1 for text."""

    def chosen(self, images: list[int]) -> Images:
        """Return the patches and sizes of some ``images``."""
        pieces = self.patches.split(self.sizes.prod(1).tolist())
        patches = torch.cat([self.patches[:0], *(pieces[image] for image in images)])
        return Images(patches, self.sizes[images], self.numbers)

    @classmethod
    def none(cls, tower: nn.Module) -> Images:
        """Return no images for ``tower``."""
        empty = torch.zeros(0, 2, dtype=torch.int64)
        return cls(torch.zeros(0, tower.get_parameter("patch_embed.weight").shape[1]), empty, empty)


@dataclass(frozen=True)
class ImageContext(ForwardContext):
    """Inputs of all layers, and the images."""

    images: Images | None = None
    deep: list[Tensor] = field(default_factory=list)
    """Added after the first layers, [s, b, h] each: outputs of deep layers of the tower at image tokens, else zeros."""


class VisionLanguageModel(GPTModel):
    """GPT whose first stage has a vision tower.

    Every rank of tensor and context parallelism computes some of the images; without images the tower runs on an empty
    one, so that its weights have gradients on all ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        settings: LanguageModelSettings,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        mtp_block_spec: None = None,
        *,
        vision: VisionConfig,
        **options: Any,
    ) -> None:
        """Build the stage as :class:`GPTModel` does, and on the first one ``vision``."""
        self.vision_settings = vision
        super().__init__(config, settings, transformer_layer_spec, mtp_block_spec, **options)

    @contextmanager
    def construction(self, **options: Any) -> Iterator[None]:
        with super().construction(**options):
            if self.pre_process:
                tower = resolve_name(tower_kind(self.vision_settings).module)
                self.vision = tower(self.config, self.vision_settings)
            yield
            if self.pre_process:
                self._add_deep_layers(len(self.vision_settings.vision_deepstack_layers or ()))

    def _add_deep_layers(self, count: int) -> None:
        """Add the outputs of deep layers of the tower after the first ``count`` layers. Raises UserError if a later
        pipeline stage has a part of these."""
        layers = [*self.decoder.layers]
        whole = [layer for layer in layers if len(layer.branches) == len(layers[0].branches)]
        if len(whole) < count:
            raise UserError(
                f"--vision-deepstack-layers: {count} layers are added to as many layers of the language model, but the "
                f"first pipeline stage has {len(whole)}; use fewer stages, or give it more layers"
            )
        for number, layer in enumerate(whole[:count]):
            layer.register_forward_hook(partial(_add_deep, number))

    def forward_context(
        self,
        input_ids: Tensor | None,
        sample_index: Tensor | None,
        documents: PackedSeqParams | TokenLayout | None = None,
        position_ids: Tensor | None = None,
        *,
        images: Images | None = None,
        axes: Tensor | None = None,
        **more: Any,
    ) -> ForwardContext:
        """Build the context of :class:`GPTModel` with ``images``; ``axes`` int64 [b, s, 3] are the rotary positions
        (time, row, column) of this rank's tokens; None: the positions of text."""
        context = super().forward_context(input_ids, sample_index, documents, position_ids, **more)
        inputs = {item.name: getattr(context, item.name) for item in fields(context)}
        sections = self.vision_settings.mrope_section
        if axes is not None and sections is not None and self.rotary_pos_emb is not None:
            inputs["rotary_pos_emb"] = axes_tables(self.rotary_pos_emb, axes, sections)
        return ImageContext(**inputs, images=images)

    def step_inputs(self, images: StepImages, rows: int) -> dict[str, Any]:
        """Return ``images``of a step of ``rows`` rows (with padding) as inputs of :meth:`forward_context`."""
        missing, device = rows - len(images.numbers), next(self.parameters()).device
        numbers = copied(F.pad(torch.from_numpy(images.numbers), (0, missing), value=-1)[None], device)
        axes = copied(F.pad(torch.from_numpy(images.axes), (0, 0, 0, missing))[None], device)
        sizes = torch.tensor(images.sizes, dtype=torch.int64).reshape(-1, 2)
        return {"images": Images(torch.from_numpy(images.patches), sizes, numbers), "axes": axes}

    def embed(self, input_ids: Tensor, position_ids: Tensor | None, context: ForwardContext) -> Tensor:
        """Return the embeddings of tokens [s, b, h]; image tokens have embeddings of the tower, without dropout."""
        assert isinstance(context, ImageContext)
        words, images = super().embed(input_ids, position_ids, context), context.images
        if images is None or not len(images.sizes):
            if not torch.is_grad_enabled():
                return words
            return words + self._computed(Images.none(self.vision)).sum().to(words.dtype)  # of [0, h]: zero
        embeddings = self._gathered(images, context.layout).to(words.dtype)
        numbers = context.layout.stream_part(images.numbers.t())
        # words read different rows: the gradients of a row, zero for words, are added one after another
        other = torch.arange(numbers.numel(), device=numbers.device).view_as(numbers) % len(embeddings)
        is_word = numbers.unsqueeze(-1) < 0
        first, *deep = embeddings[numbers.where(numbers >= 0, other)].split(words.shape[-1], dim=-1)
        context.deep.extend(x.masked_fill(is_word, 0.0) for x in deep)
        return torch.where(is_word, words, first)

    def _gathered(self, images: Images, layout: TokenLayout) -> Tensor:
        """Return the embeddings [t, (1 + k) h] of all image tokens; this rank computes a part."""
        group = self.groups.tp_cp
        if group.size == 1:
            return self._computed(images)
        grids = Grids(images.sizes, self.vision.merge, self.vision.class_tokens)
        shares = share_images(grids.patches.tolist(), group.size)
        copies = 1 if layout.stream.size > 1 else self.groups.tp.size
        plan = gathering(grids.tokens.tolist(), shares, group, copies)
        return GatherImages.apply(self._computed(images.chosen(shares[group.rank])), plan)

    def _computed(self, images: Images) -> Tensor:
        """Return the embeddings of ``images``. Without any, [0, (1 + k) h] that depend on the weights."""
        tower = self.vision
        device = tower.patch_embed.weight.device
        if len(images.sizes):
            grids = Grids(images.sizes, tower.merge, tower.class_tokens)
            return tower(copied(images.patches, device), grids)
        blank = torch.zeros(tower.merge**2, images.patches.shape[1], device=device)
        return tower(blank, Grids(torch.full((1, 2), tower.merge), tower.merge))[:0]


def _add_deep(number: int, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """Add the output of a deep layer of the tower, as a forward hook of a layer."""
    deep = next((x.deep for x in inputs if isinstance(x, ImageContext)), [])
    return output + deep[number] if number < len(deep) else output
