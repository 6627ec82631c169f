"""The requirements of pyproject.toml can be installed on every platform that torch supports."""

import re
import sys
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

ROOT = Path(__file__).resolve().parents[2]

# what the CUDA builds on the package index pin exactly or bound from above (their metadata, Linux, Python 3.10 to 3.13)
TORCH_PINS = {
    "2.11.0": {
        "setuptools": "<82", "triton": "==3.6.0", "nvidia-cudnn-cu13": "==9.19.0.56", "cuda-bindings": "<14,>=13.0.3",
        "nvidia-cusparselt-cu13": "==0.8.0", "nvidia-nccl-cu13": "==2.28.9", "nvidia-nvshmem-cu13": "==3.4.5",
    },
    "2.12.0": {
        "setuptools": "<82", "triton": "==3.7.0", "nvidia-cudnn-cu13": "==9.20.0.48", "cuda-bindings": "<14,>=13.0.3",
        "nvidia-cusparselt-cu13": "==0.8.1", "nvidia-nccl-cu13": "==2.29.7", "nvidia-nvshmem-cu13": "==3.4.5",
        "nvidia-cublas": "<=13.1.1.3,>=13.1.0.3",
    },
    "2.13.0": {
        "triton": "==3.7.1", "nvidia-cudnn-cu13": "==9.20.0.48", "cuda-bindings": "<14,>=13.0.3",
        "nvidia-cusparselt-cu13": "==0.8.1", "nvidia-nccl-cu13": "==2.29.7", "nvidia-nvshmem-cu13": "==3.4.5",
    },
}  # fmt: skip


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements():
    """Return every requirement for Linux, including the extras."""
    extras = project()["optional-dependencies"].values()
    result = [Requirement(line) for lines in (project()["dependencies"], *extras) for line in lines]
    linux = {**default_environment(), "platform_system": "Linux", "sys_platform": "linux"}
    return [item for item in result if item.marker is None or item.marker.evaluate(linux)]


def constraints():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]


def exact_version(specifier):
    return next((item.version for item in Requirement(f"x{specifier}").specifier if item.operator == "=="), None)


@pytest.mark.parametrize("torch", TORCH_PINS)
def test_requirements_agree_with_the_pins_of_torch(torch):
    native = requirements()
    assert all(our.specifier.contains(torch) for our in native if our.name == "torch")
    for requirement in native:
        pinned = exact_version(TORCH_PINS[torch].get(requirement.name, ""))
        assert pinned is None or requirement.specifier.contains(pinned), f"torch {torch} needs {pinned}: {requirement}"
        if requirement.name in TORCH_PINS[torch]:
            assert pinned is not None, f"{requirement}: torch bounds it from above; leave it to torch"


def test_constraints_agree_with_the_pins_of_their_torch():
    chosen = {constraint.name: str(constraint.specifier) for constraint in constraints()}
    torch = exact_version(chosen["torch"])
    for name, specifier in chosen.items():
        if name != "torch":
            assert specifier == TORCH_PINS[torch][name]


def test_constraints_lie_within_the_requirements():
    for constraint in constraints():
        for requirement in requirements():
            if requirement.name == constraint.name:
                assert requirement.specifier.contains(exact_version(str(constraint.specifier)))


@pytest.mark.parametrize("python", ["3.10", "3.13"])
def test_the_lock_file_holds_every_requirement_with_a_hash(python):
    """``scripts/lock.sh`` writes it; a new dependency in pyproject.toml needs a new lock file."""
    blocks = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text(encoding="utf-8"))
    blocks = [block for block in blocks if not block.startswith("#")]
    assert all("--hash=sha256:" in block for block in blocks)
    locked = [Requirement(block.partition(" \\")[0]) for block in blocks]
    machine = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    local = [item for item in locked if item.marker is None or item.marker.evaluate(machine)]
    chosen = {canonicalize_name(item.name): exact_version(str(item.specifier)) for item in local}
    assert len(chosen) == len(local)
    for requirement in [*requirements(), *constraints()]:
        if requirement.name != "torch":
            assert requirement.specifier.contains(chosen[canonicalize_name(requirement.name)]), requirement


def test_the_extension_has_one_name_outside_of_the_package():
    """Inside ``megatron`` it would be hidden from scripts of a checkout, whose own ``megatron`` comes first."""
    assert 'Pybind11Extension("megatron_data_helpers"' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert "PYBIND11_MODULE(megatron_data_helpers" in (ROOT / "megatron/data/helpers.cpp").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["bert", "t5", "moe"])
def test_description_names_trainable_models_only(kind):
    assert kind not in project()["description"].lower() or (ROOT / f"pretrain_{kind}.py").exists()


def test_plugins_of_other_programs_name_modules_that_exist():
    plugins = project()["entry-points"]
    assert plugins.keys() == {"verl.plugins"}
    for module in plugins["verl.plugins"].values():
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
