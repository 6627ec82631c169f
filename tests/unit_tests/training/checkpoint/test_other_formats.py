"""Settings of a Hugging Face folder in a run's command line."""

import pytest

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.export.hf import save_hf
from megatron.training.arguments import parse_args
from megatron.training.checkpoint.other_formats import apply_hf_settings
from tests.test_utils.hf_folders import random_model, tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama") / "hf")


def applied(folder, *flags):
    return apply_hf_settings(parse_args(["--load-hf", str(folder), *flags], needs_data=False))


def test_the_folders_tokenizer_is_taken_unless_a_flag_names_another(llama):
    assert applied(llama).tokenizer.tokenizer_type is None, "it has none"
    (llama / "tokenizer.json").write_text("{}")
    cfg = applied(llama)
    assert (cfg.tokenizer.tokenizer_type, cfg.tokenizer.tokenizer_model) == ("HuggingFaceTokenizer", str(llama))
    assert (cfg.model.num_layers, cfg.model.hidden_size, cfg.model.swiglu) == (2, 32, True)
    for flags in (["--tokenizer-type", "NullTokenizer"], ["--tokenizer-model", "elsewhere"]):
        tokenizer = applied(llama, *flags).tokenizer
        assert flags[1] in (tokenizer.tokenizer_type, tokenizer.tokenizer_model)
        assert tokenizer.tokenizer_model != str(llama)


def test_a_model_of_another_program_is_rejected_in_one_message(llama):
    cfg = parse_args(["--load-hf", str(llama), "--num-layers", "7"], needs_data=False, model_family="bert")
    with pytest.raises(CheckpointError) as caught:
        apply_hf_settings(cfg)
    programs = "pretrain_gpt.py, pretrain_moe.py and pretrain_hybrid.py"
    said = f"holds a model of the family 'gpt' (trained by {programs}), this run trains 'bert'"
    assert str(caught.value) == f"--load-hf {llama} {said}"


def test_settings_of_a_bert_come_over(tmp_path):
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64"
    flags = f"{sizes} --apply-residual-connection-post-layernorm --no-bias-gelu-fusion --norm-epsilon 1e-12"
    save_hf(random_model(flags.split(), 64, model_family="bert"), tmp_path / "hf")
    line = ["--load-hf", str(tmp_path / "hf")]
    cfg = apply_hf_settings(parse_args(line, needs_data=False, model_family="bert"))
    flat = cfg.flat
    assert (flat.num_layers, flat.norm_epsilon, flat.bias_gelu_fusion, flat.bert_binary_head) == (2, 1e-12, False, True)
    assert flat.apply_residual_connection_post_layernorm and flat.add_bias_linear
    contradicting = parse_args([*line, "--bert-no-binary-head"], needs_data=False, model_family="bert")
    with pytest.raises(CheckpointError, match="--bert-no-binary-head is False, there it is True"):
        apply_hf_settings(contradicting)
    with pytest.raises(CheckpointError, match=r"'bert' \(trained by pretrain_bert.py\), this run trains 'gpt'"):
        apply_hf_settings(parse_args(line, needs_data=False))


def test_apply_hf_settings_without_load_hf_returns_the_same_configuration():
    cfg = parse_args([], needs_data=False)
    assert apply_hf_settings(cfg) is cfg
