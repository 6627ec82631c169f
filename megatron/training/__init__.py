"""The training program. What entry scripts import from here is loaded at first use: ``--help`` needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.compat.classic import get_args, get_model, get_timers, get_tokenizer, initialize_megatron, pretrain
    from megatron.compat.training_utils import print_rank_0, print_rank_last

_HOMES = {
    "pretrain": "megatron.compat.classic",
    "get_args": "megatron.compat.classic",
    "get_model": "megatron.compat.classic",
    "get_timers": "megatron.compat.classic",
    "get_tokenizer": "megatron.compat.classic",
    "initialize_megatron": "megatron.compat.classic",
    "print_rank_0": "megatron.compat.training_utils",
    "print_rank_last": "megatron.compat.training_utils",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__all__ = [
    "get_args",
    "get_model",
    "get_timers",
    "get_tokenizer",
    "initialize_megatron",
    "pretrain",
    "print_rank_0",
    "print_rank_last",
]
