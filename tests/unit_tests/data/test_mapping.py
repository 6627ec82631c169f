"""Mapped files: no descriptor stays open, no crash in any order of deletion."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.mapping import map_file, map_npy

ROOT = Path(__file__).resolve().parents[3]


def test_mappings_hold_no_descriptor_and_are_released(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    before = len(os.listdir("/proc/self/fd"))
    arrays = [map_file(str(path)) for _ in range(100)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert Path("/proc/self/maps").read_text().count(str(path)) >= 1
    part = arrays[0][3:5]
    del arrays
    gc.collect()
    path.unlink()
    assert part.tobytes() == b"34" and not part.flags.writeable
    del part
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_empty_and_missing_files(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert len(map_file(str(tmp_path / "empty"))) == 0
    with pytest.raises(FileNotFoundError):
        map_file(str(tmp_path / "missing"))


def test_arrays_may_be_read_while_the_interpreter_shuts_down(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    program = (
        "import sys, atexit; from megatron.data.mapping import map_file; a = map_file(sys.argv[1]);"
        "sys.keep = type('Keep', (), {'__del__': lambda self: sys.stdout.write(str(int(a.sum())))})();"
        "atexit.register(lambda: a.sum())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "x")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=np.int16).reshape(3, 2), np.zeros(0, dtype=np.int64), np.float64(3)]
)
def test_numbers_come_back(tmp_path, array):
    np.save(tmp_path / "x.npy", array)
    result = map_npy(str(tmp_path / "x.npy"))
    assert result.shape == np.shape(array) and result.dtype == array.dtype and result.tobytes() == array.tobytes()


def test_objects_and_damage_are_rejected(tmp_path):
    path = str(tmp_path / "x.npy")
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="no complete array of numbers"):
        map_npy(path)
    np.save(path, np.arange(10))
    content = Path(path).read_bytes()
    for size in range(len(content)):
        Path(path).write_bytes(content[:size])
        with pytest.raises((ValueError, EOFError)):
            map_npy(path)
