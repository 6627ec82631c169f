"""A layer kind that the library does not know, given by ``--spec`` or by a program's own model provider, works
like any other: it trains in every layout, and counts, checks, stage splits, saves and loads include it.

It is ``tests/test_utils/gated_recurrence.py``: a recurrence in the place of attention, and a layer of three branches.
"""

import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.cli import ConfigError
from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.context_parallel_support import layout_problem
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.checkpoint.settings import check_args
from megatron.training.report.dry_run import dry_run_report
from megatron.training.report.memory import estimate_memory
from megatron.training.report.pipeline import run_stages
from megatron.training.stored_settings import ARCHITECTURE, weight_settings
from tests.test_utils.gated_recurrence import ContiguousRecurrence, GatedRecurrence, LocalRecurrence, scan
from tests.test_utils.gpt_runs import MODEL_FLAGS, losses, train_with_errors
from tests.test_utils.layout_table import CP2, CP4, CUT, DROPOUT, FSDP, GATHER, LLAMA, PP2, PP4, SP, TP2, VPP, ZB
from tests.test_utils.layouts import FEW_STEPS, VOCAB_SIZE, Layout, configure

ROOT = Path(__file__).resolve().parents[2]
SPEC = "--spec tests.test_utils.gated_recurrence mixed_layers"
MIXED = f"{DROPOUT} --num-layers 4 {SPEC}"  # attention, recurrence, both, attention
PACKED = f"{MIXED} --reset-position-ids --reset-attention-mask"
MODERN = f"{LLAMA} --num-layers 4 {SPEC}"

LAYOUTS = {
    "tp2": Layout(MIXED, TP2, 2),
    "tp2-sp": Layout(MODERN, f"{TP2} {SP}", 2),
    "tp4-sp-packed": Layout(PACKED, f"{TP2} {SP} --tensor-model-parallel-size 4", 4),
    "tp2-sp-overlap": Layout(MIXED, f"{TP2} {SP} --micro-batch-size 2 --tp-comm-overlap", 2),
    "pp2": Layout(MIXED, PP2, 2),
    "pp4-three-stages-of-one-layer": Layout(MODERN, f"{PP4} {CUT} Etta|a|f|tL", 4),
    "pp2-vpp-cut": Layout(PACKED, f"{PP2} {CUT} Ea|fta|a|ftL", 2),
    "pp2-vpp-zero-bubble": Layout(MIXED, f"{PP2} {VPP} {ZB}", 2),
    "zero2-gather": Layout(MIXED, f"--micro-batch-size 2 {GATHER}", 2),
    "fsdp2": Layout(MODERN, f"--micro-batch-size 2 {FSDP}", 2),
    "tp2-sp-pp2-dp2": Layout(
        MODERN, f"{PP2} --tensor-model-parallel-size 2 {SP} {GATHER} --micro-batch-size 1", 8,
    ),
    "cp2": Layout(MIXED, CP2, 2),
    "cp4-packed": Layout(PACKED, CP4, 4),
    "cp2-tp2-sp": Layout(MODERN, f"{CP2} {TP2} {SP}", 4),
    "cp2-exchanged-packed": Layout(PACKED.replace("mixed_layers", "exchanged_layers"), CP2, 2),
    "cp4-exchanged": Layout(MIXED.replace("mixed_layers", "exchanged_layers"), CP4, 4),
    "recompute": Layout(
        MIXED, "--micro-batch-size 4 --recompute-granularity selective --recompute-modules core_attn layernorm", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(matrix, name):
    one = dataclasses.replace(LAYOUTS[name], steps=FEW_STEPS)
    verdict = matrix.verdict(one)
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))


def test_a_state_that_forgets_its_document_is_found(matrix):
    one = dataclasses.replace(LAYOUTS["tp4-sp-packed"], steps=1)
    assert not matrix.verdict(one, "states_go_on_to_the_next_document").equal


# ---- what folds over the description


def settings(flags, world_size=1):
    return configure(Layout(flags, "--micro-batch-size 2", world_size).argv, world_size, "fp32")


def built_model(cfg):
    from megatron.core.models.gpt import GPTModel
    from tests.test_utils.gated_recurrence import mixed_layers

    config = cfg.model
    length = cfg.embeddings.max_position_embeddings
    return GPTModel(config, mixed_layers(config), VOCAB_SIZE, length, make_vocab_size_divisible_by=8)


