"""Named models have the published numbers of parameters; other settings take precedence over the model's."""

import json
import math

import pytest
import torch

from megatron import console
from megatron.core.config.cli import ConfigError
from megatron.core.models.registry import find_program
from megatron.export.hf import load_hf_settings
from megatron.training.arguments import parse_args, smallest_world_size, validate_args
from megatron.training.config.named_models import named_models
from megatron.training.report.memory import estimate_memory

PUBLISHED = {
    "gpt2-124m": 124_439_808, "gpt2-1.5b": 1_557_611_200, "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704, "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 682_636_472_320,  # 671,026,404,352 and the layer of multi-token prediction
    "qwen3.5-9b": 8_953_803_264, "qwen3.5-35b-a3b": 34_660_610_688, "nemotron-3-nano": 31_577_937_344,  # text parts
    "nemotron4-340b": 9_437_184_000 + 331_592_011_776,  # the paper: 9.4 B of embeddings and 331.6 B
    "bert-base": 110_106_428, "bert-large": 336_226_108,
}  # fmt: skip
"""Parameters of the weights on the Hugging Face hub, with heads; tied weights count once."""
RUN = ["--mock-data", "--seq-length", "64", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3"]


def settings(name, *flags):
    family = find_program(named_models()[name].program)[0].name if name in named_models() else "gpt"
    return parse_args(["--model", name, *RUN, *flags], model_family=family)


@pytest.mark.parametrize("name", named_models())
def test_named_model_has_the_published_number_of_parameters(name):
    cfg = settings(name, "--no-pad-vocab-size")
    resolved = validate_args(cfg, smallest_world_size(cfg), announce=False)
    assert resolved.describe(cfg.tokenizer.vocab_size).num_parameters == PUBLISHED[name]


NANO = {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "hidden_size": 2688,
    "num_key_value_heads": 2, "intermediate_size": 1856, "moe_intermediate_size": 1856, "mamba_num_heads": 64,
    "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
"""Values of its config.json that are not defaults of ``transformers``."""


RECURRENCE = {"qwen3.5-9b": 6 * 32 * 128**2, "qwen3.5-35b-a3b": 6 * 32 * 128**2, "nemotron-3-nano": 4 * 64 * 64 * 128}
"""FLOPs of a token in a layer, 6 or 4 per element of the states."""
FREE = {"max_position_embeddings", "rotary_base", "end_token_ids", "moe_router_num_groups", "moe_router_group_topk"}
"""Settings that differ on the hub, and settings for which None means 1."""


@pytest.mark.parametrize(
    "name, kind, values, layers, active",
    [
        ("qwen3.5-9b", "Qwen3_5Text", {}, (24, 8), 1),
        ("qwen3.5-35b-a3b", "Qwen3_5MoeText", {}, (30, 10), 8 / 256),
        ("nemotron-3-nano", "NemotronH", NANO, (23, 6), 6 / 128),
    ],
)
def test_hybrid_model_is_that_of_transformers(tmp_path, name, kind, values, layers, active):
    """Parameters of the model class, settings of its config.json, and 6 FLOPs for each parameter of a GEMM and token.
    ``layers``: recurrent ones and attention; ``active``: share of experts."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    sizes = {key: parameter.shape for key, parameter in model.named_parameters()}
    cfg = settings(name, "--no-pad-vocab-size", "--bf16")
    cfg = validate_args(cfg, smallest_world_size(cfg), announce=False)
    described = cfg.describe(cfg.tokenizer.vocab_size)
    assert sum(map(math.prod, sizes.values())) == PUBLISHED[name] == described.num_parameters

    config.architectures = [type(model).__name__]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    flat = cfg.flat.values()
    assert {key for key, value in load_hf_settings(tmp_path).items() if key in flat and flat[key] != value} <= FREE

    gemms = sum(math.prod(size) for key, size in sizes.items() if len(size) == 2 and "embed" not in key)
    gemms += sum(math.prod(size) for key, size in sizes.items() if len(size) == 3 and "experts" in key) * active
    scores = 2 * 2 * config.num_attention_heads * config.head_dim * 64 / 2  # half of 64 tokens: causal
    flops = 6 * gemms + 3 * (layers[0] * RECURRENCE[name] + layers[1] * scores)
    assert described.flops_per_sample / 64 == pytest.approx(flops, rel=1e-9)
    (memory,) = estimate_memory(cfg, cfg.tokenizer.vocab_size)  # one rank: bf16 weights, fp32 sums of gradients
    assert memory.weights == 2 * PUBLISHED[name]
    assert memory.gradients == pytest.approx(4 * PUBLISHED[name], rel=1e-6), "rows of buffers are aligned"


def test_flags_and_files_take_precedence_over_the_model(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("num_layers: 3\nnum_query_groups: 4\nmodel: llama3-8b\n")
    cfg = parse_args(["--yaml-cfg", str(file), "--num-layers", "5", *RUN])
    model = cfg.model
    sizes = model.num_layers, model.num_query_groups, model.hidden_size, cfg.embeddings.rotary_base
    assert sizes == (5, 4, 4096, 500000)
    assert {"hidden_size", "num_layers"} <= cfg.explicit


@pytest.mark.parametrize("flags, tokenizer, size", [
    ([], "NullTokenizer", 128256), (["--vocab-size", "99"], "NullTokenizer", 99),
    (["--tokenizer-type", "HuggingFaceTokenizer"], "HuggingFaceTokenizer", None),
])  # fmt: skip
def test_random_tokens_have_the_vocabulary_of_the_model(flags, tokenizer, size):
    cfg = settings("llama3-8b", *flags)
    assert (cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size) == (tokenizer, size)


@pytest.mark.parametrize("name, message", [
    ("llama3-9b", "--model llama3-9b: unknown model; did you mean llama3-8b"),
    ("zzz", "--model zzz: unknown model; see --help models"),
    ("bert-base", "--model bert-base: is not a model of this program; use pretrain_bert.py"),
])  # fmt: skip
def test_unknown_models_give_one_message(name, message):
    with pytest.raises(ConfigError) as caught:
        parse_args(["--model", name, *RUN])
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_console_selects_the_program_of_the_model(monkeypatch):
    called = []
    monkeypatch.setattr("megatron.training.entry.pretrain", lambda *words: called.append(words) or 0)
    assert console.main(["pretrain", "--lr", "1", "--model=bert-base"]) == 0
    assert console.main(["pretrain", "--model", "zzz"]) == 0
    assert console.main(["pretrain", "mixtral-8x7b", "--lr", "1"]) == 0
    assert [words[0] for words in called] == ["bert", "gpt", "moe"]
    assert called[2][2] == ["--model", "mixtral-8x7b", "--lr", "1"]
    assert console.main(["pretrain", "--lr", "1"]) == console.main(["pretrain", "zzz"]) == 2 and len(called) == 3


def help_text(capsys, *words):
    with pytest.raises(SystemExit) as exit:
        parse_args([*words])
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_help_shows_essential_flags_one_topic_or_all(capsys):
    short, full = help_text(capsys, "--help"), help_text(capsys, "--help", "all")
    assert len(short.splitlines()) < 175 and len(full.splitlines()) > 900
    assert "  --lr FLOAT\n" in short and "  activation-recomputation-and-offloading (" in short
    assert "--recompute-modules STR" not in short and "  --recompute-modules STR" in full
    topic = help_text(capsys, "-h", "act")
    assert "  --recompute-modules STR" in topic and "--lr FLOAT" not in topic
    assert "  llama3-8b " in help_text(capsys, "--help", "models")
    with pytest.raises(ConfigError, match="--help zzz: unknown topic; --help lists the topics"):
        parse_args(["--help", "zzz"])
