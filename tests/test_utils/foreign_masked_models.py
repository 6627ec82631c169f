"""Tiny encoders and encoder-decoders of the package ``transformers``, with the equivalent local flags and weight
names.

A family is a row of data: pairs of local and HF names. The same rearrangement applies to weights and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.test_utils.foreign_comparison import assert_close
from tests.test_utils.foreign_models import HEADS, HIDDEN, LAYERS, LENGTH, VOCAB, rope

ANSWER = 17
"""Length of T5's decoder."""
FILTER = 48


def heads_in_turn(parts: list[torch.Tensor]) -> torch.Tensor:
    """Query, key and value (or key and value) of the first head, then of the second."""
    return torch.cat([part.unflatten(0, (HEADS, -1)) for part in parts], dim=1).flatten(0, 1)


def thirds_in_turn(parts: list[torch.Tensor]) -> torch.Tensor:
    return heads_in_turn(list(parts[0].chunk(3)))


@dataclass(frozen=True)
class Part:
    """A local module, and the HF modules whose weights and biases it holds."""

    ours: str
    theirs: tuple[str, ...]
    arrange: Callable = torch.cat
    scale: float = 1.0
    """Local weight divided by HF weight; gradients use the inverse."""


@dataclass(frozen=True)
class Family:
    """One model: its class and settings in ``transformers``, the local flags, and the mapping of its tensors."""

    architecture: str
    parts: tuple[Part, ...]
    settings: dict
    flags: str
    length: int = LENGTH
    """Tokens that the output layer sees."""

    @property
    def padding(self) -> int:
        """Id of the padding token."""
        return self.settings.get("pad_token_id", 0)

    @property
    def is_t5(self) -> bool:
        return self.architecture.startswith(("T5", "MT5"))


def bert(norms: list[str]) -> tuple[Part, ...]:
    """``norms``: the first and second of every layer, and the last, in the order of the stream."""
    parts = [
        Part(f"embedding.{native}_embeddings", (f"bert.embeddings.{foreign}_embeddings",))
        for native, foreign in (("word", "word"), ("position", "position"), ("tokentype", "token_type"))
    ]
    names = [f"layers.{layer}.{part}_layernorm" for layer in range(LAYERS) for part in ("input", "pre_mlp")]
    parts += [Part(f"encoder.{native}", (f"bert.{norm}",)) for native, norm in zip([*names, "final_layernorm"], norms)]
    for layer in range(LAYERS):
        local, norm = f"encoder.layers.{layer}", f"bert.encoder.layer.{layer}"
        projections = tuple(f"{norm}.attention.self.{name}" for name in ("query", "key", "value"))
        parts += [
            Part(f"{local}.self_attention.linear_qkv", projections, heads_in_turn),
            Part(f"{local}.self_attention.linear_proj", (f"{norm}.attention.output.dense",)),
            Part(f"{local}.mlp.linear_fc1", (f"{norm}.intermediate.dense",)),
            Part(f"{local}.mlp.linear_fc2", (f"{norm}.output.dense",)),
        ]
    return (
        *parts,
        Part("lm_head.dense", ("cls.predictions.transform.dense",)),
        Part("lm_head.layer_norm", ("cls.predictions.transform.LayerNorm",)),
        Part("output_layer", ("cls.predictions",)),
        Part("pooler.dense", ("bert.pooler.dense",)),
        Part("binary_head", ("cls.seq_relationship",)),
    )


def modern_bert() -> tuple[Part, ...]:
    parts = [Part("embedding.word_embeddings", ("model.embeddings.tok_embeddings",)),
             Part("encoder.layers.0.input_layernorm", ("model.embeddings.norm",))]  # fmt: skip
    for layer in range(LAYERS):
        local, other = f"encoder.layers.{layer}", f"model.layers.{layer}"
        parts += [
            Part(f"{local}.self_attention.linear_qkv", (f"{other}.attn.Wqkv",), thirds_in_turn),
            Part(f"{local}.self_attention.linear_proj", (f"{other}.attn.Wo",)),
            Part(f"{local}.pre_mlp_layernorm", (f"{other}.mlp_norm",)),
            Part(f"{local}.mlp.linear_fc1", (f"{other}.mlp.Wi",)),
            Part(f"{local}.mlp.linear_fc2", (f"{other}.mlp.Wo",)),
        ]
        if layer:
            parts.append(Part(f"{local}.input_layernorm", (f"{other}.attn_norm",)))
    ends = {"encoder.final_layernorm": "model.final_norm", "lm_head.dense": "head.dense",
            "lm_head.layer_norm": "head.norm", "output_layer": "decoder"}  # fmt: skip
    return (*parts, *(Part(native, (end,)) for native, end in ends.items()))


