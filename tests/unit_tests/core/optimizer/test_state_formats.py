"""Formats of optimizer state: masters of every kind follow the same path; every format loads the state of any other."""

import pytest
import torch
from torch import nn

from megatron.core.dist_checkpointing import load, save
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.sharding.sharded_tensor import module_tensors

FORMATS = {
    "remainders": {},
    "copies": {"store_param_remainders": False},
    "16 bits": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": torch.bfloat16},
}


class Run:
    def __init__(self, name, dtype=torch.bfloat16, reduce_in_fp32=True):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(37, 65), nn.LayerNorm(65), nn.Linear(65, 19)).to(dtype)
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=reduce_in_fp32)
        self.ddp = DistributedDataParallel(None, config, self.net)
        config = OptimizerConfig(lr=0.01, weight_decay=0.1, adam_beta2=0.95, **FORMATS[name])
        self.optimizer = get_megatron_optimizer(config, [self.ddp])

    def train(self, steps, first=0):
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            self.ddp(torch.randn(8, 37, generator=generator).to(self.net[0].weight)).float().square().sum().backward()
            assert self.optimizer.step()[0]
        return self

    def tensors(self, state):
        return {**module_tensors(self.net, groups=SINGLE_PROCESS), **self.optimizer.sharded_tensors(state=state)}

    def save(self, folder):
        save(self.tensors(None), folder)

    def load(self, folder, step):
        state = self.optimizer.state_dict()
        load(self.tensors(state), folder)
        self.optimizer.load_state_dict({**state, "step": step})
        return self

    def bits(self):
        state = self.optimizer.state_dict()
        kinds = ("main_param", "exp_avg", "exp_avg_sq")
        named = {f"{kind}.{name}": tensor for kind in kinds for name, tensor in state[kind].items()}
        return {name: tensor.clone() for name, tensor in {**named, **self.net.state_dict()}.items()}


def same(first, second, only=""):
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first if name.startswith(only))


def distance(first, second):
    """Between all weights of two runs."""
    names = [name for name in first if name.startswith("main_param")]
    return torch.stack([(first[name] - second[name]).norm() for name in names]).norm()


def test_remainders_and_copies_are_the_same_numbers():
    split, copies = Run("remainders").train(6), Run("copies").train(6)
    assert same(split.bits(), copies.bits())
    for name, master in split.optimizer.storage.items():
        assert master.kept.dtype == torch.int16 and copies.optimizer.storage[name].kept.dtype == torch.float32
        assert torch.equal(master.weight, master.read().bfloat16())


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("loaded", FORMATS)
def test_any_format_goes_on_from_any_other(tmp_path, stored, loaded):
    first = Run(stored).train(3)
    first.save(tmp_path / "checkpoint")
    second = Run(loaded).load(tmp_path / "checkpoint", step=3)
    assert same(first.bits(), second.bits(), only="main_param")
    lossless = "16 bits" not in (stored, loaded) or stored == loaded
    before, straight, resumed = first.bits(), first.train(3, first=3).bits(), second.train(3, first=3).bits()
    if lossless:
        assert same(straight, resumed)
    else:  # 8 bits of each moment were lost: 0.2% of the way; without moments at all it would be 81%
        assert 0 < distance(straight, resumed) < 0.005 * distance(straight, before)


def test_16_bit_moments_train_like_wide_ones():
    wide, narrow = Run("remainders").train(12).bits(), Run("16 bits").train(12).bits()
    assert narrow["exp_avg_sq.0.weight"].dtype == torch.bfloat16
    assert 0 < distance(narrow, wide) < 0.01 * distance(wide, Run("remainders").bits())


def test_gradients_may_stay_in_16_bits():
    """``--main-grads-dtype bf16``: read as they were added up."""
    run = Run("16 bits", reduce_in_fp32=False)
    assert run.ddp.grad_buffers[0].grad_data.dtype == torch.bfloat16
    before = run.bits()
    assert not same(before, run.train(2).bits(), only="0.")


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_formats_without_scales_are_rejected(name):
    with pytest.raises(ValueError, match=f"--exp-avg-dtype {name}: moments fall below"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, exp_avg_dtype=name), [nn.Linear(2, 2)])


def test_a_wish_to_skip_holds_an_update_back():
    run = Run("remainders").train(1)
    before = run.bits()
    run.optimizer.zero_grad()
    run.ddp(torch.ones(1, 37).bfloat16()).sum().backward()
    update = run.optimizer.update(torch.tensor(True))
    assert bool(update.found_nonfinite) and bool(update.grad_norm > 0)
    assert same(before, run.bits()) and run.optimizer.step_count == 1
