"""Bytes that each pipeline rank needs for a training step, from the settings alone. Torch-free.

Weights, gradients and optimizer state are exact: the sizes of every parameter of every stage, cut into buckets and
shards by the same functions as the buffers themselves. Activations are an estimate of what autograd keeps, tensor by
tensor, times the micro-batches that the schedule keeps alive, and what one layer's backward pass adds while it runs.

Operations are those that GPUs run; plain torch on CPUs keeps up to a fifth more between attention's projections.
Left out: what the allocator, kernels and the communication library take, and fragments (some GB on a GPU).

Legend: t tokens of one micro-batch on this context-parallel rank, n of which this rank holds outside of linear layers
(t / tp under sequence parallelism).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.buffer_layout import bucket_alignment, chosen_bucket_size, cut_buffer, owned_elements
from megatron.core.pipeline_layout import Half, StageContents, layers_of
from megatron.core.pipeline_parallel.simulate import peak_activations
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.pipeline_report import enough_microbatches, schedule_of, stages_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank; of its data- and tensor-parallel ranks, the one that needs most."""

    contents: str
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept between forward and backward passes, at the fullest moment."""
    working: int
    """What comes and goes on top of it: gradients of one layer's activations, weights gathered for a layer."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def estimate_memory(cfg: PretrainConfig, vocab_size: int) -> list[RankMemory]:
    """One row per pipeline rank; ``vocab_size`` before padding (0: unknown, counted as nothing)."""
    ranks = cfg.pipeline_model_parallel_size
    stages = stages_of(cfg, vocab_size or None)
    schedule = schedule_of(cfg, enough_microbatches(cfg))
    kept = peak_activations(schedule, weight=lambda stage: float(stage_activations(cfg, stages[stage], vocab_size)))
    return [_rank_memory(cfg, stages[rank::ranks], vocab_size, int(kept[rank])) for rank in range(ranks)]


def _rank_memory(cfg: PretrainConfig, chunks: Sequence[StageContents], vocab_size: int, kept: int) -> RankMemory:
    states = [_chunk_state(cfg, chunk, vocab_size) for chunk in chunks]
    weights, gradients, optimizer, working = (sum(column) for column in zip(*states))
    working += max(_backward_bytes(cfg, chunk) for chunk in chunks)
    return RankMemory("; ".join(map(str, chunks)), weights, gradients, optimizer, kept, working)


# ---- parameters


