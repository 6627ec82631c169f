"""What a BERT of a checkpoint puts in the place of masked words, and whether two texts are in order.

    python tools/fill_mask.py --load RUN/checkpoints --text "The [MASK] sat on the mat." --top-k 3
    python tools/fill_mask.py --load RUN/checkpoints --text "It rained." --text-pair "So we went home."

For each mask the likeliest tokens with their probabilities; for a pair, if the model was trained with the binary head,
how likely the first text stands before the second. Model and tokenizer come from the checkpoint; the mask is written
as the tokenizer has it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.trained_model import TrainedModel


def parse_command_line() -> argparse.Namespace:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="the --save directory of a training run")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    parser.add_argument("--text", required=True, action="append", help="text with masks; may be given several times")
    parser.add_argument("--text-pair", action="append", default=[], metavar="TEXT", help="a second part of each text")
    parser.add_argument("--top-k", type=int, default=5, metavar="K", help="tokens to show for each mask")
    args = parser.parse_args()
    if args.text_pair and len(args.text_pair) != len(args.text):
        parser.error(f"--text-pair: {len(args.text_pair)} for {len(args.text)} of --text; give one for each")
    if args.top_k < 1:
        parser.error(f"--top-k {args.top_k}: must be at least 1")
    return args


def sample_of(trained: TrainedModel, texts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Ids and types as training has them: cls A sep, or cls A sep B sep.

    Raises:
        UserError: more tokens than positions, or nothing to say about the texts.
    """
    from megatron.core.config.errors import UserError
    from megatron.core.inference.sampling import check_length

    tokenizer = trained.tokenizer
    ids, types = [tokenizer.cls], [0]
    for number, part in enumerate(tokenizer.tokenize_sentences(texts, False)):
        ids += [*map(int, part), tokenizer.sep]
        types += [number] * (len(part) + 1)
    check_length(ids, trained.cfg.max_position_embeddings)
    if len(texts) == 2 and not trained.cfg.bert_binary_head:
        raise UserError("--text-pair: the model was trained with --bert-no-binary-head, on single texts")
    if len(texts) == 1 and tokenizer.mask not in ids:
        name = tokenizer.inv_vocab[tokenizer.mask]
        raise UserError(f"--text {texts[0]!r} has no {name}: put it where the model is to say what stands there")
    return ids, types


def answers(trained: TrainedModel, texts: Sequence[str], top_k: int) -> Iterator[str]:
    """The lines to print about one text, or one pair."""
    from megatron.core.inference.masked import fill_mask

    tokenizer = trained.tokenizer
    ids, types = sample_of(trained, texts)
    found, order = fill_mask(trained.model, ids, tokenizer.mask, types if trained.cfg.bert_binary_head else None)
    yield " | ".join(texts)
    for number, probabilities in enumerate(found):
        yield f"  mask {number + 1}"
        best = probabilities[: tokenizer.vocab_size].topk(min(top_k, tokenizer.vocab_size))
        for probability, token in zip(best.values.tolist(), best.indices.tolist()):
            yield f"    {probability:.4f}  {tokenizer.detokenize([token]) or tokenizer.inv_vocab[token]}"
    if len(texts) == 2 and order is not None:
        yield f"  in order  {order[0]:.4f}\n  swapped   {order[1]:.4f}"


def main() -> int:
    """Command line."""
    args = parse_command_line()
    from megatron.training.trained_model import load_trained_model

    pairs = args.text_pair or [None] * len(args.text)
    try:
        trained = load_trained_model(args.load, args.ckpt_step, "tools/fill_mask.py")
        for pair in zip(args.text, pairs):
            print("\n".join(answers(trained, [text for text in pair if text is not None], args.top_k)), flush=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
