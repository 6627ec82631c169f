"""The engine for verl: a PPO update and log-probabilities equal those of ``transformers`` with
``torch.optim.AdamW`` and verl's own loss. Skipped unless verl and what it imports (ray, tensordict) are installed."""

import importlib.util
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("verl", "ray", "tensordict", "transformers")),
    reason="verl is not installed",
)
SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
PROMPTS = [[3, 9], [5, 1, 2], [11, 12], [40]]
RESPONSES = [[4, 4, 20, 7, 31], [8, 50], [13, 14, 15, 16, 17, 18], [2, 40, 3]]
ADVANTAGES = [1.0, -2.0, 0.5, 1.5]
DEFAULTS = {"recompute_granularity": None, "recompute_modules": ["core_attn"], "attention_backend": "flash"}
"""Values of ``override_transformer_config`` in verl's own files."""
LR, BETAS, DECAY, CLIP, TEMPERATURE, ENTROPY = 1e-2, (0.9, 0.95), 0.1, 0.5, 0.7, 0.01
LAYOUTS = {
    "one rank": (1, "Qwen3", {}),
    "TP 2": (2, "Qwen3", {"tensor_model_parallel_size": 2}),
    "DP 2": (2, "Qwen3", {}),
    "PP 2": (2, "Qwen3", {"pipeline_model_parallel_size": 2}),
    "CP 2": (2, "Qwen3", {"context_parallel_size": 2}),
    "experts EP 2": (2, "Qwen3Moe", {"expert_model_parallel_size": 2}),
}


def actor_config():
    from verl.workers.config import McoreActorConfig

    return McoreActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=ENTROPY)


def batch(indices, **more):
    """Sequences ``indices`` as verl's trainer sends them to a worker; old log-probabilities are arbitrary numbers."""
    from verl.utils import tensordict_utils as tu

    def nested(rows, dtype=torch.int64):
        return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)

    prompts, responses = ([rows[i] for i in indices] for rows in (PROMPTS, RESPONSES))
    tensors = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "input_ids": nested([a + b for a, b in zip(prompts, responses)]),
        "loss_mask": nested([[0] * len(a) + [1] * len(b) for a, b in zip(prompts, responses)]),
        "response_mask": nested([[1] * len(row) for row in responses]),
        "advantages": nested([[ADVANTAGES[i]] * len(RESPONSES[i]) for i in indices], torch.float64),
        "old_log_probs": nested([[-4.0 - 0.01 * token for token in row] for row in responses], torch.float64),
    }
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "temperature": TEMPERATURE,
                "calculate_entropy": True, "global_batch_size": len(PROMPTS), **more}  # fmt: skip
    return tu.get_tensordict(tensors, settings)


def make_engine(path, layout):
    from verl.workers.config import HFModelConfig, McoreCheckpointConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    import megatron.compat.verl_engine  # noqa: F401  # verl loads it by its entry point

    engine = EngineRegistry.new(
        "language_model",
        "megatron",
        model_config=HFModelConfig(path=path, load_tokenizer=False),
        engine_config=McoreEngineConfig(
            **layout, override_transformer_config={"bf16": False, "fp64": True, **DEFAULTS}
        ),
        optimizer_config=McoreOptimizerConfig(
            lr=LR, betas=BETAS, weight_decay=DECAY, clip_grad=CLIP, total_training_steps=9, lr_decay_style="constant"
        ),
        checkpoint_config=McoreCheckpointConfig(),
    )
    engine.initialize()
    return engine


