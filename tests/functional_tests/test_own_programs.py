"""User programs: a custom data set, layer and hook, several runs in one process, no launcher."""

import os
import subprocess
from pathlib import Path

import torch

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from tests.test_utils.gpt_runs import MODEL_FLAGS

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from functools import partial
import numpy as np
import torch
from megatron.core.enums import ModelType
from megatron.core.config.errors import UserError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args, parse_args
from megatron.training.hooks import Hook
from megatron.training.run import run
from megatron.training.tasks.gpt import GPTTask


class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        text = (np.arange(33) + i) % 64
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": np.ones(32, np.float32),
                "position_ids": np.arange(32), "sample_index": i}


class Steps(Hook):
    def __init__(self):
        self.iterations = []

    def on_step(self, state, metrics):
        self.iterations.append(state.iteration)


class OwnData(GPTTask):
    def train_valid_test_datasets_provider(self, num_samples):
        return Numbers(), Numbers(), None


class Broken(OwnData):
    def train_valid_test_datasets_provider(self, num_samples):
        raise UserError("no such numbers")


class DoubledMLP(MLP):
    def forward(self, *args, **kwargs):
        built.append(type(self).__name__)
        return super().forward(*args, **kwargs)


def model_provider(pre_process=True, post_process=True):
    spec = get_gpt_layer_local_spec()
    spec.submodules.mlp.module = DoubledMLP
    args = get_args()
    return GPTModel(core_transformer_config_from_args(args), spec, 64, 32, pre_process, post_process)


def loss_func(batch, losses):
    loss, count = losses.sum(), torch.tensor(float(losses.numel()))
    return loss, count, {"lm loss": torch.stack([loss.detach(), count])}


def forward_step(batches, model):
    batch = next(batches)
    return model(batch["tokens"], batch["position_ids"], labels=batch["labels"]), partial(loss_func, batch)


built, steps = [], Steps()
cfg = parse_args(needs_data=False)
assert [run(cfg, task, hooks=[steps]) for task in (OwnData, Broken, OwnData)] == [0, 2, 0]
assert steps.iterations == [1, 2, 3, 1, 2, 3], steps.iterations
for _ in range(2):
    pretrain(lambda sizes: (Numbers(), None, None), model_provider, ModelType.encoder_or_decoder, forward_step,
             hooks=[steps])
assert len(steps.iterations) == 12 and built
"""


def run(python, *command):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run([python, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished


def test_data_layers_and_hooks_of_a_program_run_again_and_again_in_one_process(warm_python, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    finished = run(warm_python, str(tmp_path / "program.py"), *MODEL_FLAGS, "--train-iters", "3")
    assert finished.stderr.count("error: no such numbers") == 1


def test_the_simple_loop_needs_no_launcher(warm_python):
    out = run(warm_python, str(ROOT / "examples" / "run_simple_mcore_train_loop.py"), "--iterations", "2").stdout
    assert out.count("iteration") == 2 and "the checkpoint holds the model" in out


class OwnNorm(torch.nn.LayerNorm):
    """A module that takes the place of another."""

    def __init__(self, config, hidden_size, eps, groups=None):
        super().__init__(hidden_size, eps)


def test_parts_of_a_spec_can_be_replaced_and_belong_to_one_layer():
    spec = get_gpt_layer_local_spec()
    spec.submodules.pre_mlp_layernorm = OwnNorm
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True)
    assert isinstance(build_module(spec, config, layer_number=1).pre_mlp_layernorm, OwnNorm)
    assert get_gpt_layer_local_spec().submodules.pre_mlp_layernorm is not OwnNorm
    block = get_gpt_decoder_block_spec(config)
    block.layer_specs[0].submodules.pre_mlp_layernorm = OwnNorm
    assert block.layer_specs[1].submodules.pre_mlp_layernorm is not OwnNorm
