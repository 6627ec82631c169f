"""With ``batch_invariant_mode`` the generator reports the trainer's log-probabilities bit for bit, for every layout of
both; full rows of the vocabulary are compared."""

import itertools
import random

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError
from megatron.core.fusions import batch_invariant_product
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Request
from megatron.core.inference.scheduler import Limits
from megatron.core.tensor_parallel.batch_invariant import log_softmax
from megatron.core.tensor_parallel.operators import gather_from_region
from tests.unit_tests.core.inference.test_engine import LATENT, LLAMA, ROPE
from tests.unit_tests.core.models.test_gpt_model import VOCAB, make_config, make_model

LENGTH, NUM = 16, 3
COMMON = {**LLAMA, **ROPE, "batch_invariant_mode": True, "hidden_size": 64, "num_attention_heads": 4,
          "ffn_hidden_size": 128}  # fmt: skip
MODELS = {
    "dense": {"qk_layernorm": True},
    "biases": {"add_bias_linear": True, "swiglu": False, "normalization": "LayerNorm", "num_query_groups": 4},
    "window and sink": {"window_size": (5, 0), "softmax_type": "learnable", "attn_logit_softcapping": 2.0,
                        "final_logit_softcapping": 3.0},
    "tied": {"share_embeddings_and_output_weights": True},
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
                "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32",
                "moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True},
    "latent": {**LATENT, "num_query_groups": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16,
               "qk_pos_emb_head_dim": 8, "v_head_dim": 16},
}  # fmt: skip
SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
         "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}  # fmt: skip
OPTIONS = ("position_embedding_type", "share_embeddings_and_output_weights")
ROWS_OF_A_SAMPLE = LENGTH - 1


def build(name, dtype, max_sequence_length=None, **sizes):
    """Return the model of this rank; weights are functions of the seed."""
    fields = {**COMMON, **MODELS[name], **{SIZES[key]: size for key, size in sizes.items()}}
    options = {key: fields.pop(key) for key in OPTIONS if key in fields}
    options |= {} if max_sequence_length is None else {"max_sequence_length": max_sequence_length}
    if sizes.get("tp", 1) > 1 and "num_moe_experts" in fields:
        fields["sequence_parallel"] = True
    groups = parallel_state.get_process_groups()
    ends = {"pre_process": groups.pp.is_first, "post_process": groups.pp.is_last}
    config = make_config(**fields, params_dtype=dtype)
    return make_model(config, **options, **ends, make_vocab_size_divisible_by=128)


def samples():
    rng = random.Random(1)
    return [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(NUM)]


def trained_rows(model):
    """Return the log-probabilities [NUM, LENGTH, v] of a forward pass in training mode, on the last pipeline stage;
    None elsewhere."""
    groups, layout = model.groups, model.layout
    ids = layout.local(torch.tensor(samples(), device=next(model.parameters()).device), 1)
    positions = layout.positions(ids.shape[1], ids.device).expand(NUM, -1)
    ranks, rank = groups.pp.ranks, groups.pp.rank
    if rank:
        length = ids.shape[1] // layout.stream.size
        received = torch.empty(length, NUM, model.config.hidden_size, dtype=model.config.params_dtype)
        torch.distributed.recv(received, ranks[rank - 1], group=groups.pp.handle)
        model.set_input_tensor(received)
    output = model.train()(ids, positions).detach()
    if not groups.pp.is_last:
        torch.distributed.send(output.contiguous(), ranks[rank + 1], group=groups.pp.handle)
        return None
    logits = layout.full(gather_from_region(output, groups.tp), 1)
    return log_softmax(logits.flatten(0, 1), VOCAB).view(NUM, LENGTH, VOCAB).double().cpu()


def generated_rows(model, max_tokens=11):
    """Return the log-probabilities [NUM, LENGTH - 1, v] that the engine reports for the prompts' tokens, on rank 0."""
    requests = [Request(prompt=x, max_new_tokens=0, prompt_logprobs=True, top_logprobs=VOCAB) for x in samples()]
    engine = Engine(model, Limits(max_length=17, max_tokens=max_tokens, max_sequences=2), num_pages=12, page_size=4)
    result = torch.empty(NUM, ROWS_OF_A_SAMPLE, VOCAB, dtype=torch.float64)
    finished = engine.generate(requests)
    for rows, completion in zip(result, finished):
        for row, score in zip(rows, completion.prompt_scores[1:], strict=True):
            row[[token for token, _ in score.top]] = torch.tensor([x for _, x in score.top], dtype=torch.float64)
    return result if finished else None


def rows_of(rank, world_size, name, dtype, sizes, generates):
    groups = {SIZES[key]: size for key, size in sizes.items()}
    parallel_state.initialize_model_parallel(**groups)
    model = build(name, dtype, **sizes)
    return generated_rows(model) if generates else trained_rows(model)


def first(results):
    return next(result for result in results if result is not None)


def world(sizes):
    return max(sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1), sizes.get("ep", 1) * sizes.get("pp", 1))