def update(rank, world_size, path, layout, folder):
    """Return log-probabilities, losses, gradient norms and weights of two updates, with a checkpoint between them."""
    from verl.workers.utils.losses import ppo_loss

    engine = make_engine(path, layout)
    size, number = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    local = [*range(len(PROMPTS))][number * len(PROMPTS) // size : (number + 1) * len(PROMPTS) // size]
    engine.to("cpu")
    engine.to("device")
    with engine.eval_mode():
        scored = engine.infer_batch(batch(local))
    result = {"sequences": local, "is_source": engine.is_mp_src_rank_with_outputs(), "steps": []}
    if result["is_source"]:
        outputs = scored["model_output"]
        result |= {name: [row.tolist() for row in outputs[name].unbind()] for name in ("log_probs", "entropy")}
    for step in range(2):
        with engine.train_mode():
            outputs = engine.train_batch(batch(local), partial(ppo_loss, config=actor_config()))
        assert engine.lr_scheduler_step() == LR
        if result["is_source"]:
            result["steps"].append((sum(outputs["loss"]), outputs["metrics"]["grad_norm"]))
        if step == 0:
            engine.save_checkpoint(f"{folder}/actor", global_step=1)
            for param in engine.module[0].parameters():
                param.data.zero_()
            engine.load_checkpoint(f"{folder}/actor")
    weights, adapter = engine.get_per_tensor_param(base_sync_done=True)
    assert adapter is None
    return result | {"weights": {name: tensor.clone().numpy() for name, tensor in weights}}


def reference(model):
    """The same two updates of a model of ``transformers``, one sequence at a time."""
    from verl.workers.utils.losses import ppo_loss

    groups = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": DECAY}, {"params": groups[1], "weight_decay": 0.0}], lr=LR, betas=BETAS
    )
    data = batch(range(len(PROMPTS)), dp_size=1, batch_num_tokens=sum(map(len, RESPONSES)))
    offsets, steps, first = data["input_ids"].offsets(), [], None
    for _ in range(2):
        log_probs, entropies = [], []
        for prompt, response in zip(PROMPTS, RESPONSES):
            row = torch.tensor([prompt + response])
            distribution = (model(row).logits[0] / TEMPERATURE).log_softmax(-1)
            log_probs.append(distribution.gather(1, row.roll(-1).T)[:, 0])
            entropies.append(-(distribution.exp() * distribution).sum(-1))
        outputs = {
            name: torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)
            for name, rows in (("log_probs", log_probs), ("entropy", entropies))
        }
        first = first or [[row.tolist() for row in rows] for rows in (log_probs, entropies)]
        loss, _ = ppo_loss(actor_config(), outputs, data)
        optimizer.zero_grad()
        loss.backward()
        steps.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()))
        optimizer.step()
    return first, steps


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """By family: (folder of the initial weights, final weights, log-probabilities and entropies, losses and norms)."""
    return {family: train(family, tmp_path_factory.mktemp(family)) for family in ("Qwen3", "Qwen3Moe")}


def train(family, folder):
    """Return one entry of ``families``."""
    import transformers

    torch.manual_seed(1)
    sizes = SIZES | (EXPERTS if family == "Qwen3Moe" else {})
    config = getattr(transformers, f"{family}Config")(**sizes, tie_word_embeddings=False)
    kernels = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **kernels).double()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4.0) if param.dim() > 1 else param.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    first, steps = reference(model)
    model.save_pretrained(folder / "trained")
    return folder, load_file(folder / "trained" / "model.safetensors"), first, steps


@pytest.mark.parametrize("case", LAYOUTS)
def test_ppo_updates_equal_those_of_transformers(gloo_pool, tmp_path, families, case):
    ranks, family, layout = LAYOUTS[case]
    folder, weights, (log_probs, entropies), steps = families[family]
    results = gloo_pool.run(update, ranks, str(folder), layout, str(tmp_path))
    sources = [result for result in results if result["is_source"]]
    for result in sources:
        for name, expected in (("log_probs", log_probs), ("entropy", entropies)):
            for index, values in zip(result["sequences"], result[name]):
                torch.testing.assert_close(values[:-1], expected[index][:-1], rtol=0, atol=1e-6)
    for step, (loss, norm) in enumerate(steps):
        mean = sum(result["steps"][step][0] for result in sources) / len(sources)
        assert mean == pytest.approx(loss, abs=1e-6)
        assert sources[0]["steps"][step][1] == pytest.approx(norm, rel=1e-6)
    for result in results:
        assert result["weights"].keys() == weights.keys()
        for name, expected in weights.items():
            # transformers computes the router's softmax in fp32, and AdamW enlarges differences of small gradients
            atol = 1e-5 if family == "Qwen3Moe" else 1e-6
            torch.testing.assert_close(torch.from_numpy(result["weights"][name]), expected, rtol=0, atol=atol)
