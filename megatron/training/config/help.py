"""Text of ``--help``: the flags that every run needs, one topic, all flags, or the named models."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.config import cli
from megatron.core.config.cli import ConfigError, FlagSpec, Problem
from megatron.training.config.named_models import models_table

_ESSENTIAL = """
    model num_layers hidden_size num_attention_heads seq_length max_position_embeddings micro_batch_size
    global_batch_size train_iters lr min_lr lr_decay_style lr_warmup_iters bf16 fp8 data_path split mock_data
    tokenizer_type tokenizer_model save load save_interval eval_interval log_interval load_hf
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    use_distributed_optimizer attention_dropout yaml_cfg dry_run
"""
ESSENTIAL = frozenset(_ESSENTIAL.split())
"""Fields of the flags that ``--help`` shows without a topic."""


def topics(specs: Sequence[FlagSpec]) -> dict[str, list[FlagSpec]]:
    """Return the flags by topic, such as ``activation-recomputation``: the title of their group in lower case."""
    found: dict[str, list[FlagSpec]] = {}
    for spec in specs:
        title = (spec.group.__doc__ or spec.group.__name__).strip().splitlines()[0]
        name = "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())
        found.setdefault(name, []).append(spec)
    return found


def select(specs: Sequence[FlagSpec], topic: str | None) -> tuple[list[FlagSpec], str]:
    """Return (the flags that ``--help topic`` shows, the text after them). None: the essential ones and the list of
    topics; ``all``: every flag; ``models``: none, and the named models. A topic may be shortened to its beginning.
    Raises ConfigError: no topic begins with ``topic``."""
    by_topic = topics(specs)
    if topic is None:
        names = "\n".join(f"  {name} ({len(flags)})" for name, flags in by_topic.items())
        shown = [spec for spec in specs if spec.field in ESSENTIAL]
        return (
            shown,
            f"--help all shows {len(specs)} flags, --help models the models of --model, --help TOPIC:\n{names}",
        )
    if topic == "all":
        return list(specs), ""
    if topic == "models":
        return [], f"models of --model:\n{models_table()}"
    matches = [name for name in by_topic if name == topic] or [name for name in by_topic if name.startswith(topic)]
    if not matches:
        fix = cli.suggestion(topic, [*by_topic, "all", "models"])
        fix = fix.replace(cli.NO_SUGGESTION, "--help lists the topics")
        raise ConfigError([Problem("--help", "unknown topic", topic, fix)])
    return [spec for name in matches for spec in by_topic[name]], ""
