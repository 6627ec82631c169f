"""The tool keeps what a layout cares about, agrees with one rank, and says where it does not."""

import json
import re

import numpy as np
import pytest

from megatron.console import run_tool
from megatron.core.config.errors import UserError
from megatron.core.pipeline_parallel.stages import virtual_pipeline_size
from megatron.tools import verify_layout
from megatron.training.arguments import parse_args, smallest_world_size, validate_args
from megatron.training.tasks.language_model import task_class
from megatron.training.verify.layout_trace import SyntheticSamples, with_synthetic_data

FLAGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    " --ffn-hidden-size 14336 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    " --untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1"
    " --global-batch-size 128 --train-iters 1000 --lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 100 --bf16"
    " --tokenizer-type HuggingFaceTokenizer --tokenizer-model none --data-path none --save none"
)
LLAMA = FLAGS.split()


def shrunk(*layout, world_size=None, argv=LLAMA):
    cfg = parse_args([*argv, *layout], needs_data=False)
    world_size = world_size or smallest_world_size(cfg)
    small = verify_layout.shrink(cfg, world_size)
    validate_args(verify_layout.one_rank(small), 1)
    return validate_args(small, world_size)


@pytest.mark.parametrize(
    ("layout", "heads", "groups", "layers"),
    [
        ("", 4, 1, 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 8, 2, 2),
        ("--tensor-model-parallel-size 8", 32, 8, 2),
        ("--tensor-model-parallel-size 16", 32, 8, 2),
        ("--pipeline-model-parallel-size 4", 4, 1, 4),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", 4, 1, 8),
        ("--pipeline-model-parallel-size 3", 4, 1, 5),
        ("--context-parallel-size 2 --cp-comm-type a2a", 8, 2, 2),
    ],
)
def test_shrink_keeps_sizes_that_the_layout_divides(layout, heads, groups, layers):
    cfg = shrunk(*layout.split())
    assert (cfg.model.num_attention_heads, cfg.model.num_query_groups, cfg.model.num_layers) == (heads, groups, layers)
    assert cfg.model.hidden_size <= 256 and cfg.data.seq_length <= 512
    assert cfg.checkpoint.save is None and cfg.model.fp64


HYBRID = "M-M-M*E-M-GKM*" + "M-" * 40 + "/M*/M*"
HEADS = "--linear-num-key-heads 16 --linear-num-value-heads 16 --mamba-num-heads 128 --num-experts 8"
DELTA = "--experimental-attention-variant gdn --linear-num-value-heads 32 --linear-attention-freq"


@pytest.mark.parametrize(
    ("flags", "layers", "pattern", "linear", "mamba"),
    [
        (f"--hybrid-layer-pattern {HYBRID} {HEADS}", 12, "M-M-M*E-M-GK/M*/M*", (1, 1), (16, 1)),
        (f"--hybrid-layer-pattern {HYBRID} {HEADS} --tensor-model-parallel-size 4 --sequence-parallel",
         12, "M-M-M*E-M-GK/M*/M*", (4, 4), (64, 4)),
        (f"--hybrid-layer-pattern M-M*|M-E* {HEADS} --pipeline-model-parallel-size 2", 8, "M-M*|M-E*", (16, 16),
         (16, 1)),
        (f"{DELTA} 4", 8, None, (2, 1), (None, 8)),
        (f"{DELTA} 3 --pipeline-model-parallel-size 2", 6, None, (2, 1), (None, 8)),
        (f"{DELTA} {[1, 1, 0, 1] * 8} --tensor-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type a2a",
         32, None, (8, 4), (None, 8)),
    ],
)  # fmt: skip
def test_layers_with_a_state_keep_their_kinds_and_ratios_of_heads(flags, layers, pattern, linear, mamba):
    """A pattern of one stage ends with the first layer of its last kind."""
    words = flags.replace(", ", ",").split()
    argv = LLAMA if pattern is None else LLAMA[2:]  # the pattern sets --num-layers
    model = shrunk(*words, argv=argv).model
    assert (model.num_layers, model.hybrid_layer_pattern) == (layers, pattern)
    assert (model.linear_num_value_heads, model.linear_num_key_heads) == linear
    assert (model.mamba_num_heads, model.mamba_num_groups) == mamba
    assert (model.linear_key_head_dim, model.linear_value_head_dim) in ((8, 8), (128, 128))
    assert pattern is None or (model.mamba_head_dim, model.mamba_state_dim) == (8, 8)


