"""Frozen models next to the trained one: a student learns the distribution of a smaller teacher of another depth."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron.core.config.cli import ConfigError
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.variable_lengths import flops_by_length
from megatron.training.report.dry_run import dry_run_report
from megatron.training.report.memory import estimate_memory
from megatron.training.report.pipeline import run_stages
from megatron.training.report.plan.cluster import build_cluster
from megatron.training.report.plan.step_time import predict_step, stage_times
from tests.reference import data, settings
from tests.reference.model import Model
from tests.test_utils.gpt_runs import read_records, train, train_with_errors
from tests.test_utils.layouts import FEW_STEPS, MODEL, VOCAB_SIZE, Layout, running

FAMILY = "tests.test_utils.toy_distillation.family"
VOCABULARY = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]
TEACHER = [
    "--num-layers", "6", "--hidden-size", "16", "--num-attention-heads", "2", "--ffn-hidden-size", "24", "--swiglu",
    "--normalization", "RMSNorm", "--untie-embeddings-and-output-weights", "--init-method-std", "0.3",
    "--position-embedding-type", "rope", "--disable-bias-linear",
]  # fmt: skip
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
TP2, PP2, CP2 = (f"--{axis}-parallel-size 2" for axis in ("tensor-model", "pipeline-model", "context"))
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = {
    "TP 2": (f"{TP2} --micro-batch-size 4", 2),
    "TP 2 + SP": (f"{TP2} --sequence-parallel --micro-batch-size 4", 2),
    "PP 2": (f"{PP2} --micro-batch-size 2", 2),
    "PP 2 x VPP 2": (f"{VPP2} --micro-batch-size 2", 2),
    "PP 2, zero bubble, whole layers": (
        f"{PP2} --pipeline-schedule zero-bubble --whole-layers-in-pipeline-split --micro-batch-size 1", 2,
    ),
    "CP 2": (f"{CP2} --micro-batch-size 8", 2),
    "DP 2, ZeRO-1": (f"{ZERO} --micro-batch-size 2", 2),
    "FSDP2": ("--use-torch-fsdp2 --micro-batch-size 4", 2),
    "TP 2 + SP, PP 2": (f"{TP2} --sequence-parallel {PP2} --micro-batch-size 2", 4),
}  # fmt: skip


EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss"
    + (" --moe-aux-loss-coeff 0.1")
)


@pytest.fixture(scope="module")
def teacher(gloo_pool, tmp_path_factory):
    """Folder of a teacher in fp64."""
    return trained_teacher(gloo_pool, tmp_path_factory)


@pytest.fixture(scope="module")
def teacher_with_experts(gloo_pool, tmp_path_factory):
    return trained_teacher(gloo_pool, tmp_path_factory, EXPERTS)


def trained_teacher(gloo_pool, tmp_path_factory, flags=""):
    folder = tmp_path_factory.mktemp("teacher")
    argv = [
        *TEACHER,
        *flags.split(),
        *VOCABULARY,
        "--mock-data",
        "--train-iters",
        "1",
        "--lr-warmup-iters",
        "0",
        "--eval-iters",
        "0",
        "--save",
        str(folder),
    ]
    assert gloo_pool.run(train, 1, argv, True) == [0]
    return folder


def flat(name, tensor):
    """Return a weight as a matrix [out, in], a bias as a vector: checkpoints keep the blocks of a split dimension."""
    return tensor.flatten() if name.endswith(".bias") or tensor.dim() == 1 else tensor.flatten(0, -2)


def teacher_weights(folder):
    reader = CheckpointReader(folder / "iter_0000001")
    return {name.removeprefix("model."): reader.read(name) for name in reader.names if name.startswith("model.")}


def row(teacher, layout, ranks, model=DROPOUT):
    flags = " ".join([model, f"--teacher {teacher}", *VOCABULARY])
    return Layout(flags, layout, ranks, steps=FEW_STEPS, family=FAMILY)


@pytest.mark.parametrize("layout, ranks", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_equals_one_rank(matrix, teacher, layout, ranks):
    verdict = matrix.verdict(row(teacher, layout, ranks))
    assert verdict.equal, verdict.first


TOKEN_LOSSES = "tests.test_utils.toy_distillation.task:with_token_losses"


@pytest.mark.parametrize(
    "layout", [PP2, f"{PP2} --no-overlap-p2p-communication", CP2], ids=["PP 2", "no overlap", "CP 2"]
)
def test_samples_of_different_lengths_with_token_losses_equal_one_rank(matrix, teacher, layout):
    """The forward step of GPT: both models get the labels and return token losses."""
    model = f"{DROPOUT.replace('0.1', '0', 1)} --use-varlen-dataset --micro-batch-size 1"
    verdict = matrix.verdict(dataclasses.replace(row(teacher, layout, 2, model), wrap=TOKEN_LOSSES))
    assert verdict.equal, verdict.first


EP2 = "--expert-model-parallel-size 2"


@pytest.mark.parametrize(
    "student, layout, ranks",
    [
        (EXPERTS, f"{EP2} {VPP2} --micro-batch-size 1", 4),
        ("", f"{TP2} --sequence-parallel --micro-batch-size 2", 2),
    ],
    ids=["EP 2, PP 2 x VPP 2", "dense student, TP 2 + SP"],
)
def test_a_teacher_with_experts_equals_one_rank(matrix, teacher_with_experts, student, layout, ranks):
    """Its auxiliary losses are not part of the loss."""
    model = f"{DROPOUT} {student}"
    verdict = matrix.verdict(dataclasses.replace(row(teacher_with_experts, layout, ranks, model), wrap=TOKEN_LOSSES))
    assert verdict.equal, verdict.first


def test_a_dense_teacher_of_a_student_with_experts_equals_one_rank(matrix, teacher):
    one = row(teacher, f"{EP2} --micro-batch-size 4", 2, f"{DROPOUT} {EXPERTS}")
    verdict = matrix.verdict(dataclasses.replace(one, wrap=TOKEN_LOSSES))
    assert verdict.equal, verdict.first


# ---- the definition


PLAIN = "--attention-dropout 0 --hidden-dropout 0 --weight-decay 0 --clip-grad 0 --lr-decay-style constant" + (
    " --lr-warmup-iters 0"
)


class Logits(Model):
    """The definition's logits instead of its losses."""

    def cross_entropy(self, x, labels):
        return self.logits(x)