def test_parameters_and_flops_are_those_of_the_built_model():
    from torch.utils.flop_counter import FlopCounterMode

    from tests.test_utils.specs import named_specs

    cfg = settings(f"{MIXED} --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
                   "--attention-backend unfused")  # fmt: skip
    model, described = built_model(cfg), cfg.describe(VOCAB_SIZE)
    assert {name: spec.shape for name, _, spec in named_specs(model)} == {
        param.name: param.shape for param in described.params()
    }
    tokens = torch.randint(0, VOCAB_SIZE, (1, cfg.data.seq_length))
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(cfg.data.seq_length)[None], labels=tokens).sum().backward()
    attention_layers, padding = 3, 64 - VOCAB_SIZE  # torch counts all scores and the padded vocabulary
    more = 3 * 2 * cfg.model.hidden_size * (attention_layers * cfg.data.seq_length**2 + cfg.data.seq_length * padding)
    assert counter.get_total_flops() == described.flops_per_sample + more


def test_the_dry_run_knows_its_parameters_memory_and_stages():
    cfg = settings(f"{MIXED} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etta|aftL", 2)
    report = dry_run_report(cfg.with_settings(vocab_size=VOCAB_SIZE))
    assert f"{cfg.describe(VOCAB_SIZE).num_parameters:,}, of which" in report
    assert "pipeline rank 1            attention and feed-forward of layer 3 + layer 4 + loss" in report


def test_layers_without_a_description_train_and_are_not_counted(gloo_pool):
    flags = f"{DROPOUT} --num-layers 3 --spec tests.test_utils.gated_recurrence undescribed_layers"
    cfg = settings(f"{flags} --pipeline-model-parallel-size 2", 2).with_settings(vocab_size=VOCAB_SIZE)
    assert "without recurrence, which has no describe(config, place)" in dry_run_report(cfg)
    assert [stage.num_layers for stage in run_stages(cfg, VOCAB_SIZE)] == [1, 2]
    ranks = gloo_pool.run(weights_of, 2, Layout(flags, PP2, 2).argv)
    assert ranks[1][1] > ranks[0][1] > 0


@pytest.mark.parametrize("layers, parts", [("mixed_layers", [4, 5]), ("undescribed_layers", [2, 2])])
def test_the_dry_run_needs_no_vocabulary(layers, parts):
    """Tokenizers that are loaded later leave the vocabulary unknown."""
    spec = f"--spec tests.test_utils.gated_recurrence {layers}"
    cfg = settings(f"--num-layers 4 --pipeline-model-parallel-size 2 {spec}", 2)
    assert "pipeline rank 1            layers 3-4 + loss" in dry_run_report(cfg.with_settings(vocab_size=None))
    assert [len(stage.branches) for stage in run_stages(cfg, None)] == parts


def test_spec_without_layers_is_rejected_in_one_line():
    for name in ("torch.nn Linear", "os path", "platform python_version"):
        cfg = settings(f"--num-layers 4 --spec {name}")
        with pytest.raises(UserError, match=f"--spec {name}: .* specifies no layers"):
            cfg.describe(VOCAB_SIZE)


def test_stages_are_balanced_by_branch_costs():
    """The recurrence, at this width a third of a decoder layer on top, makes the third layer the longest."""
    described = settings(MIXED).describe(VOCAB_SIZE)
    layers = described.costs.layers
    assert [len(layer) for layer in layers] == [2, 2, 3, 2]
    assert sum(layers[2]) == pytest.approx(sum(layers[0]) + layers[1][0])
    cfg = settings(f"{MIXED} --pipeline-model-parallel-size 2", 2)
    stages = run_stages(cfg, VOCAB_SIZE)
    cut = stages[0].branches.stop
    costs = [*described.costs.branches]
    costs[-1] += described.costs.head
    result = max(sum(costs[:cut]), sum(costs[cut:]))
    assert result <= 1.01 * min(max(sum(costs[:at]), sum(costs[at:])) for at in range(1, len(costs)))


def test_a_layout_that_its_layers_do_not_have_is_rejected():
    settings(f"--num-layers 6 {SPEC} --pipeline-model-parallel-size 3 {CUT} Etta|aftta|afL", 3)
    with pytest.raises(ConfigError, match=r"Etta\|ftL: 'f' .* is not the last branch of layer 3"):
        settings(f"{MIXED} --pipeline-model-parallel-size 2 {CUT} Etta|ftL", 2)