def stored_vocabulary(cfg: PretrainConfig, vocab_size: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks, padding included."""
    multiple = math.lcm(cfg.make_vocab_size_divisible_by, cfg.tensor_model_parallel_size)
    return -(-vocab_size // multiple) * multiple


def chunk_parameters(cfg: PretrainConfig, stage: StageContents, vocab_size: int) -> list[tuple[str, Shape]]:
    """(name, this tensor-parallel rank's shape) of every parameter of a stage, in the order in which it is built."""
    hidden, norm = cfg.hidden_size, 2 if cfg.normalization == "LayerNorm" else 1
    word = (stored_vocabulary(cfg, vocab_size) // cfg.tensor_model_parallel_size, hidden)
    found: list[tuple[str, Shape]] = []
    if stage.embedding:
        found.append(("word_embeddings", word))
        if cfg.position_embedding_type == "learned_absolute":
            found.append(("position_embeddings", (cfg.max_position_embeddings, hidden)))
    for _, half in layers_of(stage.half_layers):
        found += _layer_parameters(cfg, half)
    if stage.loss:
        found += [("final_layernorm", (hidden,))] * norm
        if cfg.untie_embeddings_and_output_weights or not stage.embedding:
            found.append(("output_layer", word))
    return found


def _layer_parameters(cfg: PretrainConfig, half: Half | None = None) -> Iterator[tuple[str, Shape]]:
    if half != "mlp":
        yield from _attention_parameters(cfg)
    if half != "attention":
        yield from _mlp_parameters(cfg)


def _attention_parameters(cfg: PretrainConfig) -> Iterator[tuple[str, Shape]]:
    hidden, channels, tp = cfg.hidden_size, cfg.kv_channels, cfg.tensor_model_parallel_size
    heads, groups = cfg.num_attention_heads, cfg.num_query_groups
    norm, bias = 2 if cfg.normalization == "LayerNorm" else 1, cfg.add_bias_linear
    rows = [(heads + 2 * groups) * channels // tp] if groups >= tp else [heads // tp * channels, 2 * channels]
    yield from [("input_layernorm", (hidden,))] * norm
    yield from (("linear_qkv", (each, hidden)) for each in rows)
    if bias or cfg.add_qkv_bias:
        yield from (("linear_qkv.bias", (each,)) for each in rows)
    yield from [("head_norms", (channels,))] * (2 * norm * bool(cfg.qk_layernorm and not cfg.qk_l2_norm))
    yield "linear_proj", (hidden, heads * channels // tp)
    yield from [("linear_proj.bias", (hidden,))] * bias


def _mlp_parameters(cfg: PretrainConfig) -> Iterator[tuple[str, Shape]]:
    hidden, ffn, tp = cfg.hidden_size, cfg.ffn_hidden_size, cfg.tensor_model_parallel_size
    norm, bias = 2 if cfg.normalization == "LayerNorm" else 1, cfg.add_bias_linear
    wide = ffn // tp * (2 if is_gated(cfg) else 1)
    yield from [("pre_mlp_layernorm", (hidden,))] * norm
    yield "linear_fc1", (wide, hidden)
    yield from [("linear_fc1.bias", (wide,))] * bias
    yield "linear_fc2", (hidden, ffn // tp)
    yield from [("linear_fc2.bias", (hidden,))] * bias


def is_gated(cfg: PretrainConfig) -> bool:
    """Whether the feed-forward network's first layer puts out a gate beside the value."""
    return bool(cfg.swiglu or cfg.quick_geglu)


# ---- weights, gradients, optimizer state


def _chunk_state(cfg: PretrainConfig, stage: StageContents, vocab_size: int) -> tuple[int, int, int, int]:
    """(weights, gradients, optimizer state, weights gathered and gradients not yet summed for one unit) in bytes."""
    parameters = chunk_parameters(cfg, stage, vocab_size)
    if not parameters:
        return 0, 0, 0, 0
    if cfg.use_torch_fsdp2 and _sum_ranks(cfg) > 1:
        return _fully_sharded_state(cfg, parameters)
    sizes = [math.prod(shape) for _, shape in reversed(parameters)]
    shards = _sum_ranks(cfg) // cfg.num_distributed_optimizer_instances if cfg.use_distributed_optimizer else 1
    tied = cfg.pipeline_model_parallel_size > 1
    shared = {"word_embeddings"} | (set() if cfg.untie_embeddings_and_output_weights else {"output_layer"})
    alone = [tied and cfg.use_distributed_optimizer and name in shared for name, _ in reversed(parameters)]
    bucket_size = chosen_bucket_size(
        sum(sizes), bucket_size=cfg.ddp_bucket_size, num_buckets=cfg.ddp_num_buckets, overlap=cfg.overlap_grad_reduce,
        num_ranks=_sum_ranks(cfg),
    )  # fmt: skip
    alignment = bucket_alignment(shards, cfg.ddp_pad_buckets_for_high_nccl_busbw)
    cut = cut_buffer(sizes, alone, bucket_size, alignment)
    elements = cut.total if cfg.use_distributed_optimizer else sum(sizes)
    updated = max(owned_elements(sizes, cut, shards)) if cfg.use_distributed_optimizer else sum(sizes)
    optimizer = updated * (moment_bytes(cfg) + master_bytes(cfg))
    return elements * weight_bytes(cfg), cut.total * gradient_bytes(cfg), optimizer, 0


def _fully_sharded_state(cfg: PretrainConfig, parameters: Sequence[tuple[str, Shape]]) -> tuple[int, int, int, int]:
    """Rows of every parameter in full precision; beside them one layer's, and all that is in no layer, as gathered."""
    shards = _sum_ranks(cfg) // cfg.num_distributed_optimizer_instances
    rows = sum(-(-shape[0] // shards) * math.prod(shape[1:]) for _, shape in parameters)
    layer = sum(math.prod(shape) for _, shape in _layer_parameters(cfg))
    num_layers = sum(name == "linear_fc1" for name, _ in parameters)
    outside = sum(math.prod(shape) for _, shape in parameters) - num_layers * layer
    gathered = outside + layer * (min(num_layers, 2) if cfg.torch_fsdp2_reshard_after_forward else num_layers)
    unsummed = max(layer, outside)
    full = state_bytes(cfg)
    working = gathered * weight_bytes(cfg) + unsummed * gradient_bytes(cfg)
    return rows * full, rows * full, rows * moment_bytes(cfg), working


def _sum_ranks(cfg: PretrainConfig) -> int:
    """Ranks over which gradients are summed."""
    return cfg.data_parallel_size * cfg.context_parallel_size


def _is_half(cfg: PretrainConfig) -> bool:
    return cfg.fp16 or cfg.bf16


def weight_bytes(cfg: PretrainConfig) -> int:
    """Of a weight as the model computes with it, and of an activation."""
    return 2 if _is_half(cfg) else 8 if cfg.fp64 else 4


def state_bytes(cfg: PretrainConfig) -> int:
    """Of a moment."""
    return 8 if cfg.fp64 else 4


def gradient_bytes(cfg: PretrainConfig) -> int:
    """Of an accumulated gradient."""
    return 4 if _is_half(cfg) and cfg.accumulate_allreduce_grads_in_fp32 else weight_bytes(cfg)


def master_bytes(cfg: PretrainConfig) -> int:
    """Of the exact value beside a half-precision weight: for bf16 the 16 bits that it lacks, for fp16 a copy."""
    return 2 if cfg.bf16 and cfg.store_param_remainders else 4 if _is_half(cfg) else 0


def moment_bytes(cfg: PretrainConfig) -> int:
    """Of all moments of a parameter."""
    if cfg.optimizer == "sgd":
        return state_bytes(cfg) if cfg.sgd_momentum else 0
    return sum(2 if kind == "bf16" and not cfg.fp64 else state_bytes(cfg)
               for kind in (cfg.exp_avg_dtype, cfg.exp_avg_sq_dtype))


# ---- activations


@dataclass(frozen=True)
class _Sizes:
    """Elements of one layer's activations on this rank."""

    stream: int
    """Hidden states outside of linear layers."""
    whole_stream: int
    """Hidden states where sequence parallelism does not split them."""
    normed: int
    """What a linear layer keeps of its input: under --tp-comm-overlap the positions of all ranks."""
    query: int
    key_value: int
    wide: int
    """What the first feed-forward layer puts out."""
    narrow: int
    """What its activation makes of it."""
    heads: int
    """(token, head) pairs."""
    scores: int


def _sizes(cfg: PretrainConfig) -> _Sizes:
    tp = cfg.tensor_model_parallel_size
    length = cfg.seq_length // cfg.context_parallel_size
    tokens = length * cfg.micro_batch_size
    heads, groups = cfg.num_attention_heads // tp, max(cfg.num_query_groups // tp, 1)
    stream = tokens * cfg.hidden_size
    split = stream // tp if cfg.sequence_parallel else stream
    narrow = tokens * cfg.ffn_hidden_size // tp
    return _Sizes(
        stream=split, whole_stream=stream, normed=stream if cfg.tp_comm_overlap else split,
        query=tokens * heads * cfg.kv_channels, key_value=2 * tokens * groups * cfg.kv_channels,
        wide=narrow * (2 if is_gated(cfg) else 1), narrow=narrow, heads=tokens * heads,
        scores=tokens * heads * cfg.seq_length,
    )  # fmt: skip


def layer_activations(cfg: PretrainConfig, half: Half | None = None) -> int:
    """Bytes that one layer, or a half of it, keeps for its backward pass, without full recomputation."""
    n, item = _sizes(cfg), weight_bytes(cfg)
    dropped: frozenset[str] = frozenset()
    if cfg.recompute_granularity == "selective":
        dropped = frozenset(cfg.recompute_modules or ("core_attn",))
    stream_item = 4 if cfg.fp32_residual_connection and item == 2 else item
    each = n.stream * stream_item  # what a norm reads
    each += 0 if "layernorm" in dropped else n.normed * item  # and writes
    each += n.stream * bool(cfg.hidden_dropout)  # a mask of one byte
    total = each * (2 if half is None else 1)
    if half != "mlp":
        total += (2 * n.query + n.key_value) * item  # queries, keys, values; what the projection takes
        total += _core_attention(cfg, n) if "core_attn" not in dropped else 0
    if half != "attention" and "mlp" not in dropped:
        total += (n.wide + (0 if "mlp_act" in dropped else n.narrow)) * item
    return total


def _core_attention(cfg: PretrainConfig, n: _Sizes) -> int:
    """Attention between its projections, beside its inputs and its output."""
    if cfg.context_parallel_size > 1:
        return n.query * weight_bytes(cfg) + 4 * n.heads  # the ring's output in its own order, log-sum-exp
    if cfg.attention_dropout or cfg.attention_backend in ("unfused", "local"):
        item = weight_bytes(cfg)
        copies = (n.query + n.key_value // 2) * item  # of queries and scaled keys, in the order of the product
        return n.scores * (2 * item + 1 if cfg.attention_dropout else item) + copies
    return 4 * n.heads  # log-sum-exp


def stage_activations(cfg: PretrainConfig, stage: StageContents, vocab_size: int) -> int:
    """Bytes that one micro-batch leaves on a stage between its forward and its backward pass."""
    n, item = _sizes(cfg), weight_bytes(cfg)
    layers = [half for _, half in layers_of(stage.half_layers)]
    total, count = 0, len(layers)
    if stage.embedding and cfg.hidden_dropout:
        total += n.stream
    if cfg.recompute_granularity == "full":
        assert cfg.recompute_num_layers is not None
        given = min(cfg.recompute_num_layers, count)
        inputs = -(-count // given) if count and cfg.recompute_method == "uniform" else given
        share = cfg.tensor_model_parallel_size if cfg.distribute_saved_activations else 1
        total += inputs * n.stream * item // share
        layers = [] if cfg.recompute_method == "uniform" else layers[given:]
    total += sum(layer_activations(cfg, half) for half in layers)
    if stage.loss:
        tokens = n.whole_stream // cfg.hidden_size
        total += 2 * n.stream * item  # the final norm's input and output
        if cfg.cross_entropy_chunk_tokens is None:  # else logits exist a chunk at a time, and are computed again
            total += tokens * stored_vocabulary(cfg, vocab_size) // cfg.tensor_model_parallel_size * item
    return total


def _backward_bytes(cfg: PretrainConfig, stage: StageContents) -> int:
    """While one layer runs backward: its activations once more where they are recomputed, and their gradients."""
    layers = [half for _, half in layers_of(stage.half_layers)]
    if not layers:
        return 0
    n, item = _sizes(cfg), weight_bytes(cfg)
    total = (n.wide + n.narrow + 2 * n.stream) * item
    if cfg.recompute_granularity == "full":
        together = cfg.recompute_num_layers if cfg.recompute_method == "uniform" else 1
        assert together is not None
        total += max(
            sum(layer_activations(cfg, half) for half in layers[first : first + together])
            for first in range(0, len(layers), together)
        )
    elif cfg.recompute_granularity == "selective":
        total += _core_attention(cfg, n)
    return total


# ---- the table


def memory_rows(cfg: PretrainConfig, vocab_size: int) -> Iterator[tuple[str, str]]:
    """A table, GiB per rank, one line per pipeline rank; the largest marked where there are several."""
    ranks = estimate_memory(cfg, vocab_size)
    precision = "fp16" if cfg.fp16 else "bf16" if cfg.bf16 else "fp32"
    columns = ("weights", "gradients", "optimizer", "activations", "working", "total")
    yield "GiB per rank", "".join(f"{name:>13}" for name in columns) + f"   ({precision})"
    totals = [memory.total for memory in ranks]
    for index, memory in enumerate(ranks):
        cells = "".join(f"{getattr(memory, name) / 2**30:13.2f}" for name in columns)
        mark = "   <- the most" if len(ranks) > 1 and index == totals.index(max(totals)) else ""
        yield f"  pipeline rank {index}" if len(ranks) > 1 else "  every rank", cells + mark
    live = microbatches_alive(cfg)
    yield "  alive at most", f"{', '.join(f'{count:g}' for count in live)} micro-batches x chunks by pipeline rank"


def microbatches_alive(cfg: PretrainConfig) -> list[float]:
    """Per pipeline rank, the most (chunk, micro-batch) pairs between their forward and backward passes."""
    return peak_activations(schedule_of(cfg, enough_microbatches(cfg)))
