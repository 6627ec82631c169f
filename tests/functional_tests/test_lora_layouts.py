"""Low-rank adapters: every layout equals one rank; initial values, frozen base, resuming, memory."""

import pytest
import torch

from megatron.core.config.cli import ConfigError
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.training.report.memory import estimate_memory
from tests.functional_tests.test_model_transforms import inspect
from tests.test_utils.gpt_runs import losses, train, train_with_errors
from tests.test_utils.layouts import FEW_STEPS, MODEL, VOCAB_SIZE, Layout, configure

VOCABULARY = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]
TP2, PP2 = (f"--{axis}-model-parallel-size 2" for axis in ("tensor", "pipeline"))
CUT = "--pipeline-model-parallel-layout E|ttttL"
SP, CP2, VPP2 = "--sequence-parallel", "--context-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention"
LLAMA += " --num-query-groups 2 --untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-shared-expert-intermediate-size 24"
LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4"
LATENT += " --v-head-dim 8 --position-embedding-type rope --normalization RMSNorm"
MODELS = {
    "gpt": "",
    "llama": LLAMA,
    "one key head": LLAMA.replace("groups 2", "groups 1"),
    "experts": f"{LLAMA} {EXPERTS}",
    "latent": LATENT,
    "recurrent": f"{LLAMA} --hybrid-layer-pattern GKM* --linear-num-key-heads 2 --linear-num-value-heads 2"
    " --linear-key-head-dim 6 --linear-value-head-dim 4 --mamba-num-heads 4 --mamba-head-dim 6 --mamba-num-groups 2"
    " --mamba-state-dim 5",
}
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --micro-batch-size 8"
ROWS = {
    "TP 2": ("llama", f"{TP2} --micro-batch-size 4", 2),
    "TP 2 + SP": ("llama", f"{TP2} {SP} --micro-batch-size 4", 2),
    "TP 2, biases": ("gpt", f"{TP2} --micro-batch-size 4", 2),
    "TP 2, shared key head": ("one key head", f"{TP2} --micro-batch-size 4", 2),
    "TP 2 + SP, shared key head": ("one key head", f"{TP2} {SP} --micro-batch-size 4", 2),
    "TP 2 + SP, overlap": ("llama", f"{TP2} {SP} --tp-comm-overlap --micro-batch-size 4", 2),
    "PP 2": ("llama", f"{PP2} --micro-batch-size 2", 2),
    "PP 2 x VPP 2": ("llama", f"{PP2} {VPP2} --micro-batch-size 2", 2),
    "zero bubble": ("llama", f"{PP2} --pipeline-schedule zero-bubble --micro-batch-size 1", 2),
    "PP 2, a stage without adapters": ("llama", f"{PP2} {CUT} --micro-batch-size 2", 2),
    "CP 2": ("llama", f"{CP2} --micro-batch-size 8", 2),
    "EP 2": ("experts", "--expert-model-parallel-size 2 --micro-batch-size 4", 2),
    "EP 2, TP 2 + SP": (
        "experts",
        f"--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {TP2} {SP} --micro-batch-size 4",
        2,
    ),
    "MLA, TP 2": ("latent", f"{TP2} --micro-batch-size 4", 2),
    "MLA, TP 2 + SP": ("latent", f"{TP2} {SP} --micro-batch-size 4", 2),
    "recurrent, TP 2": ("recurrent", f"{TP2} --micro-batch-size 4", 2),
    "recurrent, TP 2 + SP": ("recurrent", f"{TP2} {SP} --micro-batch-size 4", 2),
    "recurrent, PP 2": ("recurrent", f"{PP2} --micro-batch-size 4", 2),
    "recurrent, CP 2": ("recurrent", f"{CP2} --micro-batch-size 8", 2),
    "recurrent, FSDP2": ("recurrent", "--use-torch-fsdp2 --micro-batch-size 4", 2),
    "DP 2, ZeRO-1": ("llama", f"{ZERO} --micro-batch-size 2", 2),
    "FSDP2": ("llama", "--use-torch-fsdp2 --micro-batch-size 4", 2),
    "full recomputation": ("llama", RECOMPUTE, 1),
    "TP 2 + SP, PP 2": ("llama", f"{TP2} {SP} {PP2} --micro-batch-size 2", 4),
}
EXPERT_LAYERS = "--lora-target-modules linear_qkv experts.linear_fc1 experts.linear_fc2"
VARIANTS = {
    "": "--lora-alpha 8", "dropout": "--lora-alpha 8 --lora-dropout 0.2", "experts": EXPERT_LAYERS,
    "rsLoRA": "--lora-use-rslora", "DoRA": "--lora-use-dora",
}  # fmt: skip
DORA_ROWS = (
    "TP 2 + SP", "TP 2, biases", "TP 2, shared key head", "PP 2", "DP 2, ZeRO-1", "FSDP2", "MLA, TP 2 + SP",
    "recurrent, TP 2",
)  # fmt: skip
EXPERT_ROWS = {
    "EP 2": ("experts", "--expert-model-parallel-size 2 --micro-batch-size 4", 2),
    "ETP 2": ("experts", f"--expert-tensor-parallel-size 2 {TP2} {SP} --micro-batch-size 4", 2),
    "EP 2 x ETP 2, TP 2": (
        "experts",
        f"--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 {TP2} {SP} --micro-batch-size 2",
        4,
    ),
    "zero bubble": ("experts", f"{PP2} --pipeline-schedule zero-bubble --micro-batch-size 1", 2),
    "EP 2, ZeRO-1": ("experts", f"{ZERO} --expert-model-parallel-size 2 --micro-batch-size 2", 2),
    "FSDP2": ("experts", "--use-torch-fsdp2 --micro-batch-size 4", 2),
    "recomputed MoE": ("experts", "--recompute-granularity selective --recompute-modules moe --micro-batch-size 8", 1),
}
ROWS.update({f"experts, {name}": row for name, row in EXPERT_ROWS.items()})
CASES = [(name, "experts" if name.startswith("experts,") else "") for name in ROWS]
ROWS["recomputed MLP, PP 2"] = (
    "llama",
    f"{PP2} --recompute-granularity selective --recompute-modules mlp --micro-batch-size 2",
    2,
)
DROPOUT_ROWS = (
    "TP 2 + SP", "TP 2 + SP, shared key head", "MLA, TP 2 + SP", "CP 2", "EP 2", "DP 2, ZeRO-1", "FSDP2",
    "full recomputation", "recomputed MLP, PP 2",
)  # fmt: skip
CASES += [(name, "dropout") for name in DROPOUT_ROWS]
CASES += [(name, "DoRA") for name in DORA_ROWS] + [("TP 2 + SP", "rsLoRA"), ("recurrent, TP 2 + SP", "dropout")]


