"""Rules that only GPT has."""

from __future__ import annotations

from megatron.core.config.errors import UserError
from megatron.core.config.problems import Problems, Settings, problem
from megatron.core.models.gpt.custom_layers import specs_of_layers
from megatron.core.transformer.spec_utils import import_module


def spec_importable(cfg: Settings) -> Problems:
    """Import the object that --spec names, which runs its module's code; reject --spec if the import fails. ``--spec
    local`` and no --spec need no import. Does not check what the object is."""
    if cfg.custom_layers.spec in (None, ["local"]):
        return
    try:
        import_module(cfg.custom_layers.spec)
    except UserError as error:
        yield problem(cfg, "spec", str(error).partition(": ")[2])


def mock_data_vocabulary(cfg: Settings) -> Problems:
    """Reject --vocab-size 1 with --mock-data and NullTokenizer: mock documents count upwards from id 1."""
    if (
        cfg.data.mock_data
        and cfg.needs_data
        and cfg.tokenizer.tokenizer_type == "NullTokenizer"
        and cfg.tokenizer.vocab_size == 1
    ):
        yield problem(cfg, "vocab_size", "is too small for --mock-data, whose token ids start at 1", "use at least 2")


def context_parallel_layers(cfg: Settings) -> Problems:
    """Reject context parallelism with --spec layers whose classes do not declare support for it, one problem per class.
    Checks nothing without --spec or with ``--spec local``. Unreadable --spec values are left to another rule."""
    if cfg.model.context_parallel_size == 1 or cfg.custom_layers.spec in (None, ["local"]) or not cfg.model.num_layers:
        return
    from megatron.core.transformer.context_parallel_support import FIX, layout_problems

    try:
        specs = specs_of_layers(cfg)
    except UserError:
        return
    for reason in layout_problems(specs):
        yield problem(cfg, "context_parallel_size", reason, FIX)


def fill_in_the_middle(cfg: Settings) -> Problems:
    """Reject --fim-data with data that has no text, a fragment token without a rate, and --fim-* without --fim-data."""
    group = cfg.fill_in_the_middle
    if not group.fim_data:
        for name in sorted(cfg.explicit & vars(group).keys() - {"fim_data"}):
            yield problem(cfg, name, "requires --fim-data", "add it, or remove this flag")
        return
    if cfg.data.mock_data:
        yield problem(cfg, "fim_data", "requires text, which --mock-data has not", "give --data-path")
    if cfg.variable_lengths.use_varlen_dataset:
        yield problem(cfg, "fim_data", "is not supported with --use-varlen-dataset", "remove one of them")
    if cfg.tokenizer.tokenizer_type == "NullTokenizer":
        yield problem(cfg, "fim_data", "requires a tokenizer with text, not NullTokenizer", "use another tokenizer")
    if group.fim_split_sample is not None and group.fim_fragment_rate is None:
        yield problem(cfg, "fim_split_sample", "requires --fim-fragment-rate", "add it")
    if group.fim_fragment_rate is not None and group.fim_split_sample is None:
        yield problem(cfg, "fim_fragment_rate", "requires --fim-split-sample", "add it, or remove this flag")
