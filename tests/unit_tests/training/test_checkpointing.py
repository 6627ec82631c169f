"""Runs are restored exactly, on any number of ranks; no death, damage or full disk costs the last good checkpoint."""

import errno
import logging
import os
import random
import select
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import CheckpointError, CheckpointReader, writer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import get_optimizer_param_scheduler
from megatron.core.process_groups import SINGLE_PROCESS
from megatron.training.checkpoint_files import SaveLock, find_checkpoint, read_tracker, saved_iterations
from megatron.training.checkpointing import Checkpointer, apply_checkpoint_args, load_checkpoint_args
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.train_state import TrainState

TRACKER = "latest_checkpointed_iteration.txt"


def settings(folder=None, **changes):
    values = {
        "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "max_position_embeddings": 4,
        "micro_batch_size": 1, "global_batch_size": 6, "lr": 0.01, "train_iters": 100, "bf16": True, "save_interval": 1,
    }  # fmt: skip
    folders = {} if folder is None else {"save": str(folder), "load": str(folder)}
    return PretrainConfig(**{**values, **folders, **changes})


class Run:
    """A tiny training run with everything that a checkpoint holds."""

    device = "cpu"

    def __init__(self, cfg, groups=SINGLE_PROCESS, fault=writer.no_fault, tokenizer="abc", dtype=torch.bfloat16):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(self.device, dtype)
        self.groups = groups
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(None, config, self.net, groups=groups)
        optimizer_config = OptimizerConfig(lr=cfg.lr, fp16=cfg.fp16, initial_loss_scale=64.0)
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model], groups=groups)
        self.scheduler = get_optimizer_param_scheduler(cfg, self.optimizer)
        named = None if tokenizer is None else SimpleNamespace(fingerprint=tokenizer)
        self.checkpointer = Checkpointer(
            cfg, [self.model], self.optimizer, self.scheduler, groups=groups, tokenizer=named, fault=fault
        )
        self.state = TrainState()

    def train(self, iterations):
        """Six samples per iteration, split over the ranks; the data is a function of the counter."""
        dp = self.groups.dp
        for _ in range(iterations):
            self.scheduler.set_samples(self.state.consumed_train_samples)
            generator = torch.Generator().manual_seed(self.state.consumed_train_samples)
            batch = torch.randn(6, 8, generator=generator)[dp.rank :: dp.size]
            self.optimizer.zero_grad()
            loss = self.model(batch.to(self.net[0].weight)).float().square().sum() / 6
            self.optimizer.scale_loss(loss).backward()
            self.model.finish_grad_sync()
            self.optimizer.step()
            self.state.iteration += 1
            self.state.consumed_train_samples += 6
        return self

    def save(self):
        return self.checkpointer.save(self.state)

    def load(self):
        state = self.checkpointer.load()
        self.state = state or TrainState()
        return state

    def bits(self):
        """Every bit that matters for what comes next."""
        state = self.optimizer.state_dict()
        tensors = {**self.net.state_dict()}
        tensors |= {f"{k}.{n}": t for k in ("exp_avg", "exp_avg_sq", "main_param") for n, t in state[k].items()}
        return (
            {name: tensor.detach().double().cpu().numpy().copy().tobytes() for name, tensor in tensors.items()},
            state["step"], state["grad_scaler"], self.scheduler.state_dict(), replace(self.state),
        )  # fmt: skip


