"""Construction of tokenizers from flags or from a path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from megatron.core.config.errors import UserError
from megatron.core.config.tokenizer import TokenizerConfig, TokenizerType
from megatron.core.safe_files import open_regular, parse_json, read_text
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.huggingface import build_bert_wordpiece, build_gpt2_bpe, build_huggingface
from megatron.core.tokenizers.sentence_piece import SentencePieceTokenizer
from megatron.core.tokenizers.sft import PROMPT_FORMATS, read_template, use_template
from megatron.core.tokenizers.simple import ByteLevelTokenizer, NullTokenizer
from megatron.core.tokenizers.tik_token import TikTokenizer

NOT_YET = ("MultimodalTokenizer", "NullMultimodalTokenizer")
DEFINITION, TEMPLATE = "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"
OF_DEFINITION = ("HuggingFaceTokenizer", "SFTTokenizer")
"""Types that read tokenizer.json."""
TOKENIZER_TYPES = get_args(TokenizerType)


def build_tokenizer(cfg: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer that the flags in ``cfg`` name, with their end tokens. Raises UserError with the fix."""
    tokenizer = _build(cfg)
    tokenizer.model_end_ids = [*tokenizer.model_end_ids, *(cfg.end_token_ids or ())]
    if cfg.chat_template is not None:
        use_template(tokenizer, read_template(cfg.chat_template))
    return tokenizer


def _build(cfg: TokenizerConfig) -> Tokenizer:
    kind = cfg.tokenizer_type
    if kind in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        lower_case, special_tokens = kind == "BertWordPieceLowerCase", cfg.tokenizer_special_tokens
        return build_bert_wordpiece(cfg.vocab_file, lower_case, cfg.vocab_extra_ids, special_tokens)
    extra_ids = cfg.vocab_extra_ids or 0
    if kind == "GPT2BPETokenizer":
        return build_gpt2_bpe(cfg.vocab_file, cfg.merge_file, cfg.tokenizer_special_tokens, extra_ids)
    if kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        legacy = cfg.tokenizer_sentencepiece_legacy or (kind == "SentencePieceTokenizer" and extra_ids > 0)
        return SentencePieceTokenizer(
            kind, cfg.tokenizer_model, legacy=legacy, extra_ids=extra_ids, special_tokens=cfg.tokenizer_special_tokens
        )
    if kind in OF_DEFINITION:
        include = not cfg.tokenizer_hf_no_include_special_tokens
        tokenizer = build_huggingface(cfg.tokenizer_model, cfg.tokenizer_special_tokens, include, extra_ids)
        if kind == "SFTTokenizer" and cfg.sft_tokenizer_prompt_format in PROMPT_FORMATS:
            use_template(tokenizer, PROMPT_FORMATS[cfg.sft_tokenizer_prompt_format])
        return tokenizer
    if extra_ids:
        raise UserError(
            f"--vocab-extra-ids {extra_ids}: --tokenizer-type {kind} does not support sentinels; remove it, or use "
            "BertWordPieceLowerCase, BertWordPieceCase, SentencePieceTokenizer, HuggingFaceTokenizer"
        )
    if kind == "TikTokenizer":
        return TikTokenizer(
            cfg.tokenizer_model,
            pattern=cfg.tiktoken_pattern,
            vocab_size=cfg.vocab_size,
            num_special_tokens=cfg.tiktoken_num_special_tokens,
            special_tokens=cfg.tokenizer_special_tokens,
        )
    if kind == "NullTokenizer":
        if cfg.vocab_size is None:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(cfg.vocab_size, cfg.null_tokenizer_eod_id, cfg.null_tokenizer_pad_id)
    if kind in ("ByteLevelTokenizer", "ByteTokenizer"):
        return ByteLevelTokenizer()
    if kind is None:
        raise UserError(f"--tokenizer-type is not set; choose one of {', '.join(TOKENIZER_TYPES)}")
    if kind in NOT_YET:
        raise UserError(f"--tokenizer-type {kind} is not available yet; choose one of {', '.join(TOKENIZER_TYPES)}")
    raise UserError(f"--tokenizer-type {kind} is unknown; choose one of {', '.join(TOKENIZER_TYPES)}")


def is_unnamed(cfg: TokenizerConfig) -> bool:
    """Whether ``cfg`` names no files of a tokenizer: a NullTokenizer also stands for an unknown one."""
    return cfg.tokenizer_type in (None, "NullTokenizer")


