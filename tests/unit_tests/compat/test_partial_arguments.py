"""Calls of programs with fewer arguments than this library's own: tokenizers, data and slots of layers."""

from argparse import Namespace
from functools import partial

import pytest

from megatron.compat import versions
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.utils import is_fa_min_version
from megatron.training.utils import get_blend_and_blend_per_split


def test_missing_arguments_of_a_tokenizer_have_the_defaults_of_the_flags():
    tokenizer = build_tokenizer(Namespace(tokenizer_type="NullTokenizer", vocab_size=100, rank=0))
    assert tokenizer.tokenize("5 7") == [5, 7]
    with pytest.raises(ValueError, match="needs --vocab-size"):
        build_tokenizer(Namespace(tokenizer_type="NullTokenizer"))


def test_data_of_programs_without_mock_data():
    paths = dict.fromkeys(("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path"))
    args = Namespace(**paths | {"data_path": ["2", "a", "1", "b"]}, per_split_data_args_path=None)
    assert get_blend_and_blend_per_split(args) == ((["a", "b"], [2.0, 1.0]), None)


@pytest.mark.parametrize("kind", ["local", "with_transformer_engine"])
def test_slots_are_those_of_the_spec(kind):
    slots = getattr(specs, f"get_gpt_layer_{kind}_submodules")(num_experts=2, qk_layernorm=True)
    assert slots == getattr(specs, f"get_gpt_layer_{kind}_spec")(num_experts=2, qk_layernorm=True).submodules
    assert get_submodules(partial(dict, submodules=slots)) is slots
    with pytest.raises(ValueError, match="has no submodules"):
        get_submodules(dict)


def test_version_of_flash_attention(monkeypatch):
    monkeypatch.setattr(versions.metadata, "version", {"flash-attn": "2.8.3"}.__getitem__)
    assert [is_fa_min_version(version) for version in ("2.7.4", "2.8.3", "2.10.0")] == [True, True, False]
    assert not is_fa_min_version("2.8.3", check_equality=False)