@pytest.fixture(scope="module")
def bases(gloo_pool, tmp_path_factory):
    """Folders of trained models by name, made when they are needed."""
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("base")
            argv = [*MODEL, *MODELS[name].split(), "--mock-data", "--vocab-size", str(VOCAB_SIZE)]
            argv += [
                "--train-iters",
                "2",
                "--lr-warmup-iters",
                "0",
                "--micro-batch-size",
                "4",
                "--save",
                str(folders[name]),
            ]
            assert gloo_pool.run(train, 1, argv, True) == [0]
        return folders[name]

    return folder


def row(bases, name, variant=""):
    model, layout, ranks = ROWS[name]
    flags = f"{MODELS[model]} --pretrained-checkpoint {bases(model)} --lora-rank 4 {VARIANTS[variant]}"
    return Layout(f"{flags} --hidden-dropout 0.1", layout, ranks, steps=FEW_STEPS)


@pytest.mark.parametrize("name, variant", CASES, ids=[" ".join(case) for case in CASES])
def test_every_layout_equals_one_rank(matrix, bases, name, variant):
    verdict = matrix.verdict(row(bases, name, variant))
    assert verdict.equal, verdict.first
    trained = {name.rpartition(".")[2] for _, name in [verdict.rows[-1]["gradient"]]}
    assert trained <= {"lora_a", "lora_b", "lora_magnitude"} and verdict.rows[-1]["norm"] > 0


# ---- frozen base, memory


