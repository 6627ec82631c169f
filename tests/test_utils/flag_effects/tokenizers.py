"""Tokenizers: what a text becomes, with the files that a run would name."""

from tests.test_utils import tiny_tokenizers
from tests.test_utils.flag_effects.rows import Probe

TEXT = "The quick foX <pad2> jumps 12"
WITHOUT = "--tokenizer-type --vocab-size"
BPE = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {bpe}"
PIECES = "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {pieces}"
TIK = "--tokenizer-type TikTokenizer --tokenizer-model {tik}"
GPT2 = "--tokenizer-type GPT2BPETokenizer"


def write(folder):
    """Name in braces -> path: small vocabularies of every kind, some in two versions."""

    def begins_with_a_special_token(definition):
        piece = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        ids = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
        definition["post_processor"] = {
            "type": "TemplateProcessing", "single": [piece, text], "pair": [piece, text], "special_tokens": ids,
        }  # fmt: skip

    (folder / "small").mkdir()
    vocab, merges = tiny_tokenizers.gpt2_files(folder)
    small_vocab, small_merges = tiny_tokenizers.gpt2_files(folder / "small", 300)
    bpe = folder / "tokenizer.json"
    tik = tiny_tokenizers.tiktoken_json(folder / "tik.json", extra=(b"th", b"the", b"in", b"oX"))
    return {
        "vocab": vocab, "merges": merges, "small_vocab": small_vocab, "small_merges": small_merges, "tik": tik,
        "bpe": tiny_tokenizers.byte_level_bpe(bpe, edit=begins_with_a_special_token),
        "small_bpe": tiny_tokenizers.byte_level_bpe(folder / "small" / "tokenizer.json", 300),
        "pieces": tiny_tokenizers.sentence_piece_model(folder / "pieces.model"),
        "bert": tiny_tokenizers.bert_vocab(folder / "vocab.txt"),
    }  # fmt: skip


def ask(what):
    """A function of settings: ``what`` of their tokenizer."""

    def asks(cfg):
        from megatron.core.tokenizers import build_tokenizer

        return what(build_tokenizer(cfg.tokenizer))

    return asks


def ids(tokenizer):
    return list(tokenizer.tokenize(TEXT))


def pieces(tokenizer):
    """The text of every token."""
    return [tokenizer.detokenize([item]) for item in tokenizer.tokenize(TEXT)]


def size(tokenizer):
    return tokenizer.vocab_size


ROWS = [
    Probe("--tokenizer-type ByteLevelTokenizer", ask(size), 257, drop="--vocab-size"),
    Probe("--tokenizer-model {small_bpe}", ask(size), 300, base=BPE, without=WITHOUT),
    Probe("--vocab-file {small_vocab}", ask(size), 300, without=WITHOUT,
          base=f"{GPT2} --vocab-file {{vocab}} --merge-file {{small_merges}}"),
    Probe("--merge-file {small_merges}", ask(lambda tokenizer: len(ids(tokenizer)) > 20), True, without=WITHOUT,
          base=f"{GPT2} --vocab-file {{vocab}} --merge-file {{merges}}"),
    Probe("--vocab-extra-ids 3", ask(lambda tokenizer: tokenizer.vocab.get("<extra_id_2>") is not None), True,
          base="--tokenizer-type BertWordPieceLowerCase --vocab-file {bert}", without=WITHOUT),
    Probe("--tokenizer-special-tokens '<pad2>'", ask(lambda tokenizer: pieces(tokenizer).count("<pad2>")), 1, base=BPE,
          without=WITHOUT),
    Probe("--end-token-ids 7 9", ask(lambda tokenizer: tokenizer.end_ids), [0, 7, 9], base=BPE, without=WITHOUT),
    Probe("--tiktoken-pattern v1", ask(lambda tokenizer: "oX" in pieces(tokenizer)), True, base=TIK, without=WITHOUT),
    Probe("--tiktoken-num-special-tokens 100", ask(size), 360, base=TIK, without=WITHOUT),
    Probe("--tokenizer-hf-no-include-special-tokens", ask(lambda tokenizer: ids(tokenizer)[0] == 0), False, base=BPE,
          without=WITHOUT),
    Probe("--tokenizer-sentencepiece-legacy", ask(lambda tokenizer: "<SEP>" in tokenizer.vocab), True, base=PIECES,
          without=WITHOUT),
]  # fmt: skip