def with_copies(cfg: TokenizerConfig, copies: Mapping[str, Path]) -> TokenizerConfig:
    """Return ``cfg`` with those of its files that are in ``copies`` (``tokenizer/<name>`` -> path, of a checkpoint); a
    tokenizer.json there also serves for an unnamed tokenizer."""
    values = {name: getattr(cfg, name) for name in ("tokenizer_model", "vocab_file", "merge_file")}
    paths: dict[str, Any] = {
        name: str(copies.get(f"tokenizer/{Path(value).name}", value)) for name, value in values.items() if value
    }
    if cfg.chat_template:
        paths["chat_template"] = str(copies.get(TEMPLATE, cfg.chat_template))
    if DEFINITION in copies and (is_unnamed(cfg) or cfg.tokenizer_type in OF_DEFINITION):
        kind = "HuggingFaceTokenizer" if is_unnamed(cfg) else cfg.tokenizer_type
        return replace(cfg, tokenizer_type=kind, **{**paths, "tokenizer_model": str(copies[DEFINITION])})
    return replace(cfg, **paths)


class MegatronTokenizer:
    """Entry point by path, for programs that have no flags."""

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None, metadata_path: str | Mapping[str, Any] | None = None, **options: Any
    ) -> Tokenizer:
        """Build the tokenizer in ``tokenizer_path``; its files determine the kind: the first of a folder with
        tokenizer.json, with vocab.json and merges.txt, with vocab.txt, or with one .model or .tiktoken file; or any of
        these files, or a JSON list for TikTokenizer. Nothing is downloaded.

        Args:
            metadata_path: Megatron-LM's description of the tokenizer, a JSON file or its content. Only ``library`` is
                read: ``null-text`` has no files, ``byte-level`` and ``null-multimodal`` are not available, other values
                have no effect.
            options: passed on to the constructor, e.g. ``include_special_tokens=False`` for tokenizer.json.

        Raises:
            UserError: the path does not exist, the folder lacks these files or has several, or the file is broken; the
                metadata has a class, a chat template or a library that is not available."""
        metadata = metadata_path or {}
        if isinstance(metadata, str):
            try:
                metadata = parse_json(read_text(metadata, 1 << 20))
            except (OSError, ValueError) as error:
                raise UserError(f"metadata_path {metadata_path}: cannot be read ({error})") from error
        if changes := sorted(key for key in ("class_name", "class_path", "chat_template") if metadata.get(key)):
            raise UserError(f"metadata_path: {', '.join(changes)} is not supported; set it on the tokenizer instead")
        if (library := metadata.get("library")) == "null-text":
            return NullTokenizer(**options)
        if library in ("byte-level", "null-multimodal"):  # the special tokens of Megatron-LM's bytes have other ids
            raise UserError(f"metadata_path: the library {library} is not available here; build a ByteLevelTokenizer")
        if tokenizer_path is None:
            raise UserError("tokenizer_path: is required, except for the library null-text")
        path = Path(tokenizer_path)
        if not path.exists():
            return build_huggingface(tokenizer_path)  # raises, saying that hub names are not downloaded
        if path.is_dir():
            if (path / "tokenizer.json").is_file():
                return build_huggingface(str(path), **options)
            if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
                return build_gpt2_bpe(str(path / "vocab.json"), str(path / "merges.txt"), **options)
            files = [path / "vocab.txt"]
            if not files[0].is_file():
                files = [*path.glob("*.model"), *path.glob("*.tiktoken")]
            if len(files) != 1:
                kinds = "tokenizer.json, vocab.json with merges.txt, vocab.txt, .model or .tiktoken"
                raise UserError(f"{path} has no {kinds}")
            path = files[0]
        if path.suffix == ".model":
            return SentencePieceTokenizer("GPTSentencePieceTokenizer", str(path), **options)
        if path.suffix == ".txt":
            return build_bert_wordpiece(str(path), options.pop("lower_case", True), **options)
        if path.suffix == ".tiktoken":
            return TikTokenizer(str(path), **options)
        try:
            with open_regular(path) as file:
                is_list = file.read(64).lstrip()[:1] == b"["
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); give the path of a tokenizer's file") from error
        return TikTokenizer(str(path), **options) if is_list else build_huggingface(str(path), **options)
