"""``megatron distill``, the rules of distillation, and ModelOpt's file of settings."""

import pytest

from megatron import console
from megatron.core.config.cli import ConfigError
from megatron.core.config.distillation import DistillationConfig
from megatron.tools import distill
from megatron.training.arguments import parse_args, validate_args
from tests.test_utils.gpt_runs import MODEL_FLAGS
from tests.test_utils.hf_folders import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_llama(tmp_path_factory.mktemp("hf") / "model"))


def test_defaults_of_the_run(model, monkeypatch):
    commands = []
    monkeypatch.setattr(console, "pretrain", lambda arguments: commands.append(arguments) or 0)
    flags = ["--teacher", "large", "--data", "a.jsonl", "--load-hf", model, "--save", "run", "--kd-temperature", "2"]
    assert distill.main(flags) == 0
    (command,) = commands
    assert command[:2] == ["gpt", "--sft"]
    values = {"--export-kd-teacher-load": "large", "--lr": "1e-4", "--load": "run", "--train-data-path": "a.jsonl"}
    assert {flag: command[command.index(flag) + 1] for flag in values} == values


def test_missing_flags_are_named_together(capsys):
    with pytest.raises(SystemExit, match="2"):
        distill.main(["--save", "run"])
    text = capsys.readouterr().err
    assert "usage: " in text and "--teacher FOLDER --data FILE" in text
    assert "the following arguments are required: --teacher, --data, --load-hf" in text


def settings(flags):
    return validate_args(parse_args([*MODEL_FLAGS, "--mock-data", *flags.split()]), 1, announce=False)


PROBLEMS = {
    "--kd-temperature 2": "--kd-temperature 2.0: has no effect without --export-kd-teacher-load or --logits-load-dir",
    "--logits-save-top-k 2": "--logits-save-top-k 2: has no effect without --logits-save-dir; add it",
    "--logits-save-dir a": "--logits-save-dir a: requires --logits-save-top-k; for example --logits-save-top-k 64",
    "--logits-save-dir a --logits-save-top-k 2 --logits-load-dir b": "--logits-save-dir a: contradicts --logits-load-",
    "--logits-save-top-p 0.9": "--logits-save-top-p: .*; --logits-save-top-k .all tokens have the same number",
    "--logits-load-kd-loss-alpha 0.9": "--logits-load-kd-loss-alpha: .*--kd-loss-scale ALPHA --kd-lm-loss-weight 1-AL",
    "--logits-load-ignore-errors": "--logits-load-ignore-errors: .*; remove it .a sample that is not stored ends",
    "--export-kd-teacher-load {hf} --kd-temperature 0": "--kd-temperature 0: must be positive",
    "--export-kd-teacher-load {hf}/none": "^--export-kd-teacher-load .*none: there is no such folder; check the path",
    "--export-kd-teacher-load a/b": "^--export-kd-teacher-load a/b: .*run `hf download a/b --local-dir b`, then give b",
    "--export-kd-teacher-load {hf} --save {hf}/": "^--export-kd-teacher-load .*: is the folder of --save, whose ",
    "--export-kd-teacher-load {hf} --dpo": "--dpo: is another kind of training than --export-kd",
    "--export-kd-teacher-load {hf} --mtp-num-layers 1": "--mtp-num-layers 1: is not supported with --export-kd-teacher",
    "--export-kd-teacher-load {hf} --export-kd-cfg {hf}/none": "--export-kd-cfg .*none: cannot be read: .*No such file",
}


def test_evaluation_may_name_the_folder_of_the_teacher(model):
    cfg = settings(f"--export-kd-teacher-load {model} --save {model} --skip-train")
    assert cfg.companions["teacher"].checkpoint.load_hf == model


@pytest.mark.parametrize("flags", PROBLEMS)
def test_problem_is_named_with_its_fix(model, flags):
    with pytest.raises(ConfigError, match=PROBLEMS[flags]):
        settings(flags.format(hf=model))


FILES = {
    "skip_lm_loss: true\nkd_loss_scale: 3": (1.0, 1.0, 0.0),
    "skip_lm_loss: false\nkd_loss_scale: 3\nlogit_kl_temperature: 2": (2.0, 3.0, 1.0),
    "logit_layers: [output_layer, output_layer]\nintermediate_layer_pairs: []": (1.0, 1.0, 0.0),
    "kd_loss_alpha: 0.75": (1.0, 0.75, 0.25),
}
BAD_FILES = {
    "kd_loss_scale: high": "kd_loss_scale high: must be a number above 0",
    "skip_lm_loss: 1": "skip_lm_loss 1: must be true or false",
    "loss: 1": "loss is not one of logit_layers, intermediate_layer_pairs, skip_lm_loss, kd_loss_scale",
    "logit_kl_topk: 8": "logit_kl_topk 8: only None is available",
    "intermediate_layer_pairs: [[a, b]]": r"\['a', 'b'\]: only \[decoder.layers.N, decoder.layers.M, cosine or mse\]",
    "intermediate_layer_pairs: [[decoder.final_layernorm, decoder.layers.1, l1]]": "'l1'.: only",
    "kd_loss_alpha: 1.5": "kd_loss_alpha 1.5: must be at most 1",
    "- 1": "must hold names and values",
    "a: [": "cannot be read: while parsing",
}


def with_file(tmp_path, model, text, flags=""):
    (tmp_path / "kd.yaml").write_text(text)
    return settings(f"--export-kd-teacher-load {model} --export-kd-distill-cfg {tmp_path / 'kd.yaml'} {flags}")


@pytest.mark.parametrize("text", FILES)
def test_file_of_modelopt_sets_flags(tmp_path, model, text):
    group = with_file(tmp_path, model, text).group(DistillationConfig)
    assert (group.kd_temperature, group.kd_loss_scale, group.kd_lm_loss_weight) == FILES[text]


def test_flags_win_over_the_file(tmp_path, model):
    group = with_file(tmp_path, model, "logit_kl_temperature: 2", "--kd-temperature 5").group(DistillationConfig)
    assert group.kd_temperature == 5


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_file_is_named_with_its_problem(tmp_path, model, text):
    with pytest.raises(ConfigError, match=f"--export-kd-cfg .*kd.yaml: .*{BAD_FILES[text]}"):
        with_file(tmp_path, model, text)
