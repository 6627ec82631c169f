"""Every family of Hugging Face's, both ways, against the package ``transformers`` itself.

A tiny random model is saved by ``transformers``, read by ``load_hf``, built through the command line of
``pretrain_gpt.py`` from nothing but the settings of its ``config.json``, and compared: logits, loss, every gradient.
Then it is written by ``save_hf`` and loaded by ``transformers`` again: the same bytes, the same logits.
"""

import dataclasses
import json
import re

import pytest
import torch

from tests.test_utils.foreign_comparison import assert_close, compare_gradients, compare_losses, random_text
from tests.test_utils.foreign_models import LAYERS, LENGTH, MIXTURES, MODELS, VOCAB, build, flags_of
from tests.test_utils.foreign_variants import VARIANTS
from tests.test_utils.hf_folders import LLAMA, as_on_the_hub, random_model, weights_in

transformers = pytest.importorskip("transformers", reason="pip install transformers: it is what is compared with")

from megatron.core.config.errors import UserError  # noqa: E402
from megatron.export.hf import load_hf, save_hf  # noqa: E402
from megatron.export.hf.registry import known_families  # noqa: E402
from megatron.tools.checkpoint import verify  # noqa: E402

EVERY = {**MODELS, **MIXTURES, **VARIANTS}
SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "n_embd", "n_head",
    "num_attention_heads", "max_position_embeddings", "n_layer", "n_positions", "num_local_experts",
    "num_experts_per_tok", "dim", "hidden_dim", "n_heads", "n_layers", "ffn_dim",
}  # fmt: skip
"""Keys that every config.json says."""
CHOSEN = {
    "llava": {"vision_config": {"model_type": "clip_vision_model"}},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), {"text_config": {"hidden_size": 3584}}),
    "t5": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "deepseek_v2": {"num_experts_per_tok": 6},
}
"""Changes that make a family's default configuration convertible."""
WITHOUT_DEFAULTS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_linear", "mt5", "nemotron_h", "t5")
"""Families whose config.json must hold all keys of sizes and experts."""
NORMS = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
PUBLISHED = {
    "kimi-linear": {f"block_sparse_moe.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "olmo-hybrid": NORMS, "olmo-hybrid-rope": NORMS,
}  # fmt: skip
"""Parts of names that ``transformers`` writes -> of published files."""
CONVERTED = [name for name, model in EVERY.items() if any(
    family.architecture.startswith((f"{model.architecture}For", f"{model.architecture}LMHead"))
    for family in known_families().values()
)]  # fmt: skip


def our_model(settings):
    """Return the model of a command line with only these settings, and the default vocabulary padding."""

    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.tasks.gpt import GPTTask

    class WithoutTokenizer(GPTTask):
        vocab_size = settings["vocab_size"]

    line = "--micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 1 --kv-lora-rank 1"
    cfg = parse_args([*line.split(), "--seq-length", str(LENGTH)], needs_data=False)
    cfg = validate_args(cfg.with_settings(**settings), 1)
    return WithoutTokenizer(cfg).model_provider()


def fill(native, interchange):
    """Load as a checkpoint would be: every tensor of the model, by its global name and shape."""
    from megatron.core import parallel_state
    from megatron.core.sharding.sharded_tensor import module_tensors

    stored = module_tensors(native, groups=parallel_state.get_process_groups(), prefix="model.")
    assert {item.name for item in stored.values()} == set(interchange.tensors)
    for tensor in stored.values():
        lazy = interchange.tensors[tensor.name]
        assert tensor.global_shape == lazy.shape == tuple(lazy.read().shape) and lazy.read().dtype == lazy.dtype
        with torch.no_grad():
            tensor.local.copy_(lazy.read())


def saved(name, tmp_path, dtype=torch.float32):
    """A model of ``transformers``, and the folder that it is in, in shards and with other files as on the hub."""
    foreign = build(EVERY[name]).to(dtype)
    foreign.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    return foreign, as_on_the_hub(tmp_path / "theirs", PUBLISHED.get(name, {}))


@pytest.mark.parametrize("name", CONVERTED)
def test_logits_loss_and_gradients_of_a_loaded_folder_equal_those_of_transformers(name, tmp_path):
    foreign, folder = saved(name, tmp_path)
    model = load_hf(folder)
    native = our_model(model.settings)
    fill(native, model)
    compare_losses(native, foreign)
    # their gradients, saved as if they were weights, are read by the same tables
    with torch.no_grad():
        for parameter in foreign.parameters():
            parameter.copy_(parameter.grad)
    foreign.save_pretrained(tmp_path / "gradients")
    gradients = load_hf(tmp_path / "gradients").tensors
    compare_gradients(native, {key.removeprefix("model."): gradient.read() for key, gradient in gradients.items()})


ROUND_TRIPS = [(name, torch.float32) for name in CONVERTED]
ROUND_TRIPS += [(name, torch.bfloat16) for name in CONVERTED if name not in VARIANTS]


@pytest.mark.parametrize("name, dtype", ROUND_TRIPS, ids=lambda value: str(value).removeprefix("torch."))
def test_a_round_trip_keeps_every_byte_and_transformers_loads_it(name, dtype, tmp_path):
    """Variants of a family in fp32 only: no table of names or layouts reads the dtype."""
    foreign, folder = saved(name, tmp_path, dtype)
    shards = 20_000 if dtype == torch.float32 else 10**9
    save_hf(load_hf(folder), tmp_path / "again", max_shard_bytes=shards)
    assert verify.main([str(tmp_path / "again")]) == 0
    files = {path.name for path in (tmp_path / "again").iterdir() if path.suffix != ".safetensors"}
    index = {"model.safetensors.index.json"} if dtype == torch.float32 else set()
    assert files == {"config.json", "generation_config.json"} | index
    before, after = weights_in(folder), weights_in(tmp_path / "again")
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype and value.shape == after[key].shape, key
        assert torch.equal(value.view(-1).view(torch.uint8), after[key].view(-1).view(torch.uint8)), key

    foreign, repeated = (
        transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", experts_implementation="eager"
        ).eval() for path in (folder, tmp_path / "again")
    )  # fmt: skip
    assert type(repeated) is type(foreign) and repeated.dtype == dtype
    pairs = {key: (value, repeated.config.to_dict().get(key)) for key, value in foreign.config.to_dict().items()}
    # null means what the other one says: the default
    # transformers writes no layers of multi-token prediction of any config
    # where SmolLM3's layers are listed, their interval has no effect
    free = ("_name_or_path", "num_nextn_predict_layers", "no_rope_layer_interval")
    different = {key: pair for key, pair in pairs.items() if pair[0] not in (None, pair[1]) and key not in free}
    assert not different
    tokens = random_text()[0]
    assert torch.equal(repeated(input_ids=tokens).logits, foreign(input_ids=tokens).logits)


