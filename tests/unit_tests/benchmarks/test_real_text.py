"""Collection of text from wheels, and training curves on it: this program against a plain loop of torch."""

import json
import lzma
import zipfile

import numpy as np
import pytest

from benchmarks import collect_text, real_text_curves
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def test_corpus_holds_text_files_of_wheels_once_in_a_fixed_order(tmp_path):
    line = "a line of text that is long enough to be read\n"
    first = {
        "a/one.py": line * 10,
        "a/two.md": line * 11,
        "a/x.png": line * 10,
        "a/short.py": "x",
        "a/l.txt": "y" * 999,
    }
    wheel(tmp_path / "a-1-py3-none-any.whl", first)
    wheel(
        tmp_path / "b-1-py3-none-any.whl",
        {"b/copy.py": line * 10, "b/latin.c": line.encode() * 9 + b"\xff", "b/c.h": line * 12},
    )
    texts = []
    for name in ("one.jsonl", "two.jsonl"):
        collect_text.write_corpus(tmp_path, tmp_path / name)
        texts.append((tmp_path / name).read_text())
    rows = [json.loads(row) for row in texts[0].splitlines()]
    assert texts[0] == texts[1]
    assert {row["path"]: row["text"] for row in rows} == {
        "a/one.py": line * 10, "a/two.md": line * 11, "b/c.h": line * 12
    }  # fmt: skip


def test_sample_cuts_the_last_document(tmp_path):
    with IndexedDatasetBuilder(str(tmp_path / "all.bin"), np.uint16) as builder:
        builder.add_documents(np.arange(30, dtype=np.uint16), np.array([10, 10, 10]))
        builder.finalize(str(tmp_path / "all.idx"))
    collect_text.write_sample(tmp_path / "all", tmp_path / "sample", 14)
    packed = tmp_path / "sample" / "text.bin"
    packed.write_bytes(lzma.decompress(packed.with_suffix(".bin.xz").read_bytes()))
    data = IndexedDataset(str(tmp_path / "sample" / "text"))
    assert [list(data[index]) for index in range(len(data))] == [list(range(10)), list(range(10, 14))]


@pytest.mark.parametrize("name", ["tiny", "tiny-experts"])
def test_plain_loop_and_this_program_have_equal_losses(tmp_path, monkeypatch, name):
    monkeypatch.setattr(real_text_curves, "BALANCE", 1.0)
    tokens = np.random.default_rng(0).integers(0, 64, 3000, dtype=np.uint16)
    with IndexedDatasetBuilder(str(tmp_path / "text.bin"), np.uint16) as builder:
        builder.add_documents(tokens, np.full(60, 50))
        builder.finalize(str(tmp_path / "text.idx"))
    shape, steps = real_text_curves.SHAPES[name], 16
    weights = real_text_curves.initial_weights(shape, 1, tmp_path / "weights")
    batch = real_text_curves.samples(shape, steps, tmp_path / "text")
    plain = real_text_curves.plain_loop(shape, steps, batch, weights, 300)
    words = real_text_curves.flags(shape, steps, tmp_path / "text")
    program = real_text_curves.run_program("bf16", words, shape["vocab"], weights, tmp_path, 300)
    assert len(plain) == steps and plain[0] - plain[-1] > 0.05, plain
    assert program["losses"] == pytest.approx(plain, abs=1e-3)


@pytest.mark.parametrize(("halves", "passed"), [(0.001, False), (0.05, True)])
def test_curves_are_compared_over_windows_with_the_larger_noise(halves, passed):
    base = [3.0 - step / 100 for step in range(40)]
    curves = {
        "bf16": {"losses": base},
        "fp8": {"losses": [loss * 1.003 for loss in base]},
        "bf16, other weights": {"losses": [loss + 0.02 for loss in base]},
        "bf16, half micro-batches": {"losses": [loss - halves for loss in base]},
        "transformers": {"losses": [loss + (0.01 if step < 20 else 0.03) for step, loss in enumerate(base)]},
        "megatron-lm": {"losses": [loss + 0.007 for loss in base]},
        "megatron-lm, fp8": {"losses": [loss + 0.011 for loss in base]},
    }
    rows = {row["curve"]: row for row in real_text_curves.compare(curves)}
    assert rows["fp8"]["last_relative"] == pytest.approx(0.003) and rows["fp8"]["passed"]
    assert rows["transformers"]["rms"] == pytest.approx((0.0005) ** 0.5)
    assert rows["transformers"]["passed"] is passed and "passed" not in rows["bf16, half micro-batches"]
    assert rows["transformers"]["last"] == pytest.approx(0.03)
    assert rows["megatron-lm"]["last"] == pytest.approx(0.007)
    assert rows["megatron-lm, fp8"]["last"] == pytest.approx(0.004)  # against Megatron-LM


@pytest.mark.parametrize(("other", "passed"), [(-0.012, None), (0.012, False), (0.020, False), (0.0, None)])
def test_fp8_fails_by_the_mean_of_two_weights_unless_its_error_is_larger_than_the_band(other, passed):
    """Standard errors: 0.012, 0, 0.004 and 0.006, in nats; the band is 0.0055."""
    curves = {name: {"losses": [loss] * 20} for name, loss in (
        ("bf16", 2.0), ("fp8", 2.012), ("bf16, other weights", 2.4), ("fp8, other weights", 2.4 + other)
    )}  # fmt: skip
    rows = {row["curve"]: row for row in real_text_curves.compare(curves)}
    assert rows["fp8, other weights"]["last"] == pytest.approx(other)
    assert rows["fp8, mean of two weights"]["last_relative"] == pytest.approx((0.012 + other) / 2 / 2.2)
    assert rows["fp8, mean of two weights"]["error_relative"] == pytest.approx(abs(0.012 - other) / 2 / 2.2)
    assert rows["fp8, mean of two weights"].get("passed") is passed


def test_each_shape_and_number_of_steps_has_a_file():
    sizes = ("345M", 400), ("345M", 1000), ("experts", 400), ("experts", 1000)
    names = [real_text_curves.results_file(*size).name for size in sizes]
    assert names == [f"real_text{end}.json" for end in ("", "_1000", "_experts", "_experts_1000")]