@pytest.mark.parametrize(
    ("layout", "text", "layers", "chunks"),
    [
        ("", "Eta|ft|ta|ftL", 6, 1),
        ("--num-virtual-stages-per-pipeline-rank 2", "Et|t|t|t|ta|ft|ta|ftL", 10, 2),
        ("--whole-layers-in-pipeline-split", None, 4, 1),
    ],
)
def test_layers_are_cut_where_those_of_the_flags_are(layout, text, layers, chunks):
    cfg = shrunk("--vocab-size", "128256", "--pipeline-model-parallel-size", "4", *layout.split())
    result = cfg.model.pipeline_model_parallel_layout, cfg.model.num_layers, virtual_pipeline_size(cfg.model)
    assert result == (text, layers, chunks)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--logits-load-dir none", "--logits-load-dir none: needs the data"),
        ("--dpo --dpo-reference stored", "--dpo-reference stored: needs the data"),
    ],
)
def test_stored_values_are_rejected(flags, message, monkeypatch):
    monkeypatch.setattr(verify_layout, "apply_hf_settings", lambda cfg: cfg)
    with pytest.raises(UserError, match=message):
        verify_layout.main([*LLAMA, *flags.split()])


LAYOUT = ["--pipeline-model-parallel-size", "2", "--overlap-grad-reduce", "--use-distributed-optimizer", "--steps", "2"]


def test_a_sound_layout_exits_with_0(capsys):
    assert verify_layout.main([*LLAMA, *LAYOUT]) == 0
    out = capsys.readouterr().out
    assert "2 ranks = tensor 1 x context 1 x pipeline 2 x data 1" in out and "\nequal: " in out


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("family", "flags"),
    [("gpt", ""), ("gpt", "--use-varlen-dataset"), ("bert", "--mask-prob 0.05"), ("t5", "--decoder-seq-length 4")],
)
def test_every_global_batch_has_tokens_that_contribute_to_the_loss(family, flags, batch_size):
    sizes = (
        f"--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 {flags}"
    )
    argv = f"{sizes} --micro-batch-size 1 --global-batch-size {batch_size} --train-iters 1 --lr 1".split()
    cfg = validate_args(parse_args(argv, needs_data=False, model_family=family), 1)
    samples = SyntheticSamples(with_synthetic_data(task_class(family), 61)(cfg), 1 << 20)
    counts = np.array([np.sum(samples[index]["loss_mask"]) for index in range(60 * batch_size)])
    assert counts.reshape(60, batch_size).sum(1).min() > 0
    assert np.all(counts[1::3] == 0) == (batch_size > 1)


def test_a_sound_layout_with_one_sequence_per_batch_exits_with_0(capsys):
    flags = ["--tensor-model-parallel-size", "2", "--global-batch-size", "1", "--steps", "3"]
    assert verify_layout.main([*LLAMA, *flags]) == 0
    out = capsys.readouterr().out
    assert "batches of 1 in micro-batches of 1" in out and "\nequal: " in out and "nan" not in out


FP8 = "--fp8-format hybrid --use-distributed-optimizer --fp8-param-gather --micro-batch-size 2 --sequence-parallel"


@pytest.mark.parametrize(
    ("recipe", "width", "length", "layers"),
    [("delayed", 8 * 16, 64, 2), ("blockwise", 8 * 128, 512, 2), ("tensorwise --first-last-layers-bf16", 128, 64, 32)],
)
def test_fp8_keeps_sizes_that_its_casts_take(recipe, width, length, layers):
    cfg = shrunk(*f"{FP8} --fp8-recipe {recipe} --tensor-model-parallel-size 2".split())
    assert (cfg.model.hidden_size, cfg.data.seq_length, cfg.model.num_layers) == (width, length, layers)
    assert cfg.model.fp8 == "hybrid" and not cfg.model.fp8_param_gather


