"""Megatron-LM's parse_args, validate_args and set_args: a namespace that programs change before and after checks."""

import copy
import pickle
import sys

import pytest
import torch

from megatron.compat.script_arguments import read_settings
from megatron.core.config.errors import UserError
from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
from megatron.training import arguments, checkpointing, get_args, global_vars
from megatron.training.initialize import _initialize_tp_communicators
from megatron.training.tokenizer.tokenizer import _vocab_size_with_padding

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
    " --micro-batch-size 1 --lr 1e-3 --train-iters 4 --vocab-size 100"
)
LINES = {
    "dense": (1, ""),
    "swiglu": (2, "--swiglu --tensor-model-parallel-size 2 --sequence-parallel --bf16 --use-distributed-optimizer"),
    "queries": (1, "--group-query-attention --num-query-groups 2 --normalization RMSNorm --rotary-base 500000"),
    "chunks": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4"),
    "experts": (2, "--num-experts 4 --expert-model-parallel-size 2 --moe-ffn-hidden-size 16 --moe-layer-freq [0,1]*2"),
    "latent": (
        1,
        "--multi-latent-attention --qk-layernorm --kv-lora-rank 8 --qk-head-dim 8 --position-embedding-type rope",
    ),
    "ramp": (1, "--global-batch-size 8 --rampup-batch-size 2 2 8 --train-samples 64 --lr-decay-samples 32"),
    "saving": (1, "--save /nowhere --save-interval 2 --async-save --lr-warmup-fraction 0.1 --weight-decay 0.1"),
}


def command(monkeypatch, text):
    model = MODEL.replace("--train-iters 4", "") if "--train-samples" in text else MODEL
    monkeypatch.setattr(sys, "argv", ["program", *model.split(), *text.split()])


@pytest.fixture(autouse=True)
def forget():
    yield
    global_vars.unset_global_variables()


@pytest.mark.parametrize("line", LINES)
def test_validated_settings_are_those_of_the_library_program(monkeypatch, line):
    world_size, text = LINES[line]
    command(monkeypatch, text)
    args = arguments.parse_args()
    args.world_size = world_size
    assert arguments.validate_args(args) is args
    cfg = arguments.parse_args(sys.argv[1:], needs_data=False)
    cfg = cfg.with_settings(transformer_impl="transformer_engine", explicit=cfg.explicit | {"transformer_impl"})
    expected = arguments.validate_args(cfg, world_size).flat.values()
    derived = {"padded_vocab_size", "transformer_impl"}
    for copied in (args, copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        actual = read_settings(copied).flat.values()
        wrong = {name for name, value in expected.items() if name not in derived and actual[name] != value}
        assert wrong == set()


def test_programs_change_the_namespace(monkeypatch, tmp_path):
    def add_flags(parser):
        parser.add_argument("--rollout-batch-size", type=int, default=3)
        for action in parser._actions:  # as slime's reset_arg
            if "--lr" in action.option_strings:
                action.default = 1e-6
        return parser

    monkeypatch.setattr(sys, "argv", ["program", *MODEL.replace("--lr 1e-3", "").split(), "--sglang-x", "1", "--bf16"])
    args = arguments.parse_args(extra_args_provider=add_flags, ignore_unknown_args=True)
    assert (args.rollout_batch_size, args.lr, args.transformer_impl) == (3, 1e-6, "transformer_engine")
    assert args.ffn_hidden_size is None and args.world_size == 1  # not resolved
    args.swiglu, args.world_size, args.tensor_model_parallel_size, args.new_name = True, 2, 2, "x"
    arguments.validate_args(args, {"weight_decay": 9.0, "lr_decay_iters": 9})
    assert args.params_dtype is torch.bfloat16 and args.ffn_hidden_size == 64 and args.new_name == "x"
    assert args.weight_decay == 0.01 and args.lr_decay_iters == 9
    args.lr_decay_iters = 7
    global_vars.set_args(args)
    assert get_args() is args is global_vars.get_args() and read_settings(args).flat.lr_decay_iters == 7
    assert read_settings(args).extra["rollout_batch_size"] == 3 and read_settings(args).data_parallel_size == 1
    with pytest.raises(UserError, match="--transformer-impl local"):
        _initialize_tp_communicators()


def test_contradictions_end_validation(monkeypatch):
    command(monkeypatch, "--num-query-groups 3")
    args = arguments.parse_args()
    args.group_query_attention = True
    with pytest.raises(ValueError, match="num-query-groups 3"):
        arguments.validate_args(args)


@pytest.mark.parametrize("text", ["--unknown 1", "--num-layers x"])
def test_mistyped_flags_end_the_process(monkeypatch, capsys, text):
    command(monkeypatch, text)
    with pytest.raises(SystemExit):
        arguments.parse_args(None, False)
    assert text.split()[0] in capsys.readouterr().err


def test_calls_of_the_library_program_are_not_changed():
    cfg = arguments.parse_args(f"{MODEL} --mock-data --tokenizer-type NullTokenizer".split())
    assert cfg.model.num_layers == 4 and arguments.validate_args(cfg, 1).flat.resolved


def test_vocabulary_is_padded_to_tensor_parallel_ranks(monkeypatch):
    """transformer vocabularies of Megatron-LM: a multiple of 128 x tensor-parallel size."""
    command(monkeypatch, "--tensor-model-parallel-size 2")
    args = arguments.parse_args()
    assert vocab_size_with_padding(50257, args) == 50432 == _vocab_size_with_padding(50257, args)


def test_checkpoint_paths_follow_the_arguments(monkeypatch, tmp_path):
    command(monkeypatch, f"--load {tmp_path}")
    args = arguments.parse_args()
    tracker = checkpointing.get_checkpoint_tracker_filename(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert checkpointing.isfile(tracker) and checkpointing.read_metadata(tracker) == (12, False)
    assert checkpointing.get_load_checkpoint_path_by_args(args) == str(tmp_path / "iter_0000012")
    args.ckpt_step = 3
    assert checkpointing.get_load_checkpoint_path_by_args(args) == str(tmp_path / "iter_0000003")
    args.load, args.ckpt_step = tmp_path / "iter_0000007", None
    assert checkpointing.get_load_checkpoint_path_by_args(args) == str(tmp_path / "iter_0000007")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert checkpointing.read_metadata(tracker) == (0, True)
    args.load = None
    with pytest.raises(UserError, match="set --load"):
        checkpointing.get_load_checkpoint_path_by_args(args)
