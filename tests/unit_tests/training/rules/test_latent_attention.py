"""Rules of multi-latent attention: what it lacks, what it excludes, what requires it."""

import pytest

from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.notices import notices
from tests.unit_tests.training.rules.test_run_all import TINY, problems

LATENT = "--multi-latent-attention --kv-lora-rank 16"


@pytest.mark.parametrize(
    "text",
    [
        LATENT,
        f"{LATENT} --q-lora-rank 8 --mla-down-proj-fusion --qk-layernorm --kv-channels 7 --rope-type rope",
        f"{LATENT} --num-attention-heads 5 --position-embedding-type rope --rotary-scaling-factor 40",
        f"{LATENT} --recompute-granularity selective --recompute-modules mla_up_proj",
        "--position-embedding-type rope --rope-type rope",
    ],
)
def test_consistent_settings_pass(text):
    assert problems(text) == []


def test_everything_that_latent_attention_excludes_is_named_at_once():
    result = problems(
        "--multi-latent-attention --group-query-attention --qk-l2-norm --add-qkv-bias --rotary-interleaved"
        " --use-rope-scaling --rotary-seq-len-interpolation-factor 2 --position-embedding-type yarn"
        " --yarn-original-max-position-embeddings 16 --mla-down-proj-fusion"
    )
    flags = [item.split(":")[0].split()[0] for item in result]
    assert flags == [
        "--qk-l2-norm", "--add-qkv-bias", "--rotary-interleaved", "--mla-down-proj-fusion", "--kv-lora-rank",
        "--group-query-attention", "--use-rope-scaling", "--rotary-seq-len-interpolation-factor",
        "--position-embedding-type",
    ]  # fmt: skip
    assert "for example --kv-lora-rank 512" in result[4] and "--rope-type yarn" in result[-1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{LATENT} --qk-pos-emb-head-dim 7", "--qk-pos-emb-head-dim 7: rotates 7 of 7 channels"),
        (f"{LATENT} --rope-type rope --rotary-percent 0.1 --qk-pos-emb-head-dim 4", "--rotary-percent 0.1: rotates 0"),
        (f"{LATENT} --v-head-dim 0", "--v-head-dim 0: must be at least 1"),
        ("--rope-type yarn", "--rope-type yarn: requires --multi-latent-attention, or an equal"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "--recompute-modules mla_up_proj: mla"),
    ],
)
def test_contradictions_are_named(text, problem):
    assert [item for item in problems(text) if item.startswith(problem)], problems(text)


def test_sizes_without_latent_attention_have_no_effect_and_say_so():
    inputs = parse_args(f"{TINY} --q-lora-rank 8 --v-head-dim 16".split())
    expected = "--q-lora-rank, --v-head-dim: no effect without --multi-latent-attention"
    assert expected in notices(inputs, resolve(inputs, 1))


def test_layers_are_built_in_ones():
    inputs = parse_args(f"{TINY} {LATENT} --transformer-impl transformer_engine".split())
    assert resolve(inputs, 1).model.transformer_impl == "local"
