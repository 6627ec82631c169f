"""Gated delta nets, Kimi delta attention and Mamba-2 generate, from the tail of their convolution and a state per
sequence, what a full forward pass gives: in chunks, after preemption, from snapshots of equal beginnings, on tensor-
and pipeline-parallel ranks."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.evaluation.scoring import score
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.inference.requests import Request
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.ssm.mixer import RecurrentMixer
from tests.unit_tests.core.inference.test_sequence_states import GREEDY, VOCAB, check, continued, engine, prompts

SIZES = {
    "hidden_size": 16, "num_attention_heads": 2, "fp64": True, "init_method_std": 0.3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 3,
    "mamba_state_dim": 5, "mamba_head_dim": 4, "mamba_num_heads": 4, "mamba_num_groups": 2,
}  # fmt: skip
DELTA = {
    "num_layers": 4, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2,
    "attention_output_gate": True,
}  # fmt: skip
HYBRID = {"num_layers": 6, "hybrid_layer_pattern": "M*-KGM", "linear_num_value_heads": 2}
MODELS = pytest.mark.parametrize("layers", [DELTA, HYBRID], ids=["delta", "hybrid"])


def build(layers, **sizes):
    torch.manual_seed(0)
    config = TransformerConfig(**{**SIZES, **layers, **sizes})
    pp = parallel_state.get_process_groups().pp if sizes else SINGLE_PROCESS.pp
    stage = {"pre_process": pp.is_first, "post_process": pp.is_last}
    return GPTModel(
        config, get_gpt_decoder_block_spec(config), VOCAB, 64, position_embedding_type="rope", **stage
    ).eval()


@MODELS
def test_a_mask_that_a_recurrence_cannot_read_is_an_error(layers):
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(UserError, match="attention_mask: linear attention reads documents, not a mask"):
        build(layers)(torch.tensor([[1, 2, 3, 4]]), torch.arange(4)[None], mask)


def test_layers_scan_by_heads_if_their_communication_type_is_all_to_all():
    mixers = [module for module in build(HYBRID | {"cp_comm_type": ["a2a", "p2p"] * 3}).modules()
              if isinstance(module, RecurrentMixer)]  # fmt: skip
    assert [(mixer.layer_number, mixer.by_heads) for mixer in mixers] == [(1, True), (4, False), (5, True), (6, False)]


@MODELS
def test_prompts_in_chunks_and_decoding_equal_the_full_forward_pass(layers):
    model = build(layers)
    check(model, engine(model), prompts(7))


@MODELS
def test_preempted_sequences_are_computed_again_from_the_zero_state(layers):
    model = build(layers)
    small = engine(model, pages=9)
    check(model, small, prompts(6, seed=1), count=12)
    assert small.scheduler.num_preemptions > 1


@MODELS
@torch.no_grad()
def test_equal_beginnings_continue_from_a_snapshot(layers):
    model = build(layers)
    reused, beginning = engine(model), [3, 1, 2, *range(10)]  # three pages
    check(model, reused, [beginning, [5, 6]])
    (result,) = reused.generate([Request(prompt=[*beginning, 7], max_new_tokens=3, sampling=GREEDY)])
    assert result.tokens == continued(model, [*beginning, 7], 3)[0]


@MODELS
@torch.no_grad()
@pytest.mark.parametrize("limits", [{}, {"max_tokens": 64, "max_sequences": 2}], ids=["few-tokens", "few-sequences"])
def test_scores_equal_the_full_forward_pass(layers, limits):
    """A text of several steps continues from its state; there are no more texts in a step than slots."""
    model = build(layers)
    generator, texts = engine(model, **limits), prompts(9, seed=3)
    pairs = [([5, *text[: len(text) // 2]], [*text[len(text) // 2 :], 7]) for text in texts]
    for _ in range(2):  # all slots and pages are free again
        for (context, continuation), likelihood in zip(pairs, score(generator, pairs), strict=True):
            ids = torch.tensor([context + continuation])
            logits = model(ids, torch.arange(ids.shape[1])[None])[0, :, :VOCAB].log_softmax(-1)
            rows = logits[len(context) - 1 : -1]
            expected = rows[range(len(continuation)), continuation].sum()
            assert likelihood.logprob == pytest.approx(float(expected), abs=1e-10)
            assert likelihood.is_greedy == (rows.argmax(-1).tolist() == continuation)


def generated(rank, world_size, layers, sizes):
    parallel_state.initialize_model_parallel(*sizes)
    names = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    model = build(layers, **dict(zip(names, sizes)))
    requests = [Request(prompt=x, max_new_tokens=5, sampling=GREEDY) for x in prompts(5, seed=4)]
    return [result.tokens for result in engine(model).generate(requests)]


@MODELS
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_layouts_generate_the_same_text(gloo_pool, layers, sizes):
    requests = [Request(prompt=x, max_new_tokens=5, sampling=GREEDY) for x in prompts(5, seed=4)]
    expected = [result.tokens for result in engine(build(layers)).generate(requests)]
    assert gloo_pool.run(generated, 2, layers, sizes)[0] == expected