NOT_QUANTIZED = {
    **dict.fromkeys([name for name in CONVERTED if name.startswith("gpt2")], "transformer.h.0.attn.c_attn.weight"),
    "granite4": "block_sparse_moe.input_linear.weight", "gpt-oss": "mlp.experts.gate_up_proj",
    "mamba2": "the model has no layers of attention",
}  # fmt: skip
NAMES = {
    (EVERY[name].architecture, EVERY[name].settings.get("tie_word_embeddings")): name for name in reversed(CONVERTED)
}
"""One model of each family, and one with tied embeddings."""


@pytest.mark.parametrize("name", sorted({*NAMES.values(), *NOT_QUANTIZED}))
def test_linear_layers_of_transformers_that_are_not_quantized_are_named_in_the_config(name, tmp_path):
    """Readers look for scales of all other layers, and take random ones for missing ones. A tied output layer has no
    tensor in the files."""
    _, folder = saved(name, tmp_path)
    model = load_hf(folder)
    if name in NOT_QUANTIZED:
        with pytest.raises(UserError, match=NOT_QUANTIZED[name].replace(".", r"\.")):
            save_hf(model, tmp_path / "fp8", quantize="fp8-dynamic")
        return
    save_hf(model, tmp_path / "fp8", quantize="fp8-dynamic")
    renamed = {"backbone.": "model.", ".block_sparse_moe.": ".mlp."}
    stored = set(weights_in(tmp_path / "fp8"))
    for part, other in renamed.items():
        stored |= {key.replace(part, other) for key in stored}
    ignored = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["ignore"]
    modules = build(EVERY[name]).named_modules()
    linear = {module for module, layer in modules if isinstance(layer, torch.nn.Linear)}
    scaled = {module for module in linear if f"{module}.weight_scale" in stored}
    assert scaled and linear - scaled == linear & {*ignored}