GENERATORS = [{}, {"tp": 2}, {"tp": 4}]
TRAINERS = [{}, {"tp": 2}, {"tp": 4}, {"cp": 2}, {"pp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}]
EXPERT_TRAINERS = [{"ep": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "pp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"tp": 4, "ep": 4}]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases():
    for name in MODELS:
        for dtype in DTYPES:
            yield name, dtype


@pytest.mark.parametrize("name, dtype", cases())
def test_every_trainer_layout_equals_every_generator_layout(gloo_pool, name, dtype):
    """In bf16 every second layout: the dtype changes no group and no order."""
    experts, step = name == "experts", 1 if dtype == "fp32" else 2
    actual = {}
    for generates, layouts in ((True, GENERATORS), (False, TRAINERS + EXPERT_TRAINERS * experts)):
        for sizes in layouts[::step]:
            shape = {**sizes, **({"etp": 1} if experts and sizes.get("tp", 1) > 1 else {})}
            rows = first(gloo_pool.run(rows_of, world(sizes), name, DTYPES[dtype], shape, generates))
            actual[f"{'generator' if generates else 'trainer'} {sizes}"] = rows[:, :ROWS_OF_A_SAMPLE]
    expected = actual["trainer {}"]
    assert expected.isfinite().all() and expected.std() > 0.1
    assert not {key: float((x - expected).abs().max()) for key, x in actual.items() if not torch.equal(x, expected)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_trainer_equals_generator_on_a_gpu(name):
    model = build(name, torch.bfloat16).cuda()
    expected = trained_rows(model)[:, :ROWS_OF_A_SAMPLE]
    for max_tokens in (5, 11, 64):
        assert torch.equal(generated_rows(model, max_tokens), expected)


@pytest.mark.gpu
def test_layers_with_large_tiles_equal_decoding_on_a_gpu(monkeypatch):
    """The trainer's products and attention have hundreds of rows, the generator's 1 to 7: other kernels serve them."""
    monkeypatch.setitem(COMMON, "hidden_size", 1024)
    monkeypatch.setitem(COMMON, "ffn_hidden_size", 1536)
    service = []
    for name in ("product_large", "product_cublas"):
        kernel = getattr(batch_invariant_product, name)
        spy = lambda *args, name=name, kernel=kernel: (service.append(name), kernel(*args))[1]  # noqa: E731
        monkeypatch.setattr(batch_invariant_product, name, spy)
    model = build("dense", torch.bfloat16, max_sequence_length=300).cuda()
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB) for _ in range(300)]
    ids = torch.tensor([prompt]).cuda()
    logits = model.train()(ids, torch.arange(300, device="cuda")[None]).detach()
    expected = log_softmax(logits[0], VOCAB).double().cpu()
    assert {"product_large", "product_cublas"} == set(service)
    for max_tokens in (7, 200):
        engine = Engine(model, Limits(max_length=300, max_tokens=max_tokens, max_sequences=2))
        request = Request(prompt=prompt, max_new_tokens=0, prompt_logprobs=True, top_logprobs=VOCAB)
        for row, score in zip(expected, engine.generate([request])[0].prompt_scores[1:], strict=False):
            assert all(row[token] == value for token, value in score.top)


def test_documents_of_a_packed_row_have_the_bits_of_separate_rows():
    """Training packs samples of different lengths into a row; the generator sees one at a time."""
    model = build("dense", torch.float32).train()
    lengths = 5, 16, 9
    results = [log_probabilities(model, [x[:n]]) for x, n in zip(samples(), lengths)]
    packed = log_probabilities(model, [x[:n] for x, n in zip(samples(), lengths)])
    assert torch.equal(packed, torch.cat(results))


def log_probabilities(model, documents):
    """Return rows [tokens, v] of a packed row of ``documents``."""
    ids = torch.tensor([sum(documents, [])])
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    bounds = torch.tensor([0, *itertools.accumulate(map(len, documents))], dtype=torch.int32)
    packed = PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    samples_of_tokens = torch.cat([torch.full((len(item),), n) for n, item in enumerate(documents)])[None]
    logits = model(ids, positions, packed_seq_params=packed, sample_index=samples_of_tokens)
    return log_softmax(logits[0].detach(), VOCAB)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_model_parallel_size": 3, "num_attention_heads": 12, "hidden_size": 96}, "divisor of 8"),
        ({"ffn_hidden_size": 36}, "ffn_hidden_size 36: batch_invariant_mode adds in 8 parts"),
        ({"cross_entropy_chunk_tokens": 16}, "chunked losses use another order"),
        ({"hybrid_layer_pattern": "M-", "num_layers": 2}, "pattern M-: is not supported with batch_inv"),
        ({"experimental_attention_variant": "kda", "linear_attention_freq": 2}, "depends on where a chunk begins; rem"),
        ({"num_moe_experts": 4, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}, "alltoall"),
        ({"num_moe_experts": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True}, "expert_tensor_parallel"),
    ],
)
def test_settings_without_a_fixed_order_are_rejected(fields, message):
    with pytest.raises(UserError, match=message):
        make_config(**{**LLAMA, "hidden_size": 64, "batch_invariant_mode": True, **fields})
