"""Training program. Names that entry scripts import from this package load on first use: ``--help`` needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.compat.classic import get_args, get_model, get_timers, get_tokenizer, initialize_megatron, pretrain
    from megatron.compat.training_functions import set_startup_timestamps
    from megatron.compat.training_utils import print_rank_0, print_rank_last

__all__ = [
    "get_args",
    "get_model",
    "get_timers",
    "get_tokenizer",
    "initialize_megatron",
    "pretrain",
    "print_rank_0",
    "print_rank_last",
    "set_startup_timestamps",
]


def __getattr__(name: str) -> object:
    """Import a name of ``__all__`` from its ``megatron.compat`` module on first access. Raises AttributeError for any
    other name. Does not store the result in this module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {
        "print_rank_0": "training_utils",
        "print_rank_last": "training_utils",
        "set_startup_timestamps": "training_functions",
    }
    home = homes.get(name, "classic")
    return getattr(import_module(f"megatron.compat.{home}"), name)
