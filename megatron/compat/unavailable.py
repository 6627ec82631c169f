"""Names that entry scripts import for what this library does not have: importing one is fine, using it is an error."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from megatron.core.config.errors import UserError

__all__ = ["GPTFIMDataset", "GPTFIMDatasetConfig", "MambaModel", "SFTDataset", "get_gpt_heterogeneous_layer_spec"]


def get_gpt_heterogeneous_layer_spec(config: Any, use_te: bool = False) -> NoReturn:
    """Layers of several kinds that a JSON file describes."""
    raise UserError("heterogeneous layers from a JSON file are not available; --spec takes layers of your own")


class _Unavailable:
    """Raises :class:`UserError` when it is made."""

    instead: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UserError(f"{type(self).__name__} is not available; {self.instead}")


class SFTDataset(_Unavailable):
    """Conversations for fine-tuning (--sft)."""

    instead = "examples/pretrain_custom_gpt.py shows how a data set of your own takes its place"


class GPTFIMDataset(SFTDataset):
    """Documents with their middles moved to the end (--fim-data)."""


class GPTFIMDatasetConfig(SFTDataset):
    """The settings of :class:`GPTFIMDataset`."""


class MambaModel(_Unavailable):
    """A model whose layers have a state space."""

    instead = "layers of your own are given with --spec"
