"""Command lines become settings: order of truth, retired spellings, scripts' own flags, YAML, all errors at once."""

import argparse
import json
import logging
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.config import absent
from megatron.core.config.cli import ConfigError, Problem
from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import (
    core_transformer_config_from_args,
    exit_on_config_error,
    flag_specs,
    format_arguments,
    parse_args,
    validate_args,
)
from megatron.training.entry import read_settings
from megatron.training.stored_settings import config_to_dict

ROOT = Path(__file__).resolve().parents[3]

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def parse(text="", **options):
    return parse_args((TINY + " " + text).split(), **options)


def problems_of(text, world_size=1, base=TINY, **options):
    with pytest.raises(ConfigError) as caught:
        validate_args(parse_args((base + " " + text).split(), **options), world_size)
    return [str(problem) for problem in caught.value.problems]


def test_import_and_help_need_no_torch():
    program = (
        "import sys, megatron.training.arguments as a\n"
        "try: a.parse_args(['--help', 'all'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'numpy', 'yaml'} & set(sys.modules), sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    for part in ("Network size:", "--num-layers INT", "--disable-bias-linear", "Checkpoints:", "--dry-run"):
        assert part in result.stdout


def test_command_line_wins_over_yaml_over_script_over_fields(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("optimizer:\n  adam_beta1: 0.5\n  adam-beta2: 0.5\nhidden_dropout: 0.5\n")
    defaults = {"adam_beta1": 0.6, "hidden_dropout": 0.6, "attention_dropout": 0.6}
    cfg = parse(f"--yaml-cfg {path} --adam-beta1 0.7", args_defaults=defaults)
    flat = cfg.flat
    assert (flat.adam_beta1, flat.adam_beta2, flat.hidden_dropout, flat.attention_dropout) == (0.7, 0.5, 0.5, 0.6)
    assert {"adam_beta1", "adam_beta2", "hidden_dropout"} <= cfg.explicit and "attention_dropout" not in cfg.explicit


def test_yaml_mistakes_are_named(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("hiden_size: 3\nlayernorm_epsilon: 1e-6\nbf16: 1\n")
    problems = problems_of(f"--yaml-cfg {path}")
    assert problems == [
        f"{path}: hiden_size 3: unknown setting; did you mean hidden-size or ffn-hidden-size?",
        f"{path}: bf16 1: must be true or false",
    ]
    path.write_text("- 1")
    assert "must hold names and values" in problems_of(f"--yaml-cfg {path}")[0]
    path.write_text("lr: 1e-3\nmoe: {num_experts: 4}\nlr: 2e-3\n")
    assert "lr is set twice" in problems_of(f"--yaml-cfg {path}")[0]
    assert "line 3, column 1" in problems_of(f"--yaml-cfg {path}")[0]
    path.write_text("lr: 1e-3\nseed: 5\nmore: {--lr: 2e-3, seed: 5}\nno-masked-softmax-fusion: true\n")
    assert problems_of(f"--yaml-cfg {path}") == [
        f"{path}: --lr 2e-3: is set twice; before to 0.001; keep one of both"
    ]
    path.write_text("a: [")
    assert len(problems_of(f"--yaml-cfg {path}")) == 1
    assert "No such file" in problems_of(f"--yaml-cfg {tmp_path / 'none'}")[0]


def test_script_defaults_must_be_settings():
    assert problems_of("", args_defaults={"tokenizr_type": "x"})[0].startswith("tokenizr_type x: unknown setting")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("--batch-size 4", {"micro_batch_size": 2}),  # today's spelling, in TINY, wins
        ("--layernorm-epsilon 1e-6", {"norm_epsilon": 1e-6}),
        ("--use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        ("--checkpoint-activations", {"recompute_granularity": "full", "recompute_method": "uniform"}),
        ("--activations-checkpoint-method block --checkpoint-num-layers 3",
         {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}),
        ("--checkpoint-num-layers 3 --checkpoint-activations", {"recompute_num_layers": 3}),
        ("--activations-checkpoint-method uniform", {"recompute_num_layers": 1}),
        ("--warmup .01", {"lr_warmup_fraction": 0.01}),
        ("--override-lr-scheduler", {"override_opt_param_scheduler": True}),
        ("--override_opt_param_scheduler", {"override_opt_param_scheduler": True}),
        ("--override-opt-param-scheduler", {"override_opt_param_scheduler": True}),
        ("--model-parallel-size 2", {"tensor_model_parallel_size": 2}),
        ("--moe-layer-recompute", {"recompute_modules": ["moe"], "recompute_granularity": "selective"}),
        ("--use-flash-attn --use-mcore-models --DDP-impl local --data-impl mmap --no-one-logger --local_rank 3",
         {"attention_backend": "auto", "local_rank": 3}),
        ("--min-scale 2", {"min_loss_scale": 2.0}),
        ("--window-size 127,0", {"window_size": (127, 0)}),
        ("--window-size (127,-1) --window-attn-skip-freq [1,0]",
         {"window_size": (127, -1), "window_attn_skip_freq": [1, 0]}),
        ("--exit-signal SIGUSR1", {"exit_signal": signal.SIGUSR1}),
    ],
)  # fmt: skip
def test_spelling_is_understood(text, values):
    cfg = parse(text)
    assert {name: getattr(cfg.flat, name) for name in values} == values


def test_retired_spellings_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        parse("--use-mcore-models --layernorm-epsilon 1e-6")
    assert [record.message for record in caplog.records] == [
        "--layernorm-epsilon means --norm-epsilon ...",
        "--use-mcore-models accepted without effect: there is only one set of models",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--warmup 3", "--lr-warmup-fraction 3: must be at least 0 and less than 1"),
        ("--deepspeed", "--deepspeed: is a flag of DeepSpeed; --use-distributed-optimizer shards the optimizer"),
        (
            "--encoder-pipeline-model-parallel-size 2",
            "--encoder-pipeline-model-parallel-size: is not a flag any more; "
            "encoder and decoder share one pipeline: add its stages to --pipeline-model-parallel-size",
        ),
        ("--expert-parallel", "--expert-parallel: is not a flag any more; --expert-model-parallel-size"),
        ("--dsa-indexer-topk 3", "--dsa-indexer-topk: exists in Megatron-LM, is not available here; remove it"),
        ("--retro-workdir x", "--retro-workdir: was removed from Megatron-LM; remove it"),
        ("--num-layer 3", "--num-layer: unknown flag; did you mean --num-layers"),
        ("--window-size a", "--window-size a: "),
        ("--moe-layer-freq [2]", "--moe-layer-freq [2]: must be an integer"),
        ("--fp8-hybrid --hidden-size 72", "--hidden-size 72: is 72 per rank; --fp8-recipe delayed requires"),
        ("--fp8-e4m3 --hidden-size 72", "--hidden-size 72: is 72 per rank; --fp8-recipe delayed requires"),
        ("--optimizer-offload-fraction 1.5", "--optimizer-offload-fraction 1.5: must be at least 0 and at most 1"),
        ("--optimizer-offload-fraction 0.5", "--optimizer-offload-fraction 0.5: requires --optimizer-cpu-offload; add"),
        ("--overlap-cpu-optimizer-d2h-h2d", "--overlap-cpu-optimizer-d2h-h2d: requires --optimizer-cpu-offload; add"),
        ("--exit-signal SIGNOPE", "--exit-signal SIGNOPE: must be the name of a signal"),
    ],
)
def test_wrong_spelling_is_answered(text, problem):
    assert problems_of(text)[0].startswith(problem)


def test_mistakes_and_contradictions_are_reported_together():
    problems = problems_of("--hiden-size 3 --lr fast --fp16 --bf16 --global-batch-size 3 --tokenizer-hf-no-use-fast")
    assert [problem.split()[0].rstrip(":") for problem in problems] == [
        "--hiden-size", "--lr", "--fp16", "--global-batch-size", "--tokenizer-hf-no-use-fast",
    ]  # fmt: skip


def test_all_missing_flags_of_a_published_mixture_are_reported_at_once():
    command = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --expert-model-parallel-size 4 "
        "--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
        "--hidden-size 4096 --num-layers 32 --num-attention-heads 32 --seq-length 4096 --bf16 "
        "--max-position-embeddings 4096 "
        "--use-mcore-models --transformer-impl transformer_engine --data-path x --vocab-file v --merge-file m"
    )
    problems = problems_of(command, world_size=8, base="", args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    starts = ("--micro-batch-size: is required", "--num-experts 8: with --tensor-model-parallel-size > 1 requires")
    assert all(any(problem.startswith(start) for problem in problems) for start in starts)


def test_exit_status_of_a_usage_error_is_2(capsys, monkeypatch):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop, exit_on_config_error("program"):
            parse("--nonsense")
        assert stop.value.code == 2
    assert capsys.readouterr().err.count("--nonsense") == 1  # rank 0 only


def add_flags(parser):
    group = parser.add_argument_group("mine")
    group.add_argument("--my_number", type=int, default=5)
    group.add_argument("--my-list", nargs="+", type=float)
    group.add_argument("--patch-dim", type=int)
    group.add_argument("--my-kind", choices=["a", "b"], default="a")
    parser.set_defaults(hidden_dropout=0.25)
    return parser


def test_script_flags_become_attributes():
    cfg = parse("--my-number 7 --my_list 1 -2 --patch-dim 3", extra_args_provider=add_flags)
    flat = cfg.flat
    assert (flat.my_number, flat.my_list, flat.patch_dim, flat.my_kind) == (7, [1.0, -2.0], 3, "a")
    assert cfg.model.hidden_dropout == 0.25
    resolved = validate_args(cfg, 1)
    assert resolved.flat.my_number == 7 and resolved.extra["my_list"] == [1.0, -2.0]
    with pytest.raises(AttributeError, match="no setting 'my_nonsense'"):
        _ = flat.my_nonsense


def test_script_flag_mistakes_are_reported_with_the_others():
    problems = problems_of("--my-number x --nonsense --my-kind c", extra_args_provider=add_flags)
    assert problems[0].startswith("--nonsense: unknown flag")
    assert any("--my_number" in problem for problem in problems)


def test_script_flag_that_exists_is_rejected_by_argparse():
    with pytest.raises(argparse.ArgumentError):
        parse(extra_args_provider=lambda parser: parser.add_argument("--hidden-size"))


def test_resolved_settings_are_frozen_and_survive_copies():
    cfg = validate_args(parse("--bf16"), 2)
    with pytest.raises(AttributeError, match="frozen"):
        cfg.model.hidden_size = 3
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert cfg.with_settings(seed=3).model.seed == 3
    assert json.loads(json.dumps(config_to_dict(cfg.flat)))["exit_signal"] == "SIGTERM"


def test_arguments_are_printed_sorted_with_dots():
    lines = format_arguments(validate_args(parse(), 1).flat).splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[-1] == "-------------------- end of arguments ---------------------"
    assert "  hidden_size ..................................... 64" in lines
    names = [line.split()[0] for line in lines[1:-1]]
    assert names == sorted(names, key=str.lower) and len(names) > 250


def test_run_prints_explicit_and_changed_settings():
    text = format_arguments(validate_args(parse("--norm-epsilon 1e-5 --bf16"), 1).flat, everything=False)
    names = [line.split()[0] for line in text.splitlines()[1:-1]]
    assert {"hidden_size", "ffn_hidden_size", "norm_epsilon", "bf16", "params_dtype", "world_size"} <= set(names)
    assert not {"fp16", "swiglu", "explicit", "resolved", "extra"} & set(names) and len(names) < 50


def test_library_configuration_has_the_same_fields():
    cfg = validate_args(parse("--bf16 --group-query-attention --num-query-groups 2 --swiglu --norm-epsilon 1e-6"), 1)
    config = core_transformer_config_from_args(cfg.flat)
    assert type(config) is TransformerConfig
    assert (config.num_query_groups, config.ffn_hidden_size, config.kv_channels) == (2, 128, 16)
    assert config.layernorm_epsilon == 1e-6 and config.params_dtype is cfg.model.params_dtype
    assert str(config.params_dtype) == "torch.bfloat16"


@pytest.mark.parametrize("content", [None, "a: [", "- 1\n- 2\n", "x: y: z"])
def test_an_unusable_yaml_file_is_the_only_message(tmp_path, content):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        parse_args(["--yaml-cfg", str(path)])
    (problem,) = str(error.value).splitlines()
    assert problem.startswith(f"--yaml-cfg {path}: ") and "Errno" not in problem and "; " in problem


def test_no_rejected_flag_is_suggested():
    rejected = {name for row in absent.rows() if row.status not in ("means", "no effect") for name in row.names}
    registered = [name for spec in flag_specs() for name in spec.names] + [
        name for row in absent.rows() for name in row.names
    ]
    for typed in [name[:-1] for name in registered] + ["--resume", "--model-name", "--config"]:
        fix = absent.explain(Problem(typed, "unknown flag"), registered).fix
        assert not rejected.intersection(fix.rstrip("?").replace(",", " ").split()), (typed, fix)
    assert "--yaml-cfg" in absent.explain(Problem("--config", "unknown flag"), registered).fix
    assert "--load " in absent.explain(Problem("--resume", "unknown flag"), registered).fix
    assert "--load-hf" in absent.explain(Problem("--model-name", "unknown flag"), registered).fix


@pytest.mark.parametrize("program, flag", [("hybrid", "--hybrid-layer-pattern"), ("moe", "--num-experts")])
def test_programs_require_their_layers_unless_stored_settings_have_them(program, flag, tmp_path, capsys):
    for stored in ("--use-checkpoint-args --pretrained-checkpoint", "--load-hf"):
        assert read_settings(program, "pretrain", [*stored.split(), str(tmp_path), "--mock-data"]) is not None
    with pytest.raises(SystemExit, match="2"):
        read_settings(program, "pretrain", ["--pretrained-checkpoint", str(tmp_path), "--mock-data"])
    assert f"  {flag}: is required" in capsys.readouterr().err
