"""Small tokenizers of every kind, trained on the spot, and a flag object for ``build_tokenizer``."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace

TEXTS = [
    "def read_file(path):\n    with open(path) as file:\n        return file.read()\n\n",
    "The quick brown fox jumps over the lazy dog. It's 12345 degrees!  Isn't it?\r\n",
    "naïve café — Ελληνικά, Русский текст, 中文字符 and 👩‍👩‍👧 emoji.\n\n\n",
    "class Tokenizer:\n\t# tabs\n\tdef __init__(self): self.ids = [0, 1, 22, 333, 4444]\n",
] * 8


def flags(tokenizer_type, **values):
    """Flags that ``build_tokenizer`` reads."""
    defaults = {
        "tokenizer_model": None,
        "chat_template": None,
        "sft_tokenizer_prompt_format": "nemotron-h-aligned",
        "vocab_file": None,
        "merge_file": None,
        "vocab_size": None,
        "vocab_extra_ids": None,
        "tokenizer_special_tokens": None,
        "end_token_ids": None,
        "tiktoken_pattern": None,
        "tiktoken_num_special_tokens": 1000,
        "tokenizer_hf_no_include_special_tokens": False,
        "tokenizer_sentencepiece_legacy": False,
        "null_tokenizer_eod_id": None,
        "null_tokenizer_pad_id": -1,
        "trust_remote_code": False,
    }
    return SimpleNamespace(tokenizer_type=tokenizer_type, **{**defaults, **values})


def byte_level_bpe(path, vocab_size=600, pre_tokenizer=None, normalizer=None, special=("<|endoftext|>",), edit=None):
    """A tokenizer.json at ``path``; ``edit`` changes its parsed content before it is written."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    definition = json.loads(tokenizer.to_str())
    if edit is not None:
        edit(definition)
    Path(path).write_text(json.dumps(definition), encoding="utf-8")
    return str(path)


def byte_fallback_bpe(folder, **config):
    """A folder with a tokenizer of LLaMA's kind: bytes for unknown characters, ``<s>`` by the post-processor, spaces as
    ``\u2581``. ``config``: keys of its tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    characters = "\u2581abcdefghijklmnopqrstuvwxyzTI'.<>|\n"
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "c"), ("a", "t"), ("\u2581c", "at"), ("o", "n")]
    tokens += ["".join(pair) for pair in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def gpt2_files(folder, vocab_size=600):
    """vocab.json and merges.txt."""
    path = Path(byte_level_bpe(Path(folder) / "made.json", vocab_size))
    definition = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    vocab, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
    vocab.write_text(json.dumps(definition["model"]["vocab"], ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in definition["model"]["merges"])]
    merges.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(vocab), str(merges)


def sentence_piece_model(path, **options):
    """A SentencePiece .model."""
    import io

    import sentencepiece

    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=stream,
        **{"vocab_size": 200, "hard_vocab_limit": False, "minloglevel": 2, **options},
    )
    Path(path).write_bytes(stream.getvalue())
    return str(path)


def llama_model(path):
    """A SentencePiece .model of LLaMA's kind: BPE, bytes for unknown characters, a space before the text."""
    options = {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": True, "remove_extra_whitespaces": False}
    ids = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "normalization_rule_name": "identity", "character_coverage": 0.98}
    return sentence_piece_model(path, vocab_size=420, **options, **ids)


def tiktoken_json(path, extra=(b"th", b"the", b"in", b" the")):
    """A TikTokenizer vocabulary: the bytes and a few longer tokens."""
    pieces = [bytes([byte]) for byte in range(256)] + list(extra)
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": piece.decode("latin-1")}
        for rank, piece in enumerate(pieces)
    ]
    Path(path).write_text(json.dumps(rows), encoding="utf-8")
    return str(path)


def bert_vocab(path):
    """A BERT vocab.txt."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "quick",
        "fox",
        "##es",
        "jump",
        "##s",
        "The",
        ".",
        ",",
    ]
    Path(path).write_text("\n".join(words) + "\n", encoding="utf-8")
    return str(path)
