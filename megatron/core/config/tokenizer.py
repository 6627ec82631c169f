"""Settings of the tokenizer and its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Dim, Range

TokenizerType = Literal[
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
    "ByteLevelTokenizer",
    "SFTTokenizer",
]

TOKENIZER_FILES: dict[str, tuple[str, ...]] = {
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "NullTokenizer": ("vocab_size",),
    "ByteLevelTokenizer": (),
}
"""Flags that tokenizers need; the others: ``tokenizer_model``."""

WITHOUT_SENTINELS = ("TikTokenizer", "NullTokenizer", "ByteLevelTokenizer")
"""Types to which no sentinels can be added."""

_HUGGING_FACE = (
    "autotokenizer", "auto", "hf", "hftokenizer", "huggingface", "transformers", "tokenizers", "pretrainedtokenizer",
    "pretrainedtokenizerfast", "gpt2tokenizer", "gpt2tokenizerfast", "llamatokenizer", "llamatokenizerfast",
    "llama3tokenizer", "qwen2tokenizer", "qwen2tokenizerfast", "gemmatokenizer", "gemmatokenizerfast",
    "gptneoxtokenizer", "gptneoxtokenizerfast", "t5tokenizer", "t5tokenizerfast", "bloomtokenizerfast", "bpe",
)  # fmt: skip
OTHER_NAMES = dict.fromkeys(_HUGGING_FACE, "HuggingFaceTokenizer") | {
    "tiktoken": "TikTokenizer",
    "sentencepiece": "SentencePieceTokenizer",
    "spm": "SentencePieceTokenizer",
    "bytetokenizer": "ByteLevelTokenizer",
    "byt5tokenizer": "ByteLevelTokenizer",
    "gpt2": "GPT2BPETokenizer",
    "berttokenizer": "BertWordPieceLowerCase",
    "berttokenizerfast": "BertWordPieceLowerCase",
    "wordpiece": "BertWordPieceLowerCase",
}
"""--tokenizer-type to suggest for names of other libraries, in lower case."""


@dataclass(kw_only=True)
class TokenizerConfig(FlagGroup):
    """Tokenizer"""

    tokenizer_type: TokenizerType | None = flag(suggestions=OTHER_NAMES)
    """Kind of tokenizer; each script has its own default (GPT: GPT2BPETokenizer). NullTokenizer needs only
    --vocab-size, ByteLevelTokenizer needs nothing."""

    tokenizer_model: str | None = None
    """File or folder of the tokenizer: tokenizer.json, SentencePiece .model, or tiktoken ranks."""

    chat_template: str | None = None
    """File with a Jinja chat template, in place of the tokenizer's."""

    sft_tokenizer_prompt_format: Literal["nemotron-h-aligned", "nemotron-nano-v2", "identity", "default"] = (
        "nemotron-h-aligned"
    )
    """SFTTokenizer (a HuggingFaceTokenizer for --sft): name of its chat template; default: the tokenizer's own."""

    vocab_file: str | None = None
    """Vocabulary: vocab.json of GPT-2, or vocab.txt of BERT."""

    merge_file: str | None = None
    """Merges of GPT-2's byte pair encoding."""

    vocab_size: Dim | None = None
    """Vocabulary size, if the tokenizer does not define it (NullTokenizer) or a larger one is wanted."""

    pad_vocab_size: bool = flag("--no-pad-vocab-size", "--disable-pad-vocab-size", default=True)
    """Pad the vocabulary to a multiple of --make-vocab-size-divisible-by."""

    vocab_extra_ids: Annotated[int, Range(0, 2**31 - 1)] | None = None
    """Number of sentinel tokens (extra_id_0 ...) for T5's masked spans, added after the tokenizer's vocabulary unless
    it has them. Default: 100 with BertWordPieceCase, as in Megatron-LM, else none."""

    tokenizer_special_tokens: list[str] | None = None
    """Special tokens to add."""

    end_token_ids: list[Annotated[int, Range(0, 2**31 - 1)]] | None = None
    """Ids of tokens that end a generated text, in addition to the tokenizer's. Default: eos_token_id of the Hugging
    Face folder."""

    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """Pattern by which TikTokenizer splits text into words; default: v2."""

    tiktoken_num_special_tokens: Annotated[int, Range(0, 2**31 - 1)] = 1000
    """Number of ids that TikTokenizer reserves for special tokens."""

    tokenizer_hf_no_include_special_tokens: bool = False
    """HuggingFaceTokenizer: add no special tokens to text."""

    tokenizer_sentencepiece_legacy: bool = False
    """SentencePieceTokenizer: treat special tokens as older releases did."""

    null_tokenizer_eod_id: Annotated[int, Range(0, 2**31 - 1)] | None = None
    """NullTokenizer: id of end of document; default: vocabulary size - 1."""

    null_tokenizer_pad_id: Annotated[int, Range(-1, 2**31 - 1)] = -1
    """NullTokenizer: id of padding; -1: none."""
