"""Checkpoints written and read by Megatron Core, against this library. ``MEGATRON_CORE_PYTHON`` names an interpreter
that has it (0.14 or 0.16, and torch for CPUs): both packages are called ``megatron`` and cannot be in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.simple import NullTokenizer
from megatron.export.megatron_lm import (
    load_megatron_torch,
    load_megatron_torch_dist,
    save_megatron_torch_dist,
)

PYTHON = os.environ.get("MEGATRON_CORE_PYTHON")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="MEGATRON_CORE_PYTHON is not set")]
ROOT = Path(__file__).parents[2]
VOCABULARY, LENGTH, BATCH, SWITCH, END = 128, 16, 4, 20, 40
ARGS = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "group_query_attention": True,
    "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "norm_epsilon": 1e-5,
    "vocab_size": 100, "padded_vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "seq_length": LENGTH,
    "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "use_distributed_optimizer": False,
    "lr": 1e-3, "min_lr": 1e-5, "weight_decay": 0.1, "clip_grad": 1.0, "adam_beta2": 0.95, "global_batch_size": BATCH,
    "micro_batch_size": 2, "lr_warmup_iters": 2, "lr_decay_iters": END, "lr_decay_style": "cosine", "train_iters": END,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
}  # fmt: skip
FLAGS = [
    f"--seq-length={LENGTH}", "--micro-batch-size=2", f"--global-batch-size={BATCH}", f"--train-iters={END}",
    "--lr=1e-3", "--min-lr=1e-5", "--lr-warmup-iters=2", f"--lr-decay-iters={END}", "--lr-decay-style=cosine",
    "--weight-decay=0.1",
    "--adam-beta2=0.95", "--mock-data", "--tokenizer-type=NullTokenizer", f"--vocab-size={VOCABULARY}",
    "--eval-iters=0", "--no-use-tokenizer-model-from-checkpoint-args", "--log-interval=1", "--use-checkpoint-args",
    "--no-load-rng",
]  # fmt: skip


def run_there(world, port, tp=1, pp=1, **options):
    """Ranks of Megatron Core."""
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    args = {**ARGS, **options.pop("args", {}), **sizes}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # fmt: skip
    command = [PYTHON, str(ROOT / "tests/test_utils/megatron_core_run.py"), json.dumps({"args": args, **options})]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(rank)}, cwd="/", text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT)
        for rank in range(world)
    ]  # fmt: skip
    try:
        messages = [each.communicate(timeout=240)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    if "Unknown sharding_type" in messages[0]:
        pytest.skip(f"this version has no {options['sharding_type']}")
    assert not any(each.returncode for each in ranks), messages[0][-3000:]


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A run on four ranks up to the switch, in both formats, and its losses from there on."""
    folder = tmp_path_factory.mktemp("there")
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=LENGTH, split="1,1,1", tokenizer=NullTokenizer(VOCABULARY)
    )
    train, _, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, [END * BATCH, 0, 0], lambda: True, config).build()
    samples = [np.append(train[i]["tokens"], train[i]["labels"][-1]) for i in range(END * BATCH)]
    np.save(folder / "data.npy", np.stack(samples).reshape(END, BATCH, LENGTH + 1))
    common = {"data": str(folder / "data.npy"), "save": str(folder), "losses": str(folder / "losses.json")}
    run_there(4, 29631, 2, 2, until=[SWITCH], formats=["torch_dist", "torch"], **common)
    run_there(1, 29632, until=[END], load=str(folder / "torch_dist"), load_iteration=SWITCH, **common)
    return folder


def same(one, other):
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor.read(), other.tensors[name].read()), name


