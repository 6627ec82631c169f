"""Parse a command line into a :class:`PretrainConfig`.

Precedence: command line, then ``--yaml-cfg``, then ``--model``, then the entry script's ``args_defaults``, then field
defaults. Torch-free, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from megatron import serve_calls, serve_other_names
from megatron.core.config import absent, cli
from megatron.core.config.cli import ConfigError, FlagSpec, Problem, Segment
from megatron.core.config.errors import UserError
from megatron.core.config.notices import notice
from megatron.core.config.problems import problem
from megatron.core.models.registry import default_family, families
from megatron.core.safe_files import read_text
from megatron.training.config.flat import FlatConfig, flags_by_field
from megatron.training.config.help import select
from megatron.training.config.launcher import environment_problems, is_first_rank, launched_world_size
from megatron.training.config.named_models import mock_tokenizer, model_settings
from megatron.training.config.pretrain_config import PretrainConfig, compose
from megatron.training.config.resolve import resolve, smallest_world_size
from megatron.training.exits.endings import notify_launcher
from megatron.training.notices import notices
from megatron.training.rules.common import impossible_values
from megatron.training.rules.inputs import input_problems, reads_data_files, samples_of_epochs
from megatron.training.rules.run_all import check
from megatron.version import version_text

logger = logging.getLogger(__name__)

DESCRIPTION = (
    "Both - and _ are accepted inside names, --name=value too; names are not abbreviated. Values in brackets are "
    "defaults. docs/reference/flags.md says which flags are available."
)

SECONDS_TO_SPEAK = 0.5
"""Delay of other ranks: the launcher ends rank 0, which reports for all, as soon as another rank has exited."""

ExtraArgsProvider = Callable[[argparse.ArgumentParser], object]


def flag_specs(model_family: str | None = None) -> tuple[FlagSpec, ...]:
    """Return every flag of a model family's programs (None: the default family's), in the order of ``--help``."""
    return tuple(flags_by_field(model_family or default_family()).values())


def all_flag_specs() -> tuple[FlagSpec, ...]:
    """Return the flags of all families, the default family's first."""
    specs: dict[str, FlagSpec] = {}
    for family in families():
        for spec in flag_specs(family):
            specs.setdefault(spec.field, spec)
    return tuple(specs.values())


def _is_script_call(*args: object, **named: object) -> bool:
    """Whether a call of :func:`parse_args` has arguments of Megatron-LM's function only."""
    other = named.keys() - {"extra_args_provider", "ignore_unknown_args"}
    return len(args) > 1 or callable(next(iter(args), None)) or not (args or other)


@serve_calls("megatron.compat.script_arguments", _is_script_call)
def parse_args(
    argv: Sequence[str] | None = None,
    *,
    args_defaults: Mapping[str, object] | None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    needs_data: bool = True,
    model_family: str | None = None,
    ignore_unknown: bool = False,
) -> PretrainConfig:
    """Return the settings of a command line, not yet resolved (see :func:`validate_args`). Flags take precedence over
    --yaml-cfg, then come the settings of --model, then ``args_defaults``. Rank 0 logs renamed and ineffective flags as
    warnings.

    Args:
        argv: the command line without the program; None: this program's.
        args_defaults: defaults of an entry script, by field name.
        extra_args_provider: adds a script's custom flags to an ``argparse.ArgumentParser``; their values are the
            result's ``extra`` and attributes of its ``flat``.
        needs_data: False for scripts with custom data sets and tokenizers.
        model_family: name of the model family; None: the default one.
        ignore_unknown: drop unknown flags with their values.

    Raises:
        ConfigError: lists every mistake of the command line, and problems of the settings that could be read.
        SystemExit: 0 after ``--help [TOPIC]`` or ``--version``."""
    argv = list(sys.argv[1:] if argv is None else argv)
    family = model_family or default_family()
    specs = flag_specs(family)
    if "--version" in argv:
        sys.stdout.write(f"{version_text()}\n")
        raise SystemExit(0)
    if {"-h", "--help"} & set(argv):
        _print_help(specs, argv, extra_args_provider)
        raise SystemExit(0)
    extras = _ExtraFlags(specs, extra_args_provider)
    found, problems = cli.segments(argv)
    problems += environment_problems()
    known = {*cli.flag_table(specs), *extras.names}
    own = [segment for segment in found if segment.name in extras.names]  # the script defines their meaning
    found, renamed, refused = absent.rewrite([segment for segment in found if segment not in own], known)
    found += own
    ours = [segment for segment in found if segment.name not in extras.names]
    read = (*specs, *(spec for spec in absent.specs() if extras.names.isdisjoint(spec.names)))
    values, misread = cli.read_segments(read, ours)
    spelled = {*cli.flag_table(read), *extras.names}
    if ignore_unknown:
        misread = [problem for problem in misread if problem.reason != "unknown flag"]
    misread = [absent.explain(each, spelled) if each.reason == "unknown flag" else each for each in misread]
    extra, extra_problems = extras.read([segment for segment in found if segment.name in extras.names])
    from_file, file_problems = _read_yaml(read, values.get("yaml_cfg"))
    defaults, default_problems = cli.read_mapping(read, dict(args_defaults or {}))
    name = values.get("model", from_file.get("model"))
    of_model, model_problems = model_settings(specs, name, family)
    explicit = {**of_model, **from_file, **values}
    if explicit.get("mock_data") or not needs_data:
        explicit |= mock_tokenizer(name, explicit)
    merged = {**extras.defaults, **defaults, **explicit}
    without_effect, unavailable = absent.answers(merged)
    problems += refused + misread + extra_problems + file_problems + model_problems + default_problems
    fieldless = merged.keys() - {spec.field for spec in specs}
    extra.update({name: merged[name] for name in fieldless & absent.settings().keys()})
    for name in fieldless:
        del merged[name]
    explicit_fields = frozenset(explicit) - fieldless
    cfg = compose(
        FlatConfig(**merged, explicit=explicit_fields, extra=extra, needs_data=needs_data, model_family=family)
    )
    if model_problems or any(problem.flag == "--yaml-cfg" for problem in file_problems):
        raise ConfigError(problems + unavailable)  # sizes that a mistyped model or file leaves out are no problems
    if problems or unavailable:
        raise ConfigError(problems + _problems_after_misread(cfg, problems) + unavailable)
    if is_first_rank():
        for sentence in renamed + without_effect:
            logger.warning("%s", sentence)
    return cfg


