"""The running program of entry scripts: its settings as one namespace, its tokenizer and timers.

``get_args()`` has every setting, the script's own flags, and the names that older scripts expect."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.config import absent
from megatron.core.config.cli import normalize
from megatron.core.config.errors import UserError
from megatron.core.config.model_parallel_config import parameter_dtype
from megatron.core.models.registry import default_family, families
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size
from megatron.core.tensor_parallel.vocabulary import padded_vocab_size
from megatron.core.timers import Timers
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.arguments import exit_on_config_error, flag_specs, parse_args, validate_args
from megatron.training.checkpoint.other_formats import apply_hf_settings
from megatron.training.checkpoint.settings import apply_checkpoint_args
from megatron.training.config.flat import optional_groups
from megatron.training.config.launcher import launched_rank, launched_world_size, local_rank
from megatron.training.config.pretrain_config import PretrainConfig

RETIRED_ARGS: dict[str, object] = {
    "use_mcore_models": True,
    "renormalize_blend_weights": True,
    "s3_cache_path": None,
    "encoder_tensor_model_parallel_size": 0,
    "encoder_pipeline_model_parallel_size": 0,
}
"""Names that older scripts read."""


@dataclass
class Program:
    """A program whose command line has been read."""

    args: Namespace
    tokenizer: Tokenizer | None
    timers: Timers
    cfg: PretrainConfig

    @classmethod
    def of(cls, cfg: PretrainConfig, tokenizer: Tokenizer | None = None, timers: Timers | None = None) -> Program:
        """A program with the resolved settings ``cfg``."""
        timers = timers or Timers(
            cfg.logging.timing_log_level, cfg.logging.timing_log_option, cfg.logging.barrier_with_L1_time
        )
        return cls(as_namespace(cfg, tokenizer), tokenizer, timers, cfg)


class Current:
    """Global, because autograd's threads, which recompute layers on GPUs, have separate contexts."""

    program: Program | None = None
    parsed: tuple[PretrainConfig, dict[str, object]] | None = None
    """Settings of the command line before they were resolved, and ``vars(args)`` as the script got them."""


def current_program() -> Program:
    """The running program."""
    if Current.program is None:
        raise RuntimeError("no program is running: call pretrain() or initialize_megatron() first")
    return Current.program


def get_args() -> Namespace:
    """Every setting of the running program, and the flags its script added."""
    return current_program().args


def get_tokenizer() -> Tokenizer | None:
    """The tokenizer of the running program."""
    program = current_program()
    if program.tokenizer is None and program.cfg.tokenizer.tokenizer_type is not None:
        program.tokenizer = build_tokenizer(program.cfg.tokenizer)
    return program.tokenizer


def get_timers() -> Timers:
    """The timers of the running program."""
    return current_program().timers


def as_namespace(cfg: PretrainConfig, tokenizer: Tokenizer | None) -> Namespace:
    """Return a resolved configuration as a new namespace under the names that entry scripts read: its fields, the
    script's own flags, names of older releases and derived names. ``vocab_size`` is the tokenizer's."""
    values = {**RETIRED_ARGS, **absent.defaults(), **cfg.flat.values()}
    values |= cfg.extra | _derived(cfg)
    if tokenizer is not None:
        values["vocab_size"] = tokenizer.vocab_size
    if values["padded_vocab_size"] is None and values["vocab_size"] is not None:
        values["padded_vocab_size"] = padded_vocab_size(
            values["vocab_size"], cfg.embeddings.make_vocab_size_divisible_by
        )
    return Namespace(**values)


def _derived(cfg: PretrainConfig) -> dict[str, object]:
    """Names that follow from other settings or from the process; later assignments cannot change them."""
    chunks = virtual_pipeline_size(cfg.model)
    return {
        "rank": launched_rank(),
        "local_rank": local_rank(),
        "params_dtype": parameter_dtype(cfg.model.fp16, cfg.model.bf16, cfg.model.fp64),
        "num_experts": cfg.model.num_moe_experts,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
    }


def parse_script_args(
    args_defaults: dict[str, object] | None,
    extra_args_provider: Callable[[ArgumentParser], object] | None,
    ignore_unknown: bool = False,
) -> PretrainConfig:
    """Return the settings of an entry script's command line, not yet resolved, without unknown flags if
    ``ignore_unknown``. The script names no model family: it is
    the first one that has all groups of the given flags, or else the default one."""
    typed = {normalize(word.partition("=")[0]) for word in sys.argv[1:]}
    specs = [spec for spec in flag_specs() if not typed.isdisjoint(map(normalize, spec.names))]
    used = {spec.group for spec in specs if spec.field not in getattr(spec.group, "HARMLESS", ())}
    optional = used & {*optional_groups(default_family())}
    family = next((name for name, candidate in families().items() if optional <= {*candidate.groups}), None)
    return parse_args(
        args_defaults=args_defaults,
        extra_args_provider=extra_args_provider,
        needs_data=False,
        model_family=family,
        ignore_unknown=ignore_unknown,
    )


def parse_and_validate_args(
    extra_args_provider: Callable[[ArgumentParser], object] | None = None,
    ignore_unknown_args: bool = False,
    args_defaults: dict[str, object] | None = None,
) -> Namespace:
    """Parse ``sys.argv`` and return every setting; :func:`get_args` returns the same object until training starts. Also
    applies the settings of a checkpoint or Hugging Face folder if flags ask for them. Wrong flags end the process with
    one message. ``ignore_unknown_args`` must be False (UserError)."""
    if ignore_unknown_args:
        raise UserError("parse_and_validate_args: ignore_unknown_args is not available; use extra_args_provider")
    with exit_on_config_error():
        cfg = parse_script_args(args_defaults, extra_args_provider)
        completed = apply_hf_settings(apply_checkpoint_args(cfg))
        resolved = validate_args(completed, launched_world_size() or 1, announce=False)
    Current.program = Program.of(resolved)
    Current.parsed = cfg, dict(vars(Current.program.args))
    return Current.program.args


def current_settings(args: Namespace) -> PretrainConfig:
    """Return the settings that :func:`parse_and_validate_args` read, not resolved, updated by the script's later
    changes to ``args``: changed fields are taken as given by the user, other names as the script's own flags.

    Raises:
        UserError: a changed name that follows from other settings.
        RuntimeError: :func:`parse_and_validate_args` was not called."""
    if Current.parsed is None:
        raise RuntimeError("call parse_and_validate_args() first")
    cfg, before = Current.parsed
    changed = {name: value for name, value in vars(args).items() if name not in before or before[name] != value}
    if derived := sorted(changed.keys() & {*_derived(cfg), "padded_vocab_size"}):
        raise UserError(f"args.{derived[0]}: follows from other settings and cannot be assigned; change those")
    fields = changed.keys() & cfg.flat.values().keys()
    return cfg.with_settings(
        **{name: changed[name] for name in fields},
        explicit=cfg.explicit | fields,
        extra=cfg.extra | {name: value for name, value in changed.items() if name not in fields},
    )
