"""Streams of samples of BERT and T5: settings, what the library's data sets give, and what the reference says."""

from types import SimpleNamespace

import numpy as np

from tests.reference.masked_samples import Masking, bert_samples, t5_samples
from tests.test_utils.masked_runs import SENTINELS, VOCABULARIES, corpora
from tests.test_utils.tiny_tokenizers import flags

SETTINGS = {
    "bert-defaults": {},
    "bert-one-stretch": {"pair": False},
    "bert-longer": {"length": 61, "seed": 2, "wanted": 400},
    "bert-shorter": {"length": 16, "wanted": 500},
    "bert-never-short": {"short": 0.0},
    "bert-half-short": {"short": 0.6, "seed": 77},
    "bert-always-short": {"short": 1.0},
    "bert-many-masks": {"how": Masking(0.5)},
    "bert-few-masks": {"how": Masking(0.02)},
    "bert-single-words": {"how": Masking(0.15, 1)},
    "bert-long-spans": {"how": Masking(0.3, 5, longer=True)},
    "bert-pieces": {"how": Masking(0.15, 3, whole_words=False), "pair": False},
    "bert-geometric": {"how": Masking(0.15, 4, geometric=True)},
    "bert-small-corpus": {"corpus": "c", "wanted": 100, "seed": 2**31},
    "bert-one-epoch": {"wanted": None},
    "t5-defaults": {},
    "t5-longer": {"lengths": (61, 24), "seed": 2, "wanted": 400},
    "t5-shorter": {"lengths": (16, 12), "wanted": 500},
    "t5-never-short": {"short": 0.0, "corpus": "b"},
    "t5-always-short": {"short": 0.8},
    "t5-many-masks": {"how": Masking(0.5, 10, geometric=True), "lengths": (32, 40)},
    "t5-few-masks": {"how": Masking(0.02, 10, geometric=True)},
    "t5-short-spans": {"how": Masking(0.2, 2, geometric=True), "lengths": (40, 32), "seed": 9},
    "t5-pieces": {"how": Masking(0.15, 10, whole_words=False, geometric=True)},
    "t5-weighted": {"how": Masking(0.15, 3)},
    "t5-one-epoch": {"wanted": None},
}


DEFAULTS = {"corpus": "a", "length": 32, "lengths": (32, 20), "wanted": 300, "short": 0.1, "seed": 1234, "pair": True}


def options_of(name):
    """All settings of a row; what is masked as the program asks for it where the row does not say."""
    masking = Masking() if name.startswith("bert") else Masking(0.15, 10, geometric=True)
    return SimpleNamespace(**{**DEFAULTS, "how": masking, **SETTINGS[name]})


def reference_stream(name):
    """Samples in training order."""
    o = options_of(name)
    documents = corpora()[o.corpus]
    if name.startswith("bert"):
        return bert_samples(documents, o.wanted, o.length, o.short, o.seed, VOCABULARIES["bert"], o.how, o.pair)
    return t5_samples(documents, o.wanted, o.lengths, o.short, o.seed, VOCABULARIES["t5"], o.how)


def library_stream(name, folder, cache):
    """The data set of the library over the whole of a corpus."""
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
    from megatron.core.tokenizers import build_tokenizer
    from megatron.data.blend import Split
    from megatron.data.indexed_dataset import IndexedDataset

    o, is_bert = options_of(name), name.startswith("bert")
    vocabulary = flags(
        "BertWordPieceLowerCase", vocab_file=f"{folder}/vocab.txt", vocab_extra_ids=0 if is_bert else SENTINELS
    )
    common = {
        "random_seed": o.seed, "sequence_length": o.length if is_bert else o.lengths[0], "split": "1,0,0",
        "blend": ([f"{folder}/{o.corpus}"], None), "path_to_cache": str(cache),
        "tokenizer": build_tokenizer(vocabulary), "masking_probability": o.how.probability,
        "short_sequence_probability": o.short, "masking_max_ngram": o.how.most_words,
        "masking_do_full_word": o.how.whole_words, "masking_use_longer_ngrams": o.how.longer,
        "masking_use_geometric_distribution": o.how.geometric,
    }  # fmt: skip
    if is_bert:
        kind, config = BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
        common["classification_head"] = o.pair
    else:
        kind, config = T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
        common["sequence_length_decoder"] = o.lengths[1]
    source = IndexedDataset(f"{folder}/{o.corpus}")
    indices = np.arange(len(source.document_indices) - 1, dtype=np.int32)
    return kind(source, f"{folder}/{o.corpus}", indices, o.wanted, Split.train, config(**common))
