"""Full runs of ``pretrain_bert.py`` and ``pretrain_t5.py`` compared with the reference: data, differences per row."""

import struct
from pathlib import Path

import numpy as np

from tests.reference import bert, settings, t5, training
from tests.reference.masked_samples import Vocabulary
from tests.test_utils import reference_runs

WORDS, SENTINELS = 61, 30
TEXTS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"{'##' * (i % 4 == 0)}w{i}" for i in range(5, WORDS))]
SPECIALS = {"cls": 2, "sep": 3, "mask": 4, "pad": 0}
VOCABULARIES = {
    "bert": Vocabulary(dict(enumerate(TEXTS)), **SPECIALS, bos=2, eos=3),
    "t5": Vocabulary(dict(enumerate([*TEXTS, *(f"<extra_id_{index}>" for index in range(SENTINELS))])), **SPECIALS,
                     bos=2, eos=3, sentinels=tuple(range(WORDS, WORDS + SENTINELS))),
}  # fmt: skip
RECIPES = {"bert": bert.recipe(VOCABULARIES["bert"]), "t5": t5.recipe(VOCABULARIES["t5"])}
COMMON = [
    "--hidden-size", "32", "--num-attention-heads", "4", "--max-position-embeddings", "44", "--micro-batch-size", "4",
    "--global-batch-size", "4", "--train-iters", "6", "--lr", "5e-3", "--eval-iters", "2", "--adam-eps", "1e-5",
]  # fmt: skip
TOKENIZER = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "vocab.txt"]
PROGRAM_ONLY = {"bert": TOKENIZER, "t5": [*TOKENIZER, "--vocab-extra-ids", str(SENTINELS)]}
SIZES = {"--encoder-num-layers": ("--num-layers", "2"), "--encoder-seq-length": ("--seq-length", "32")}
"""Flag -> (default flag, its value) that the flag replaces."""


def corpora():
    """Documents of 1 to 8 sentences of 1 to 12 tokens, by name of the file. A document counts upwards in a step drawn
    for it; some hold the ids of special tokens, as text that was tokenized with them does."""
    generator = np.random.default_rng(5)
    result = {}
    for name, count in {"a": 70, "b": 25, "c": 12}.items():
        result[name] = []
        for _ in range(count):
            start, step, parts = generator.integers(0, 56), generator.integers(1, 9), generator.integers(1, 9)
            lengths = generator.integers(1, 13, parts)
            text = (start + step * np.arange(lengths.sum())) % (WORDS - 5) + 5
            text[generator.random(len(text)) < 0.01] = generator.integers(1, 4)
            result[name].append(np.split(text, np.cumsum(lengths)[:-1]))
    return result


def write(prefix, documents):
    """The pair of files of a corpus (docs/reference/data_format.md): uint16 tokens, one sequence per sentence."""
    sentences = [sentence for document in documents for sentence in document]
    lengths = np.array([len(sentence) for sentence in sentences])
    offsets = 2 * (np.cumsum(lengths) - lengths)
    ends = np.cumsum([0, *(len(document) for document in documents)])
    Path(f"{prefix}.bin").write_bytes(np.concatenate(sentences).astype("<u2").tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sentences), len(ends))
    arrays = lengths.astype("<i4"), offsets.astype("<i8"), ends.astype("<i8")
    Path(f"{prefix}.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))


def write_corpora(folder):
    for name, documents in corpora().items():
        write(folder / name, documents)
    (folder / "vocab.txt").write_text("\n".join(TEXTS) + "\n")


def command_line(kind, flags):
    """Return the flags of all rows and a row's flags, which take precedence."""
    lengths = ["--decoder-seq-length", "20"] if kind == "t5" else []
    base = [word for flag, pair in SIZES.items() if flag not in flags for word in pair]
    return [*base, *COMMON, *lengths, *flags]


def differences(pool, kind, row, folder, save):
    """Return the differences between a run of the program and the reference run, one line each."""
    flags, precision = row
    argv, vocab_size = command_line(kind, flags), len(VOCABULARIES[kind].texts)
    options = [*argv, *PROGRAM_ONLY[kind]], precision == "fp64", str(folder), str(save), kind, vocab_size
    result = pool.run(reference_runs.program, 1, *options)[0]
    c = settings.read([*argv, "--vocab-size", str(vocab_size)])
    return reference_runs.compare(result, training.train(c, corpora(), (), RECIPES[kind]), precision)
