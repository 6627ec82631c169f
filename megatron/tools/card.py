"""Verify a Hugging Face folder with this program: ``megatron card --load-hf FOLDER --output CARD``.

Runs the other commands on the folder, each in a separate process, and writes CARD/card.json and CARD/card.md with
verdict, figures, command and output of every check, versions and device:

- import: convert to the native format; compare logits of the weights, and of a small random model with their settings,
  with ``transformers``; checksums, names and shapes of the result
- export: convert back; every tensor has the same bytes
- training: --steps steps on random tokens, and again from the checkpoint in the middle: all tensors have the same bytes
- layouts: verify-layout with a small model of the same settings (tensor, pipeline, context, expert parallelism)
- greedy text: the text of ``transformers``, in fp32

Exit code 0: every check that applies passed; 1: one failed."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import EXIT_BAD_INPUT, UserError
from megatron.core.models.registry import families, get_family
from megatron.export.hf import load_hf_settings
from megatron.export.hf.reader import read_weights
from megatron.tools.engine_flags import check_new_folder
from megatron.training.checkpoint.environment import environment

LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "ep2": "--expert-model-parallel-size 2",
}
Run = Callable[[Sequence[str]], tuple[int, str]]
Check = dict[str, Any]


def run_megatron(words: Sequence[str]) -> tuple[int, str]:
    """Run ``megatron WORDS`` in a process; return exit code and output (stdout, then stderr)."""
    job = subprocess.run([sys.executable, "-m", "megatron", *words], capture_output=True, text=True, check=False)
    return job.returncode, job.stdout + job.stderr


def relevant(output: str, words: Sequence[str]) -> str:
    """Return the losses of ``output``, the lines that contain one of ``words``, else the last three."""
    if losses := re.findall(r"lm loss: (\S+)", output):
        return f"loss {', '.join(f'{float(loss):.5f}' for loss in losses)}"
    lines = [line.strip() for line in output.splitlines() if any(word in line for word in words)]
    return "\n".join(line for line in lines if line) or last_lines(output)


def last_lines(output: str) -> str:
    """Return the last three lines of ``output`` that are not empty."""
    return "\n".join([line.strip() for line in output.splitlines() if line.strip()][-3:])


class Card:
    """Checks of one folder, in the order in which they ran."""

    def __init__(self, folder: str, workspace: Path, run: Run) -> None:
        self.folder, self.workspace, self.run = folder, workspace, run
        settings = load_hf_settings(folder)
        self.family = families().get(str(settings["model_family"])) or get_family(str(settings["model_family"]))
        self.settings, self.checks = settings, dict[str, Check]()
        has_tokenizer = any((Path(folder) / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
        null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(settings.get("vocab_size"))]
        self.model_flags = ["--load-hf", folder, *([] if has_tokenizer else null)]

    def command(self, name: str, words: Sequence[str], figures: Sequence[str] = (), *, optional: bool = False) -> bool:
        """Record the result of ``megatron WORDS`` as check ``name``. ``optional``: exit code 2 means not applicable.
        ``figures`` select lines of the output if it passed. Return whether it passed."""
        start = time.perf_counter()
        code, output = self.run(words)
        rejected = "not applicable" if optional else "failed"
        verdict = {0: "passed", EXIT_BAD_INPUT: rejected}.get(code, "failed")
        command = "megatron " + shlex.join(words).replace(str(self.workspace), "WORK").replace(self.folder, "FOLDER")
        # the error comes last, also after losses
        details = relevant(output, figures) if code == 0 else last_lines(output)
        self.record(name, verdict, details, time.perf_counter() - start, command)
        return code == 0

    def record(self, name: str, verdict: str, details: str, seconds: float, command: str = "") -> None:
        details = details.replace(str(self.workspace), "WORK").replace(self.folder, "FOLDER")
        check = {"verdict": verdict, "details": details, "command": command, "seconds": round(seconds, 1)}
        self.checks[name] = {key: value for key, value in check.items() if key != "command" or value}

    def conversion(self) -> None:
        """Check import, checksums and export."""
        native, back = str(self.workspace / "native"), str(self.workspace / "exported")
        words = ["convert", "--loader", "hf", "--saver", "native", "--load-dir", self.folder, "--save-dir", native]
        if not self.command("import, logits", words, ["against transformers", "note:"]):
            return
        self.command("checksums, names, shapes", ["verify", native], ["whole", "problem"])
        words = ["convert", "--loader", "native", "--saver", "hf", "--load-dir", native, "--save-dir", back]
        if self.command("export", [*words, "--no-checking"], ["complete"]):
            start = time.perf_counter()
            same, count, absent, new = compare_tensors(self.folder, back)
            details = f"{same} of {count} exported tensors have the bytes of the folder"
            details += f"; not in the export: {', '.join(absent)}" if absent else ""
            details += f"; not in the folder: {', '.join(new)}" if new else ""
            # tensors that the folder lacks pass only if the import said that it created them
            created = all(name in self.checks["import, logits"]["details"] for name in new)
            verdict = "passed" if same == count > 0 and created else "failed"
            self.record("exported bytes", verdict, details, time.perf_counter() - start)

    def training(self, steps: int, length: int) -> None:
        """Check ``steps`` steps, and the same steps from the checkpoint in the middle."""
        full, resumed = str(self.workspace / "run"), str(self.workspace / "resumed")
        words = ["pretrain", self.family.programs[0].name, *self.model_flags, "--mock-data", "--num-workers", "0"]
        words += f"--micro-batch-size 1 --global-batch-size 2 --seq-length {length} --lr 1e-4".split()
        words += f"--train-iters {steps} --eval-iters 0 --log-interval 1 --save-interval {steps // 2}".split()
        if not self.command(f"{steps} training steps", [*words, "--save", full]):
            return
        resuming = [*words, "--load", full, "--ckpt-step", str(steps // 2), "--save", resumed]
        if self.command("resume", resuming):
            self.command("resumed bytes", ["inspect", full, resumed], ["equal", "same"])

    def layouts(self, names: Sequence[str]) -> None:
        """Check ``names`` of :data:`LAYOUTS` with a small model in fp64."""
        flags = ["--program", self.family.programs[0].name, *self.model_flags, "--micro-batch-size", "1"]
        flags += ["--seq-length", "64", "--lr", "1e-3", "--train-iters", "1"]
        for name in names:
            self.command(f"layout {name}", ["verify-layout", *flags, *LAYOUTS[name].split()], ["equal"], optional=True)

    def greedy_text(self, prompt: str, num_tokens: int) -> None:
        """Check greedy text against ``transformers``."""
        name, words = "greedy text", ["generate", "--load", self.folder, "--prompt", prompt, "--temperature", "0"]
        if not self.command(name, [*words, "--max-new-tokens", str(num_tokens)], [""], optional=True):
            return
        start, text = time.perf_counter(), self.checks[name]["details"]
        try:
            expected = transformers_text(self.folder, prompt, num_tokens)
        except Exception as error:  # any: transformers cannot load or run the folder
            expected = f"no text: {type(error).__name__}: {error}"
        same = " ".join(text.split()).startswith(" ".join((prompt + expected).split()))
        verdict, details = ("passed", expected) if same else ("failed", f"{text}\ntransformers: {expected}")
        if not expected.strip():  # any text starts with it
            verdict, details = "not applicable", "transformers ends the text at once; give another --prompt"
        self.record(name, verdict, details, time.perf_counter() - start, self.checks[name]["command"])


def compare_tensors(folder: str, exported: str) -> tuple[int, int, list[str], list[str]]:
    """Return how many tensors have the same bytes, dtype and shape in both folders, how many both have, and the names
    that only ``folder`` and only ``exported`` have. A folder without heads, whose names lack the prefix of the encoder
    (``bert.``), is compared without it, and without heads."""
    before, after = (read_weights(Path(place))[0] for place in (folder, exported))
    if not before.keys() & after.keys():
        after = {name.partition(".")[2]: tensor for name, tensor in after.items() if name.partition(".")[2] in before}
    same, common = 0, before.keys() & after.keys()
    for name in common:
        first, second = before[name].read(), after[name].read()
        is_same = first.dtype == second.dtype and first.shape == second.shape
        same += is_same and torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))
    return same, len(common), sorted(before.keys() - common), sorted(after.keys() - common)


def transformers_text(folder: str, prompt: str, num_tokens: int) -> str:
    """Return the greedy continuation of ``prompt`` by ``transformers`` in fp32, without the end token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.eval().generate(**tokens, max_new_tokens=num_tokens, do_sample=False)
    ids, ends = output[0, tokens["input_ids"].shape[1] :].tolist(), model.generation_config.eos_token_id
    has_end = ids[-1] in (ends if isinstance(ends, list) else [ends])
    return tokenizer.decode(ids[:-1] if has_end else ids)


