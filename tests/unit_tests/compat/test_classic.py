"""Entry scripts reach the settings of the running program from wherever their code runs."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron.compat import classic, program
from megatron.compat.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.training.arguments import parse_args, validate_args

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
)


@pytest.fixture
def forgotten(monkeypatch):
    monkeypatch.setattr(program.Current, "program", None)
    yield
    destroy_num_microbatches_calculator()


def test_getters_before_initialization_name_the_call_to_make(forgotten):
    with pytest.raises(RuntimeError, match="call pretrain"):
        program.get_args()


def test_threads_see_the_program(forgotten):
    """On GPUs autograd recomputes layers in separate threads."""
    classic.ClassicTask(validate_args(parse_args(TINY.split()), 1), None, {})
    with ThreadPoolExecutor(1) as other:
        assert other.submit(program.get_args).result().hidden_size == 64