def t5(gated: bool, decoder_layers: int, head: tuple[Part, ...] = (), scale: float = 1.0) -> tuple[Part, ...]:
    parts = [Part("embedding.word_embeddings", ("shared",)), *head]
    for stack, depth in (("encoder", LAYERS), ("decoder", decoder_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        parts.append(Part(f"{stack}_relative_pos_emb.relative_attention_bias", (bias,)))
        for layer in range(depth):
            here, other = f"{stack}.layers.{layer}", f"{stack}.block.{layer}.layer"
            self_attention, cross = f"{other}.0.SelfAttention", f"{other}.1.EncDecAttention"
            mlp = f"{other}.{1 if stack == 'encoder' else 2}"
            names = ("wi_0", "wi_1") if gated else ("wi",)
            parts += [
                Part(f"{here}.input_layernorm", (f"{other}.0.layer_norm",)),
                Part(f"{here}.self_attention.linear_qkv", tuple(f"{self_attention}.{x}" for x in "qkv"), heads_in_turn),
                Part(f"{here}.self_attention.linear_proj", (f"{self_attention}.o",)),
                Part(f"{here}.pre_mlp_layernorm", (f"{mlp}.layer_norm",)),
                Part(f"{here}.mlp.linear_fc1", tuple(f"{mlp}.DenseReluDense.{name}" for name in names)),
                Part(f"{here}.mlp.linear_fc2", (f"{mlp}.DenseReluDense.wo",)),
            ]
            if stack == "decoder":
                parts += [
                    Part(f"{here}.pre_cross_attn_layernorm", (f"{other}.1.layer_norm",)),
                    Part(f"{here}.cross_attention.linear_q", (f"{cross}.q",)),
                    Part(f"{here}.cross_attention.linear_kv", (f"{cross}.k", f"{cross}.v"), heads_in_turn),
                    Part(f"{here}.cross_attention.linear_proj", (f"{cross}.o",)),
                ]
        part_scale = scale if stack == "decoder" else 1.0
        norm = (f"{stack}.final_layer_norm",)
        parts.append(Part(f"{stack}.final_layernorm", norm, scale=part_scale))
    return tuple(parts)


POST = ["embeddings.LayerNorm"] + [
    f"encoder.layer.{layer}.{part}output.LayerNorm" for layer in range(LAYERS) for part in ("attention.", "")
]
PRE = [f"encoder.layer.{layer}.{part}ln" for layer in range(LAYERS) for part in ("attention.", "")] + ["encoder.ln"]
BERT = {"intermediate_size": FILTER, "layer_norm_eps": 1e-3, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS}  # fmt: skip
BERT_FLAGS = f"--ffn-hidden-size {FILTER} --norm-epsilon 1e-3 --no-bias-gelu-fusion"
MODERN = {
    "intermediate_size": FILTER, "norm_eps": 1e-3, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "local_attention": 10, "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {kind: rope(base)["rope_parameters"] for kind, base in
                        (("full_attention", 160000.0), ("sliding_attention", 100.0))},
}  # fmt: skip
T5_SIZES = {"d_model": HIDDEN, "d_kv": 12, "d_ff": FILTER, "num_layers": LAYERS, "num_heads": HEADS,
            "relative_attention_num_buckets": 10, "relative_attention_max_distance": 14, "num_decoder_layers": 3,
            "layer_norm_epsilon": 1e-3, "decoder_start_token_id": 0}  # fmt: skip
T5_FLAGS = (
    f"--kv-channels 12 --ffn-hidden-size {FILTER} --norm-epsilon 1e-3 --normalization RMSNorm --disable-bias-linear"
    " --position-embedding-type relative --relative-attention-num-buckets 10 --relative-attention-max-distance 14"
    f" --decoder-num-layers 3 --decoder-seq-length {ANSWER} --softmax-scale 1.0"
)
HEAD = Part("lm_head.output_layer", ("lm_head",))
FAMILIES = {
    "bert": Family("BertForPreTraining", bert(POST), BERT,
                   f"{BERT_FLAGS} --apply-residual-connection-post-layernorm"),
    "megatron-bert": Family("MegatronBertForPreTraining", bert(PRE), BERT, BERT_FLAGS),
    "modern-bert": Family(
        "ModernBertForMaskedLM", modern_bert(), MODERN,
        f"--ffn-hidden-size {FILTER} --norm-epsilon 1e-3 --disable-bias-linear --position-embedding-type rope"
        " --rotary-base 160000 --rotary-base-local 100 --window-size 5,5 --window-attn-skip-freq [0,1] --geglu"
        " --bert-no-binary-head --embed-layernorm --exact-gelu --disable-norm-bias",
    ),
    "t5": Family("T5ForConditionalGeneration", t5(False, 3, scale=HIDDEN**-0.5), T5_SIZES, f"{T5_FLAGS} --relu",
                 length=ANSWER),
    "t5-v1.1": Family(
        "T5ForConditionalGeneration", t5(True, 3, (HEAD,)),
        {**T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        f"{T5_FLAGS} --geglu --untie-embeddings-and-output-weights", length=ANSWER,
    ),
}  # fmt: skip
ROBERTA_FLAGS = (
    f"{BERT_FLAGS} --apply-residual-connection-post-layernorm --bert-no-binary-head --bert-num-tokentypes 1"
    " --learned-position-offset 2"
)

CONVERTED = {
    **FAMILIES,
    "distilbert": Family(
        "DistilBertForMaskedLM", (), {"dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": FILTER},
        f"--ffn-hidden-size {FILTER} --norm-epsilon 1e-12 --no-bias-gelu-fusion --bert-no-binary-head"
        " --apply-residual-connection-post-layernorm",
    ),
    "roberta": Family("RobertaForMaskedLM", (), {**BERT, "pad_token_id": 1, "type_vocab_size": 1}, ROBERTA_FLAGS),
    "roberta-two-types": Family("RobertaForMaskedLM", (), {**BERT, "type_vocab_size": 2}, ""),
    "xlm-roberta": Family(
        "XLMRobertaForMaskedLM", (), {**BERT, "pad_token_id": 4, "type_vocab_size": 1, "hidden_act": "gelu_python"}, ""
    ),
    "mt5": Family("MT5ForConditionalGeneration", (), {**T5_SIZES, "tie_word_embeddings": False}, "", length=ANSWER),
    "mt5-relu": Family(
        "MT5ForConditionalGeneration", (), {**T5_SIZES, "feed_forward_proj": "relu", "tie_word_embeddings": False}, "",
        length=ANSWER,
    ),
}  # fmt: skip
"""Models that can be converted. The new ones compute as the others do, so they have no parts."""


def flags_of(family: Family) -> list[str]:
    """The whole command line."""
    sizes = f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {LENGTH}"
    rest = "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 1"
    return f"{sizes} {rest} --hidden-dropout 0 --attention-dropout 0 {family.flags}".split()


def build(family: Family) -> torch.nn.Module:
    """The foreign model in float32; norms and biases are random too, so that each of them matters."""
    import transformers

    model_class = getattr(transformers, family.architecture)
    max_length = {} if family.is_t5 else {"max_position_embeddings": 64}
    common = {"vocab_size": VOCAB, "initializer_range": 0.2, "pad_token_id": 0, **max_length,
              **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)}  # fmt: skip
    config = model_class.config_class(**{**common, **family.settings})
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    foreign = model_class(config).float().eval()
    if family.is_t5 and family.settings.get("tie_word_embeddings") is False:  # transformers 5 ties it all the same
        foreign.lm_head.weight = torch.nn.Parameter(torch.empty_like(foreign.lm_head.weight))
    spread = 0.1 if family.is_t5 else 0.2  # its scores are not scaled: larger ones magnify float32's rounding
    with torch.no_grad():
        for value in foreign.parameters():
            value.copy_(torch.randn(value.shape) * spread + float(value.dim() == 1))
    return foreign


def to_ours(family: Family, tensors: dict[str, torch.Tensor], gradients: bool = False) -> dict[str, torch.Tensor]:
    """Return weights (or gradients) of the foreign model under local names and in local layout."""
    actual: dict[str, torch.Tensor] = {}
    for part in family.parts:
        scale = 1 / part.scale if gradients else part.scale
        for kind in ("weight", "bias"):
            values = [tensors.get(f"{name}.{kind}") for name in part.theirs]
            if all(value is not None for value in values):
                actual[f"{part.ours}.{kind}"] = part.arrange(values) * scale
    return actual


def random_arrays(family: Family) -> dict[str, torch.Tensor]:
    """Return a batch of two, the first padded; real tokens are above the padding id of the HF models."""
    generator = torch.Generator().manual_seed(3)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(family.padding + 1 if high > 2 else 0, high, shape, generator=generator)

    real = torch.arange(LENGTH) < torch.tensor([[LENGTH - 5], [LENGTH]])
    tokens = torch.where(real, draw(VOCAB, 2, LENGTH), family.padding)
    arrays = {"tokens": tokens, "real": real, "labels": draw(VOCAB, 2, family.length)}
    arrays["loss_mask"] = torch.rand(2, family.length, generator=generator) < 0.4
    if family.is_t5:
        return {**arrays, "decoder": torch.cat((torch.zeros(2, 1, dtype=torch.long), arrays["labels"][:, :-1]), dim=1)}
    types = min(family.settings.get("type_vocab_size", 2), 2)
    return {**arrays, "loss_mask": arrays["loss_mask"] & real, "types": draw(types, 2, LENGTH) * real,
            "swapped": torch.tensor([1, 0])}  # fmt: skip


def run_foreign(family: Family, foreign: torch.nn.Module, arrays: dict) -> tuple[torch.Tensor, torch.Tensor | None,
                                                                                torch.Tensor]:  # fmt: skip
    """(logits [b, s, vocabulary], logits of the order [b, 2] or None, loss)."""
    labels = torch.where(arrays["loss_mask"], arrays["labels"], -100)
    inputs = {"input_ids": arrays["tokens"], "attention_mask": arrays["real"].long(), "labels": labels}
    if family.is_t5:
        output = foreign(**inputs, decoder_input_ids=arrays["decoder"], use_cache=False)
        return output.logits, None, output.loss
    if "seq_relationship" not in "".join(part.theirs[0] for part in family.parts):
        types = {"token_type_ids": arrays["types"]} if "Roberta" in family.architecture else {}
        output = foreign(**inputs, **types)
        return output.logits, None, output.loss
    output = foreign(**inputs, token_type_ids=arrays["types"], next_sentence_label=arrays["swapped"])
    return output.prediction_logits, output.seq_relationship_logits, output.loss


def run_ours(family: Family, model: torch.nn.Module, arrays: dict, labels: torch.Tensor | None) -> tuple:
    """(logits or losses [b, s], logits of the order or None)."""
    if family.is_t5:
        return model(arrays["tokens"], arrays["decoder"], arrays["real"], lm_labels=labels), None
    return model(arrays["tokens"], arrays["real"], arrays["types"] if "swapped" in arrays else None, labels)


def compare_losses(family: Family, native: torch.nn.Module, foreign: torch.nn.Module, arrays: dict) -> None:
    """Logits and losses agree; both models then have the gradients of the loss."""
    logits, order, expected_loss = run_foreign(family, foreign, arrays)
    actual, found_order = run_ours(family, native, arrays, None)
    counted = torch.ones_like(arrays["loss_mask"]) if family.is_t5 else arrays["real"]
    assert_close("logits", actual[..., :VOCAB][counted], logits[counted])
    losses, _ = run_ours(family, native, arrays, arrays["labels"])
    loss = (losses * arrays["loss_mask"]).sum() / arrays["loss_mask"].sum()
    if order is not None:
        assert_close("logits of the order", found_order, order)
        loss = loss + torch.nn.functional.cross_entropy(found_order, arrays["swapped"])
    assert_close("loss", loss.detach(), expected_loss.detach())
    loss.backward()
    expected_loss.backward()
