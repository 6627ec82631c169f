"""Folders in Hugging Face's format, made without ``transformers``."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

LLAMA = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--ffn-hidden-size", "64",
    "--group-query-attention", "--num-query-groups", "2", "--max-position-embeddings", "64", "--swiglu",
    "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope",
    "--untie-embeddings-and-output-weights",
]  # fmt: skip
"""The flags of the model that :func:`tiny_llama` writes."""


def random_model(argv: list[str], vocab_size: int, dtype: torch.dtype = torch.float32, model_family: str = "gpt"):
    """Random weights of the model that flags describe, and its settings."""
    from megatron.core.sharding.lazy_tensor import LazyTensor
    from megatron.export.interchange import Interchange
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpoint.other_formats import MODEL, expected_tensors
    from megatron.training.stored_settings import config_to_dict

    rest = ["--micro-batch-size", "1", "--skip-train", "--eval-iters", "0", "--seq-length", "32"]
    cfg = validate_args(parse_args([*rest, *argv], needs_data=False, model_family=model_family), 1)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: LazyTensor.of((torch.randn(shape, generator=generator) * 0.1 + ("norm" in name)).to(dtype))
        for name, shape in expected_tensors(cfg, vocab_size).items()
    }
    settings = {name: value for name, value in config_to_dict(cfg.flat).items() if name in MODEL}
    return Interchange(settings | {"vocab_size": vocab_size, "model_family": model_family}, tensors)


def as_on_the_hub(folder: Path, names: Mapping[str, str] = {}) -> Path:
    """Add the files that Hub repositories hold in addition to weights and config.json, and replace parts of names of
    tensors by ``names``; return ``folder``."""
    if names:
        from safetensors.torch import load_file, save_file

        def published(name: str) -> str:
            return next((name.replace(old, new) for old, new in names.items() if f".{old}" in name), name)

        for path in folder.glob("*.safetensors"):
            tensors = {published(name): tensor for name, tensor in load_file(path).items()}
            save_file(tensors, path, metadata={"format": "pt"})
        index = folder / "model.safetensors.index.json"
        table = json.loads(index.read_text(encoding="utf-8"))
        table["weight_map"] = {published(name): file for name, file in table["weight_map"].items()}
        index.write_text(json.dumps(table), encoding="utf-8")
    files = {
        "generation_config.json": '{"do_sample": true, "temperature": 0.6, "transformers_version": "4.43.0"}',
        "README.md": "---\nlicense: other\n---", ".gitattributes": "*.safetensors filter=lfs", "LICENSE": "text",
        "configuration_model.py": "raise SystemExit", "training_args.bin": "not weights", "trainer_state.json": "{}",
        "pytorch_model.bin.index.json": '{"weight_map": {}}', "model.safetensors.index.fp32.json": "{}",
    }  # fmt: skip
    for name, text in files.items():
        if not (folder / name).exists():
            (folder / name).write_text(text, encoding="utf-8")
    (folder / "original").mkdir(exist_ok=True)
    (folder / "original" / "params.json").write_text("{}", encoding="utf-8")
    return folder


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in ``folder``."""
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def tiny_llama(folder: Path, vocab_size: int = 64, dtype: torch.dtype = torch.float32) -> Path:
    """``folder``, with a random LLaMA of the flags ``LLAMA``."""
    from megatron.export.hf import save_hf

    save_hf(random_model(LLAMA, vocab_size, dtype), folder)
    return folder