def draws():
    return random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_2n_steps_equal_n_and_resume_and_n(tmp_path, dtype):
    cfg = settings(tmp_path, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    straight = Run(cfg, dtype=dtype).train(3)
    np.random.randn()  # leaves a cached second value in the generator
    assert straight.save()
    expected_draws = draws()
    straight.train(3)
    resumed = Run(cfg, dtype=dtype)
    state = resumed.load()
    assert draws() == expected_draws
    assert state == TrainState(iteration=3, consumed_train_samples=18)
    assert resumed.train(3).bits() == straight.bits()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_2n_steps_equal_n_and_resume_and_n_on_a_gpu(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(Run, "device", "cuda")
    cfg = settings(tmp_path, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    straight = Run(cfg, dtype=dtype).train(3)
    assert straight.save()
    expected = torch.rand(1, device="cuda").item()
    straight.train(3)
    resumed = Run(cfg, dtype=dtype)
    assert resumed.load().iteration == 3
    assert torch.rand(1, device="cuda").item() == expected
    assert resumed.train(3).bits() == straight.bits()


def test_the_folder_looks_as_scripts_expect(tmp_path, caplog):
    logger = logging.getLogger("megatron")
    logger.propagate, before = True, logger.propagate
    with caplog.at_level(logging.INFO, "megatron"):
        run = Run(settings(tmp_path)).train(1)
        run.save()
        Run(settings(tmp_path)).load()
    logger.propagate = before
    assert (tmp_path / TRACKER).read_text() == "1"
    assert {p.name for p in tmp_path.iterdir()} == {TRACKER, ".lock", "iter_0000001"}
    assert f"saving checkpoint at iteration       1 to {tmp_path} in torch_dist format" in caplog.messages
    assert f"  successfully saved checkpoint from iteration       1 to {tmp_path} [ t 1/1, p 1/1 ]" in caplog.messages
    assert f"  successfully loaded checkpoint from {tmp_path} [ t 1/1, p 1/1 ] at iteration 1" in caplog.messages


def ranks_train(rank, world, folder, start, steps):
    parallel_state.initialize_model_parallel()
    run = Run(settings(folder), parallel_state.get_process_groups())
    loaded = run.load()
    assert (loaded is None) == (start == 0) and run.state.iteration == start
    run.train(steps)
    assert run.save()
    run.checkpointer.close()
    return run.bits()


def test_any_number_of_ranks_continues(gloo_pool, tmp_path):
    first = gloo_pool.run(ranks_train, 3, tmp_path, 0, 2)
    assert first[0] == first[1] == first[2]
    [single] = gloo_pool.run(ranks_train, 1, tmp_path, 2, 0)
    assert single == first[0]
    second = gloo_pool.run(ranks_train, 2, tmp_path, 2, 2)
    files = {p.name for p in (tmp_path / "iter_0000004").glob("model*")}
    assert files == {"model_00000.safetensors", "model_00001.safetensors"}, "the ranks share the writing"
    [alone] = gloo_pool.run(ranks_train, 1, tmp_path, 4, 0)
    assert alone == second[0]


# ---- dying and failing


def in_child(action):
    """Exit status of a forked process that runs ``action`` and exits with what it returns.

    ``action`` must not run backward: where torch sees a GPU, a forked process cannot.
    """
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = action() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


PHASES = [
    "before_directory", "mid_shard", "before_fsync", "after_shards", "before_manifest", "before_rename", "after_rename",
    "before_tracker", "before_tracker_rename", "after_tracker", "mid_delete", "between_renames",
]  # fmt: skip


@pytest.fixture(scope="module")
def snapshots():
    """bits() after 0, 1, 2 … iterations."""
    run = Run(settings())
    return [run.train(1).bits() if i else run.bits() for i in range(8)]


@pytest.mark.parametrize("phase", PHASES)
def test_death_at_any_phase_leaves_the_old_or_the_new_checkpoint(tmp_path, phase, snapshots):
    cfg = settings(tmp_path, save_retain_interval=10)
    again = phase == "between_renames"

    armed = []
    run = Run(cfg, fault=lambda name: os._exit(9) if armed and name == phase else None).train(2)
    assert run.save()
    run.train(0 if again else 2)
    armed.append(1)
    assert in_child(run.save) == 9
    survivor = Run(cfg)
    survivor.load()
    assert survivor.state.iteration in ((2,) if again else (2, 4))
    assert survivor.bits() == snapshots[survivor.state.iteration]
    assert survivor.train(1).save()
    assert not [p for p in tmp_path.glob(".*") if p.name != ".lock"], "the next save cleans up"
    assert Run(cfg).load().iteration == survivor.state.iteration


def test_death_at_any_moment_leaves_a_good_checkpoint(tmp_path, snapshots):
    """A process that saves without pause is killed at random moments."""
    cfg = settings(tmp_path, save_retain_interval=100)
    random_moments = random.Random(5)
    run = Run(cfg).train(1)
    assert run.save()

    def save_forever():
        os.write(ready[1], b"x")
        while True:
            run.state = TrainState()
            run.checkpointer._saved.clear()
            for _ in range(7):
                run.state.iteration += 1
                run.save()

    for _ in range(12):
        ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                save_forever()
            finally:
                os._exit(70)
        os.close(ready[1])
        assert os.read(ready[0], 1) == b"x", "the saving process did not start"
        select.select([], [], [], random_moments.uniform(0.0, 0.04))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        survivor = Run(cfg)
        assert survivor.load().iteration in range(1, 8)
        assert survivor.bits()[0] == snapshots[1][0]
        os.close(ready[0])


def test_a_full_disk_keeps_the_old_checkpoint_and_is_reported(tmp_path, monkeypatch, snapshots):
    run = Run(settings(tmp_path)).train(2)
    assert run.save()

    def full(file, tensor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write_blocks", full)
        assert run.train(1).save() is False and run.save() is False
        assert run.checkpointer.failed_saves == 2
    assert {p.name for p in tmp_path.iterdir()} == {TRACKER, ".lock", "iter_0000002"}
    other = Run(settings(tmp_path))
    other.load()
    assert other.bits() == snapshots[2]
    assert run.save() and run.checkpointer.failed_saves == 0


def test_a_system_limit_on_file_sizes_is_survived(tmp_path):
    """The same with an error from the system itself."""
    import resource

    run = Run(settings(tmp_path)).train(1)

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
        return 0 if run.save() is False else 1

    assert in_child(limited) == 0
    assert {p.name for p in tmp_path.iterdir()} == {".lock"}


def test_a_second_job_is_kept_from_the_same_folder(tmp_path):
    run = Run(settings(tmp_path))

    def second_job():
        try:
            Run(settings(tmp_path))
        except CheckpointError as error:
            return 3 if f'"pid": {os.getppid()}' in str(error) and "--save" in str(error) else 4

    assert in_child(second_job) == 3
    run.checkpointer.close()
    assert in_child(second_job) == 0
    assert in_child(lambda: SaveLock(tmp_path) and 0) == 0
    SaveLock(tmp_path).release()  # the holder is dead, its lock does not matter


# ---- trackers


@pytest.fixture
def two(tmp_path):
    """Checkpoints of iterations 1 and 2."""
    run = Run(settings(tmp_path)).train(1)
    run.save()
    run.train(1).save()
    return tmp_path


BAD_TRACKERS = [b"", b"\n", b"abc", b"-5", b"\xff\xfe", b"7", b"99999999999999999999", b"1.5", None]


@pytest.mark.parametrize("content", BAD_TRACKERS)
def test_a_bad_tracker_falls_back_to_the_newest_complete_checkpoint(two, content, caplog):
    logging.getLogger("megatron").propagate = True
    (two / TRACKER).unlink()
    if content is not None:
        (two / TRACKER).write_bytes(content)
    with caplog.at_level(logging.WARNING, "megatron"):
        assert find_checkpoint(two).iteration == 2
    assert TRACKER in caplog.text or "iter_0000007" in caplog.text
    (two / "iter_0000002" / "metadata.json").unlink()
    assert find_checkpoint(two).iteration == 1
    (two / "iter_0000001" / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_checkpoint(two)


def test_line_ends_in_a_tracker_do_not_matter(two):
    (two / TRACKER).write_bytes(b" 1\r\n")
    assert find_checkpoint(two).iteration == read_tracker(two) == 1


def test_damage_is_refused_and_an_earlier_checkpoint_named(two):
    path = two / "iter_0000002" / "optimizer_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="optimizer_00000.safetensors: optimizer.*is damaged.*--ckpt-step 1"):
        Run(settings(two)).load()
    assert Run(settings(two, ckpt_step=1)).load().iteration == 1


def test_a_renamed_checkpoint_is_refused(two):
    (two / "iter_0000002").rename(two / "iter_0000009")
    (two / TRACKER).write_text("9")
    with pytest.raises(CheckpointError, match="of iteration 2: it was renamed"):
        Run(settings(two)).load()


# ---- flags


def test_nothing_to_load(tmp_path):
    assert Run(settings(load=str(tmp_path / "none"))).load() is None
    assert Run(settings()).load() is None
    with pytest.raises(CheckpointError, match="--exit-on-missing-checkpoint"):
        Run(settings(load=str(tmp_path), exit_on_missing_checkpoint=True)).load()
    with pytest.raises(CheckpointError, match="iter_0000007: no checkpoint"):
        Run(settings(tmp_path, ckpt_step=7)).load()


def test_weights_only_starts_at_zero(two, snapshots):
    for changes in ({"finetune": True}, {"load": None, "pretrained_checkpoint": str(two)}):
        run = Run(settings(two, save=None, **changes), tokenizer="another")
        assert run.load() == TrainState()
        assert run.net.state_dict().keys() == Run(settings()).net.state_dict().keys()
        assert run.bits()[0]["0.weight"] == snapshots[2][0]["0.weight"]
        assert run.optimizer.step_count == 0
        assert torch.equal(run.optimizer.main_params["0.weight"], run.net[0].weight.float())
    (two / "iter_0000002").rename(two / "release")
    (two / TRACKER).write_text("release")
    run = Run(settings(two, save=None))
    assert run.load() == TrainState() and run.bits()[0]["0.weight"] == snapshots[2][0]["0.weight"]


def test_own_progress_comes_before_pretrained_weights(two, tmp_path):
    other = tmp_path / "other"
    Run(settings(other)).train(3).save()
    assert Run(settings(two, load=str(other), save=None, pretrained_checkpoint=str(two))).load().iteration == 3


def test_optimizer_and_random_state_can_be_left_out(tmp_path, snapshots):
    cfg = settings(tmp_path, no_save_optim=True, no_save_rng=True)
    run = Run(cfg).train(2)
    run.save()
    assert {n.split(".")[0] for n in CheckpointReader(tmp_path / "iter_0000002").names} == {"model"}
    with pytest.raises(CheckpointError, match="--no-load-optim.*--no-load-rng"):
        Run(settings(tmp_path)).load()
    resumed = Run(settings(tmp_path, no_load_optim=True, no_load_rng=True))
    assert resumed.load().iteration == 2 and resumed.optimizer.step_count == 0
    assert resumed.bits()[0]["2.bias"] == snapshots[2][0]["2.bias"]
    Run(settings(tmp_path)).train(3).save()
    before = draws_after_seed()
    partial = Run(settings(tmp_path, no_load_optim=True, no_load_rng=True))
    torch.manual_seed(9)
    assert partial.load().iteration == 3 and torch.rand(1).item() == before


def draws_after_seed():
    torch.manual_seed(9)
    return torch.rand(1).item()


def test_another_architecture_is_refused_with_every_mismatch(two):
    with pytest.raises(CheckpointError) as caught:
        Run(settings(two, num_layers=3, swiglu=True, hidden_dropout=0.5)).load()
    assert "num_layers is 3, the checkpoint has 2" in str(caught.value)
    assert "swiglu is True, the checkpoint has False" in str(caught.value)
    assert "dropout" not in str(caught.value) and "--use-checkpoint-args" in str(caught.value)
    with pytest.raises(CheckpointError, match="rotary_base is 500000"):
        Run(settings(two, rotary_base=500000)).load()
    Run(settings(two, rotary_base=500000, finetune=True)).load()
    with pytest.raises(CheckpointError, match="hidden_size is 16"):
        Run(settings(two, hidden_size=16, finetune=True)).load()


def test_another_tokenizer_is_refused(two):
    with pytest.raises(CheckpointError, match="another tokenizer"):
        Run(settings(two), tokenizer="xyz").load()


def test_a_changed_schedule_is_refused_or_overridden(two):
    with pytest.raises(ValueError, match="max_lr: checkpoint 0.01, now 0.02"):
        Run(settings(two, lr=0.02)).load()
    run = Run(settings(two, lr=0.02, override_opt_param_scheduler=True))
    run.load()
    assert run.scheduler.plan.max_lr == 0.02


def test_architecture_can_come_from_the_checkpoint(two):
    assert load_checkpoint_args(two)["hidden_size"] == 8
    given = {"num_layers": None, "hidden_size": None, "num_attention_heads": 4, "swiglu": True, "lr": 3.0}
    taken = apply_checkpoint_args(settings(two, use_checkpoint_args=True, **given))
    assert (taken.num_layers, taken.hidden_size, taken.swiglu) == (2, 8, False)
    assert (taken.num_attention_heads, taken.lr) == (4, 3.0), "sizes that are given stay, training flags too"
    unchanged = settings(two, **given)
    assert apply_checkpoint_args(unchanged) is unchanged
    for bad in ({"load": None}, {"load": str(two / "none")}):
        with pytest.raises(CheckpointError, match="--use-checkpoint-args"):
            apply_checkpoint_args(settings(use_checkpoint_args=True, **bad))


def test_only_multiples_of_the_retain_interval_and_the_latest_stay(tmp_path):
    run = Run(settings(tmp_path, save_retain_interval=2))
    for _ in range(5):
        run.train(1).save()
    assert saved_iterations(tmp_path) == [5, 4, 2]
    assert Run(settings(tmp_path)).load().iteration == 5


def test_tokenizer_files_travel_along(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text('{"vocab": {}}')
    run = Run(settings(tmp_path / "c", tokenizer_model=str(tokenizer))).train(1)
    run.save()
    assert (tmp_path / "c/iter_0000001/tokenizer/tokenizer.json").read_text() == '{"vocab": {}}'


def test_no_checkpoint_code_can_unpickle():
    root = Path(__file__).resolve().parents[3] / "megatron"
    files = [*(root / "core/dist_checkpointing").glob("*.py"), *(root / "training").glob("checkpoint*.py")]
    assert len(files) > 8
    for path in files:
        text = path.read_text()
        assert "import pickle" not in text and "torch.load" not in text and "gather_object" not in text, path


def test_a_save_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"--save .*file/run: cannot be written \(Not a directory\)"):
        SaveLock(tmp_path / "file" / "run")
