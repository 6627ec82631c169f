"""``megatron dpo`` and the rules of --dpo."""

import pytest

from megatron import console
from megatron.core.config.cli import ConfigError
from megatron.core.config.preferences import PreferenceConfig
from megatron.tools import dpo
from megatron.training.arguments import parse_args, validate_args
from tests.test_utils.chats import CHATML, preferences, tokenizer_folder, write_lines
from tests.test_utils.gpt_runs import MODEL_FLAGS
from tests.test_utils.hf_folders import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    tiny_llama(folder, 1024)
    return tokenizer_folder(folder, CHATML)


def test_defaults_of_the_run(tmp_path, model, monkeypatch):
    commands = []
    monkeypatch.setattr(console, "pretrain", lambda arguments: commands.append(arguments) or 0)
    path = write_lines(tmp_path / "pairs.jsonl", preferences(1))
    assert dpo.main(["--data", path, "--load-hf", model, "--save", "run", "--lora-rank", "8"]) == 0
    (command,) = commands
    assert command[:2] == ["gpt", "--dpo"] and command.count("--lr") == 1
    values = {"--lr": "1e-6", "--num-epochs": "1", "--load": "run", "--train-data-path": path, "--lora-rank": "8"}
    assert {flag: command[command.index(flag) + 1] for flag in values} == values


def test_inspection_prints_both_completions(tmp_path, model, capsys):
    path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "Is it 4? ", "chosen": "Yes.", "rejected": "No."}])
    assert dpo.main(["--data", path, "--load-hf", model, "--seq-length", "64", "--inspect", "1"]) == 0
    text = capsys.readouterr().out
    assert "Is it 4? ⟦Yes." in text and "Is it 4? ⟦No." in text


def settings(model, flags):
    base = [*MODEL_FLAGS, "--mock-data"]
    return validate_args(parse_args([*base, *flags.format(hf=model).split()]), 1, announce=False)


PAIRS = "--dpo --pretrained-checkpoint {hf}"
PROBLEMS = {
    "--dpo-beta 0.5": "--dpo-beta 0.5: has no effect without --dpo; add --dpo, or remove this flag",
    "--dpo": "--dpo: compares with a reference model, and none is given; add --load-hf, --pretrained-checkpoint or",
    f"{PAIRS} --sft": "--dpo: is another kind of training than --sft; remove one of them",
    f"{PAIRS} --mtp-num-layers 1": "--mtp-num-layers 1: is not supported with --dpo: its loss has no further tokens",
    f"{PAIRS} --eod-mask-loss": "--eod-mask-loss: contradicts --dpo, whose masks come from the answers; remove it",
    f"{PAIRS} --use-varlen-dataset": "--use-varlen-dataset: is not supported with --dpo and its own data set",
    f"{PAIRS} --dpo-loss ipo --dpo-label-smoothing 0.1": "is defined for --dpo-loss sigmoid, not ipo",
    f"{PAIRS} --dpo-label-smoothing 0.5": "--dpo-label-smoothing 0.5: must be at least 0 and less than 0.5",
    f"{PAIRS} --dpo-reference base": "base is the model below adapters, which requires --lora-rank; add --lora-rank",
    f"{PAIRS} --lora-rank 2 --dpo-reference base --dpo-reference-load {{hf}}": "contradicts --dpo-reference base",
    "--dpo --dpo-reference-load {hf}/none": "^--dpo-reference-load .*none: there is no such folder; check the path",
    "--dpo --dpo-reference-load a/b": "^--dpo-reference-load a/b: .* run `hf download a/b --local-dir b`, then give b",
    "--dpo --load-hf {hf} --load {hf} --save {hf}": "^--load-hf .*: is the folder of --save, whose .*; choose another",
    f"{PAIRS} --dpo-reference stored": "stored requires data files, not --mock-data; use model",
    "--no-sft-packing": "--no-sft-packing: requires --sft or --dpo; add one, or remove this flag",
}


@pytest.mark.parametrize("flags", PROBLEMS)
def test_problem_is_named_with_its_fix(model, flags):
    with pytest.raises(ConfigError, match=PROBLEMS[flags]):
        settings(model, flags)


@pytest.mark.parametrize(
    "flags, reference, companions",
    [("--load-hf {hf}", "model", 1), ("--load-hf {hf} --lora-rank 2", "base", 0),
     ("--load-hf {hf} --lora-rank 2 --dpo-reference model", "model", 1),
     ("--load-hf {hf} --lora-rank 2 --dpo-reference-load {hf}", "model", 1)],
)  # fmt: skip
def test_reference_follows_from_adapters(model, flags, reference, companions):
    cfg = settings(model, f"--dpo {flags}")
    assert cfg.group(PreferenceConfig).dpo_reference == reference
    assert len(cfg.companions) == companions
    assert cfg.documents.reset_attention_mask and cfg.documents.reset_position_ids


def test_flops_include_the_forward_pass_of_the_reference(model):
    vocabulary, load = 1024, "--load-hf {hf} --lora-rank 2"
    plain, lora = (settings(model, flags).describe(vocabulary) for flags in ("--load-hf {hf}", load))
    base, with_model, full = (
        settings(model, f"--dpo {flags}").describe(vocabulary)
        for flags in (load, f"{load} --dpo-reference model", "--load-hf {hf}")
    )
    assert base.flops_per_sample == lora.flops_per_sample + plain.forward_flops
    assert full.flops_per_sample - plain.flops_per_sample == with_model.flops_per_sample - lora.flops_per_sample > 0
    assert base.num_parameters == lora.num_parameters
