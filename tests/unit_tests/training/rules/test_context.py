"""Every impossible split of sequences is rejected with the reason and the nearest sizes."""

import pytest

from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.rules.run_all import check

BASE = (
    "--num-layers 2 --hidden-size 48 --num-attention-heads 12 --group-query-attention --num-query-groups 4"
    " --seq-length 48 --max-position-embeddings 48 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --eval-iters 0"
)


def problems(text, world_size):
    return [str(problem) for problem in check(resolve(parse_args(f"{BASE} {text}".split()), world_size))]


@pytest.mark.parametrize("text, world_size, expected", [
    ("--context-parallel-size 4 --seq-length 44", 4,
     "--seq-length 44: is not a multiple of 2 x --context-parallel-size 4: each rank holds an early and a late chunk; "
     "nearest: 40 or 48"),
    ("--context-parallel-size 2 --cp-comm-type p2p allgather p2p", 2,
     "--cp-comm-type p2p allgather p2p: has 3 values for --num-layers 2; give one value, or 2"),
    ("--context-parallel-size 8 --cp-comm-type a2a", 8,
     "--num-attention-heads 12: is not a multiple of 8 (--tensor-model-parallel-size 1 x 8 ranks of --cp-comm-type "
     "a2a); nearest: 8 or 16; or --cp-comm-type p2p or allgather, which split no heads"),
    ("--context-parallel-size 3 --tensor-model-parallel-size 2 --cp-comm-type a2a p2p", 6,
     "--num-query-groups 4: is not a multiple of 6 (--tensor-model-parallel-size 2 x 3 ranks"),
    ("--context-parallel-size 4 --cp-comm-type a2a+p2p", 4,
     "--hierarchical-context-parallel-sizes: is required by --cp-comm-type a2a+p2p; ranks inside and outside: 2 2"),
    ("--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4", 4,
     "--hierarchical-context-parallel-sizes 2 4: must be two sizes whose product is --context-parallel-size 4; for"),
    ("--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4", 4,
     "--hierarchical-context-parallel-sizes 4: must be two sizes"),
    ("--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2", 4,
     "--hierarchical-context-parallel-sizes 2 2: requires --cp-comm-type a2a+p2p; add that, or remove it"),
])  # fmt: skip
def test_an_impossible_layout_is_named_with_its_fix(text, world_size, expected):
    actual = problems(text, world_size)
    assert any(item.startswith(expected) for item in actual), actual


@pytest.mark.parametrize("text, world_size", [
    ("--context-parallel-size 4", 4),
    ("--context-parallel-size 3 --cp-comm-type allgather", 3),
    ("--context-parallel-size 2 --cp-comm-type a2a p2p", 4),
    ("--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4),
    ("--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --cp-comm-type a2a", 4),
    ("--cp-comm-type a2a", 1),
])  # fmt: skip
def test_a_possible_layout_passes(text, world_size):
    assert problems(text, world_size) == []