@serve_calls("megatron.compat.script_arguments", lambda cfg=None, *_, **named: not isinstance(cfg, PretrainConfig))
def validate_args(cfg: PretrainConfig, world_size: int, *, announce: bool = True) -> PretrainConfig:
    """Resolve and check the settings of a run on ``world_size`` ranks; return a frozen copy with all derived settings.
    A dry run uses its own world size. If a rule fails, also looks at tokenizer, data files and stored settings.
    ``announce``: log overridden and ineffective flags. Raises ConfigError with all problems."""
    if cfg.program.dry_run:
        world_size = cfg.program.dry_run_world_size or max(world_size, smallest_world_size(cfg))
    if problems := impossible_values(cfg):
        raise ConfigError(problems)
    resolved = resolve(_with_samples_of_epochs(cfg, world_size), world_size)
    if problems := check(resolved):
        raise ConfigError(problems + input_problems(resolved, problems))
    if announce:
        for sentence in notices(cfg, resolved):
            notice(logger, "%s", sentence)
    return resolved


def _with_samples_of_epochs(cfg: PretrainConfig, world_size: int) -> PretrainConfig:
    """Set ``train_samples`` from --num-epochs and the size of the training data."""
    resolved = resolve(cfg, world_size)
    lengths = {"train_iters", "train_samples"} & cfg.explicit
    unknown = cfg.validation.skip_train or lengths or not resolved.data.seq_length or not reads_data_files(resolved)
    if cfg.training.num_epochs is None or unknown:
        return cfg
    try:
        return cfg.with_settings(train_samples=samples_of_epochs(resolved))
    except UserError as error:
        raise ConfigError([problem(resolved, "num_epochs", str(error))]) from error


@contextmanager
def exit_on_config_error(prog: str = "") -> Iterator[None]:
    """Turn a :class:`ConfigError` in the body into ``SystemExit`` with status 2, after reporting it to the launcher.
    Rank 0 prints the problems; other ranks only wait ``SECONDS_TO_SPEAK`` first, so that it can."""
    try:
        yield
    except ConfigError as error:
        notify_launcher(str(error))
        if not is_first_rank():
            time.sleep(SECONDS_TO_SPEAK)
            raise SystemExit(2) from None
        cli.report(error, prog)
        raise SystemExit(2) from None


def log_arguments(cfg: PretrainConfig) -> None:
    """Log the settings that were passed or differ from defaults; at level DEBUG all settings."""
    everything = logger.isEnabledFor(logging.DEBUG)
    logger.info("%s", format_arguments(cfg.flat, everything))
    if not everything:
        logger.info("all other settings have their defaults (docs/reference/flags.md; --logging-level 10 lists them)")


def changed_settings(cfg: FlatConfig) -> dict[str, object]:
    """Return the settings that were passed or differ from defaults, with a script's custom flags."""
    values, defaults = cfg.values(), type(cfg)(model_family=cfg.model_family)
    shown = {*cfg.explicit, "world_size", "data_parallel_size"}
    hidden = {"explicit", "needs_data", "resolved", "extra"}
    changed = {name for name, value in values.items() if name not in hidden and value != getattr(defaults, name)}
    return {name: value for name, value in values.items() if name in changed | shown} | values["extra"]


def format_arguments(cfg: FlatConfig, everything: bool = True) -> str:
    """Return a text of settings sorted by name, with dots up to column 48 and a title: all settings, or only those that
    were passed or differ from defaults. Includes a script's custom flags and the derived ``params_dtype``."""
    values: dict[str, object] = cfg.values() if everything else changed_settings(cfg)
    if everything:
        values |= {"explicit": " ".join(sorted(cfg.explicit)) or None, **cfg.extra}
        del values["extra"]
    values["params_dtype"] = "float16" if cfg.fp16 else "bfloat16" if cfg.bf16 else "float32"
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in values.items()]
    title, end = f"{'-' * 24} arguments {'-' * 24}", f"{'-' * 20} end of arguments {'-' * 21}"
    return "\n".join([title, *sorted(lines, key=str.lower), end])


