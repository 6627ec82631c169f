"""Run the Dockerfile's steps in a fresh virtual environment, on a copy of the files that its COPY includes.

The step that installs the project is run; its dependencies come from this environment instead of the lock file, because
downloading them takes minutes. ``test_packaging.py`` compares the lock file with pyproject.toml.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IGNORED = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line]


def steps(kind):
    """The arguments of one kind of instruction, in order."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    return re.findall(rf"^{kind} (.*)$", text, re.MULTILINE)


def installs():
    return [step.replace(" --no-cache-dir", "") for step in steps("RUN") if "pip install" in step]


def test_the_image_installs_locked_packages_and_then_the_project():
    """CI installs the same packages."""
    *packages, project = installs()
    assert packages == [
        "pip install -c constraints.txt torch", "pip install --no-deps --require-hashes -r requirements.lock"
    ]  # fmt: skip
    assert project == "pip install --no-deps --no-build-isolation ."
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert all(f"- run: {step}\n" in workflow for step in packages)


def test_dockerignore_lists_machine_made_files():
    assert {".git", ".venv", "build", "*.so", "**/__pycache__"} <= set((ROOT / ".dockerignore").read_text().split())


def test_its_steps_give_an_environment_in_which_a_recipe_runs(tmp_path):
    tree = tmp_path / "megatron"
    shutil.copytree(
        ROOT, tree, ignore=lambda folder, names: [n for n in names if any(fnmatch(n, item) for item in IGNORED)]
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    pip = tmp_path / "venv/bin/pip"  # this environment's, for the new one: installing another takes 4 s
    pip.write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m pip "$@"\n')
    pip.chmod(0o755)
    site = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    (Path(site) / "packages_of_this_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    native = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHON", "DATA_PATH")}
    env = {**native, "PATH": f"{tmp_path / 'venv/bin'}{os.pathsep}{os.environ['PATH']}"}

    def run(command):
        result = subprocess.run(["bash", "-c", command], cwd=tree, env=env, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout

    run(installs()[-1])
    env["PYTHONPATH"] = steps("ENV")[0].removeprefix("PYTHONPATH=").replace(steps("WORKDIR")[0], str(tree))
    assert run("python -c 'import megatron_data_helpers as m; print(m.__file__)'").startswith(str(site))
    assert run("python -c 'import megatron.core as m; print(m.__file__)'").startswith(str(tree))
    assert "8,030,261,248" in run("examples/llama/train_llama3_8b.sh --dry-run")


def test_the_image_has_the_libraries_of_infiniband_and_an_unprivileged_user():
    (packages,) = (step for step in steps("RUN") if "apt-get install" in step)
    assert {"libibverbs1", "librdmacm1", "ibverbs-providers", "g++", "libc6-dev"} <= set(packages.split())
    (user,) = steps("USER")
    assert user not in ("root", "0") and f"useradd --create-home --uid 1000 {user}" in steps("RUN")
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    installs = [number for number, line in enumerate(lines) if line.startswith("RUN")]
    assert lines.index(f"USER {user}") > max(installs), "installing needs root"


def test_the_base_image_names_a_patch_release_and_a_distribution():
    (base,) = steps("ARG")
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", base)
    assert steps("FROM") == ["${BASE}"]
