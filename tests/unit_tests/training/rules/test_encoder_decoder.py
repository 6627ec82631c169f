"""Options that encoder-decoder models do not support, and settings that only they have."""

import pytest

from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.notices import notices
from megatron.training.rules.run_all import check

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 "
)
DECODER = "--decoder-seq-length 16 "
RELATIVE = DECODER + "--position-embedding-type relative "


def problems(text, world_size=1, family="t5", **options):
    parsed = parse_args((TINY + text).split(), model_family=family, **options)
    return [str(item) for item in check(resolve(parsed, world_size))]


@pytest.mark.parametrize("text, world_size, flag, reason", [
    ("", 1, "--decoder-seq-length", "is required; for example --decoder-seq-length 128"),
    ("--decoder-seq-length 33", 1, "--max-position-embeddings 32", "smaller than --decoder-seq-length 33"),
    ("--decoder-seq-length 18 --context-parallel-size 2", 2, "--decoder-seq-length 18", "not a multiple of 2 x"),
    ("--decoder-seq-length 15 --sequence-parallel --tensor-model-parallel-size 2", 2, "--decoder-seq-length 15",
     "not a multiple of --tensor-model-parallel-size 2"),
    (DECODER + "--encoder-num-layers 3", 1, "--encoder-num-layers 3", "contradicts --num-layers 2"),
    (DECODER + "--use-parallel-residual", 1, "--use-parallel-residual", "is not supported by pretrain_t5.py"),
    (DECODER + "--window-size 4,4 --window-attn-skip-freq 2", 1, "--window-attn-skip-freq 2", "not supported by"),
    (DECODER + "--softmax-type learnable", 1, "--softmax-type learnable", "choose vanilla or off-by-one"),
    (DECODER + "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4", 4,
     "--num-query-groups 2", "which cross-attention requires"),
    (DECODER + "--scale-decoder-outputs --untie-embeddings-and-output-weights", 1, "--scale-decoder-outputs",
     "contradicts --untie-embeddings-and-output-weights"),
    (RELATIVE + "--relative-attention-num-buckets 7", 1, "--relative-attention-num-buckets 7", "is odd"),
    (RELATIVE + "--relative-attention-max-distance 16", 1, "--relative-attention-max-distance 16", "at least 17"),
    (DECODER + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tL", 2,
     "--pipeline-model-parallel-layout", "has 3 layers for --num-layers 2 and --decoder-num-layers 2"),
    (DECODER + "--pipeline-model-parallel-size 8", 8, "--num-layers 2", "4 layers cannot fill 8 pipeline stages"),
])  # fmt: skip
def test_invalid_encoder_decoder_settings_are_rejected(text, world_size, flag, reason):
    (problem,) = problems(text, world_size)
    assert flag in problem and reason in problem


def test_weights_only_checkpoint_leaves_the_length_to_the_command_line():
    """A converted checkpoint stores no length; --use-checkpoint-args has already taken its settings when rules run."""
    (problem,) = problems("--use-checkpoint-args --load x")
    assert problem == "--decoder-seq-length: is required; for example --decoder-seq-length 128"


def test_scripts_with_custom_data_need_the_length_to_train():
    (problem,) = problems("", needs_data=False)
    assert problem.startswith("--decoder-seq-length: is required")
    assert not problems("--skip-train", needs_data=False)


def test_parallel_branches_are_on_one_stage():
    pipeline = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Eta|fL "
    assert not problems(pipeline, 2, "bert")
    (problem,) = problems(pipeline + "--use-parallel-residual", 2, "bert")
    assert problem.startswith("--pipeline-model-parallel-layout Eta|fL: ")


@pytest.mark.parametrize("text, world_size", [
    (DECODER, 1),
    (DECODER + "--decoder-num-layers 5 --pipeline-model-parallel-size 4", 4),
    (RELATIVE + "--context-parallel-size 2 --softmax-type off-by-one", 2),
    (RELATIVE + "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 4),
    (DECODER + "--context-parallel-size 2 --pipeline-model-parallel-layout Etta|aftL --pipeline-model-parallel-size 2",
     4),
])  # fmt: skip
def test_valid_encoder_decoder_settings_are_accepted(text, world_size):
    assert not problems(text, world_size)


@pytest.mark.parametrize("text", [
    "--decoder-num-layers 3", "--decoder-seq-length 16", "--position-embedding-type relative",
    "--scale-decoder-outputs",
])  # fmt: skip
@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_settings_of_two_stacks_are_rejected_elsewhere(text, family):
    (problem,) = problems(text, family=family)
    assert problem.startswith(text.split()[0]) and "is supported only by pretrain_t5.py" in problem


def test_bucket_sizes_without_relative_positions_give_one_notice():
    inputs = parse_args((TINY + DECODER + "--relative-attention-num-buckets 8").split(), model_family="t5")
    (notice,) = (item for item in notices(inputs, resolve(inputs, 1)) if item.startswith("--relative"))
    assert notice == "--relative-attention-num-buckets: no effect without --position-embedding-type relative"


GPT = "pretrain_gpt.py, pretrain_moe.py, pretrain_hybrid.py and pretrain_vlm.py"


@pytest.mark.parametrize("family, text, flag, programs", [
    ("bert", "--num-experts 8", "--num-experts 8", GPT),
    ("t5", DECODER + "--spec my.module layers", "--spec my.module layers", GPT),
    ("t5", DECODER + "--use-packed-sequence", "--use-packed-sequence", "pretrain_bert.py and pretrain_vlm.py"),
])  # fmt: skip
def test_flags_of_other_families_are_rejected_with_their_programs(family, text, flag, programs):
    assert problems(text, family=family) == [f"{flag}: is supported only by {programs}; remove it"]


@pytest.mark.parametrize("family, text", [("bert", ""), ("t5", DECODER)])
def test_families_that_do_not_continue_texts_reject_prompts(family, text):
    (problem,) = problems(text + "--sample-prompts 5", family=family)
    assert f"is not supported with pretrain_{family}.py, which does not generate" in problem


@pytest.mark.parametrize("text, programs", [
    ("--mask-prob 0.2", "pretrain_bert.py and pretrain_t5.py"),
    ("--short-seq-prob 0.2", "pretrain_bert.py and pretrain_t5.py"), ("--bert-no-binary-head", "pretrain_bert.py"),
])  # fmt: skip
def test_harmless_flags_of_other_families_give_one_notice(text, programs):
    inputs = parse_args((TINY + text).split())
    assert f"{text.split()[0]}: no effect here, only in {programs}" in notices(inputs, resolve(inputs, 1))
    assert not problems(text, family="gpt")


def test_the_local_spec_is_accepted_by_every_family():
    assert not problems("--spec local", family="bert")