def _problems_after_misread(cfg: PretrainConfig, problems: list[Problem]) -> list[Problem]:
    """Return problems that the rules find in the settings that could be read, except problems that mention a misread
    flag, because they concern its default. Empty if the settings come from a checkpoint."""
    if cfg.checkpoint.use_checkpoint_args or cfg.checkpoint.load_hf:
        return []
    misread = {problem.flag for problem in problems}
    resolved = resolve(cfg, launched_world_size() or smallest_world_size(cfg))
    found = [each for each in check(resolved) if misread.isdisjoint((each.flag, *re.findall(r"--[\w-]+", each.reason)))]
    return found + input_problems(resolved, problems + found)


def _read_yaml(specs: Sequence[FlagSpec], path: str | None) -> tuple[dict[str, object], list[Problem]]:
    """Read the file of --yaml-cfg; return (field -> value, problems), both empty for None. A file that cannot be read
    gives one problem; otherwise each bad entry gives one with the path in front."""
    if path is None:
        return {}, []
    if importlib.util.find_spec("yaml") is None:
        return {}, [Problem("--yaml-cfg", "needs the package PyYAML", path, "pip install pyyaml")]
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            names = set[str]()
            for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
                if key.value in names:  # PyYAML would take the last value without a message
                    reason = f"{key.value} is set twice"
                    raise yaml.constructor.ConstructorError(problem=reason, problem_mark=key.start_mark)
                names.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(read_text(path), UniqueKeys)
        json.dumps(content, default=str, skipkeys=True)  # ValueError for an alias that makes a list contain itself
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        return {}, [Problem("--yaml-cfg", f"cannot be read: {reason}", path, "check the path and the YAML syntax")]
    except RecursionError:
        return {}, [Problem("--yaml-cfg", "is nested too deeply", path)]
    if not isinstance(content, Mapping):
        return {}, [Problem("--yaml-cfg", "must hold names and values", path, "one `name: value` per line")]
    values, problems = cli.read_mapping(specs, content, absent.renamed())
    return values, [dataclasses.replace(problem, flag=f"{path}: {problem.flag}") for problem in problems]


def _print_help(specs: Sequence[FlagSpec], argv: Sequence[str], provider: ExtraArgsProvider | None) -> None:
    """Print the topic that follows --help in ``argv``, with the flags of an entry script."""
    following = argv[min(argv.index(flag) for flag in ("-h", "--help") if flag in argv) + 1 :][:1]
    topic = following[0] if following and not following[0].startswith("-") else None
    shown, text = select(specs, topic)
    extras = _ExtraFlags(shown, provider, wants_help=True)
    extras.parser.epilog = text
    extras.parser.print_help()


class _RaisingParser(argparse.ArgumentParser):
    """Parser that raises ValueError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _ExtraFlags:
    """Flags that an entry script adds through argparse."""

    def __init__(self, specs: Sequence[FlagSpec], provider: ExtraArgsProvider | None, wants_help: bool = False) -> None:
        # building a parser of all flags is slow, and most runs need none
        self.parser = cli.make_parser(specs, description=DESCRIPTION) if provider or wants_help else _RaisingParser()
        self.actions: list[argparse.Action] = []
        self.defaults: dict[str, object] = {}
        if provider is None:
            self.names: frozenset[str] = frozenset()
            return
        before = set(map(id, self.parser._actions))
        fields = {spec.field: self.parser.get_default(spec.field) for spec in specs}
        provider(self.parser)
        self.actions = [action for action in self.parser._actions if id(action) not in before]
        self.names = frozenset(cli.normalize(name) for action in self.actions for name in action.option_strings)
        changed = {name: self.parser.get_default(name) for name in fields}
        self.defaults = {name: value for name, value in changed.items() if value != fields[name]}

    def read(self, found: Sequence[Segment]) -> tuple[dict[str, object], list[Problem]]:
        """Parse the segments ``found`` with the script's custom flags only. Return (values by dest, including defaults;
        at most one problem, if argparse rejects them). Does not exit."""
        if not self.actions:
            return {}, []
        parser = _RaisingParser(add_help=False, allow_abbrev=False)
        for action in self.actions:
            parser._add_action(action)
        spelled = {cli.normalize(name): name for action in self.actions for name in action.option_strings}
        tokens = [token for s in found for token in dataclasses.replace(s, typed=spelled[s.name]).tokens]
        try:
            return vars(parser.parse_args(tokens)), []
        except (ValueError, argparse.ArgumentError) as error:
            text = str(error).removeprefix("argument ")
            name, _, reason = text.partition(": ")
            return {}, [Problem(name, reason) if reason else Problem("script's own flags", text)]


serve_other_names(__name__)