def plain_training(c, weights, teacher, teacher_settings, batches):
    """Yield the loss, the gradients and the weights of every step, computed in plain torch with two models."""
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=c.lr, eps=c.adam_eps, weight_decay=0)
    for batch in batches:
        student = Logits(c, weights, batch, {}, len(batch.tokens), training=False).losses().log_softmax(-1)
        target = Logits(teacher_settings, teacher, batch, {}, len(batch.tokens), training=False).losses()
        mask = torch.from_numpy(batch.loss_mask)
        kl = torch.nn.functional.kl_div(student, target.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        loss = (kl * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        gradients = {name: weight.grad.clone() for name, weight in weights.items()}
        optimizer.step()
        yield float(loss), gradients, {name: weight.detach().clone() for name, weight in weights.items()}


def one_rank_trace(rank, world_size, one):
    """A task of the pool: losses, gradients and weights by step, and the samples of every global batch."""
    from megatron.training.tasks.language_model import task_class
    from megatron.training.verify.layout_trace import SyntheticSamples, build_reference
    from tests.test_utils.layouts import configure

    with running(one, world_size) as traces:
        steps = [dataclasses.asdict(step) for step in build_reference(traces)]
    task = task_class(FAMILY)(configure(one.argv, 1, "fp64", FAMILY))
    samples = SyntheticSamples(task, 1 << 20)
    return steps, [[samples[8 * step + index] for index in range(8)] for step in range(one.steps)]


def test_one_rank_equals_two_models_in_plain_torch(gloo_pool, teacher):
    one = row(teacher, "--micro-batch-size 4", 1, PLAIN)
    ((trace, samples),) = gloo_pool.run(one_rank_trace, 1, one)
    batches = []
    for rows in samples:
        columns = {name: np.stack([sample[name] for sample in rows]) for name in rows[0]}
        shape = columns["tokens"].shape
        places = columns["position_ids"], np.zeros(shape, dtype=np.int64), np.arange(len(rows))
        batches.append(data.Batch(columns["tokens"], columns["labels"], columns["loss_mask"], *places))
    workers = MODEL.index("--num-workers")  # unknown to the definition
    student = settings.read([*MODEL[:workers], *MODEL[workers + 2 :], *PLAIN.split(), *VOCABULARY[2:]])
    target = settings.read([*TEACHER, *VOCABULARY[2:], *MODEL[MODEL.index("--seq-length") :][:6], "--lr", "1"])
    initial, fixed = trace[0]["tensors"]["weight"], teacher_weights(teacher)
    both = ({name: flat(name, weight) for name, weight in weights.items()} for weights in (initial, fixed))
    expected = plain_training(student, *both, target, batches)
    for step, (loss, gradients, weights) in zip(trace[1:], expected, strict=True):
        assert step["losses"]["kl"] == pytest.approx(loss, rel=1e-11) and loss > 0.05
        for kind, tensors in (("gradient", gradients), ("weight", weights)):
            assert tensors.keys() == step["tensors"][kind].keys()
            for name, tensor in tensors.items():
                scale = float(tensor.abs().max()) or 1.0
                difference = float((flat(name, step["tensors"][kind][name]) - tensor).abs().max())
                assert difference <= 1e-10 * scale, (kind, name)


# ---- weights, checkpoints, memory


def train_and_inspect(rank, world_size, one, path):
    """A task of the pool: train a step; (differences of the teacher's shards from its checkpoint, bytes of its weights,
    training modes and gradient flags of its modules and parameters, training modes of the stages)."""
    from megatron.core.sharding.sharded_tensor import module_tensors
    from megatron.training.exits.conditions import ExitConditions
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.language_model import task_class
    from megatron.training.trainer import Trainer
    from tests.test_utils.layouts import configure

    cfg = configure([*one.argv, "--mock-data"], world_size, one.precision, one.family)
    groups = initialize_megatron(cfg)
    parts = build_components(cfg, task_class(FAMILY)(cfg), groups)
    with ExitConditions(cfg) as exits:
        trainer = Trainer(cfg, parts, exits)
        trainer.step.run()
        trainer.evaluator.evaluate(parts.valid_sets, "validation", False)
        trainer.step.run()
    (frozen,) = parts.companions
    stored = teacher_weights(path)
    differing = []
    for chunk in frozen.model:
        for shard in module_tensors(chunk, groups=groups).values():
            if not torch.equal(shard.local, shard.rectangle.of(stored[shard.name])):
                differing.append(shard.name)
    parameters = [parameter for chunk in frozen.model for parameter in chunk.parameters()]
    modes = {module.training for chunk in frozen.model for module in chunk.modules()}
    flags = {parameter.requires_grad or parameter.grad is not None for parameter in parameters}
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]
    size = sum(parameter.numel() * parameter.element_size() for parameter in local)
    return differing, size, modes | flags, {chunk.training for chunk in parts.stages}


@pytest.mark.parametrize("name", ["PP 2", "PP 2 x VPP 2", "TP 2 + SP, PP 2", "DP 2, ZeRO-1", "FSDP2"])
def test_the_teacher_stays_as_it_was_and_its_bytes_are_estimated_exactly(gloo_pool, teacher, name):
    from tests.test_utils.layouts import configure

    one = row(teacher, *LAYOUTS[name])
    results = gloo_pool.run(train_and_inspect, one.world_size, one, teacher)
    cfg = configure(one.argv, one.world_size, "fp64", FAMILY)
    estimate = estimate_memory(cfg, VOCAB_SIZE)
    without = estimate_memory(configure([*MODEL, *one.layout.split()], one.world_size, "fp64"), VOCAB_SIZE)
    for rank, (differing, size, modes, stages) in enumerate(results):
        assert not differing and modes == {False} and stages == {True}
        memory, single = (memories[rank * len(estimate) // one.world_size] for memories in (estimate, without))
        assert (memory.frozen, memory.weights) == (size, single.weights + size)
        assert (memory.gradients, memory.optimizer) == (single.gradients, single.optimizer)
        assert memory.activations == single.activations and memory.working > single.working


RUN = ["--mock-data", *VOCABULARY, "--num-layers", "4", "--train-iters", "4", "--save-interval", "2"]


@pytest.mark.parametrize("layout, ranks", [("", 1), (f"{VPP2} --bf16", 2)], ids=["one rank", "interleaved bf16"])
def test_resuming_changes_no_bit_and_the_checkpoint_has_no_teacher(gloo_pool, teacher, tmp_path, layout, ranks):
    def run(folder, *flags):
        argv = [*RUN, *layout.split(), "--teacher", str(teacher), "--save", str(folder), *map(str, flags)]
        assert gloo_pool.run(train, ranks, argv, False, FAMILY) == [0] * ranks

    full, parts = tmp_path / "whole", tmp_path / "parts"
    run(full)
    run(parts, "--exit-interval", 2)
    run(parts, "--load", parts)
    assert (full / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    readers = [CheckpointReader(folder / "iter_0000004") for folder in (full, parts)]
    assert readers[0].names == readers[1].names and len(readers[0].names) > 40
    for name in readers[0].names:
        assert torch.equal(*(reader.read(name).view(torch.uint8) for reader in readers)), name
    layers = {name.split(".layers.")[1].split(".")[0] for name in readers[0].names if ".layers." in name}
    assert layers == {"0", "1", "2", "3"}  # the teacher has six
    assert {read_record["kind"] for read_record in read_records(full / "metrics.jsonl")} >= {"train", "valid"}


def test_a_hugging_face_folder_is_a_teacher(gloo_pool, teacher, tmp_path):
    """The same losses as with the checkpoint that it was exported from."""
    from megatron.console import run_tool

    folder = tmp_path / "hf"
    assert (
        run_tool(
            "convert", ["--loader", "native", "--saver", "hf", "--load-dir", str(teacher), "--save-dir", str(folder)]
        )
        == 0
    )
    for name, path in (("native", teacher), ("exported", folder)):
        argv = [*RUN, "--train-iters", "3", "--teacher", str(path), "--save", str(tmp_path / name)]
        assert gloo_pool.run(train, 1, argv, True, FAMILY) == [0]
    assert (tmp_path / "native" / "metrics.jsonl").read_bytes() == (
        tmp_path / "exported" / "metrics.jsonl"
    ).read_bytes()


def settings_of(teacher, flags="", world_size=1):
    argv = [*MODEL, *VOCABULARY, "--micro-batch-size", "1", "--mock-data", "--teacher", str(teacher), *flags.split()]
    return validate_args(parse_args(argv, model_family=FAMILY), world_size)


def test_the_dry_run_names_the_teacher(teacher):
    report = dry_run_report(settings_of(teacher, f"{PP2} --dry-run"))
    count = sum(weight.numel() for weight in teacher_weights(teacher).values())
    assert f"companion teacher          6 layers, width 16, {count:,} frozen parameters, of {teacher}" in report
    assert "  of weights: frozen models at most 0.00 GiB per rank" in report


def test_flops_and_predicted_times_include_the_forward_pass_of_the_teacher(teacher):
    length, vocabulary = 32, VOCAB_SIZE
    student = length * (4 * (24 * 32**2 + 2 * length * 32) + 2 * 32 * vocabulary)  # a dense GPT layer: 24 h^2 + 2 s h
    frozen = length * (6 * (8 * 16**2 + 6 * 16 * 24 + 2 * length * 16) + 2 * 16 * vocabulary)  # three matrices in MLPs
    cfg = settings_of(teacher, "--dry-run")
    model = cfg.describe(vocabulary)
    assert model.flops_per_sample == 3 * student + frozen
    assert f"{(3 * student + frozen) / length:.4g} FLOPs per token" in dry_run_report(cfg)
    linear, square = flops_by_length(model, length)
    assert linear * length + square * length**2 == pytest.approx(3 * student + frozen)

    cluster, flags = build_cluster("H200", 1, 2), f"{PP2} --bf16"
    times = predict_step(settings_of(teacher, flags, 2), cluster, vocabulary, {})
    argv = [*MODEL, *TEACHER, *VOCABULARY, "--micro-batch-size", "1", "--mock-data", *flags.split()]
    cfg = validate_args(parse_args(argv), 2)
    model = cfg.describe(vocabulary)
    stages = [stage_times(cfg, model, stage, cluster, phases="F") for stage in run_stages(cfg, vocabulary, model)]
    forward = sum(seconds for stage in stages for seconds in stage.values())
    # micro-batches, average of two ranks; waiting for the host depends a little on settings of training
    assert times.parts["frozen models"] == pytest.approx(8 * forward / 2, rel=1e-4)


def test_settings_that_the_teacher_does_not_fit_are_rejected(teacher, gloo_pool, tmp_path):
    with pytest.raises(ConfigError, match=r"companion teacher: --.*num-attention-heads 2: .*\d"):
        settings_of(teacher, "--tensor-model-parallel-size 4", 4)
    assert settings_of(teacher, f"{CP2} --cp-comm-type a2a p2p a2a p2p", 2).companions["teacher"].model.num_layers == 6
    with pytest.raises(ConfigError, match="companion teacher: .*layers"):
        settings_of(teacher, f"{PP2} --num-virtual-stages-per-pipeline-rank 4 --num-layers 8", 2)
    with pytest.raises(ConfigError, match=f"companions {tmp_path}: holds no checkpoint"):
        settings_of(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(teacher, broken)
    weights = max(broken.rglob("*"), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-100])
    argv = [*RUN, "--teacher", str(broken), "--save", str(tmp_path / "run")]
    ((code, errors),) = gloo_pool.run(train_with_errors, 1, argv, False, FAMILY)
    assert code != 0 and str(broken) in errors and not list((tmp_path / "run").glob("iter_*"))
