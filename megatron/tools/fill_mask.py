"""Predict masked tokens, and the order of two texts, with a BERT checkpoint.

    python tools/fill_mask.py --load RUN/checkpoints --text "The [MASK] sat on the mat." --top-k 3
    python tools/fill_mask.py --load RUN/checkpoints --text "It rained." --text-pair "So we went home."

Prints the most likely tokens of each mask with their probabilities. For a pair, also prints the probability that the
texts are in order; this requires a model with the binary head. Model and tokenizer come from the checkpoint. Write the
mask as the tokenizer spells it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron.core.config.commands import tool_parser
from megatron.core.models.bert.config import BertConfig, num_tokentypes
from megatron.tools.engine_flags import add_tokenizer_flags, tokenizer_settings

if TYPE_CHECKING:
    from megatron.training.trained_model import TrainedModel


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Exits with code 2 for malformed flags, --top-k below 1, or --text-pair unless there is one for each --text."""
    parser = tool_parser(__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="--save folder of a run, or a Hugging Face folder")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    add_tokenizer_flags(parser)
    parser.add_argument("--family", metavar="MODULE", help="module of a model family outside of megatron")
    parser.add_argument("--text", required=True, action="append", help="text with masks; may be given several times")
    parser.add_argument("--text-pair", action="append", default=[], metavar="TEXT", help="second part of each text")
    parser.add_argument("--top-k", type=int, default=5, metavar="K", help="tokens to show for each mask")
    args = parser.parse_args(argv)
    if args.text_pair and len(args.text_pair) != len(args.text):
        parser.error(f"--text-pair: {len(args.text_pair)} for {len(args.text)} of --text; give one for each")
    if args.top_k < 1:
        parser.error(f"--top-k {args.top_k}: must be at least 1")
    return args


def build_sample(trained: TrainedModel, texts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return (token ids, token types) in the format of training: cls A sep, or cls A sep B sep, types 0 and 1. Raises
    UserError: more tokens than positions, a pair for a model without binary head, or a single text without mask."""
    from megatron.core.config.errors import UserError
    from megatron.core.inference.sampling import check_length

    tokenizer = trained.tokenizer
    ids, types = [tokenizer.cls], [0]
    for number, part in enumerate(tokenizer.tokenize_sentences(texts, False)):
        ids += [*map(int, part), tokenizer.sep]
        types += [number] * (len(part) + 1)
    check_length(ids, trained.cfg.embeddings.max_position_embeddings)
    if len(texts) == 2 and not trained.cfg.flat.bert_binary_head:
        raise UserError("--text-pair: the model was trained with --bert-no-binary-head, on single texts")
    if len(texts) == 1 and tokenizer.mask not in ids:
        name = tokenizer.inv_vocab[tokenizer.mask]
        raise UserError(f"--text {texts[0]!r} has no {name}: put it where the model must predict a token")
    return ids, types


def answers(trained: TrainedModel, texts: Sequence[str], top_k: int) -> Iterator[str]:
    """Yield the text, the ``top_k`` tokens of each mask with probabilities, then the order of a pair."""
    from megatron.core.models.bert.fill_mask import fill_mask

    tokenizer = trained.tokenizer
    ids, types = build_sample(trained, texts)
    has_types = num_tokentypes(trained.cfg.group(BertConfig))
    masks, order = fill_mask(trained.model, ids, tokenizer.mask, types if has_types else None)
    yield " | ".join(texts)
    for number, probabilities in enumerate(masks):
        yield f"  mask {number + 1}"
        best = probabilities[: tokenizer.vocab_size].topk(min(top_k, tokenizer.vocab_size))
        for probability, token in zip(best.values.tolist(), best.indices.tolist()):
            yield f"    {probability:.4f}  {tokenizer.detokenize([token]) or tokenizer.inv_vocab[token]}"
    if len(texts) == 2 and order is not None:
        yield f"  in order  {order[0]:.4f}\n  swapped   {order[1]:.4f}"


def main(argv: Sequence[str]) -> int:
    """Print the --top-k tokens of each mask, and for a --text-pair the probabilities of both orders; return 0."""
    args = parse_command_line(argv)
    from megatron.training.trained_model import load_trained_model

    pairs = args.text_pair or [None] * len(args.text)
    tokenizer = tokenizer_settings(args)
    trained = load_trained_model(args.load, args.ckpt_step, "tools/fill_mask.py", args.family, (), tokenizer)
    for pair in zip(args.text, pairs):
        print("\n".join(answers(trained, [text for text in pair if text is not None], args.top_k)), flush=True)
    return 0