@pytest.mark.parametrize("name, variant", [
    ("TP 2 + SP, PP 2", ""), ("PP 2, a stage without adapters", ""), ("TP 2, shared key head", "DoRA"), ("EP 2", ""),
    ("recurrent, TP 2 + SP", ""),
])  # fmt: skip
def test_frozen_base_has_no_gradients_and_estimated_bytes_are_exact(gloo_pool, bases, name, variant):
    one = row(bases, name, variant)
    results = gloo_pool.run(inspect, one.world_size, one)
    estimate = estimate_memory(configure(one.argv, one.world_size, "fp64"), VOCAB_SIZE)
    for rank, (trained, buffers, state, size, wrong) in enumerate(results):
        memory = estimate[rank * len(estimate) // one.world_size]
        assert not wrong and all("adapter.lora_" in name for name in trained)
        assert trained or (rank == 0 and "without" in name), rank
        assert (memory.weights, memory.gradients, memory.optimizer) == (size * 8, buffers * 8, state * 8)


def sharded_bytes(rank, world_size, one):
    """A task of the pool: bytes of this rank's shards by dtype, after a step."""
    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.exits.conditions import ExitConditions
    from megatron.training.initialize import initialize_megatron
    from megatron.training.run import build_components
    from megatron.training.tasks.language_model import task_class
    from megatron.training.trainer import Trainer

    cfg = configure([*one.argv, "--mock-data", *VOCABULARY], world_size, one.precision)
    groups = initialize_megatron(cfg)
    parts = build_components(cfg, task_class("gpt")(cfg, build_tokenizer(cfg.tokenizer)), groups)
    with ExitConditions(cfg) as exits:
        Trainer(cfg, parts, exits).step.run()
    sizes = {True: {}, False: {}}
    for chunk in parts.model:
        chunk.finish_param_sync()
        for parameter in chunk.parameters():
            of_kind, local = sizes[parameter.requires_grad], parameter.to_local()
            of_kind[local.dtype] = of_kind.get(local.dtype, 0) + local.numel() * local.element_size()
    return sizes


def test_shards_of_a_frozen_base_have_half_precision_and_estimated_bytes_are_exact(gloo_pool, bases):
    one = row(bases, "FSDP2")
    one = Layout(f"{one.model} --bf16", one.layout, 2, precision="bf16", steps=FEW_STEPS)
    results = gloo_pool.run(sharded_bytes, 2, one)
    (estimate,) = estimate_memory(configure(one.argv, 2, "bf16"), VOCAB_SIZE)
    for sizes in results:
        assert [*sizes[True]] == [torch.float32] and [*sizes[False]] == [torch.bfloat16]
    assert estimate.weights == max(sizes[True][torch.float32] + sizes[False][torch.bfloat16] for sizes in results)


# ---- checkpoints


RUN = ["--mock-data", *VOCABULARY, "--num-layers", "4", "--train-iters", "4", "--save-interval", "2"]
RUN += ["--global-batch-size", "4"]
TO_RUN = ["--lora-rank", "4", "--lora-alpha", "8", "--lora-use-dora"]


def run(gloo_pool, base, folder, *flags, model="llama", layout="", ranks=1, fp64=True):
    argv = [*RUN, *MODELS[model].split(), *layout.split(), "--pretrained-checkpoint", base, *TO_RUN, "--save", folder]
    assert gloo_pool.run(train, ranks, [str(word) for word in (*argv, *flags)], fp64) == [0] * ranks
    return CheckpointReader(folder / "iter_0000004")


@pytest.mark.parametrize("model, layout, ranks", [
    ("llama", "", 1), ("llama", f"{TP2} {SP} {PP2} --bf16", 4), ("llama", "--use-torch-fsdp2 --bf16", 2),
    ("recurrent", f"{TP2} {SP} {ZERO} --bf16", 4),
], ids=["one rank", "TP, PP, bf16", "FSDP2, bf16", "recurrent, TP, ZeRO-1, bf16"])  # fmt: skip
def test_resuming_changes_no_bit(gloo_pool, bases, tmp_path, model, layout, ranks):
    def continued(folder, *flags):
        fp64 = "bf16" not in layout
        return run(gloo_pool, bases(model), folder, *flags, model=model, layout=layout, ranks=ranks, fp64=fp64)

    complete, parts = tmp_path / "complete", tmp_path / "parts"
    expected = continued(complete)
    with pytest.raises(CheckpointError):
        continued(parts, "--exit-interval", 2)
    resumed = continued(parts, "--load", parts)
    assert (complete / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    assert expected.names == resumed.names and len(expected.names) > 40
    for name in expected.names:
        assert torch.equal(*(reader.read(name).view(torch.uint8) for reader in (expected, resumed))), name


def test_checkpoints_hold_adapters_name_their_base_and_load_in_other_layouts(gloo_pool, bases, tmp_path):
    base = bases("llama")
    expected = run(gloo_pool, base, tmp_path / "one")
    weights = [name for name in expected.names if name.startswith("model.")]
    assert len(weights) == 4 * 4 * 3 and all("adapter.lora_" in name for name in weights)
    assert expected.objects["base"]["folder"] == str(base)
    layouts = {f"{TP2} {SP} {PP2}": 4, ZERO: 2, "--use-torch-fsdp2": 2}
    for index, (layout, ranks) in enumerate(layouts.items()):
        flags = ("--load", tmp_path / "one", "--ckpt-step", 2)
        resumed = run(gloo_pool, base, tmp_path / str(index), *flags, layout=layout, ranks=ranks)
        for name in weights:
            assert resumed.shape(name) == expected.shape(name)
            torch.testing.assert_close(resumed.read(name), expected.read(name), rtol=1e-9, atol=1e-12)


def test_resharding_changes_no_bit(gloo_pool, bases, tmp_path):
    """TP 2 -> one rank -> PP 2 -> FSDP2 without updates of the weights, then training with ZeRO-1."""
    layouts = {f"{TP2} {SP}": 2, "": 1, PP2: 2, "--use-torch-fsdp2": 2, ZERO: 2}
    readers, folder = [], None
    for step, (layout, ranks) in enumerate(layouts.items(), 2):
        flags = ["--train-iters", 6, "--exit-interval", step, "--save-interval", 1, "--eval-iters", 0]
        flags += ["--iterations-to-skip", 3, 4, 5]
        source = () if folder is None else ("--load", folder)
        folder = tmp_path / str(step)
        argv = [*RUN, *MODELS["llama"].split(), *layout.split(), "--pretrained-checkpoint", bases("llama"), *TO_RUN]
        argv += ["--save", folder, *source, *flags]
        assert gloo_pool.run(train, ranks, list(map(str, argv)), True) == [0] * ranks
        readers.append(CheckpointReader(folder / f"iter_{step:07}"))
    first, *resharded, trained = readers
    assert all(reader.names == first.names for reader in readers) and len(first.names) > 40 * 3
    state = [name for name in first.names if not name.startswith("rng.")]
    for reader in resharded:
        for name in state:
            assert torch.equal(*(of.read(name).view(torch.uint8) for of in (first, reader))), name
    assert all(not torch.equal(first.read(name), trained.read(name)) for name in first.names if "lora_b" in name)


def rejected(gloo_pool, *flags):
    argv = [*RUN, *MODELS["llama"].split(), *map(str, flags)]
    ((code, errors),) = gloo_pool.run(train_with_errors, 1, argv, True)
    assert code != 0 and errors.count("error:") == 1
    return errors


def test_checkpoints_that_do_not_fit_are_rejected(gloo_pool, bases, tmp_path):
    base, adapters, save = bases("llama"), tmp_path / "adapters", tmp_path / "run"
    run(gloo_pool, base, adapters)
    other = tmp_path / "other"
    argv = [*RUN, *MODELS["llama"].split(), "--seed", "7", "--save", str(other)]
    assert gloo_pool.run(train, 1, argv, True) == [0]
    with_other = ("--pretrained-checkpoint", other, *TO_RUN, "--load", adapters, "--save", save)
    assert f"adapters of another base than {other}: give '{base}'" in rejected(gloo_pool, *with_other)
    full_model = ("--pretrained-checkpoint", base, *TO_RUN, "--load", other, "--save", save)
    assert f"{other}/iter_0000004 contains a full model without adapters" in rejected(gloo_pool, *full_model)
    assert "contains adapters only: add --lora-rank" in rejected(gloo_pool, "--load", adapters, "--save", save)
    teacher = rejected(gloo_pool, "--export-kd-teacher-load", adapters)
    assert f"--export-kd-teacher-load {adapters}: contains adapters only; merge them" in teacher
    as_base = rejected(gloo_pool, "--pretrained-checkpoint", adapters, *TO_RUN, "--save", save)
    assert f"{adapters}/iter_0000004: contains adapters only; merge them with megatron lora merge" in as_base
    rank = ("--pretrained-checkpoint", base, "--lora-rank", "2", "--load", adapters, "--save", save)
    assert "lora_rank is 2, the checkpoint has 4" in rejected(gloo_pool, *rank)
    assert not list(save.glob("iter_*"))


# ---- flags


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--lora-rank 4", "--lora-rank 4: trains adapters of a trained model, and none is given; add --load-hf"),
        ("--lora-alpha 4", "--lora-alpha 4.0: has no effect without --lora-rank; add --lora-rank"),
        ("{base} --lora-target-modules linear_q", "linear_q matches no linear layer .* choose from linear_qkv"),
        ("{base} --qk-clip", "--lora-rank 4: is not supported with --qk-clip; remove one of them"),
        ("{base} --batch-invariant-mode", "is not supported with --batch-invariant-mode"),
        (
            f"{{base}} {EXPERTS} {EXPERT_LAYERS} --lora-use-dora",
            r"--lora-use-dora: is not supported for experts, such as decoder.layers.0.mlp.experts.linear_fc1; remove",
        ),
        ("--lora-dropout 0.1", "--lora-dropout 0.1: has no effect without --lora-rank"),
        (f"{{base}} {EXPERTS} {EXPERT_LAYERS} --lora-dropout 0.1", "--lora-dropout 0.1: is not supported for experts"),
        ("{base} --lora-rank 0", "--lora-rank 0"),
    ],
)  # fmt: skip
def test_flags_that_contradict_are_rejected(tmp_path, flags, message):
    flags = flags.replace("{base}", f"--lora-rank 4 --pretrained-checkpoint {tmp_path}")
    with pytest.raises(ConfigError, match=message):
        configure([*MODEL, "--micro-batch-size", "1", *LLAMA.split(), *flags.split()], 1, "fp32")


