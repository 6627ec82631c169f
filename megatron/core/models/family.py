"""Model family: the special features of one kind of model, as data. Torch-free.

``core/models/<name>/family.py`` defines ``FAMILY``; the registry finds the folders. A module outside of ``megatron``
that defines ``FAMILY`` is a family too, named by its dotted path. No other file compares a family's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from megatron.core.config.optional import OptionalGroup
from megatron.core.config.problems import Rule, Settings
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.description.model import ModelDescription
from megatron.core.pipeline_parallel.stages import BranchNames

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
    from megatron.core.datasets.megatron_dataset import MegatronDataset
    from megatron.core.inference.images import PromptImages
    from megatron.core.inference.sampling import Sampling

Options = dict[str, Any]
DataSet: TypeAlias = "tuple[type[MegatronDataset], BlendedMegatronDatasetConfig]"
"""Class of a data set and its configuration."""


class TrainedModel(Protocol):
    """Inference model with its settings and tokenizer."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def cfg(self) -> Settings: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def cuda_graphs(self) -> bool: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def images(self) -> PromptImages | None: ...
    def tokenize(self, prompt: str) -> list[int]: ...


@dataclass(frozen=True)
class Program:
    """A pretraining program: ``pretrain_<name>.py``, or ``megatron pretrain <name>``."""

    name: str
    about: str
    """Name of its models, for ``megatron --help``."""
    required: tuple[str, ...] = ()
    """Fields that the command line must set."""

    @property
    def script(self) -> str:
        """File name of the entry script."""
        return f"pretrain_{self.name}.py"


def one_decoder(settings: Settings) -> dict[str, TransformerConfig]:
    """Return the configuration of a model with a single stack, the decoder."""
    return {"decoder": settings.model}


def standard_branches(settings: Settings) -> BranchNames | None:
    """Return one name per layer with --use-parallel-residual, whose layers are indivisible, else None."""
    return [["layer"]] * settings.model.num_layers if settings.model.use_parallel_residual else None


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One kind of model. ``settings`` are the resolved settings of a run, except where stated otherwise."""

    name: str
    """Name of the folder, or the dotted path of the module."""
    programs: tuple[Program, ...]
    """Its pretraining programs; the first one is named in messages."""
    task: str
    """Class of the training task as ``"package.module:Class"``, imported when it is used."""
    describe: Callable[[Settings, int], ModelDescription]
    """(settings, unpadded vocabulary size or 0) -> description of the model."""
    data_set: Callable[[Settings, Options], DataSet] | None = None
    """(settings, common options) -> (data set class, its configuration). None: the task makes its data sets, and no
    data files are checked before the start."""
    transformers: Callable[[Settings], Mapping[str, TransformerConfig]] = one_decoder
    """Name of a stack -> its configuration. One command line may configure stacks of different sizes."""
    branches: Callable[[Settings], BranchNames | None] = standard_branches
    """Branch names of every layer; None: attention and feed-forward network."""
    groups: tuple[type[OptionalGroup], ...] = ()
    """Optional groups of flags that it has. Its programs also have the flags of groups that no other family has."""
    rules: tuple[Rule, ...] = ()
    """Its own rules, in addition to the common ones."""
    derive: Callable[[Any], Options] = lambda flat: {}
    """Flat settings (not yet resolved) -> values of fields that follow from others."""
    shrink: Callable[[Settings, Options], Options] | None = None
    """(settings, values of the small model) -> more values of the small model of ``tools/verify_layout.py``, which then
    keeps whole layers per stage. None: nothing more, and stages keep their cuts."""
    tokenizer_type: str = "GPT2BPETokenizer"
    """Default of --tokenizer-type."""
    lengths: tuple[str, ...] = ("seq_length",)
    """Fields of the lengths of a sample's sequences."""
    sequence_tensors: frozenset[str] = frozenset()
    """Batch tensors [b, s, ...] that context-parallel ranks split along s."""
    full_tensors: frozenset[str] = frozenset()
    """Batch tensors of two or more dims that every context-parallel rank needs in full."""
    weight_settings: tuple[str, ...] = ()
    """Settings that the meaning of its weights depends on, in addition to the settings of common layers."""
    companions: str = ""
    """Function (settings) -> {name: resolved settings} of the frozen models that its task needs, as
    ``"package.module:function"``, imported when it is used (``training/checkpoint/companion_settings.py``)."""
    is_default: bool = False
    """Whether checkpoints and programs that name no family mean this one."""
    is_causal: bool = True
    """Whether logits depend on earlier tokens only."""
    tool: str = ""
    """Inference tool that serves it, such as ``tools/generate.py``."""
    generate: Callable[[TrainedModel, Sequence[str], int, Sampling], Iterator[str]] | None = None
    """(trained model, prompts, maximum number of new tokens, sampling) -> text of each prompt, in order, that
    ``tools/generate.py`` prints."""
    logits: Callable[[nn.Module, Settings, Tensor], Tensor] | None = None
    """(model, settings, tokens int64 [b, s]) -> logits [b, s, v]; ``peer_inputs`` has the input of a decoder."""
    auto_model: str = ""
    """Auto class of ``transformers`` for such models."""
    peer_inputs: Callable[[Tensor], dict[str, Tensor]] = lambda tokens: {}
    """Tokens -> further arguments with which the model of ``transformers`` gives the same logits."""
