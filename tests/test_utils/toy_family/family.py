"""Settings, rules and description of the family. Torch-free.

A sample holds ``--numbers-count`` vectors of ``--numbers-features`` numbers. A small transformer of another width and
depth encodes them; the mean of its outputs is projected and added to the embedding of every token of a decoder.
"""

from dataclasses import dataclass, replace

from megatron.core.config.optional import OptionalGroup
from megatron.core.config.problems import problem
from megatron.core.config.ranges import Dim
from megatron.core.description.model import LayerPlace, Param
from megatron.core.description.parts import gemm, norm
from megatron.core.models.common.description import encoder_layer
from megatron.core.models.family import ModelFamily, Program
from megatron.core.models.gpt.description import describe_gpt


@dataclass(kw_only=True)
class NumbersConfig(OptionalGroup):
    """Encoder of numbers"""

    numbers_count: Dim = 4
    """Vectors per sample."""

    numbers_features: Dim = 3
    """Numbers per vector."""

    numbers_hidden_size: Dim = 16
    """Width of the encoder."""

    numbers_num_layers: Dim = 2
    """Layers of the encoder."""


SETTINGS = ("numbers_features", "numbers_hidden_size", "numbers_num_layers")


def transformers(cfg):
    """The encoder's sizes differ from the decoder's; it computes all positions on every tensor-parallel rank."""
    numbers = cfg.group(NumbersConfig)
    encoder = {
        "num_layers": numbers.numbers_num_layers, "hidden_size": numbers.numbers_hidden_size, "num_attention_heads": 2,
        "num_query_groups": None, "kv_channels": None, "ffn_hidden_size": None, "sequence_parallel": False,
        "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
    }  # fmt: skip
    return {"numbers": replace(cfg.model, **encoder), "decoder": cfg.model}


def describe(cfg, vocab_size):
    """A GPT whose embedding includes the encoder."""
    model = describe_gpt(
        cfg.model, vocab_size=vocab_size, seq_length=cfg.data.seq_length,
        max_sequence_length=cfg.embeddings.max_position_embeddings,
        position_embedding_type=cfg.embeddings.position_embedding_type,
        share_embeddings_and_output_weights=not cfg.embeddings.untie_embeddings_and_output_weights,
        make_vocab_size_divisible_by=cfg.embeddings.make_vocab_size_divisible_by,
    )  # fmt: skip
    config, numbers = transformers(cfg)["numbers"], cfg.group(NumbersConfig)
    count = numbers.numbers_count
    pieces = []
    for index in range(config.num_layers):
        branches = encoder_layer(config, LayerPlace(index + 1, count, causal=False))
        pieces += [branch.under(f"numbers.layers.{index}.") for branch in branches]
    into = Param("numbers_in.weight", (config.hidden_size, numbers.numbers_features))
    out = Param("numbers_out.weight", (cfg.model.hidden_size, config.hidden_size))
    final = norm("numbers.final_layernorm", config.hidden_size, config)
    params = [into, *(param for piece in pieces for param in piece.params), *final, out]
    ops = [gemm(into, config, count), *(op for piece in pieces for op in piece.ops), gemm(out, config, 1)]
    encoder = replace(model.embedding, params=tuple(params), ops=tuple(ops))
    encoder = encoder.scaled_to_tokens(count / cfg.data.seq_length)
    both = model.embedding.params + encoder.params, model.embedding.ops + encoder.ops
    settings = (*model.embedding.settings, *SETTINGS)
    return replace(model, embedding=replace(model.embedding, params=both[0], ops=both[1], settings=settings))


def one_context_parallel_rank(cfg):
    if cfg.model.context_parallel_size > 1:
        yield problem(cfg, "context_parallel_size", "is not supported by the encoder of numbers", "remove it")


def generate(trained, prompts, max_new_tokens, sampling):
    """The answers for the numbers that the prompts give to every feature."""
    import torch

    cfg, sizes = trained.cfg, trained.cfg.group(NumbersConfig)
    tokens = torch.zeros(1, cfg.data.seq_length, dtype=torch.int64)
    for prompt in prompts:
        numbers = torch.full((1, sizes.numbers_count, sizes.numbers_features), float(prompt))
        with torch.no_grad():
            logits = trained.model(tokens, torch.arange(cfg.data.seq_length)[None], numbers)
        yield str(int(logits[0, -1].argmax()))


FAMILY = ModelFamily(
    name=__name__,
    programs=(Program("numbers", "numbers and text"),),
    task="tests.test_utils.toy_family.task:NumbersTask",
    describe=describe,
    transformers=transformers,
    groups=(NumbersConfig,),
    rules=(one_context_parallel_rank,),
    tokenizer_type="NullTokenizer",
    sequence_tensors=frozenset({"tokens", "labels", "loss_mask", "position_ids"}),
    full_tensors=frozenset({"numbers"}),
    weight_settings=SETTINGS,
    tool="tools/generate.py",
    generate=generate,
)