def weights_of(rank, world_size, argv):
    """Bytes of this rank's weights."""
    from megatron.training.checks.self_checks import check_build
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.gpt import GPTTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    cfg = configure(argv, world_size, "fp32")
    groups = initialize_megatron(cfg)
    parts = build_components(cfg, with_synthetic_data(GPTTask, VOCAB_SIZE)(cfg), groups)
    check_build(parts, cfg)
    return groups.pp.rank, sum(p.numel() * p.element_size() for chunk in parts.model for p in chunk.parameters())


def test_memory_and_the_check_after_the_build_know_it(gloo_pool):
    one = LAYOUTS["pp4-three-stages-of-one-layer"]
    expected = estimate_memory(configure(one.argv, 4, "fp32"), VOCAB_SIZE)
    for rank, size in gloo_pool.run(weights_of, 4, one.argv):
        assert size == expected[rank].weights


def missing(rank, world_size, argv):
    from megatron.training.checks.self_checks import BuildError
    from tests.test_utils import layout_faults

    with layout_faults.dropped_half(rank), pytest.raises(BuildError) as error:
        weights_of(rank, world_size, argv)
    return str(error.value)


def test_a_branch_that_no_rank_holds_is_named(gloo_pool):
    argv = Layout(MIXED, f"{PP2} {CUT} Ettaa|ftL", 2).argv
    assert "the feed-forward branch of layer 4 is on no rank" in gloo_pool.run(missing, 2, argv)[0]


# ---- whole programs


def train(pool, world_size, dataset, save, *flags):
    argv = [*f"--num-layers 4 {SPEC} --split 80,10,10 --save-interval 4".split(), "--data-path", str(dataset),
            "--save", str(save), *map(str, flags)]  # fmt: skip
    for code, errors in pool.run(train_with_errors, world_size, argv, True):
        assert code == 0, errors
    return save


def test_a_run_resumes_bit_for_bit_and_goes_on_in_any_layout(gloo_pool, dataset, tmp_path):
    full = train(gloo_pool, 1, dataset, tmp_path / "whole")
    parts = tmp_path / "parts"
    train(gloo_pool, 1, dataset, parts, "--exit-interval", 4)
    first = (parts / "metrics.jsonl").read_bytes()
    train(gloo_pool, 1, dataset, parts, "--load", parts)
    assert (parts / "metrics.jsonl").read_bytes() == (full / "metrics.jsonl").read_bytes() > first
    other = tmp_path / "other"
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer --ckpt-step 4"
    train(gloo_pool, 4, dataset, other, "--load", full, *layout.split())
    np.testing.assert_allclose(losses(other), losses(full)[4:], rtol=1e-11)


def test_a_checkpoint_of_other_settings_of_its_layers_is_rejected():
    """The description names them, a script's own flags among them, in place of a list in the library."""
    described = settings(MIXED).describe(VOCAB_SIZE)
    assert {"gate_width", "ffn_hidden_size", "rotary_base"} <= set(described.settings)
    stored, current = ({"extra": {"gate_width": width}, "explicit": []} for width in (2, 3))
    check_args({"args": stored}, dict(stored), "here", architecture=described.settings)
    with pytest.raises(CheckpointError, match="another architecture: gate_width is 3, the checkpoint has 2"):
        check_args({"args": stored}, current, "here", architecture=described.settings)
    assert weight_settings(described) == described.settings
    unknown = settings("--num-layers 3 --spec tests.test_utils.gated_recurrence undescribed_layers").describe(9)
    assert {*ARCHITECTURE} <= {*weight_settings(unknown)}


PROGRAM = """
from functools import partial
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from tests.test_utils.gated_recurrence import mixed_layers


def model_provider(pre_process=True, post_process=True):
    config = core_transformer_config_from_args(get_args())
    return GPTModel(config, mixed_layers(config), 64, 32, pre_process, post_process)


def datasets(sizes):
    config = GPTDatasetConfig(random_seed=1, sequence_length=32, split="1,1,1", tokenizer=get_tokenizer())
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


def loss_func(batch, losses):
    loss, count = losses.sum(), torch.tensor(float(losses.numel()))
    return loss, count, {"lm loss": torch.stack([loss.detach(), count])}


def forward_step(batches, model):
    batch = next(batches)
    return model(batch["tokens"], batch["position_ids"], labels=batch["labels"]), partial(loss_func, batch)


pretrain(datasets, model_provider, ModelType.encoder_or_decoder, forward_step)
"""


