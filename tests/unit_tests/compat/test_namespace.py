"""Other distributions with modules named ``megatron.…``: each import runs in a new process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def python(program, *path, code=0, **environment):
    """Run ``program`` with ``path`` in front of ``sys.path``; return (stdout, stderr)."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK")}
    variables |= {"PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    result = subprocess.run(
        [sys.executable, "-c", program], env=variables, cwd="/", capture_output=True, text=True, check=False
    )
    assert result.returncode == code, result.stderr
    return result.stdout.strip(), result.stderr


def write(folder, **modules):
    """Write the modules ``megatron.NAME`` of another distribution; return its folder."""
    for name, text in modules.items():
        file = folder / "megatron" / name / "__init__.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return folder


def orders(other):
    return [(ROOT, other), (other, ROOT)]


def test_modules_of_another_distribution_are_importable_in_both_orders(tmp_path):
    other = write(tmp_path / "site", other="import megatron.version\nNAME = __name__")
    for path in orders(other):
        out, err = python("import megatron.other as m, megatron; print(m.NAME, megatron.__file__)", *path)
        assert out == f"megatron.other {ROOT / 'megatron/__init__.py'}" and not err


def test_megatron_core_elsewhere_gives_one_warning_and_no_module(tmp_path):
    other = write(tmp_path / "site", core="", training="", rl="", bridge="NAME = 'bridge'")
    (other / "megatron/core/only_theirs.py").write_text("")
    program = """
import sys, megatron.core, megatron.core.inference, megatron.training.config, megatron.bridge
print(megatron.core.__file__, megatron.training.__file__, megatron.bridge.NAME)
for name in ("core.only_theirs", "rl"):
    try:
        __import__(f"megatron.{name}")
    except ImportError as error:
        print(error)
"""
    for path in orders(other):
        out, err = python(program, *path)
        files, core, rl = out.splitlines()
        assert files == f"{ROOT}/megatron/core/__init__.py {ROOT}/megatron/training/__init__.py bridge"
        assert core == "No module named 'megatron.core.only_theirs'" and "megatron.core.rl serves" in rl
        assert err.count("Warning") == 1
        assert f"two packages are named megatron.core: {ROOT}/megatron is imported, {other}/megatron is not; " in err
    assert not python("import megatron", *path, RANK="1")[1]


def test_megatron_core_in_the_same_folder_is_an_error(tmp_path):
    """pip does not check whether two distributions have the same files."""
    (tmp_path / "megatron").symlink_to(ROOT / "megatron")
    (tmp_path / "megatron_core-0.16.1.dist-info").mkdir()
    _, err = python("import megatron", tmp_path, code=1)
    assert err.splitlines()[-1].startswith(f"ImportError: megatron_core-0.16.1 is installed in {tmp_path}, the folder")
    assert "pip uninstall -y megatron-core megatron-pretraining" in err


ENERGON = (
    "megatron-energon webdataset braceexpand multi-storage-client xattr cffi rapidyaml lark jsonschema wcmatch bracex "
    "referencing rpds-py jsonschema-specifications attrs prettytable wcwidth mfusepy filetype s3fs deprecation"
)
"""The package and packages that it imports, so that pip need not resolve dependencies."""


@pytest.fixture(scope="module")
def energon(tmp_path_factory):
    """Install megatron-energon; return the folder."""
    folder = tmp_path_factory.mktemp("energon")
    options = ["-q", "--no-deps", "--no-compile", "--target", folder]
    command = [sys.executable, "-m", "pip", "install", *options, *ENERGON.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode:
        pytest.skip(f"pip cannot install megatron-energon: {result.stderr.splitlines()[-1:]}")
    return folder


def test_energon_is_importable_in_both_orders(energon):
    for path in orders(energon):
        out, _ = python("import megatron.energon as e, megatron.core; print(e.WorkerConfig.__module__)", *path)
        assert out == "megatron.energon.worker"
