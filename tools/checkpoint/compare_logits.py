"""The logits of a Hugging Face folder, by ``transformers``, beside those of this project for the same weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from types import SimpleNamespace

import torch

from megatron.core.export.interchange import Interchange
from megatron.core.export.native import InterchangeReader
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.sharding.sharded_tensor import module_tensors
from megatron.training.checkpoint.other_formats import WORDS
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.tasks.language_model import task_class
from tools.checkpoint.formats import say

LARGEST = 1_000_000_000
"""Parameters up to which both models are built without being asked: 8 GB in fp32."""
TOLERANCE = 1e-4
LENGTH = 32
AUTO_MODELS = {"gpt": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}
"""What builds their model of each of our families."""


def compare_with_transformers(folder: str, ours: Interchange, cfg: PretrainConfig, *, always: bool = False) -> int:
    """Print how far the logits of both implementations differ on two short sequences, in fp32; 1: by too much."""
    count = sum(math.prod(tensor.shape) for tensor in ours.tensors.values())
    if importlib.util.find_spec("transformers") is None:
        say("logits not compared: transformers is not installed")
        return 0
    if count > LARGEST and not always:
        say(f"logits not compared: {count:,} parameters; --check-logits does it, in {8 * count / 1e9:.0f} GB of memory")
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    rows = ours.tensors[WORDS].shape[0]
    tokens = torch.randint(rows, (2, min(LENGTH, cfg.seq_length or LENGTH)), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(tokens)
    decoded = {"decoder_input_ids": tokens, "attention_mask": real} if cfg.model_family == "t5" else {}
    with torch.no_grad():
        kind = getattr(transformers, AUTO_MODELS[cfg.model_family])
        theirs = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        expected = theirs.eval()(tokens, **decoded).logits.float()
        del theirs
        found = our_logits(ours, cfg, tokens)
    error, scale = (found - expected).abs().max().item(), expected.abs().max().item()
    agree = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    verdict = "equal" if error <= TOLERANCE * max(scale, 1) else "DIFFERENT"
    say(f"logits beside transformers, {tokens.numel()} tokens in fp32: {verdict}; largest difference {error:.2e} of"
        f" {scale:.2f}, same next token {agree:.1%}")  # fmt: skip
    return int(verdict == "DIFFERENT")


def our_logits(weights: Interchange, cfg: PretrainConfig, tokens: torch.Tensor) -> torch.Tensor:
    """fp32 [b, s, vocabulary] of this project's model with ``weights``."""
    rows = weights.tensors[WORDS].shape[0]
    plain = dataclasses.replace(cfg, bf16=False, fp16=False, attention_dropout=0.0, hidden_dropout=0.0)
    model = task_class(cfg.model_family)(plain, SimpleNamespace(vocab_size=rows)).model_provider().eval()
    model.float()
    reader = InterchangeReader(weights, "")
    for tensor in module_tensors(model, prefix="model.", groups=SINGLE_PROCESS).values():
        reader.read_into(tensor)
    if cfg.model_family == "bert":
        types = torch.zeros_like(tokens) if cfg.bert_binary_head else None
        return model(tokens, None, types)[0].float()[..., :rows]
    if cfg.model_family == "t5":
        return model(tokens, tokens, torch.ones_like(tokens)).float()[..., :rows]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions).float()[..., :rows]