@pytest.mark.parametrize("ranks, flags", [(1, ""), (2, "--pipeline-model-parallel-size 2")])
def test_program_with_a_custom_model_provider_trains_it(warm_python, tmp_path, ranks, flags):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [warm_python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
               str(tmp_path / "program.py"), *MODEL_FLAGS, "--num-layers", "3", "--train-iters", "3",
               "--log-interval", "1", *flags.split()]  # fmt: skip
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "iteration        3/" in done.stdout + done.stderr, done.stderr[-3000:]


def test_the_library_does_not_name_it():
    for path in (ROOT / "megatron").rglob("*.py"):
        text = path.read_text().lower()
        assert "gatedrecurrence" not in text and "gated_recurrence" not in text, path


# ---- context parallelism


class Redefined(GatedRecurrence):
    def forward(self, x, ctx):
        return super().forward(x, ctx)


class Renamed(GatedRecurrence):
    """Does not override ``forward``, so that the declaration still covers it."""


@pytest.mark.parametrize(
    "kind, orders",
    [
        (LocalRecurrence, ()), (GatedRecurrence, ("zigzag", "contiguous")), (Redefined, ()),
        (Renamed, ("zigzag", "contiguous")), (ContiguousRecurrence, ("contiguous",)),
        (SelfAttention, ("zigzag", "contiguous")), (MLP, ("zigzag", "contiguous")),
        (MoELayer, ("zigzag", "contiguous")), (TransformerLayer, ("zigzag", "contiguous")), (torch.nn.Identity, ()),
    ],
)  # fmt: skip
def test_token_layouts_are_declared_for_the_forward_that_runs(kind, orders):
    assert tuple(order for order in ("zigzag", "contiguous") if layout_problem(kind, order) is None) == orders


REJECTED = {
    "local_layers": r"LocalRecurrence, which sees only this rank's part of a sequence.*mixes_tokens",
    "contiguous_layers": r"ContiguousRecurrence, which takes contiguous layouts, not zigzag",
}


@pytest.mark.parametrize("layers", REJECTED)
def test_dry_run_rejects_a_mixer_that_does_not_declare_the_layout(layers):
    flags = f"{MIXED.replace('mixed_layers', layers)} --context-parallel-size 2"
    with pytest.raises(ConfigError, match=f"--context-parallel-size 2.*{REJECTED[layers]}"):
        settings(flags, 2)


def _reason(rank, world_size, argv):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from tests.test_utils.gated_recurrence import local_layers

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    config = configure(argv, world_size, "fp32").model
    config = dataclasses.replace(config, context_parallel_size=2)
    try:
        GPTModel(config, local_layers(config), VOCAB_SIZE, 64)
    except UserError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return None


def test_a_model_rejects_an_undeclared_mixer_under_context_parallelism(gloo_pool):
    for reason in gloo_pool.run(_reason, 2, Layout(MIXED, "--micro-batch-size 2", 2).argv):
        assert reason is not None and "LocalRecurrence" in reason and "context_parallel_size 2" in reason


def scanned(rank, size, order):
    """Return the relative difference of this rank's states and gradients to its part of one rank's."""
    from megatron.core import parallel_state

    groups = parallel_state.initialize_model_parallel(context_parallel_size=size)
    layout = TokenLayout.of(groups, order=order)
    shape, generator = (16, 2, 8), torch.Generator().manual_seed(1)
    keep, new, grad = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    results = []
    for local in (TokenLayout(), layout):
        leaves = [local.local(x, 0).clone().requires_grad_() for x in (keep, new)]
        states = scan(*leaves, local)
        states.backward(local.local(grad, 0))
        results.append([states.detach(), *(x.grad for x in leaves)])
    return max(
        ((layout.local(one, 0) - actual).norm() / one.norm()).item() for one, actual in zip(*results, strict=True)
    )


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [2, 4])
def test_states_pass_between_ranks_in_either_order(gloo_pool, size, order):
    assert max(gloo_pool.run(scanned, size, order)) < 1e-14


def test_states_that_do_not_pass_between_ranks_are_found(matrix):
    one = dataclasses.replace(LAYOUTS["cp2"], steps=1)
    assert not matrix.verdict(one, "states_begin_at_zero_on_every_rank").equal
