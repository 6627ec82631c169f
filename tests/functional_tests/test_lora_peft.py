"""Low-rank adapters against PEFT on models of ``transformers``: training, files in and out, merged weights, text."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from megatron.console import run_tool
from megatron.core.config.errors import UserError
from megatron.export.hf.conversion import placements
from megatron.export.hf.family import complete
from megatron.export.hf.peft import Adapter, LoraSettings, common_name, to_peft
from megatron.export.hf.registry import load_settings
from tests.functional_tests import test_llava_models
from tests.functional_tests.test_image_models import peer, save
from tests.test_utils.foreign_models import MODELS as FOREIGN_MODELS
from tests.test_utils.foreign_models import build
from tests.test_utils.lazy_packages import lazy_package

peft = lazy_package("peft")
transformers = pytest.importorskip("transformers")

VOCAB_SIZE, LENGTH, STEPS, RANK = 61, 32, 10, 4
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
NARROW = {"intermediate_size": 48, "tie_word_embeddings": False}
LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 24,
}  # fmt: skip
RECURRENT = ("qwen3-next", "qwen3.5", "olmo-hybrid", "kimi-linear", "nemotron-h", "mamba2")


def recurrent(name):
    """Configuration of a tiny model with linear attention."""
    model = FOREIGN_MODELS[name]
    kinds = [f"{model.architecture}TextConfig", f"{model.architecture}Config"]
    config_class = next(getattr(transformers, kind) for kind in kinds if hasattr(transformers, kind))
    short = {"chunk_size": LENGTH} if name in ("nemotron-h", "mamba2") else {}  # less to compute
    return config_class(**{**SIZES, "num_attention_heads": 4, "pad_token_id": 0, **model.settings, **short})


MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **HEADS, **NARROW),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **HEADS, **NARROW, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, attn_pdrop=0, resid_pdrop=0,
        embd_pdrop=0,
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES, **HEADS, **NARROW, pad_token_id=0),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **HEADS, **NARROW, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **HEADS, **NARROW, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SIZES, **NARROW, **LATENT),
    **{name: lambda name=name: recurrent(name) for name in RECURRENT},
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
LATENT_MODULES = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
CASES = {
    "llama, all linear layers": ("llama", DENSE, {}),
    "llama, DoRA": ("llama", DENSE, {"use_dora": True}),
    "llama, queries and values": ("llama", ["q_proj", "v_proj"], {}),
    "llama, one layer": ("llama", ["model.layers.1.mlp.down_proj"], {"lora_alpha": 16}),
    "qwen3, rsLoRA": ("qwen3", DENSE, {"use_rslora": True}),
    "gpt2": ("gpt2", ["c_fc"], {"fan_in_fan_out": True}),
    "mixtral, attention": ("mixtral", ATTENTION, {}),
    "mixtral, attention and experts": (
        "mixtral", ATTENTION, {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "qwen3_moe, experts only": (
        "qwen3_moe", [], {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "qwen3_moe, gate and up of experts": ("qwen3_moe", [], {"target_parameters": ["mlp.experts.gate_up_proj"]}),
    "qwen3_moe, one layer's down projections": (
        "qwen3_moe", ["q_proj"], {"target_parameters": ["model.layers.1.mlp.experts.down_proj"], "use_rslora": True},
    ),
    "qwen3.5": ("qwen3.5", ["in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj"], {}),
    "olmo-hybrid": ("olmo-hybrid", [*ATTENTION, "g_proj", "b_proj", "a_proj", "down_proj"], {}),
    "kimi-linear": ("kimi-linear", [*ATTENTION, "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"], {}),
    "nemotron-h": ("nemotron-h", ["in_proj", "q_proj"], {}),
    "mamba2": ("mamba2", ["in_proj"], {}),
    "deepseek, latent attention": ("deepseek_v3", LATENT_MODULES, {}),
    "deepseek, a dense layer and shared experts": (
        "deepseek_v3", ["o_proj"], {"target_parameters": [
            "layers.0.mlp.gate_proj.weight", "layers.0.mlp.down_proj.weight", "shared_experts.up_proj.weight",
        ]},
    ),
}  # fmt: skip
EAGER = {"experts_implementation": "eager"}  # grouped GEMMs take no fp64
FLAGS = [
    "--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "100", "--eval-iters", "0",
    "--num-workers", "0", "--lr", "1e-2", "--lr-decay-style", "constant", "--lr-warmup-iters", "0", "--clip-grad", "0",
    "--weight-decay", "0.01", "--adam-beta1", "0.9", "--adam-beta2", "0.999", "--adam-eps", "1e-8",
    "--seq-length", str(LENGTH), "--attention-dropout", "0", "--hidden-dropout", "0", "--moe-aux-loss-coeff", "0",
    "--moe-router-bias-update-rate", "0",
]  # fmt: skip


def base_model(name, folder):
    """Save a random model; return it."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager", **EAGER).float()
    for key, parameter in model.named_parameters():  # larger than the initial values, so that all modules matter
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
        if key.endswith("A_log"):
            parameter.data.sub_(3)  # states that last for several tokens
    model.save_pretrained(folder)
    return model