def test_dropout_of_adapters_is_rejected_with_two_batch_overlap(tmp_path):
    overlap = f"{LLAMA} {TP2} {SP} --tp-comm-overlap --pretrained-checkpoint {tmp_path} --lora-rank 4"
    argv = [*MODEL, "--micro-batch-size", "2", *overlap.split()]
    assert configure(argv, 2, "fp32").model.tp_comm_overlap
    with pytest.raises(ConfigError, match="--tp-comm-overlap: is not supported with --lora-dropout"):
        configure([*argv, "--lora-dropout", "0.1"], 2, "fp32")


def test_targets_are_names_or_patterns(tmp_path):
    def adapted(*targets):
        base = ["--pretrained-checkpoint", str(tmp_path), "--lora-rank", "4", "--lora-target-modules", *targets]
        description = configure([*MODEL, "--micro-batch-size", "1", *base], 1, "fp32").describe(VOCAB_SIZE)
        return [param.name for param in description.params() if param.name.endswith("lora_a")]

    assert len(adapted("linear_qkv", "linear_fc2")) == 8
    assert adapted("*.layers.3.*.linear_fc1") == ["decoder.layers.3.mlp.linear_fc1.adapter.lora_a"]


# ---- fp8


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_first_loss_on_a_base_in_fp8_equals_the_loss_of_full_training(gloo_pool, tmp_path, recipe):
    """B is zero. Losses of later steps differ."""
    sizes = "--hidden-size 128 --ffn-hidden-size 256 --num-layers 2 --seq-length 64 --max-position-embeddings 64"
    model = [*RUN, *LLAMA.split(), *sizes.split(), "--bf16", "--micro-batch-size", "2", "--log-interval", "1"]
    base = tmp_path / "base"
    assert gloo_pool.run(train, 1, [*model, "--save", str(base)]) == [0]
    model += ["--fp8-format", "e4m3", "--fp8-recipe", recipe, "--pretrained-checkpoint", str(base)]
    traces = []
    for name, flags in (("full", []), ("adapters", ["--lora-rank", "4"])):
        assert gloo_pool.run(train, 1, [*model, *flags, "--save", str(tmp_path / name)]) == [0]
        traces.append(losses(tmp_path / name))
    assert traces[0][0] == traces[1][0] and traces[0][1:] != traces[1][1:] and len(traces[1]) == 4