def page(card: dict[str, Any]) -> str:
    """Return ``card`` as Markdown."""
    conditions = ", ".join(f"{key} {value}" for key, value in card["environment"].items() if value)
    lines = [f"# {card['model']}", "", f"{card['model_type']}, {card['parameters']:,} parameters. {conditions}.", ""]
    lines += ["| check | verdict | details |", "|---|---|---|"]
    for name, check in card["checks"].items():
        lines.append(f"| {name} | {check['verdict']} | {cell(check['details'])} |")
    commands = [check["command"] for check in card["checks"].values() if "command" in check]
    return "\n".join([*lines, "", "```bash", *commands, "```", ""])


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of this tool."""
    arguments = tool_parser(__doc__)
    arguments.add_argument("--load-hf", required=True, metavar="FOLDER", help="Hugging Face folder")
    arguments.add_argument("--output", required=True, metavar="CARD", help="folder to create")
    arguments.add_argument("--name", help="name of the model; default: of the folder")
    arguments.add_argument("--steps", type=int, default=4, help="training steps, even")
    arguments.add_argument("--seq-length", type=int, default=64, help="tokens of a row in training")
    arguments.add_argument(
        "--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS), help="layouts to verify"
    )
    arguments.add_argument("--prompt", default="The capital of France is", help="start of the greedy text")
    arguments.add_argument("--new-tokens", type=int, default=16, help="tokens of the greedy text")
    return arguments


def main(argv: Sequence[str], run: Run = run_megatron) -> int:
    """Write the card of the folder that ``argv`` names, print its verdicts, and return the exit code. Raises
    UserError: the output exists, --steps is odd, or config.json cannot be represented."""
    args = parser().parse_args(argv)
    check_new_folder("--output", args.output)
    if args.steps < 2 or args.steps % 2:
        raise UserError(f"--steps {args.steps}: must be even and at least 2")
    folder = str(Path(args.load_hf).resolve())
    with tempfile.TemporaryDirectory() as workspace:
        card = Card(folder, Path(workspace), run)
        card.conversion()
        card.training(args.steps, args.seq_length)
        card.layouts(args.layouts)
        if card.family.auto_model == "AutoModelForCausalLM":
            card.greedy_text(args.prompt, args.new_tokens)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result = {
        "model": args.name or Path(folder).name,
        "model_type": config["model_type"],
        "parameters": sum(math.prod(tensor.shape) for tensor in read_weights(Path(folder))[0].values()),
        "environment": {**{k: v for k, v in environment().items() if k != "host"}, "device": device},
        "date": datetime.now(timezone.utc).date().isoformat(),
        "checks": card.checks,
    }
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "card.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (output / "card.md").write_text(page(result), encoding="utf-8")
    for name, check in card.checks.items():
        print(f"{check['verdict']:<15} {name}")
    return int(any(check["verdict"] == "failed" for check in card.checks.values()))