def peft_model(model, modules, options):
    """Wrap ``model`` with random A and zero B."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        **{"r": RANK, "lora_alpha": 8, "target_modules": modules, "task_type": "CAUSAL_LM"} | options
    )
    return peft.get_peft_model(model, config)


def train_here(rank, world_size, argv, steps, save):
    """A task of the pool: train ``steps`` steps and save; the losses and the samples."""
    from megatron.training.exits.conditions import ExitConditions
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.trainer import Trainer
    from megatron.training.verify.layout_trace import SyntheticSamples, with_synthetic_data

    cfg = configured([*argv, "--save", save], world_size)
    groups = initialize_megatron(cfg)
    task = with_synthetic_data(GPTTask, VOCAB_SIZE)(cfg)
    parts = build_components(cfg, task, groups)
    with ExitConditions(cfg) as exits:
        trainer = Trainer(cfg, parts, exits)
        losses = [float(trainer.step.run().losses["lm loss"]) for _ in range(steps)]
    assert parts.checkpointer.save(parts.state)
    parts.checkpointer.close()
    samples = SyntheticSamples(task, 1 << 20)
    return losses, [samples[index] for index in range(8 * steps)]


def configured(argv, world_size):
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpoint.other_formats import apply_hf_settings

    cfg = apply_hf_settings(parse_args(argv, needs_data=False))
    return validate_args(cfg.with_settings(fp64=True), world_size)


def train_there(model, samples, steps):
    """The same with PEFT and torch's AdamW; the losses. Norms of DoRA have no weight decay, as all vectors here."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed, vectors = ([p for p in trained if (p.ndim > 1) is matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, eps=1e-8)
    losses = []
    for step in range(steps):
        batch = {
            key: torch.tensor([sample[key].tolist() for sample in samples[8 * step : 8 * step + 8]])
            for key in ("tokens", "labels", "loss_mask")
        }
        logits = model(input_ids=batch["tokens"], use_cache=False).logits
        token_losses = torch.nn.functional.cross_entropy(logits.mT, batch["labels"], reduction="none")
        loss = (token_losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def adapters_in(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def lora(*words):
    assert run_tool("lora", [str(word) for word in words]) == 0


def trained(gloo_pool, tmp_path, case, layout=(), ranks=1):
    """Import the adapters of PEFT, train them here, and export them; return (PEFT model, folder, losses, samples)."""
    name, modules, options = CASES[case]
    base, initial, start, run = (tmp_path / word for word in ("base", "initial", "start", "run"))
    model = peft_model(base_model(name, base), modules, options)
    model.save_pretrained(initial)
    lora("import", "--load", initial, "--base", base, "--save", start)
    config = json.loads((start / "release" / "metadata.json").read_text())["objects"]["args"]
    argv = [*FLAGS, *layout, "--load-hf", str(base), "--load", str(start), "--lora-rank", str(config["lora_rank"])]
    argv += ["--lora-alpha", str(config["lora_alpha"]), "--lora-target-modules", *config["lora_target_modules"]]
    argv += ["--lora-use-dora"] * config["lora_use_dora"] + ["--lora-use-rslora"] * config["lora_use_rslora"]
    (losses, samples), *_ = gloo_pool.run(train_here, ranks, argv, STEPS, str(run))
    lora("export", "--load", run, "--save", tmp_path / "exported")
    return model, losses, samples


def loaded(folder):
    """The model of a folder in fp64, whose norms and softmax ``transformers`` computes in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **EAGER)
    return model.double().eval()


TOKENS = torch.randint(0, VOCAB_SIZE, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model):
    return model.eval()(TOKENS).logits


def assert_close(one, other, tolerance):
    assert one.shape == other.shape
    assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_logits_and_merged_logits_equal_peft(gloo_pool, tmp_path, case):
    model, losses, samples = trained(gloo_pool, tmp_path, case)
    expected = train_there(model.double(), samples, STEPS)
    assert losses == pytest.approx(expected, rel=1e-6 if case in RECURRENT else 1e-7) and losses[-1] != losses[0]
    model.save_pretrained(tmp_path / "theirs")
    native, foreign = adapters_in(tmp_path / "exported"), adapters_in(tmp_path / "theirs")
    if case in RECURRENT:  # names of files and of modules differ
        foreign = {common_name(name): value for name, value in foreign.items()}
        native = {common_name(name): value for name, value in native.items()}
    assert native.keys() == foreign.keys() and native
    # transformers computes recurrences and the softmax of routers in fp32; AdamW amplifies that in rarely used experts
    tolerance = 1e-4 if case in RECURRENT else 3e-5 if any("experts" in name for name in native) else 5e-6
    for name in native:
        assert_close(native[name], foreign[name].double(), tolerance)
    logits = logits_of(model)
    assert_close(
        logits_of(peft.PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "exported")), logits, 1e-6
    )
    lora("merge", "--load", tmp_path / "run", "--save", tmp_path / "merged")
    assert_close(logits_of(loaded(tmp_path / "merged")), logits, 1e-5)  # the base's files are in fp32
    assert float((logits_of(loaded(tmp_path / "base")) - logits).abs().max()) > 0.01 * float(logits.abs().max())


@pytest.mark.parametrize(
    "name, stacked",
    [
        ("gpt2", {3}), ("phi3", {2, 3}), ("qwen3-next", {2, 4}), ("qwen3.5", {3}), ("kimi-linear", ()),
        ("nemotron-h", ()),
    ],
)  # fmt: skip
def test_adapters_of_fused_modules_are_exported_with_a_larger_rank_and_imported(
    gloo_pool, tmp_path, capsys, name, stacked
):
    """The default targets; ``stacked``: numbers of matrices in modules of several."""
    base_model(name, tmp_path / "base")
    argv = [*FLAGS, "--load-hf", str(tmp_path / "base"), "--lora-rank", str(RANK), "--lora-alpha", "8"]
    argv += ["--lora-use-rslora"] * (name == "gpt2")
    gloo_pool.run(train_here, 1, argv, 3, str(tmp_path / "run"))
    for action, folder in (("export", "exported"), ("merge", "merged")):
        lora(action, "--load", tmp_path / "run", "--save", tmp_path / folder)
    assert run_tool("verify", [str(tmp_path / "run")]) == 0
    config = json.loads((tmp_path / "exported" / "adapter_config.json").read_text())
    assert set(config["rank_pattern"].values()) == {number * RANK for number in stacked}
    lora("import", "--load", tmp_path / "exported", "--base", tmp_path / "base", "--save", tmp_path / "start")
    lora("export", "--load", tmp_path / "start", "--save", tmp_path / "again")
    first, again = (adapters_in(tmp_path / folder) for folder in ("exported", "again"))
    assert first.keys() == again.keys() and all(torch.equal(again[key], value) for key, value in first.items())
    if stacked:
        full = {key: value + 1 for key, value in first.items()}
        save_file(full, tmp_path / "again" / "adapter_model.safetensors")
        words = ["import", "--load", tmp_path / "again", "--base", tmp_path / "base", "--save", tmp_path / "full"]
        assert run_tool("lora", [str(word) for word in words]) != 0
        assert f"lora_B.weight is no block matrix of adapters of rank {RANK}" in capsys.readouterr().err
    adapted = peft.PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "exported")
    assert_close(logits_of(adapted), logits_of(loaded(tmp_path / "merged")), 1e-5)
    assert float((logits_of(loaded(tmp_path / "base")) - logits_of(adapted)).abs().max()) > 1e-3


@pytest.mark.parametrize(
    "name, modules",
    [("qwen3-next", ["in_proj_qkvz", "in_proj_ba", "out_proj"]), ("qwen3-next", ["in_proj_ba"]),
     ("qwen3.5", ["in_proj_qkv", "in_proj_a", "k_proj"])],
)  # fmt: skip
def test_imported_adapters_of_fused_projections_compute_as_with_peft(tmp_path, name, modules):
    base, adapter, start = (tmp_path / word for word in ("base", "adapter", "start"))
    model = peft_model(base_model(name, base), modules, {})
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(adapter)
    if name == "qwen3.5":  # names of the class with images
        prefix = "base_model.model.model."
        renamed = {key.replace(prefix, f"{prefix}language_model."): x for key, x in adapters_in(adapter).items()}
        save_file(renamed, adapter / "adapter_model.safetensors")
    lora("import", "--load", adapter, "--base", base, "--save", start)
    lora("merge", "--load", start, "--save", tmp_path / "merged")
    lora("export", "--load", start, "--save", tmp_path / "exported")
    logits = logits_of(model.double())
    assert_close(logits_of(loaded(tmp_path / "merged")), logits, 1e-5)
    assert_close(logits_of(peft.PeftModel.from_pretrained(loaded(base), tmp_path / "exported")), logits, 1e-5)
    assert float((logits_of(loaded(base)) - logits).abs().max()) > 0.01 * float(logits.abs().max())


@pytest.mark.parametrize(
    "layout, ranks",
    [("--tensor-model-parallel-size 2 --sequence-parallel", 2), ("--pipeline-model-parallel-size 2", 2)],
    ids=["TP 2 + SP", "PP 2"],
)
def test_imported_adapters_train_in_a_layout_as_with_peft(gloo_pool, tmp_path, layout, ranks):
    model, losses, samples = trained(gloo_pool, tmp_path, "llama, queries and values", layout.split(), ranks)
    assert losses == pytest.approx(train_there(model.double(), samples, STEPS), rel=1e-7)
    model.save_pretrained(tmp_path / "theirs")
    native, foreign = adapters_in(tmp_path / "exported"), adapters_in(tmp_path / "theirs")
    assert native.keys() == foreign.keys()
    for name in native:
        assert_close(native[name], foreign[name].double(), 5e-6)


def test_dora_of_modules_named_as_experts_is_not_exported(tmp_path):
    """PEFT reads DoRA of target modules only."""
    base_model("deepseek_v3", tmp_path)
    family, settings, _ = load_settings(tmp_path, "gpt")
    adapter = Adapter(torch.ones(1, 2, 48), torch.ones(32, 2), torch.ones(32))
    adapters = {"decoder.layers.0.mlp.linear_fc2.weight": adapter}
    plan, matrices = placements(family, complete(settings)), dict.fromkeys(adapters, (32,))
    with pytest.raises(UserError, match="cannot read DoRA of model.layers.0.mlp.down_proj; write the full model"):
        to_peft(plan, adapters, LoraSettings(2, 4.0, use_dora=True), "base", matrices)
    untrained = dict.fromkeys(adapters, Adapter(adapter.a, torch.zeros(32, 2)))
    tensors, config = to_peft(plan, untrained, LoraSettings(2, 4.0), "base", matrices)
    assert len(tensors) == 2
    assert config["target_parameters"] == ["model.layers.0.mlp.down_proj.weight"] and config["target_modules"] == []


def test_adapters_of_shared_experts_of_nemotron_h_are_applied(tmp_path):
    """Its files have other names than its modules."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    build(FOREIGN_MODELS["nemotron-h"]).save_pretrained(base)
    family, settings, _ = load_settings(base, "gpt")
    plan, name = placements(family, complete(settings)), "layers.4.mixer.shared_experts.up_proj.weight"
    (placement,) = (item for item in plan if item.parts[0].name.endswith(name))
    a, b = torch.randn(1, 2, placement.shape[-1]), torch.randn(*placement.shape[:-1], 2)
    adapters, matrices = {placement.name: Adapter(a, b)}, {placement.name: (24,)}
    tensors, config = to_peft(plan, adapters, LoraSettings(2, 6.0), str(base), matrices)
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    before = loaded(base).state_dict()[f"model.{name}"].clone()
    after = peft.PeftModel.from_pretrained(loaded(base), adapter).merge_and_unload().state_dict()[f"model.{name}"]
    assert_close(after, before + 3.0 * (b.view(-1, 2).double() @ a[0].double()), 1e-6)
    name = "decoder.layers.0.mixer.out_proj.weight"
    with pytest.raises(UserError, match="PEFT rejects adapters of backbone.layers.0.mixer.out_proj; write the full"):
        to_peft(plan, {name: Adapter(a[..., :1], b[:1])}, LoraSettings(2, 6.0), "base", {name: (32,)})


def train_images(rank, world_size, argv):
    """A task of the pool: ``pretrain_vlm.py``; the exit code."""
    from megatron.training.arguments import parse_args
    from megatron.training.run import run
    from megatron.training.tasks.language_model import task_class

    return run(parse_args(argv, model_family="vlm"), task_class("vlm"))


@pytest.mark.parametrize("kind", ["qwen3_vl", "clip"])
def test_adapters_of_image_models_are_exported_and_merged(gloo_pool, tmp_path, kind):
    base, run = tmp_path / "base", tmp_path / "run"
    save(peer(kind) if kind == "qwen3_vl" else test_llava_models.peer(kind), base)
    argv = f"--load-hf {base} --save {run} --mock-data --tokenizer-type NullTokenizer --lora-rank 3 --lora-alpha 12"
    argv += " --micro-batch-size 2 --global-batch-size 4 --seq-length 32 --lr 0.3 --train-iters 3 --eval-iters 0"
    argv += " --lr-warmup-iters 0 --num-workers 0 --lora-target-modules linear_qkv linear_fc2 vision.*.linear_fc1"
    assert gloo_pool.run(train_images, 1, argv.split()) == [0]
    for action, folder in (("export", "exported"), ("merge", "merged")):
        lora(action, "--load", run, "--save", tmp_path / folder)
    before, merged = (transformers.AutoModelForImageTextToText.from_pretrained(x) for x in (base, tmp_path / "merged"))
    first = {name: value.clone() for name, value in before.state_dict().items()}
    adapted = peft.PeftModel.from_pretrained(before, tmp_path / "exported").merge_and_unload().state_dict()
    changed = {name for name, value in adapted.items() if not torch.equal(value, first[name])}
    assert len(changed) == sum("lora_A" in name for name in adapters_in(tmp_path / "exported"))
    assert any("visual" in name or "vision" in name for name in changed)
    for name in changed:
        assert_close(adapted[name], merged.state_dict()[name], 1e-5)


# ---- generation


def test_generation_with_adapters_equals_the_merged_model(gloo_pool, tmp_path):
    from megatron.core.inference.engine import Engine
    from megatron.core.inference.requests import Request
    from megatron.core.inference.sampling import Sampling, generate
    from megatron.core.inference.scheduler import Limits
    from megatron.training.trained_model import load_trained_model

    base_model("llama", tmp_path / "base")
    argv = [*FLAGS, "--load-hf", str(tmp_path / "base"), "--lora-rank", "4", "--lora-use-dora"]
    argv += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]
    gloo_pool.run(train_here, 1, argv, 3, str(tmp_path / "run"))
    lora("merge", "--load", tmp_path / "run", "--save", tmp_path / "merged")
    adapted = load_trained_model(str(tmp_path / "run"), None, "a test")
    assert not any("lora" in name for name, _ in adapted.model.named_parameters())
    greedy = {"max_new_tokens": 8, "max_sequence_length": LENGTH, "sampling": Sampling(temperature=0)}
    tokens, merged, expected = (
        list(generate(adapted.model, [1, 2, 3], **greedy)),
        loaded(tmp_path / "merged"),
        [1, 2, 3],
    )
    for _ in range(8):
        with torch.no_grad():
            expected.append(int(merged(torch.tensor([expected])).logits[0, -1].argmax()))
    engine = Engine(adapted.model, Limits(LENGTH, max_sequences=2))
    (completion,) = engine.stream([Request(prompt=[1, 2, 3], max_new_tokens=8, sampling=Sampling(temperature=0))])
    assert tokens == list(completion.tokens) == expected[3:]


# ---- bad input


@pytest.mark.parametrize(
    "change, message",
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA can be imported"),
        ({"bias": "all"}, "bias 'all' not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' not supported"),
        ({"alora_invocation_tokens": [3, 4]}, r"alora_invocation_tokens \[3, 4\] not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern {'q_proj': 2}, alpha_pattern {}: modules with another scale"),
        ({"rank_pattern": {"q_proj": "2"}}, "modules with another scale are not supported"),
        ({"alpha_pattern": ["q_proj"]}, r"alpha_pattern \['q_proj'\]: modules with another scale"),
        ({"r": 2, "lora_alpha": 4}, r"q_proj.lora_A.weight is \[4, 32\], expected \[2, 32\]"),
        ({"target": "lm_head"}, "no layer that supports adapters has base_model.model.lm_head"),
        ({"r": 0}, "r is 0 and lora_alpha 8; both must be positive numbers"),
        ({"r": 2}, r"q_proj.lora_A.weight is \[4, 32\], expected \[2, 32\]"),
        ({"use_dora": True}, "lora_magnitude_vector is missing"),
    ],
)
def test_adapters_that_cannot_be_imported_are_rejected(tmp_path, capsys, change, message):
    modules = [*ATTENTION, change.pop("target", "up_proj")]
    peft_model(base_model("llama", tmp_path / "base"), modules, {}).save_pretrained(tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    capsys.readouterr()
    words = ["import", "--load", tmp_path / "peft", "--base", tmp_path / "base", "--save", tmp_path / "out"]
    assert run_tool("lora", [str(word) for word in words]) != 0
    errors = capsys.readouterr().err
    assert re.search(message, errors) and errors.count("error:") == 1
    assert not (tmp_path / "out").exists()


def test_other_bases_and_folders_without_adapters_are_rejected(tmp_path, capsys):
    def rejected(*words):
        assert run_tool("lora", [str(word) for word in words]) != 0
        return capsys.readouterr().err

    base, start = tmp_path / "base", tmp_path / "start"
    peft_model(base_model("llama", base), ATTENTION, {}).save_pretrained(tmp_path / "peft")
    lora("import", "--load", tmp_path / "peft", "--base", base, "--save", start)
    wider = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, **NARROW)).float()
    wider.model.norm.weight.data.mul_(2)
    wider.save_pretrained(tmp_path / "other")
    errors = rejected("export", "--load", start, "--base", tmp_path / "other", "--save", tmp_path / "out")
    assert f"--base {tmp_path / 'other'}: is not the base" in errors
    missing = tmp_path / "none"
    errors = rejected("export", "--load", missing, "--save", tmp_path / "out")
    assert f"--load {missing}: there is no such folder" in errors
    errors = rejected("import", "--load", base, "--base", base, "--save", tmp_path / "out")
    assert f"--load {base}: holds no adapter_config.json" in errors
    errors = rejected("import", "--load", base, "--base", missing, "--save", tmp_path / "out")
    assert f"--base {missing}: there is no such folder" in errors
    assert "--base: is required" in rejected("import", "--load", tmp_path / "peft", "--save", tmp_path / "out")
    assert f"{start}: exists already" in rejected(
        "import", "--load", tmp_path / "peft", "--base", base, "--save", start
    )
