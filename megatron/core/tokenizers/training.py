"""Training of byte-level BPE and WordPiece vocabularies, deterministic for the same texts in the same order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.safe_files import create_file
from megatron.core.tokenizers.libraries import require


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, output: str, *, end_of_document: str = "<|endoftext|>", asked_by: str
) -> int:
    """Train on ``texts`` with GPT-2's pre-tokenizer and write ``output`` (a tokenizer.json), replacing older files;
    return the size reached, which may be less than ``vocab_size``.

    Id 0 is ``end_of_document``, then come the 256 bytes, then the merges in order. Next to ``output``,
    tokenizer_config.json names the special tokens, so that ``transformers`` loads the folder, too. ``asked_by`` names
    the caller in errors. Raises UserError: the vocabulary is too small for the bytes, or `tokenizers` is not
    installed."""
    if vocab_size < 257:
        raise UserError(f"--vocab-size {vocab_size}: at least 257 are needed, 256 bytes and {end_of_document}")
    library = require("tokenizers", asked_by)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_document],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_document,
        "eos_token": end_of_document,
        "clean_up_tokenization_spaces": False,
    }
    _replace(Path(output), tokenizer.to_str(pretty=True))
    _replace(Path(output).with_name("tokenizer_config.json"), json.dumps(config, indent=2) + "\n")
    return tokenizer.get_vocab_size()


BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MOST_CHARACTERS = 1000


def train_wordpiece(
    texts: Iterable[str], vocab_size: int, output: str, *, lower_case: bool = True, asked_by: str
) -> int:
    """Train on ``texts`` (all held in memory) with BERT's pre-tokenizer and write ``output`` (a vocab.txt), replacing
    an older file; return the size reached, which may be less than ``vocab_size``.

    Ids 0 to 4 are [PAD] [UNK] [CLS] [SEP] [MASK]; then come the most frequent characters, a quarter of the vocabulary
    and 1000 at most, inside words (##) and at their start, then whole pieces in the order of their merges. Raises
    UserError: the vocabulary is below 64, or `tokenizers` is not installed."""
    if vocab_size < 64:
        raise UserError(f"--vocab-size {vocab_size}: at least 64 are needed, {' '.join(BERT_TOKENS)} among them")
    library = require("tokenizers", asked_by)
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    texts = [tokenizer.normalizer.normalize_str(text) for text in texts]
    counts = Counter(character for text in texts for character in text if not character.isspace())
    frequent = sorted(counts, key=lambda character: (-counts[character], character))
    alphabet = sorted(frequent[: min(MOST_CHARACTERS, vocab_size // 4)])
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        # given their ids here: the library numbers ## pieces, and breaks ties by them, in the order of a hash table
        special_tokens=BERT_TOKENS + [f"##{character}" for character in alphabet],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab()
    _replace(Path(output), "".join(f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__)))
    return len(vocab)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with create_file(partial) as file:
        file.write(text.encode())
    partial.replace(path)