def rotating(name, **settings):
    """A row of the table with other settings."""
    return dataclasses.replace(EVERY[name], settings={**EVERY[name].settings, **settings})


@pytest.mark.parametrize("length", [2, 15, 16, 17, 40])
@pytest.mark.parametrize(
    "model",
    [rotating("llama-dynamic", max_position_embeddings=16), EVERY["llama-longrope"], EVERY["glm-longrope"],
     rotating("phi3-longrope", original_max_position_embeddings=16)],
    ids=["dynamic", "longrope", "longrope-partial", "phi3"],
)  # fmt: skip
def test_rows_below_and_above_the_original_length_rotate_as_in_transformers(model, length, tmp_path):
    foreign = build(model)
    foreign.save_pretrained(tmp_path)
    folder = load_hf(tmp_path)
    ours = our_model({**folder.settings, "max_position_embeddings": 64})
    fill(ours, folder)
    tokens = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
    positions = torch.arange(length).expand(2, -1)
    for _ in range(2):  # the second time with cached tables
        assert_close("logits", ours(tokens, positions)[..., :VOCAB], foreign(input_ids=tokens, use_cache=False).logits)
        other = torch.zeros(1, 56 - length, dtype=torch.int64)
        ours(other, torch.arange(56 - length)[None])


def test_exported_dynamic_scaling_begins_where_that_of_a_longer_training_did(tmp_path):
    """Training with longer rows raises --max-position-embeddings; transformers scales from its own maximum on."""
    foreign = build(rotating("llama-dynamic", max_position_embeddings=16))
    foreign.save_pretrained(tmp_path / "theirs")
    model = load_hf(tmp_path / "theirs")
    save_hf(dataclasses.replace(model, settings={**model.settings, "max_position_embeddings": 64}), tmp_path / "again")
    repeated = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", attn_implementation="eager").eval()
    tokens = random_text()[0]
    assert torch.equal(repeated(input_ids=tokens).logits, foreign(input_ids=tokens).logits)


def test_a_family_that_pads_with_a_high_id_takes_a_small_vocabulary(tmp_path):
    save_hf(random_model(LLAMA, 64), tmp_path / "phi3", family="phi3")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "phi3").config.pad_token_id is None


@pytest.mark.parametrize("name", sorted(known_families().keys() & transformers.CONFIG_MAPPING.keys()))
def test_missing_config_key_equals_the_transformers_default_or_is_rejected(name):
    family = known_families()[name]
    config = dict(family.flat(transformers.CONFIG_MAPPING[name](**CHOSEN.get(name, {})).to_dict()))
    settings, read = family.load_settings(config), {key for rule in family.config for key in rule.hf_keys}
    needed = {*SIZES, "rope_parameters"} | (read if name in WITHOUT_DEFAULTS else set())
    files_tell = {"num_nextn_predict_layers"}  # whether it counts
    chosen = {"feed_forward_proj", "scale_decoder_outputs", "tie_word_embeddings"} if name == "t5" else set()
    for key in sorted(read & config.keys() - files_tell - chosen):
        try:
            assert family.load_settings({item: value for item, value in config.items() if item != key}) == settings, key
        except UserError as error:
            assert key in needed and (f"{key} is missing" in str(error) or key == "rope_parameters")


def test_experts_without_groups_are_one_group_of_deepseek(tmp_path):
    flags = re.sub(r"--moe-router-(num-groups|group-\S+) \d", "", " ".join(flags_of(EVERY["deepseek-v3-few-choices"])))
    exported = random_model(flags.split(), VOCAB)
    save_hf(exported, tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (config["n_group"], config["topk_group"]) == (1, 1)
    foreign = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    repeated = load_hf(tmp_path / "ours")
    native = our_model(repeated.settings).eval()
    fill(native, repeated)
    tokens = random_text()[0]
    result = native(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))[..., :VOCAB]
    torch.testing.assert_close(result, foreign(input_ids=tokens).logits.to(result.dtype), rtol=1e-4, atol=1e-4)


