"""Runs are restored exactly, on any number of ranks; flags skip, reject or take parts of the checkpoint."""

import dataclasses
import logging
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import CheckpointError, CheckpointReader
from megatron.core.dist_checkpointing.manifest import FORMAT
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.training.arguments import all_flag_specs
from megatron.training.checkpoint import settings as checkpoint_args
from megatron.training.checkpoint.files import saved_iterations
from megatron.training.checkpoint.live_state import LiveState
from megatron.training.checkpoint.lock import SaveLock
from megatron.training.checkpoint.settings import apply_checkpoint_args, check_args, load_checkpoint_args
from megatron.training.config.flat import FlatConfig
from megatron.training.train_state import TrainState
from tests.test_utils.checkpointed_run import TRACKER, Run, settings


def test_settings_that_only_one_side_has_are_not_compared():
    current = {"model_family": "gpt", "explicit": [], "num_layers": 2, "new_flag": 1}
    stored = {"model_family": "gpt", "explicit": ["removed_flag"], "num_layers": 2, "removed_flag": 3}
    assert check_args({"args": stored}, current, "here") == []


def test_saved_lines_name_tensor_and_pipeline_ranks_from_one():
    groups = replace(SINGLE_PROCESS, tp=Group("tp", (0, 1), 1), pp=Group("pp", (1, 3, 5), 2), cp=Group("cp", (1, 7), 0))
    assert LiveState(settings(), [], None, None, groups, None).coordinates == (2, 2, 3, 3)


def draws():
    normal = random.gauss(0.0, 1.0), random.gauss(0.0, 1.0), np.random.randn(), np.random.randn()
    return random.random(), np.random.rand(), *normal, torch.rand(1).item(), torch.randn(1).item()


