"""Settings of a Hugging Face folder in a run's command line."""

import pytest

from megatron.training.arguments import parse_args
from megatron.training.checkpoint.other_formats import apply_hf_settings
from tests.test_utils.hf_folders import tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama") / "hf")


def applied(folder, *flags):
    return apply_hf_settings(parse_args(["--load-hf", str(folder), *flags], needs_data=False))


def test_the_folders_tokenizer_is_taken_unless_a_flag_names_another(llama):
    assert applied(llama).tokenizer_type is None, "it has none"
    (llama / "tokenizer.json").write_text("{}")
    cfg = applied(llama)
    assert (cfg.tokenizer_type, cfg.tokenizer_model) == ("HuggingFaceTokenizer", str(llama))
    assert (cfg.num_layers, cfg.hidden_size, cfg.swiglu) == (2, 32, True)
    for flags in (["--tokenizer-type", "NullTokenizer"], ["--tokenizer-model", "elsewhere"]):
        cfg = applied(llama, *flags)
        assert flags[1] in (cfg.tokenizer_type, cfg.tokenizer_model) and str(llama) != cfg.tokenizer_model


def test_without_the_flag_nothing_changes():
    cfg = parse_args([], needs_data=False)
    assert apply_hf_settings(cfg) is cfg