def test_both_formats_of_a_state_give_equal_values(there):
    same(load_megatron_torch(there / "torch"), load_megatron_torch_dist(there / "torch_dist"))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_run_begun_there_goes_on_here_with_its_losses(there, tmp_path, tp):
    convert = [sys.executable, "tools/checkpoint/convert.py", "--saver=native", "--keep-vocab-padding"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    paths = [f"--load-dir={there}/torch_dist", f"--save-dir={tmp_path}/native"]
    subprocess.run([*convert, *paths], cwd=ROOT, env=env, check=True, timeout=120)
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={tp}", f"--master-port={29640 + tp}"] if tp > 1 else []
    folders = [f"--load={tmp_path}/native", f"--save={tmp_path}/out", "--save-interval=1000"]
    command = [sys.executable, *launch, "pretrain_gpt.py", *folders, *FLAGS, f"--tensor-model-parallel-size={tp}"]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=240)
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = {each["iteration"]: each["lm loss"] for each in records if "lm loss" in each}
    foreign = json.loads((there / "losses.json").read_text())
    np.testing.assert_allclose([losses[i] for i in range(SWITCH + 1, END + 1)], foreign, rtol=1e-5)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_megatron_core_continues_from_our_checkpoint_with_equal_losses(there, tmp_path, tp, pp):
    loaded = load_megatron_torch(there / "torch", padded_vocabulary=True)
    save_megatron_torch_dist(loaded, tmp_path)
    run_there(
        tp * pp, 29650 + tp, tp, pp, until=[END], data=str(there / "data.npy"), load=str(tmp_path),
        load_iteration=SWITCH, losses=str(tmp_path / "losses.json"),
    )  # fmt: skip
    foreign = json.loads((there / "losses.json").read_text())
    np.testing.assert_allclose(json.loads((tmp_path / "losses.json").read_text()), foreign, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dp_reshardable", "fully_reshardable", "fully_sharded_model_space"])
def test_the_distributed_optimizers_state_is_that_of_the_plain_one(there, tmp_path, kind):
    run_there(
        4, 29660, 2, 2, until=[SWITCH], formats=["torch_dist", "torch"], save=str(tmp_path), sharding_type=kind,
        data=str(there / "data.npy"), losses=str(tmp_path / "losses"), args={"use_distributed_optimizer": True},
    )  # fmt: skip
    plain, sharded = load_megatron_torch_dist(there / "torch_dist"), load_megatron_torch_dist(tmp_path / "torch_dist")
    same(sharded, load_megatron_torch(tmp_path / "torch"))
    for name, tensor in plain.tensors.items():
        torch.testing.assert_close(sharded.tensors[name].read(), tensor.read(), rtol=2e-3, atol=1e-6, msg=name)


# ---- BERT and T5


MASKED_LENGTH, DECODER_LENGTH = 24, 12
MASKED_ARGS = {
    **ARGS, "num_layers": 2, "encoder_num_layers": 2, "num_query_groups": 4, "group_query_attention": False,
    "swiglu": False, "normalization": "LayerNorm", "add_bias_linear": True, "vocab_size": VOCABULARY,
    "max_position_embeddings": MASKED_LENGTH, "seq_length": MASKED_LENGTH, "encoder_seq_length": MASKED_LENGTH,
    "decoder_seq_length": DECODER_LENGTH, "untie_embeddings_and_output_weights": False, "micro_batch_size": BATCH,
    "position_embedding_type": "learned_absolute", "bert_binary_head": True, "bias_gelu_fusion": False,
    "kv_channels": 8,
}  # fmt: skip
MASKED_FLAGS = [
    *(each for each in FLAGS if not each.startswith(("--seq-length", "--micro"))), f"--seq-length={MASKED_LENGTH}",
    f"--micro-batch-size={BATCH}",
]  # fmt: skip


def masked_samples(kind, path):
    """Return the samples of --mock-data by name, [iterations, samples, ...]."""
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.tasks.language_model import mock_data, task_class

    sizes = ["--num-layers=2", "--hidden-size=32", "--num-attention-heads=4"]
    max_length = f"--max-position-embeddings={MASKED_LENGTH}"
    more = [f"--decoder-seq-length={DECODER_LENGTH}"] if kind == "t5" else []
    flags = [each for each in MASKED_FLAGS if each not in ("--use-checkpoint-args", "--no-load-rng")]
    cfg = validate_args(parse_args([*flags, *sizes, max_length, *more], model_family=kind), 1)
    task = task_class(kind)(cfg, NullTokenizer(VOCABULARY))
    train = mock_data(task, (END * BATCH, 0, 0))[0]
    samples = [train[index] for index in range(END * BATCH)]
    arrays = {name: np.stack([each[name] for each in samples]) for name in samples[0] if name != "sample_index"}
    np.savez(path, **{name: each.reshape(END, BATCH, *each.shape[1:]) for name, each in arrays.items()})


@pytest.mark.parametrize(("kind", "tp", "pp"), [("bert", 2, 2), ("t5", 2, 1)])
def test_encoders_begun_there_go_on_here_with_their_losses_and_back(kind, tp, pp, tmp_path):
    masked_samples(kind, tmp_path / "data.npz")
    common = {"data": str(tmp_path / "data.npz"), "kind": kind, "args": MASKED_ARGS}
    retained = {"save": str(tmp_path), "losses": str(tmp_path / "losses.json")}
    run_there(tp * pp, 29670, tp, pp, until=[SWITCH], formats=["torch_dist", "torch"], **common, **retained)
    run_there(1, 29672, until=[END], load=str(tmp_path / "torch_dist"), load_iteration=SWITCH, **common, **retained)
    foreign = json.loads((tmp_path / "losses.json").read_text())
    same(load_megatron_torch(tmp_path / "torch"), load_megatron_torch_dist(tmp_path / "torch_dist"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    paths = [f"--load-dir={tmp_path}/torch_dist", f"--save-dir={tmp_path}/native"]
    convert = [sys.executable, "tools/checkpoint/convert.py", "--saver=native", "--keep-vocab-padding"]
    subprocess.run([*convert, *paths], cwd=ROOT, env=env, check=True, timeout=120)
    folders = [f"--load={tmp_path}/native", f"--save={tmp_path}/out", "--save-interval=1000"]
    more = [f"--decoder-seq-length={DECODER_LENGTH}"] if kind == "t5" else []
    command = [sys.executable, f"pretrain_{kind}.py", *folders, *MASKED_FLAGS, *more]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=240)
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = {each["iteration"]: each["lm loss"] for each in records if "lm loss" in each}
    np.testing.assert_allclose([losses[i] for i in range(SWITCH + 1, END + 1)], foreign, rtol=1e-5)
    save_megatron_torch_dist(load_megatron_torch(tmp_path / "torch", padded_vocabulary=True), tmp_path / "ours")
    run_there(tp, 29674, tp, until=[END], load=str(tmp_path / "ours"), load_iteration=SWITCH, **common,
              losses=str(tmp_path / "back.json"))  # fmt: skip
    np.testing.assert_allclose(json.loads((tmp_path / "back.json").read_text()), foreign, rtol=1e-5)