def test_convolutions_are_split_between_queries_keys_and_values(tmp_path):
    """As in the published files of OLMo-Hybrid; ``transformers`` writes three equal parts."""
    exported = random_model([*flags_of(EVERY["olmo-hybrid"]), "--linear-value-head-dim", "7"], VOCAB)
    save_hf(exported, tmp_path / "ours")
    rows = [len(weights_in(tmp_path / "ours")[f"model.layers.0.linear_attn.{x}_conv1d.weight"]) for x in "qkv"]
    assert rows == [16, 16, 28]
    foreign = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    repeated = load_hf(tmp_path / "ours")
    native = our_model(repeated.settings).eval()
    fill(native, repeated)
    tokens = random_text()[0]
    result = native(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))[..., :VOCAB]
    torch.testing.assert_close(result, foreign(input_ids=tokens).logits.to(result.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("change", "said"), [
    ({"moe_router_group_score_topk": None}, "moe_router_group_score_topk is 1, the family adds up the 2 best scores"),
    ({"moe_router_group_score_topk": 1}, "moe_router_group_score_topk is 1, the family adds up the 2 best scores"),
])  # fmt: skip
def test_groups_that_are_scored_otherwise_are_no_deepseek(change, said, tmp_path):
    exported = random_model(flags_of(EVERY["deepseek-v3-few-choices"]), VOCAB)
    exported.settings |= change
    with pytest.raises(UserError, match=said):
        save_hf(exported, tmp_path / "ours", family="deepseek_v3")


def test_a_single_expert_that_is_normalized_cannot_be_represented():
    config = transformers.DeepseekV3Config(num_experts_per_tok=1, n_group=1, topk_group=1).to_dict()
    with pytest.raises(UserError, match="norm_topk_prob is True, but must be False for num_experts_per_tok 1"):
        known_families()["deepseek_v3"].load_settings(config)


@pytest.mark.parametrize("name, attention", [
    ("deepseek-v3", ("self_attention.linear_kv_up_proj", "self_attn.kv_b_proj")),
    ("glm4-moe", ("self_attention.linear_proj", "self_attn.o_proj")),
])  # fmt: skip
def test_transformers_reads_our_layers_of_multi_token_prediction(name, attention, tmp_path, monkeypatch):
    from transformers.modeling_layers import MtpModel

    flags = [*flags_of(EVERY[name]), "--mtp-num-layers", "2"]
    save_hf(random_model(flags, VOCAB), tmp_path / "ours", max_shard_bytes=20_000)
    kind = getattr(transformers, f"{EVERY[name].architecture}ForCausalLM")
    # HF's pattern is a constant for the published number of layers
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[23]\..*"])
    foreign = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    result = MtpModel.from_pretrained(foreign).state_dict()
    weights = load_hf(tmp_path / "ours").tensors
    for depth in range(2):
        local, other = f"model.mtp.layers.{depth}", f"layers.{depth}"
        for native, theirs in (
            ("enorm", "enorm"), ("hnorm", "hnorm"), ("eh_proj", "eh_proj"), ("final_layernorm", "post_norm"),
            tuple(f"{block}.{part}" for block, part in zip(("mtp_model_layer", "mtp_block"), attention)),
            ("mtp_model_layer.mlp.router", "mtp_block.mlp.gate"),
        ):  # fmt: skip
            assert torch.equal(result[f"{other}.{theirs}.weight"], weights[f"{local}.{native}.weight"].read()), theirs
        experts = weights[f"{local}.mtp_model_layer.mlp.experts.linear_fc1.weight"].read().flatten(1, 2)
        assert torch.equal(result[f"{other}.mtp_block.mlp.experts.gate_up_proj"], experts)
    assert foreign.config.num_mtp_layers == 2 and foreign.config.num_hidden_layers == LAYERS
