"""tools/checkpoint/inspect_checkpoint.py and verify.py: what they show, what they find, and their exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import Target
from megatron.export.native import load_native, save_safetensors
from megatron.tools.checkpoint import convert, formats, inspect_checkpoint, verify
from tests.test_utils.hf_folders import tiny_llama

ROOT = Path(__file__).resolve().parents[4]
FINAL = "model.decoder.final_layernorm.weight"


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    tiny_llama(folder / "hf")
    places = ["--load-dir", str(folder / "hf"), "--save-dir", str(folder / "native")]
    assert convert.main(["--saver", "native", *places, "--no-checking"]) == 0
    return folder / "native"


def changed(native, folder, change):
    """Plain safetensors of the same weights, after ``change``."""
    result = load_native(native / "release")
    change(result.tensors)
    with Target(folder) as target:
        save_safetensors(result, target)
        target.publish()
    return folder


def set_value(value):
    def change(tensors):
        values = tensors[FINAL].read()
        values[3] = value
        tensors[FINAL] = LazyTensor.of(values)

    return change


def test_the_tree_shows_shapes_types_and_norms(native, capsys):
    assert inspect_checkpoint.main([str(native), "--norms"]) == 0
    result = capsys.readouterr()
    assert result.err.startswith("read 0.000 GB in ")
    lines = result.out.splitlines()
    assert lines[0].startswith(f"folder {native}  format native  tensors 15  parameters 22,688")
    assert lines[1:4] == ["model", "  decoder", "    final_layernorm"]
    norm = load_native(native / "release").tensors[FINAL].read().norm().item()
    (line,) = [line for line in lines if f"norm {norm:.6g}" in line]
    assert line.split()[:3] == ["weight", "32", "F32"]
    at = next(number for number, line in enumerate(lines) if line.strip() == "final_layernorm")
    assert lines[at - 1].strip() == "decoder" and lines[at + 1] == line


def test_the_largest_value_is_that_farthest_from_zero(native, tmp_path, capsys):
    other = changed(native, tmp_path / "other", set_value(-9.0))
    assert inspect_checkpoint.main([str(other), "--norms", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["names"][FINAL]
    assert result["largest"] == 9.0 and 9.0 < result["norm"] < 12.0


def test_json_holds_the_same(native, capsys):
    assert inspect_checkpoint.main([str(native), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.startswith('{\n  "folder"'), "a person may read it, too"
    result = json.loads(out)
    assert result["names"][FINAL] == {"shape": [32], "dtype": "F32", "bytes": 128}
    assert result["settings"]["num_layers"] == 2 and result["parameters"] == 22688


def test_two_formats_of_the_same_weights_are_equal(native, capsys):
    assert inspect_checkpoint.main([str(native), str(native.parent / "hf")]) == 0
    result = capsys.readouterr()
    assert "15 tensors are equal, 0 differ" in result.out and result.err.startswith("compared 0.000 GB in ")


def test_comparison_names_the_different_tensor_and_its_error(native, tmp_path, capsys):
    before = load_native(native / "release").tensors[FINAL].read()[3].item()
    other = changed(native, tmp_path / "other", set_value(before + 0.5))
    assert inspect_checkpoint.main([str(native), str(other), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["differ"].keys() == {FINAL} and result["equal"] == 14
    assert result["differ"][FINAL]["elements"] == 1
    assert result["differ"][FINAL]["largest difference"] == pytest.approx(0.5)
    norm = load_native(native / "release").tensors[FINAL].read().norm().item()
    assert result["differ"][FINAL]["relative norm"] == pytest.approx(0.5 / norm)
    assert inspect_checkpoint.main([str(native), str(other), "--tolerance", "0.6"]) == 0


def test_names_in_one_checkpoint_only_and_other_shapes_are_named(native, tmp_path, capsys):
    def change(tensors):
        tensors["model.extra"] = tensors.pop("model.output_layer.weight")
        tensors[FINAL] = LazyTensor.of(torch.ones(16))

    assert inspect_checkpoint.main([str(native), str(changed(native, tmp_path / "other", change))]) == 1
    out = capsys.readouterr().out
    assert "only in the first: model.output_layer.weight" in out and "only in the second: model.extra" in out
    assert f"{FINAL}: shapes [32] | [16]" in out


def test_complete_checkpoints_of_all_formats_are_complete(native, tmp_path, capsys):
    for folder in (native, native.parent / "hf", changed(native, tmp_path / "plain", lambda tensors: None)):
        assert verify.main([str(folder)]) == 0
        assert "whole" in capsys.readouterr().out


def test_every_damaged_tensor_is_named(native, tmp_path, capsys):
    shutil.copytree(native, tmp_path / "bad")
    path = tmp_path / "bad" / "release" / "model_00000.safetensors"
    data = bytearray(path.read_bytes())
    entries = json.loads((tmp_path / "bad" / "release" / "metadata.json").read_text())["tensors"]
    names = [FINAL, "model.output_layer.weight"]
    for name in names:
        data[entries[name]["chunks"][0]["start"]] ^= 1
    path.write_bytes(data)
    assert verify.main([str(tmp_path / "bad")]) == 1
    out = capsys.readouterr().out
    assert all(f"{name} is damaged" in out for name in names) and "2 problems" in out


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(native, tmp_path, capsys, value):
    assert verify.main([str(changed(native, tmp_path / "bad", set_value(value)))]) == 1
    assert f"{FINAL}: 1 of 32 values are not finite" in capsys.readouterr().out


def test_a_missing_tensor_and_a_missing_file_are_damage(native, tmp_path, capsys):
    assert verify.main([str(changed(native, tmp_path / "bad", lambda tensors: tensors.pop(FINAL)))]) == 1
    assert f"{FINAL} is missing, expected [32]" in capsys.readouterr().out
    shutil.copytree(native, tmp_path / "native")
    (tmp_path / "native" / "release" / "model_00000.safetensors").unlink()
    assert verify.main([str(tmp_path / "native")]) == 1
    assert "model_00000.safetensors is missing" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect_checkpoint nothing", "verify nothing",
                                     "convert --saver hf --load-dir nothing --save-dir out"])  # fmt: skip
def test_tools_run_as_scripts(warm_python, tmp_path, command):
    tool, *arguments = command.split()
    program = [warm_python, str(ROOT / "tools" / "checkpoint" / f"{tool}.py"), *arguments]
    result = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "nothing: there is no such folder" in result.stdout + result.stderr


def test_no_script_hides_a_module_of_the_standard_library():
    """A script's folder comes first on sys.path of the programs in it."""
    scripts = {path.stem for folder in ("tools", "megatron/tools") for path in (ROOT / folder).rglob("*.py")}
    assert scripts & sys.stdlib_module_names == set()


def test_flags_are_not_abbreviated():
    """Flags that a tool does not know belong to pretrain_gpt.py."""
    _, rest = formats.parser("").parse_known_args(["--load", "x"])
    assert rest == ["--load", "x"]
