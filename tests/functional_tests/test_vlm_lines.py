"""Command lines of Megatron-LM's pretrain_vlm.py (its functional tests) pass the dry run with the same shapes."""

import numpy as np
import pytest

from megatron.core.config.vision import VisionConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.training import entry
from megatron.training.arguments import parse_args, validate_args
from megatron.training.tasks.images import ImageTask

COMMON = (
    "--attention-dropout 0.0 --hidden-dropout 0.0 --log-params-norm --log-num-zeros-in-grad"
    " --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --train-iters 50 --timing-log-level 0"
    " --lr-decay-iters 320000 --split 949,50,1 --tokenizer-type NullTokenizer --vocab-size 8193"
    " --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2"
    " --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 1 --save-interval 10000 --eval-interval 1000"
    " --eval-iters 10 --transformer-impl transformer_engine --deterministic-mode --attention-softmax-in-fp32"
    " --ckpt-format torch --no-gradient-accumulation-fusion --bf16 --img-h 336 --img-w 336 --patch-dim 14 --mock-data"
    " --log-memory-to-tensorboard --num-layers 12 --pipeline-model-parallel-size 1"
)
HERE = "--distributed-backend gloo --transformer-impl local"
LINES = {
    "te_tp1_pp1": (
        "--hidden-size 624 --num-attention-heads 12 --micro-batch-size 4 --global-batch-size 32 --seq-length 1024"
        " --max-position-embeddings 1024 --tensor-model-parallel-size 1",
        (1024 + 577, 624, 2496, 12),
    ),
    "te_tp4_sp_cp2": (
        "--hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1 --global-batch-size 8"
        " --dataloader-seq-length 1232 --seq-length 576 --disable-vision-class-token --max-position-embeddings 4096"
        " --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 --use-packed-sequence"
        " --calculate-per-token-loss --num-channels 3",
        (1232 + 576, 1024, 4096, 16),
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_has_the_shapes_of_megatron_lm(name, monkeypatch, capsys):
    flags, (length, width, ffn, heads) = LINES[name]
    arguments = f"{flags} {COMMON}".split()
    cfg = validate_args(parse_args([*arguments, *HERE.split()], model_family="vlm"), 8)
    vision = cfg.group(VisionConfig)
    assert (vision.vision_model_type, cfg.data.seq_length) == ("clip", length)
    sizes = (vision.vision_hidden_size, vision.vision_ffn_hidden_size, vision.vision_num_attention_heads)
    assert (vision.vision_num_layers, *sizes) == (12, width, ffn, heads)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert entry.read_settings("vlm", "pretrain_vlm.py", [*arguments, "--dry-run"]) is None
    assert "the settings are consistent" in capsys.readouterr().out


def test_mock_data_has_an_image_in_front():
    arguments = f"{LINES['te_tp1_pp1'][0]} {COMMON} {HERE}".split()
    cfg = validate_args(parse_args(arguments, model_family="vlm"), 8)
    sample = ImageTask(cfg, build_tokenizer(cfg.tokenizer)).random_sample(np.random.default_rng(1))
    assert np.flatnonzero(sample["tokens"] == 0).tolist() == list(range(577))
    assert not sample["loss_mask"][:576].any() and sample["loss_mask"][576:].any()
    assert sample["sizes"].values.tolist() == [[24, 24]]
    assert sample["patches"].values.shape == (576, 3 * 14 * 14)


def test_rows_are_rounded_up_for_context_parallel_ranks():
    flags = LINES["te_tp4_sp_cp2"][0].replace("--disable-vision-class-token", "").replace("1232", "1233")
    arguments = f"{flags} {COMMON} {HERE}".split()
    cfg = validate_args(parse_args(arguments, model_family="vlm"), 8)
    assert cfg.data.seq_length == 1824  # 1233 + 577, to a multiple of 2 x 2 x 4


@pytest.mark.parametrize("flag, answer", [
    ("--use-te", "--transformer-impl"), ("--decoder-tp-comm-overlap", "--tp-comm-overlap"),
    ("--num-channels 1", "three channels"), ("--pixel-shuffle", "examples/multimodal"),
    ("--language-model-type mistral_7b", "--hidden-size"),
])  # fmt: skip
def test_other_flags_are_answered_by_one_sentence(flag, answer, capsys):
    with pytest.raises(SystemExit):
        entry.read_settings("vlm", "pretrain_vlm.py", [*LINES["te_tp1_pp1"][0].split(), *COMMON.split(), *flag.split()])
    assert answer in capsys.readouterr().err
