"""Conversions of NaN and infinite weights: counted, named, rejected unless they are allowed."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.tools.checkpoint import convert, formats
from megatron.tools.checkpoint.finite import FiniteCheck
from tests.test_utils.hf_folders import tiny_llama

NORM, HEAD = "model.layers.1.post_attention_layernorm.weight", "lm_head.weight"


@pytest.fixture
def broken(tmp_path):
    """A LLaMA with three NaNs and two infinities in two tensors."""
    file = tiny_llama(tmp_path / "source", dtype=torch.bfloat16) / "model.safetensors"
    weights = load_file(file)
    weights[NORM][:3] = torch.nan
    weights[HEAD][5, :2] = torch.tensor([torch.inf, -torch.inf])
    save_file(weights, file, {"format": "pt"})
    return tmp_path


def convert_to(folder, saver, *flags):
    target = folder / saver
    places = ["--load-dir", str(folder / "source"), "--save-dir", str(target)]
    return convert.main(["--saver", saver, *places, "--no-checking", *flags])


@pytest.mark.parametrize("saver", formats.SAVERS)
def test_non_finite_weights_are_counted_named_and_not_published(broken, saver):
    with pytest.raises(CheckpointError) as caught:
        convert_to(broken, saver)
    assert "not written, 5 NaN or infinite values in 2 tensors" in str(caught.value)
    for name in ("model.decoder.layers.1.pre_mlp_layernorm.weight (3)", "model.output_layer.weight (2)"):
        assert name in str(caught.value)
    assert not (broken / saver).exists()


def test_repeated_conversion_counts_files_of_the_first_attempt(broken):
    for _ in range(2):
        with pytest.raises(CheckpointError, match="5 NaN or infinite values in 2 tensors"):
            convert_to(broken, "native", "--max-shard-size", "0.000005")


def test_allowed_non_finite_weights_come_over_with_a_note(broken, capsys):
    assert convert_to(broken, "native", "--allow-non-finite") == 0
    assert "note: 5 NaN or infinite values in 2 tensors" in capsys.readouterr().err
    shutil.rmtree(broken / "source")
    (broken / "native").rename(broken / "source")
    assert convert_to(broken, "hf", "--allow-non-finite") == 0
    weights = load_file(broken / "hf" / "model.safetensors")
    assert int(weights[NORM].isnan().sum()) == 3 and int(weights[HEAD].isinf().sum()) == 2


def test_values_that_overflow_in_the_new_dtype_are_counted(tmp_path):
    file = tiny_llama(tmp_path / "source", dtype=torch.float32) / "model.safetensors"
    weights = load_file(file)
    weights[HEAD][0, 0] = 1e6
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="1 NaN or infinite value in 1 tensor"):
        convert_to(tmp_path, "native", "--dtype", "fp16")


def test_rows_and_full_reads_of_one_tensor_count_once():
    check, values = FiniteCheck(), torch.tensor([[torch.nan, 1.0], [torch.inf, torch.nan], [0.0, 0.0]])
    tensors = check.watch({"a": LazyTensor.of(values), "b": LazyTensor.of(torch.ones(2, dtype=torch.int64))})
    tensors["a"].rows(0, 1), tensors["a"].rows(1, 3), tensors["a"].rows(0, 1)
    check.read_others({"b": tensors["b"]})
    assert check.problem() == "3 NaN or infinite values in 1 tensor: a (3)"
    assert FiniteCheck().problem() == ""
