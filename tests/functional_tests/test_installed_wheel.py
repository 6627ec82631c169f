"""The console command ``megatron`` of a wheel, installed outside the checkout: every subcommand, and a small run."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megatron.console import TOOLS
from megatron.core.models.registry import programs
from megatron.version import __version__
from tests.test_utils.warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]
IGNORED = [*(line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()), "tests"]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --swiglu"
    " --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --micro-batch-size 2 --lr 1e-3"
    " --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
    " --train-iters 2 --eval-iters 0 --log-interval 1"
    " --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --make-vocab-size-divisible-by 4"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the checkout, without the C++ extension, which takes long to compile."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=lambda _, names: [n for n in names if any(fnmatch(n, i) for i in IGNORED)])
    build = "from setuptools import build_meta as b; print(b.build_wheel('..'))"
    environment = {**os.environ, "CXX": "false", "CC": "false"}
    result = subprocess.run([sys.executable, "-c", build], cwd=tree, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    shutil.rmtree(tree)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def shell(wheel, tmp_path_factory):
    """Install the wheel into a virtual environment; return a function that runs a shell command in a new folder."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    # Without PYTHONPATH: pip would take the egg-info that an editable install leaves in the checkout for this package.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK")}
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True, cwd=folder, env=environment)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (site / "packages_of_this_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    (folder / "work").mkdir()
    return Shell(folder / "work", site, environment)


@dataclass
class Shell:
    """Runs commands in ``folder``; the package is installed in ``site``."""

    folder: Path
    site: Path
    environment: dict

    def __call__(self, command, code=0):
        result = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert result.returncode == code, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout + result.stderr


@pytest.fixture(scope="module")
def warm_shell(shell, tmp_path_factory):
    """A ``shell`` whose ``python`` and ``megatron`` start with torch and the installed package loaded."""
    programs = tmp_path_factory.mktemp("warm")
    installed = Path(shutil.which("megatron", path=shell.environment["PATH"]))
    warm = WarmPython(programs, installed.with_name("python"), shell.environment)
    command = programs / "megatron"
    command.write_text(f"#!{warm.python}\n{installed.read_text().partition(chr(10))[2]}")
    command.chmod(0o755)
    path = f"{programs}{os.pathsep}{shell.environment['PATH']}"
    yield replace(shell, environment={**shell.environment, "PATH": path})
    warm.close()


def test_wheel_has_the_typing_marker_and_no_other_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"megatron", f"megatron_pretraining-{__version__}.dist-info"}
    assert {"megatron/py.typed", "megatron/core/config/absent.tsv", "megatron/data/helpers.cpp"} <= set(names)
    assert "megatron/core/inference/server/chat.html" in names


def test_console_command_and_module_are_the_same_program(shell):
    assert shell("python -c 'import megatron; print(megatron.__file__)'").startswith(str(shell.site))
    assert shell("megatron --help") == shell("python -m megatron --help")
    listed = shell("megatron --help")
    assert all(f"  {name} " in listed for name in [*TOOLS, *(f"pretrain {model}" for model in programs())])
    assert shell("megatron --version") == f"megatron-pretraining {__version__}\n"
    assert "megatron nothing: unknown command" in shell("megatron nothing", code=2)
    assert "usage: megatron COMMAND" in shell("megatron", code=2)


def test_every_subcommand_prints_its_help(shell):
    """In one process, which imports torch once."""
    program = f"""
import contextlib, io, sys
from megatron.console import main
for words in {[[name] for name in TOOLS] + [["pretrain", model] for model in programs()]}:
    sys.argv, out = ["megatron", *words, "--help"], io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    assert not code and out.getvalue().startswith("usage: megatron " + " ".join(words)), (words, code, out.getvalue())
"""
    (shell.folder / "helps.py").write_text(program)
    shell("python helps.py")


def test_help_and_version_do_not_import_torch(shell):
    (shell.folder / "torch.py").write_text("raise SystemExit('torch was imported')")
    try:
        for command in ("--help", "--version", "pretrain", "pretrain gpt --version", "pretrain gpt --help",
                        "pretrain t5 --nproc 2 --help", "preprocess --help", "plot --help"):  # fmt: skip
            code = 2 if command == "pretrain" else 0
            assert "torch was imported" not in shell(f"PYTHONPATH=. megatron {command}", code)
    finally:
        (shell.folder / "torch.py").unlink()


def test_installed_commands_go_from_text_to_generated_text(warm_shell):
    shell = warm_shell
    assert shell("python -c 'import megatron; print(megatron.__file__)'").startswith(str(shell.site))
    shell("megatron make-corpus --output corpus.jsonl --max-bytes 200000")
    shell("megatron train-tokenizer --input corpus.jsonl --vocab-size 300 --output tokenizer")
    shell("megatron preprocess --input corpus.jsonl --output-prefix data --workers 1 --append-eod"
          " --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer")  # fmt: skip
    assert "  ok" in shell("megatron check-data data_text_document")
    flags = f"{MODEL} --data-path data_text_document --split 9,1,0 --save run"
    log = shell(f"megatron pretrain gpt --nproc 2 --tensor-model-parallel-size 2 {flags}")
    assert f"megatron-pretraining {__version__} on host " in log and "iteration        2/       2" in log
    assert "layout: 2 ranks = tensor 2" in log
    torchrun = "python -m torch.distributed.run --standalone --nproc_per_node=1"  # of the new environment
    log = shell(f"{torchrun} -m megatron pretrain gpt {flags} --load run")
    assert "successfully loaded checkpoint" in log
    manifest = json.loads((shell.folder / "run/iter_0000002/metadata.json").read_text())
    result = manifest["objects"]["environment"]
    assert result["version"] == __version__ and result["host"] == os.uname().nodename and result["torch"]
    shell("megatron convert --load-dir run --saver hf --save-dir hf --no-checking")
    assert "tensors" in shell("megatron inspect hf")
    assert "whole" in shell("megatron verify run")
    assert shell("megatron generate --load run --prompt 'def' --max-new-tokens 3").startswith("def")


@pytest.mark.parametrize(("words", "code", "said"), [
    ("--nproc 0", 2, "--nproc 0: must be a positive integer"),
    ("--nproc", 2, "--nproc (empty): must be"),
    ("--nproc=x", 2, "--nproc x: must be"),
    ("--num-layers -1", 2, "megatron pretrain gpt: "),
])  # fmt: skip
def test_wrong_flags_of_pretrain_end_with_one_message(shell, words, code, said):
    message = shell(f"megatron pretrain gpt {words}", code)
    assert said in message and "Traceback" not in message


def test_nproc_is_rejected_inside_torchrun(shell):
    message = shell("RANK=0 WORLD_SIZE=1 megatron pretrain gpt --nproc 2", code=2)
    assert "torchrun has already started this process; remove --nproc" in message
