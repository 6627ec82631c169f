"""Entry scripts reach the settings of the running program from wherever their code runs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron.compat import classic, program
from megatron.compat.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.enums import ModelType
from megatron.training.arguments import parse_args, validate_args
from megatron.training.observe.loss_sums import LossSums

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


def test_model_type_may_be_before_a_named_forward_step(monkeypatch):
    calls = []
    monkeypatch.setattr(classic, "_train", lambda settings, functions, *rest: calls.append((settings, functions)))
    container = classic.PretrainConfigContainer("settings", model="of the settings")
    step, sets, provider = (lambda iterator, model: None), list, dict
    classic.pretrain(container, sets, ModelType.encoder_or_decoder, forward_step_func=step)
    classic.pretrain(container, sets, provider, ModelType.encoder_or_decoder, step)
    own = {"datasets_provider": sets, "forward_step": step}
    assert calls == [("settings", own), ("settings", own | {"model_provider": provider})]


def test_gradients_and_counts_follow_the_tokens_of_the_script(forgotten):
    task = classic.ClassicTask(validate_args(parse_args(TINY.split()), 1), None, {})
    pairs = {classic.MAIN_LOSS: torch.tensor([30.0, 6.0]), "logged": torch.tensor([8.0, 4.0])}
    chunk, factors = torch.nn.Identity(), []
    chunk.scale_gradients = lambda factor: factors.append(factor.item())
    sums = LossSums(torch.device("cpu"), pairs)
    counts = task.make_batches().final_counts(sums, torch.tensor([12.0], dtype=torch.float64), [chunk])
    assert counts.tolist() == [6.0, 4.0] and factors == [2.0] and list(sums.pairs) == ["logged"]