def move_generators(seed):
    """Into states that no checkpoint of these tests holds; python's and numpy's with a second normal number cached."""
    for start in (random.seed, np.random.seed, torch.manual_seed):
        start(seed)
    random.gauss(0.0, 1.0), np.random.randn(), torch.randn(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_2n_steps_equal_n_and_resume_and_n(tmp_path, dtype):
    cfg = settings(tmp_path, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    straight = Run(cfg, dtype=dtype).train(3)
    np.random.randn()  # leaves a cached second value in the generator
    assert straight.save()
    expected_draws = draws()
    straight.train(3)
    resumed = Run(cfg, dtype=dtype)
    move_generators(seed=5)
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
    assert f"saving checkpoint at iteration       1 to {tmp_path} in {FORMAT} format" in caplog.messages
    assert "safetensors" in FORMAT
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
    [separate] = gloo_pool.run(ranks_train, 1, tmp_path, 4, 0)
    assert separate == second[0]


def ranks_draw(rank, world, folder, seed, save):
    """Return this rank's random draws after saving or loading."""
    parallel_state.initialize_model_parallel()
    run = Run(settings(folder), parallel_state.get_process_groups())
    move_generators(seed + rank)
    assert run.train(1).save() if save else run.load().iteration == 1
    run.checkpointer.close()
    return draws()


def test_every_rank_resumes_its_random_state(gloo_pool, tmp_path):
    saved = gloo_pool.run(ranks_draw, 3, tmp_path, 10, True)
    assert len({*saved}) == 3 and not any(set(one) & set(other) for one, other in zip(saved, saved[1:]))
    assert gloo_pool.run(ranks_draw, 3, tmp_path, 20, False) == saved
    assert gloo_pool.run(ranks_draw, 2, tmp_path, 30, False) == gloo_pool.run(ranks_draw, 2, tmp_path, 30, False)


@pytest.mark.parametrize("changes", [{"no_load_rng": True}, {"finetune": True}])
def test_random_numbers_that_are_not_asked_for_stay(two, changes):
    run = Run(settings(two, **changes))
    move_generators(seed=5)
    expected = draws()
    move_generators(seed=5)
    run.load()
    assert draws() == expected


# ---- flags


def test_nothing_to_load(tmp_path):
    assert Run(settings(load=str(tmp_path / "none"))).load() is None
    assert Run(settings()).load() is None
    with pytest.raises(CheckpointError, match="--exit-on-missing-checkpoint"):
        Run(settings(load=str(tmp_path), exit_on_missing_checkpoint=True)).load()
    with pytest.raises(CheckpointError, match="--pretrained-checkpoint none: holds no checkpoint to start from"):
        Run(settings(load=str(tmp_path / "none"), pretrained_checkpoint="none")).load()
    with pytest.raises(CheckpointError, match="--ckpt-step 7: .*iter_0000007: no checkpoint"):
        Run(settings(tmp_path, ckpt_step=7)).load()


def test_weights_only_starts_at_zero(two, snapshots):
    for changes in ({"finetune": True}, {"load": None, "pretrained_checkpoint": str(two)}):
        run = Run(settings(two, save=None, **changes), tokenizer="another")
        assert run.load() == TrainState()
        assert run.net.state_dict().keys() == Run(settings()).net.state_dict().keys()
        assert run.bits()[0]["0.weight"] == snapshots[2][0]["0.weight"]
        assert run.optimizer.step_count == 0
        assert torch.equal(run.optimizer.storage["0.weight"].read(), run.net[0].weight.float())
    (two / "iter_0000002").rename(two / "release")
    (two / TRACKER).write_text("release")
    run = Run(settings(two, save=None))
    assert run.load() == TrainState() and run.bits()[0]["0.weight"] == snapshots[2][0]["0.weight"]


@pytest.mark.parametrize("flag", ["finetune", "no_load_optim", "pretrained_checkpoint"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_tiny_step_after_loading_only_weights_stays_near_them(tmp_path, dtype, flag):
    """Main parameters become copies of the loaded weights."""
    precision = {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16}
    trained = Run(settings(tmp_path, lr=0.1, **precision), dtype=dtype).train(5)
    trained.save()
    pretrained = {"load": None, "pretrained_checkpoint": str(tmp_path)}
    changes = pretrained if flag == "pretrained_checkpoint" else {flag: True}
    schedule = {"lr": 1e-6, "override_opt_param_scheduler": True}
    run = Run(settings(tmp_path, **schedule, **precision, **changes), dtype=dtype)
    initial = [weight.detach().clone() for weight in run.net.parameters()]
    run.load()
    run.train(2)
    for weight, loaded, first in zip(run.net.parameters(), trained.net.parameters(), initial):
        assert (loaded - first).abs().max() > 0.1
        assert (weight - loaded).abs().max() < 1e-3


def test_a_constant_loss_scale_is_given_again_and_a_dynamic_one_continues(tmp_path):
    def load(**changes):
        run = Run(settings(tmp_path, bf16=False, fp16=True, **changes), dtype=torch.float16)
        run.load()
        return run.optimizer.get_loss_scale()

    run = Run(settings(tmp_path, bf16=False, fp16=True, loss_scale=256.0), dtype=torch.float16).train(1)
    run.save()
    with pytest.raises(CheckpointError, match="constant loss scale: give its --loss-scale, or add --no-load-optim"):
        load()
    assert load(loss_scale=256.0) == 256.0
    assert load(no_load_optim=True) == load(finetune=True) == 64.0  # the initial scale of these runs
    run = Run(settings(tmp_path, bf16=False, fp16=True, start_over=True), dtype=torch.float16).train(2)
    run.optimizer.grad_scaler.scale = 2.0
    run.save()
    assert (load(), load(loss_scale=8.0), load(no_load_optim=True)) == (2.0, 8.0, 64.0)


def test_resumed_progress_precedes_pretrained_weights(two, tmp_path):
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


def test_another_architecture_is_rejected_with_every_mismatch(two):
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


def test_another_tokenizer_is_rejected(two):
    with pytest.raises(CheckpointError, match="another tokenizer"):
        Run(settings(two), tokenizer="xyz").load()


def test_a_changed_schedule_is_rejected_or_overridden(two):
    with pytest.raises(ValueError, match="max_lr: checkpoint 0.01, now 0.02"):
        Run(settings(two, lr=0.02)).load()
    run = Run(settings(two, lr=0.02, override_opt_param_scheduler=True))
    run.load()
    assert run.scheduler.plan.max_lr == 0.02


def test_architecture_can_come_from_the_checkpoint(two):
    assert load_checkpoint_args(two)["hidden_size"] == 8
    inputs = {"num_layers": None, "hidden_size": None, "num_attention_heads": 4, "swiglu": True, "lr": 3.0}
    chosen = apply_checkpoint_args(settings(two, use_checkpoint_args=True, **inputs))
    model = chosen.model
    assert (model.num_layers, model.hidden_size, model.swiglu) == (2, 8, False)
    assert (model.num_attention_heads, chosen.optimizer.lr) == (4, 3.0), "sizes that are given stay, training flags too"
    unchanged = settings(two, **inputs)
    assert apply_checkpoint_args(unchanged) is unchanged
    with pytest.raises(CheckpointError, match="--use-checkpoint-args"):
        apply_checkpoint_args(settings(use_checkpoint_args=True, load=None))


@pytest.mark.parametrize("given", [
    {"hidden_size": None}, {"exit_on_missing_checkpoint": True}, {"pretrained_checkpoint": "none"},
])  # fmt: skip
def test_a_missing_checkpoint_is_rejected_where_something_of_it_is_needed(tmp_path, given):
    with pytest.raises(CheckpointError, match="^--(load|pretrained-checkpoint) .*none: holds no checkpoint"):
        apply_checkpoint_args(settings(use_checkpoint_args=True, load=str(tmp_path / "none"), **given))


def test_first_run_of_a_resuming_command_line_uses_its_flags(tmp_path):
    requested = settings(use_checkpoint_args=True, load=str(tmp_path / "none"))
    assert apply_checkpoint_args(requested) is requested


def test_the_gelu_of_the_checkpoint_is_taken_unless_another_is_named(two):
    """An imported BERT has the exact one: tanh's would be another model, and exported no BERT any more."""
    Run(settings(two, bias_gelu_fusion=False)).save()
    assert not apply_checkpoint_args(settings(two, use_checkpoint_args=True)).model.bias_gelu_fusion
    named = settings(two, use_checkpoint_args=True, explicit=frozenset({"bias_gelu_fusion"}))
    assert apply_checkpoint_args(named).model.bias_gelu_fusion


def test_a_tokenizer_of_the_command_line_stays(two):
    Run(settings(two, tokenizer_type="NullTokenizer", vocab_size=99)).save()
    for kind, explicit, retained in (
        ("BertWordPieceCase", set(), ("NullTokenizer", 99)),
        ("BertWordPieceCase", {"vocab_file"}, ("BertWordPieceCase", 7)),
        ("NullTokenizer", {"tokenizer_type"}, ("NullTokenizer", 99)),
        ("NullTokenizer", {"tokenizer_type", "vocab_size"}, ("NullTokenizer", 7)),
    ):  # fmt: skip
        asked = settings(two, use_checkpoint_args=True, tokenizer_type=kind, vocab_size=7, explicit=frozenset(explicit))
        selected = apply_checkpoint_args(asked)
        assert (selected.tokenizer.tokenizer_type, selected.tokenizer.vocab_size) == retained


def test_settings_come_from_the_step_that_is_asked_for(tmp_path):
    assert Run(settings(tmp_path)).train(1).save()
    later = Run(settings(tmp_path, attention_dropout=0.3))
    later.load()
    assert later.train(1).save()
    for step, dropout in ((1, 0.1), (2, 0.3), (None, 0.3)):
        requested = settings(tmp_path, use_checkpoint_args=True, attention_dropout=0.5, ckpt_step=step)
        assert apply_checkpoint_args(requested).model.attention_dropout == dropout
    empty = {"load": str(tmp_path / "none"), "pretrained_checkpoint": str(tmp_path)}
    requested = settings(use_checkpoint_args=True, attention_dropout=0.5, **empty)
    assert apply_checkpoint_args(requested).model.attention_dropout == 0.3


def test_experts_of_an_upcycled_model_are_not_taken_from_the_dense_one(two):
    experts = settings(two, use_checkpoint_args=True, num_moe_experts=4)
    assert apply_checkpoint_args(experts).model.num_moe_experts is None
    assert apply_checkpoint_args(experts.with_settings(moe_use_upcycling=True)).model.num_moe_experts == 4


def test_adapters_of_the_command_line_stay_next_to_a_checkpoint_without(two, tmp_path):
    adapters = {"lora_rank": 4, "lora_alpha": 8.0, "lora_target_modules": ["linear_qkv"], "lora_use_rslora": True}
    folders = {"load": str(tmp_path / "none"), "pretrained_checkpoint": two, "hidden_size": None}
    chosen = apply_checkpoint_args(settings(use_checkpoint_args=True, **folders, **adapters))
    assert chosen.model.hidden_size == 8
    assert {name: getattr(chosen.flat, name) for name in adapters} == adapters


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
    Run(settings(tmp_path / "d", tokenizer_model="x" * 5000)).train(1).save()  # no file can have that name
    assert not (tmp_path / "d/iter_0000001/tokenizer").exists()


def test_only_tokenizer_files_of_a_folder_are_copied(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "trainer.json",
                 "model.safetensors.index.json", "requirements.txt"):  # fmt: skip
        (folder / name).write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    for name in ("rag.jinja", "tool_use.jinja", "notes.txt"):
        (folder / "additional_chat_templates" / name).write_text(name)
    copied = {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
              "additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"}  # fmt: skip
    Run(settings(tmp_path / "a", tokenizer_model=str(folder))).train(1).save()
    assert files_below(tmp_path / "a/iter_0000001/tokenizer") == copied
    assert CheckpointReader(tmp_path / "a/iter_0000001").verify_assets() == []
    named = {"tokenizer_model": str(folder / "tokenizer.json"), "tokenizer_type": "HuggingFaceTokenizer"}
    Run(settings(tmp_path / "b", **named)).train(1).save()
    assert files_below(tmp_path / "b/iter_0000001/tokenizer") == copied  # they name the ends of texts


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_no_checkpoint_code_can_unpickle():
    root = Path(__file__).resolve().parents[4] / "megatron"
    files = [*(root / "core/dist_checkpointing").glob("*.py"), *(root / "training/checkpoint").glob("*.py")]
    assert len(files) > 8
    for path in files:
        text = path.read_text()
        assert "import pickle" not in text and "torch.load" not in text and "gather_object" not in text, path


def test_a_save_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"--save .*file/run: cannot be written \(Not a directory\)"):
        SaveLock(tmp_path / "file" / "run")


def test_changed_data_or_numeric_settings_are_the_last_warning(two, caplog):
    changes = {"seed": 5, "seq_length": 8, "clip_grad": 0.5, "num_workers": 7, "mask_prob": 0.3}
    with caplog.at_level(logging.INFO, "megatron"):
        Run(settings(two, **changes)).load()
    block = caplog.messages[-1]
    for line in ("data: seed was 1234, is 5", "data: seq_length was 4, is 8", "numbers: clip_grad was 1.0, is 0.5",
                 "data: mask_prob was 0.15, is 0.3"):  # fmt: skip
        assert f"\n  {line}\n" in block
    assert "num_workers" not in block and "****" in block and caplog.records[-1].levelno == logging.WARNING
    caplog.clear()
    with caplog.at_level(logging.WARNING, "megatron"):
        Run(settings(two, num_workers=7)).load()
        Run(settings(two, finetune=True, seed=5)).load()
    assert not caplog.records


def test_other_precision_is_logged_with_its_conversion(two, caplog):
    fp16 = {"bf16": False, "fp16": True, "loss_scale": 64.0}
    Run(settings(two, **fp16), dtype=torch.float16).load()
    notice = "the checkpoint's run was in bf16, this run is in fp16: weights are converted, main parameters"
    assert f"{notice} are loaded unchanged" in caplog.text
    caplog.clear()
    Run(settings(two, **fp16, finetune=True), dtype=torch.float16).load()
    assert f"{notice} start from the loaded weights" in caplog.text
    with pytest.raises(
        ValueError, match="of a run in bf16, this run is in fp32: train in bf16, or add --no-load-optim"
    ):
        Run(settings(two, bf16=False), dtype=torch.float32).load()
    caplog.clear()
    Run(settings(two)).load()
    assert "this run is in" not in caplog.text


def test_another_version_of_torch_is_warned_of(two, caplog, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    with caplog.at_level(logging.WARNING, "megatron"):
        Run(settings(two)).load()
    assert "software: torch was " in caplog.messages[-1] and "is 9.9.9" in caplog.messages[-1]


def test_a_forgotten_flag_that_orders_the_samples_is_rejected(tmp_path):
    Run(settings(tmp_path, seed=42, explicit=frozenset({"seed", "lr"}))).train(1).save()
    with pytest.raises(CheckpointError, match="--seed 42 is not given any more and would become 1234"):
        Run(settings(tmp_path, explicit=frozenset({"lr"}))).load()
    Run(settings(tmp_path, explicit=frozenset({"lr"}), finetune=True)).load()
    Run(settings(tmp_path, seed=42)).load()
    evaluated = Run(settings(tmp_path, explicit=frozenset({"lr"}), skip_train=True, lr=3.0, bf16=False))
    assert evaluated.load().iteration == 1, "nothing follows in an evaluation"
    assert Run(settings(tmp_path, seed=7, explicit=frozenset({"seed"}))).load().iteration == 1, "given: it is meant"


def test_settings_compared_with_a_checkpoint_are_registered():
    registered = {field.name for field in dataclasses.fields(FlatConfig)} | {spec.field for spec in all_flag_specs()}
    assert {*checkpoint_args.DATA_STREAM, *checkpoint_args.NUMBERS, *checkpoint_args.FORGOTTEN} <= registered
    assert set(checkpoint_args.CONVERTED) <= registered
