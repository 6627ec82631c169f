"""Megatron-LM's ``parse_args``, ``validate_args`` and ``set_args``: settings as a namespace that programs change.

The namespace has every setting, the program's flags, and names of Megatron-LM (``program.as_namespace``). Settings are
read from it again whenever they are needed, so that assignments of the program count."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

from megatron.compat.program import Current, Program, as_namespace, current_program, get_tokenizer, parse_script_args
from megatron.core.config.errors import UserError
from megatron.core.extensions.installed import is_installed
from megatron.core.tensor_parallel.vocabulary import padded_vocab_size
from megatron.core.tokenizers.base import Tokenizer
from megatron.training import arguments
from megatron.training.config.flat import FlatConfig
from megatron.training.config.launcher import launched_world_size
from megatron.training.config.pretrain_config import PretrainConfig, compose
from megatron.training.config.resolve import resolve

ENGINE = "transformer_engine"
UNCHANGED = ("rank", "local_rank", "iteration", "consumed_train_samples", "consumed_valid_samples", "padded_vocab_size")
"""Names that belong to the process or the program."""


def parse_args(
    extra_args_provider: Callable[[ArgumentParser], object] | None = None, ignore_unknown_args: bool = False
) -> Namespace:
    """Return the settings of ``sys.argv``, neither resolved nor checked, with the flags of ``extra_args_provider``.
    Without --transformer-impl it is ``transformer_engine``, as in Megatron-LM. Mistyped values end the process with one
    message, as do unknown flags unless ``ignore_unknown_args`` drops them with their values."""
    with arguments.exit_on_config_error():
        cfg = parse_script_args(None, extra_args_provider, ignore_unknown=ignore_unknown_args)
    if "transformer_impl" not in cfg.explicit:
        cfg = cfg.with_settings(transformer_impl=ENGINE)
    args = as_namespace(cfg, None)
    args.world_size, args.padded_vocab_size = launched_world_size() or 1, cfg.extra.get("padded_vocab_size")
    return args


def validate_args(args: Namespace, defaults: Mapping[str, object] | None = None) -> Namespace:
    """Replace None by ``defaults``, check the settings for ``args.world_size`` ranks and write the derived ones into
    ``args``, in place. Returns ``args``; ``rank`` and names that are no settings stay. Raises ConfigError."""
    for name, value in (defaults or {}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    settings, unchanged = read_settings(args), {*UNCHANGED}
    if args.train_iters is None and args.train_samples is None:
        settings = settings.with_settings(skip_train=True)  # the program decides about the length later
        unchanged.add("skip_train")
    resolved = as_namespace(arguments.validate_args(settings, args.world_size), None)
    if not is_installed(ENGINE):
        unchanged.add("transformer_impl")  # layers are local in any case; it chooses the names of their parameters
    unchanged |= settings.extra.keys()
    vars(args).update({name: value for name, value in vars(resolved).items() if name not in unchanged})
    if args.padded_vocab_size is None and args.vocab_size is not None:
        args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args)
    return args


def read_settings(args: Namespace) -> PretrainConfig:
    """Return the settings in ``args``, resolved if they were. Settings that differ from their defaults count as passed
    by the user."""
    defaults = FlatConfig(model_family=args.model_family)
    values: dict[str, Any] = {name: vars(args).get(name, value) for name, value in defaults.values().items()}
    if not args.resolved:
        values["explicit"] |= {name for name in defaults.flags if values[name] != getattr(defaults, name)}
    values["extra"] = {name: getattr(args, name, value) for name, value in args.extra.items()}
    return compose(FlatConfig(**values))


def set_args(args: Namespace) -> None:
    """Make ``args`` the settings of the running program; :func:`get_args` returns this object. Settings that were not
    validated are resolved for ``args.world_size`` ranks, without checks."""
    cfg = read_settings(args)
    program = Program.of(cfg if args.resolved else resolve(cfg, args.world_size))
    program.args = args
    Current.program = program


def set_global_variables(args: Namespace, build_tokenizer: bool = True) -> None:
    """:func:`set_args` and, if asked, the tokenizer."""
    set_args(args)
    if build_tokenizer:
        build_program_tokenizer(args)


def unset_global_variables() -> None:
    """Forget the running program."""
    Current.program = None


def build_program_tokenizer(args: Namespace) -> Tokenizer | None:
    """Return the tokenizer of the running program; sets ``padded_vocab_size`` of ``args`` if it is None."""
    tokenizer = get_tokenizer()
    if tokenizer is not None and args.padded_vocab_size is None:
        args.padded_vocab_size = vocab_size_with_padding(tokenizer.vocab_size, args)
    return tokenizer


def vocab_size_with_padding(orig_vocab_size: int, args: Namespace, logging_enabled: bool = True) -> int:
    """Return the next multiple of ``make_vocab_size_divisible_by`` times ``tensor_model_parallel_size``."""
    return padded_vocab_size(orig_vocab_size, args.make_vocab_size_divisible_by * args.tensor_model_parallel_size)


def initialize_tp_communicators() -> None:
    """Reject Transformer Engine's communicators. Raises UserError if --tp-comm-overlap is set with its layers."""
    if current_program().cfg.model.transformer_impl == ENGINE:
        raise UserError("_initialize_tp_communicators: not available here; use --transformer-impl local")
