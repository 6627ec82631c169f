"""Groups of flags that only some model families have. Only fields, no torch.

A family lists its groups (``core/models/family.py``). Other families reject flags of a group, unless the group declares
them harmless."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, ClassVar

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import PositiveFloat, PositiveInt, Range


class OptionalGroup(FlagGroup):
    """Base class of groups that a family may list."""

    HARMLESS: ClassVar[tuple[str, ...]] = ()
    """Fields that other families ignore, with one notice."""
    NEUTRAL: ClassVar[Mapping[str, object]] = {}
    """Value of a field, besides its default, that every family accepts."""
    CHOICES: ClassVar[Mapping[str, tuple[object, str]]] = {}
    """Field of another group -> (value that requires this group, fix)."""
    TRANSFORM: ClassVar[str] = ""
    """Function (settings) -> ``ModelTransform`` or None that the group asks for, as ``"package.module:function"``."""


def used_fields(group: type[OptionalGroup], settings: object) -> Iterator[str]:
    """Yield the fields by which ``settings`` use ``group``: fields of the group that are not at a default or neutral
    value, and fields of other groups at a value that requires the group. Includes harmless fields."""
    for field in fields(group):  # type: ignore[arg-type]  # subclasses are dataclasses
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if getattr(settings, field.name) not in (default, group.NEUTRAL.get(field.name, default)):
            yield field.name
    yield from (name for name, (value, _) in group.CHOICES.items() if getattr(settings, name) == value)


@dataclass(kw_only=True)
class MultiplierConfig(OptionalGroup):
    """Multipliers and output bias"""

    embedding_multiplier: PositiveFloat = 1.0
    """Factor of the embeddings (Granite)."""

    residual_multiplier: PositiveFloat = 1.0
    """Factor of each branch's output before it joins the residual stream (Granite)."""

    logits_scaling: PositiveFloat = 1.0
    """Divisor of the output layer's logits (Granite)."""

    output_layer_bias: bool = False
    """Bias in the output layer (Phi)."""


@dataclass(kw_only=True)
class RopeScalingConfig(OptionalGroup):
    """Llama 3.1 rotary scaling"""

    use_rope_scaling: bool = False
    """Scale low rotary frequencies as Llama 3.1 does."""

    rope_scaling_factor: PositiveFloat = 8.0
    """Factor of --use-rope-scaling: 8 for Llama 3.1, 32 for Llama 3.2."""


@dataclass(kw_only=True)
class CustomLayersConfig(OptionalGroup):
    """Custom layers"""

    NEUTRAL: ClassVar[Mapping[str, object]] = {"spec": ["local"]}

    spec: list[str] | None = flag("--spec", nargs="*", metavar="MODULE NAME")
    """Python module and name of custom layers: the spec of one layer or all layers, or a function that returns it
    and may take the library's ``config``. ``local``: the built-in layers."""


@dataclass(kw_only=True)
class UpcyclingConfig(OptionalGroup):
    """Upcycling"""

    moe_use_upcycling: bool = False
    """If --load or --pretrained-checkpoint contains a dense model, start with experts that are copies of its
    feed-forward networks and new routers. A checkpoint with experts is continued."""

    moe_upcycling_granularity: PositiveInt = 1
    """With --moe-use-upcycling: slices that each feed-forward network is divided into; one slice is the width of an
    expert."""


@dataclass(kw_only=True)
class DocumentConfig(OptionalGroup):
    """Documents within a sample"""

    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""

    reset_attention_mask: bool = False
    """Attend only within a document."""

    eod_mask_loss: bool = False
    """Exclude end-of-document tokens from the loss."""


@dataclass(kw_only=True)
class VariableLengthConfig(OptionalGroup):
    """Samples of different lengths"""

    use_varlen_dataset: bool = False
    """One sample per document, split after --seq-length tokens. Samples are packed into rows of at most
    --max-seqlen-per-dp-cp-rank tokens per rank, planned for equal work of all ranks."""

    varlen_mock_dataset_config_json: str | None = None
    """Lengths of --mock-data documents as JSON text: {"type": "lognormal", "min_seq_len": 16, "max_seq_len": 8192, and
    "mean_seq_len" with "lognormal_sigma", or "p50" with "p95"}. Requires --use-varlen-dataset."""


@dataclass(kw_only=True)
class FillInTheMiddleConfig(OptionalGroup):
    """Fill-in-the-middle"""

    fim_data: bool = False
    """Write parts of the samples as prefix, suffix and middle, between tokens that mark them (code models)."""

    fim_rate: Annotated[float, Range(0, 1, above=True)] = 0.5
    """Probability that --fim-data rearranges the text between two --fim-eod-token."""

    fim_spm_rate: Annotated[float, Range(0, 1)] = 0.5
    """Share of rearranged texts with the suffix first (SPM) instead of the prefix (PSM)."""

    fim_split_sample: str | None = None
    """Token between fragments (files of a repository) that are rearranged separately."""

    fim_fragment_rate: Annotated[float, Range(0, 1)] | None = None
    """Probability that a fragment is rearranged; required with --fim-split-sample."""

    fim_no_prefix: str | None = None
    """Texts that start with this are not rearranged."""

    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""

    fim_middle_token: str = "<fim_middle>"
    """Token before the middle."""

    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""

    fim_pad_token: str = "<fim_pad>"
    """Token that fills samples which became shorter; it must exist, but has no loss and no effect."""

    fim_eod_token: str = "<|endoftext|>"
    """Token that ends documents; texts between two of them are rearranged separately."""


@dataclass(kw_only=True)
class PackedSamplesConfig(OptionalGroup):
    """Packed samples"""

    use_packed_sequence: bool = False
    """Pack the samples of a micro-batch in one row, without padding; attention separates them (pretrain_bert.py). No
    effect in pretrain_vlm.py, whose rows have no padding."""


@dataclass(kw_only=True)
class MaskedDataConfig(OptionalGroup):
    """Masked words"""

    HARMLESS: ClassVar[tuple[str, ...]] = ("mask_prob", "short_seq_prob")

    mask_prob: Annotated[float, Range(0, 1, above=True, below=True)] = 0.15
    """Share of a sample's tokens that are masked (pretrain_bert.py) or replaced by sentinels (pretrain_t5.py)."""

    short_seq_prob: Annotated[float, Range(0, 1)] = 0.1
    """Probability that a sample is shorter than the maximum (pretrain_bert.py, pretrain_t5.py)."""