@pytest.mark.parametrize(("original", "expected"), [(8192, 16), (8191, 8)])
def test_rotary_scaling_by_length_keeps_the_side_of_the_original_length(original, expected):
    factors = {"short_factor": [*range(1, 65)], "long_factor": [*range(2, 66)], "attention_factor": 1.5}
    table = {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
    cfg = shrunk("--rope-parameters", json.dumps(table))
    small = {"original_max_position_embeddings": expected, "short_factor": [1, 2, 3, 4], "long_factor": [2, 3, 4, 5]}
    assert json.loads(cfg.model.rope_parameters) == table | small and cfg.data.seq_length == 16


@pytest.mark.parametrize("ranks, limit", [(2, 8192), (8, 1024), (8, 3000)])
def test_samples_of_different_lengths_need_as_many_ranks(ranks, limit):
    flags = f"--use-varlen-dataset --hybrid-context-parallel --max-seqlen-per-dp-cp-rank {limit} --attention-dropout 0"
    cfg = shrunk(*flags.split(), world_size=ranks)
    needed = -(-cfg.data.seq_length // cfg.model.max_seqlen_per_dp_cp_rank)
    assert cfg.model.hybrid_context_parallel and needed == -(-8192 // limit)


def test_a_sound_layout_of_different_lengths_exits_with_0(capsys):
    flags = "--use-varlen-dataset --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 4096 --attention-dropout 0"
    assert run_tool("verify-layout", [*LLAMA, *flags.split(), "--world-size", "2", "--steps", "2"]) == 0
    assert "match one rank to 1e-10" in capsys.readouterr().out


def test_fp8_layouts_equal_one_rank_with_the_same_micro_batches(capsys):
    """Scales belong to a micro-batch; two-batch overlap casts halves."""
    flags = f"{FP8} --tensor-model-parallel-size 2 --tp-comm-overlap --steps 2".split()
    assert verify_layout.main([*LLAMA, *flags]) == 0
    assert "\nequal: " in capsys.readouterr().out


T5_FLAGS = (
    "--encoder-num-layers 24 --decoder-num-layers 12 --hidden-size 1024 --num-attention-heads 16"
    " --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512 --vocab-extra-ids 100"
    " --micro-batch-size 8 --global-batch-size 64 --train-iters 100 --lr 1e-4 --position-embedding-type relative"
)
T5 = T5_FLAGS.split()
BERT_FLAGS = (
    "--num-layers 22 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --max-position-embeddings 512"
    " --micro-batch-size 8 --global-batch-size 64 --train-iters 100 --lr 1e-4"
    " --window-attn-skip-freq 3 --position-embedding-type rope --window-size"
)


@pytest.mark.parametrize(
    ("layout", "depths", "lengths"),
    [
        ("", (2, 1), (16, 8)),
        ("--pipeline-model-parallel-size 3", (3, 2), (16, 8)),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", (4, 2), (16, 8)),
        ("--tensor-model-parallel-size 8", (2, 1), (16, 16)),
    ],
)
def test_both_stacks_of_a_t5_are_shrunk(layout, depths, lengths):
    cfg = parse_args([*T5, *layout.split()], needs_data=False, model_family="t5")
    world_size = smallest_world_size(cfg)
    small = validate_args(verify_layout.shrink(cfg, world_size), world_size)
    assert (small.model.num_layers, small.flat.decoder_num_layers) == depths
    assert (small.data.seq_length, small.flat.decoder_seq_length) == lengths


@pytest.mark.parametrize(("window", "expected"), [("64,64", (4, 4)), ("64,0", (4, 0)), ("64,-1", (4, -1))])
def test_windows_stay_on_the_side_on_which_they_are(window, expected):
    cfg = parse_args([*BERT_FLAGS.split(), window], needs_data=False, model_family="bert")
    assert validate_args(verify_layout.shrink(cfg, 1), 1).model.window_size == expected


def test_a_sound_layout_of_a_t5_exits_with_0(capsys):
    layout = ["--program", "pretrain_t5.py", "--pipeline-model-parallel-size", "2", "--steps", "1"]
    assert verify_layout.main([*T5, *layout]) == 0
    out = capsys.readouterr().out
    assert "a model of 3 layers" in out and "sequences of 16 and 8" in out and "\nequal: " in out


IMAGES = "--program vlm --image-token-id 1 --vision-model-type"
QWEN = f"{IMAGES} qwen --rotary-percent 0.25 --mrope-section 6 5 5 --vision-deepstack-layers 5 11 17"


@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        (f"{QWEN} --tensor-model-parallel-size 2 --sequence-parallel --reset-attention-mask", "vision|decoder"),
        (f"{QWEN} --pipeline-model-parallel-size 2 --freeze-ViT", "decoder|vision.merger|vision.deep_mergers"),
        (f"{IMAGES} clip --vision-feature-layer -2 --context-parallel-size 2 --freeze-LM", "vision."),
        (f"{IMAGES} siglip --img-h 28 --img-w 28 --images-per-row 3 --use-torch-fsdp2", "vision|decoder"),
        ("--program vlm --image-token-id 1 --use-distributed-optimizer --freeze-LM", "vision."),
    ],
)
def test_sound_layouts_of_models_with_images_exit_with_0(flags, trained, capsys):
    """Small images keep the kind of tower, deep layers on the first stage, and which parts are trained."""
    assert verify_layout.main([*LLAMA, *flags.split(), "--world-size", "2", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    worst = [line.split()[-4] for line in out.splitlines() if " / " in line][1:]  # after the header
    assert len(worst) == 2 and all(re.match(trained, name) for name in worst), worst


def test_a_difference_exits_with_1_and_is_named(capsys, monkeypatch):
    correct = verify_layout.one_rank
    monkeypatch.setattr(verify_layout, "one_rank", lambda cfg: correct(cfg).with_settings(weight_decay=0.5))
    assert verify_layout.main([*LLAMA, *LAYOUT]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out and "step 1: weight of embedding.word_embeddings.weight differs by" in out


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_a_comparison_of_no_step_exits_with_2(steps, capsys):
    assert run_tool("verify-layout", [*LLAMA, "--steps", steps]) == 2
    assert capsys.readouterr().err == f"error: --steps {steps}: must be at least 1\n"


def test_contradictions_exit_with_2_and_all_reasons(capsys):
    flags = ["--tensor-model-parallel-size", "3", "--sequence-parallel", "--num-distributed-optimizer-instances", "2"]
    assert run_tool("verify-layout", [*LLAMA, *flags]) == 2
    errors = capsys.readouterr().err
    assert "--num-attention-heads" in errors and "--num-distributed-optimizer-instances" in errors


DEEPSEEK = (
    "--num-experts 256 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-ffn-hidden-size"
    " 2048 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-layer-freq ([0]*2+[1]*2)"
    " --num-layers 4 --moe-shared-expert-intermediate-size 2048"
)
MIXTRAL = "--num-experts 8 --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall --sequence-parallel"


@pytest.mark.parametrize(
    ("layout", "experts", "width", "ranks"),
    [
        (f"{DEEPSEEK} --expert-model-parallel-size 4", 16, 8, 4),
        (f"{DEEPSEEK} --expert-model-parallel-size 16 --context-parallel-size 8", 16, 8, 16),
        (f"{MIXTRAL} --expert-model-parallel-size 8", 8, 8, 8),
        (f"{MIXTRAL} --tensor-model-parallel-size 2 --expert-model-parallel-size 4", 4, 16, 8),
        (f"{MIXTRAL} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2"
         " --moe-expert-capacity-factor 1", 4, 8, 2),
    ],
)  # fmt: skip
def test_shrink_keeps_sizes_that_expert_layouts_divide(layout, experts, width, ranks):
    cfg = shrunk(*layout.split())
    assert (cfg.model.num_moe_experts, cfg.model.moe_ffn_hidden_size, cfg.world_size) == (experts, width, ranks)
    assert cfg.model.moe_expert_capacity_factor in (None, cfg.model.num_moe_experts / cfg.model.moe_router_topk)


def test_a_sound_layout_of_experts_exits_with_0(capsys):
    layout = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --steps 2"
    assert verify_layout.main([*LLAMA, *MIXTRAL.split(), *layout.split()]) == 0
    out = capsys.readouterr().out
    assert "4 experts, 2 per token, over expert 2 x tensor 1 ranks" in out and "\nequal: " in out
