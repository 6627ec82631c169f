"""One table of names, splits and settings between Megatron-LM's checkpoints and ours, from which both readers and the
writer derive.

Both programs lay out a layer's weights alike: query, key and value interleaved by query group, the gate before the
value. What differs: we keep such a matrix as [groups, …, hidden] and [2, width, hidden], experts as one tensor, norms
under their own names, and no padding of the vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.core.dist_checkpointing.errors import CheckpointError

T = TypeVar("T")
LAYER = re.compile(r"((?:model\.)?(?:(?:en|de)coder\.layers\.\d+|mtp\.layers\.\d+\.mtp_model_layer)\.)(.+)")


@dataclass(frozen=True)
class Row:
    """A parameter: its name within a layer (or the model), and how a rank's part lies in the whole."""

    ours: str
    theirs: str = ""
    """Its name in ``torch_dist``, where it is another than ours."""
    dim: int | None = None
    """The dimension that tensor-parallel ranks divide, in their shape; None: every rank has all of it."""
    fold: str = ""
    """Which sizes ours has for their first dimension (of an expert): ``groups`` or ``gate``."""
    experts: bool = False
    """Ours has a leading dimension of experts."""


def _linear(name: str, dim: int | None, fold: str = "", theirs: str = "", experts: bool = False) -> list[Row]:
    """A weight and its bias; the bias of a row-parallel layer is whole on every rank."""
    theirs = theirs or name
    return [
        Row(f"{name}.weight", f"{theirs}.weight", dim, fold, experts),
        Row(f"{name}.bias", f"{theirs}.bias", 0 if dim == 0 else None, fold, experts),
    ]


def _norm(name: str, theirs: str = "") -> list[Row]:
    return [Row(f"{name}.{kind}", f"{theirs or name + '.'}{kind}") for kind in ("weight", "bias")]


_ATTENTION = "self_attention."
LAYER_ROWS = [
    *_linear(f"{_ATTENTION}linear_qkv", 0, "groups"), *_linear(f"{_ATTENTION}linear_proj", 1),
    *_norm("input_layernorm", f"{_ATTENTION}linear_qkv.layer_norm_"), *_norm("input_layernorm"),
    *_norm("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_"), *_norm("pre_mlp_layernorm"),
    *_norm(f"{_ATTENTION}q_layernorm"), *_norm(f"{_ATTENTION}k_layernorm"),
    *_norm(f"{_ATTENTION}q_layernorm", f"{_ATTENTION}linear_q_up_proj.layer_norm_"),
    *_norm(f"{_ATTENTION}kv_layernorm", f"{_ATTENTION}linear_kv_up_proj.layer_norm_"),
    *_norm(f"{_ATTENTION}kv_layernorm"),
    Row(f"{_ATTENTION}core_attention.softmax_offset", dim=0),
    *(Row(f"{_ATTENTION}{name}.weight", dim=0) for name in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")),
    *(Row(f"{_ATTENTION}{name}.weight") for name in ("linear_q_down_proj", "linear_kv_down_proj")),
    *_linear("mlp.linear_fc1", 0, "gate"), *_linear("mlp.linear_fc2", 1),
    *_linear("mlp.experts.linear_fc1", 0, "gate", "mlp.experts.experts.linear_fc1", True),
    *_linear("mlp.experts.linear_fc2", 1, "", "mlp.experts.experts.linear_fc2", True),
    *_linear("mlp.shared_experts.linear_fc1", 0, "gate"), *_linear("mlp.shared_experts.linear_fc2", 1),
    Row("mlp.shared_experts.gate_weight"), *_linear("mlp.router", None), Row("mlp.router.expert_bias"),
    *_norm("pre_cross_attn_layernorm"), *_linear("cross_attention.linear_q", 0),
    *_linear("cross_attention.linear_kv", 0, "groups"), *_linear("cross_attention.linear_proj", 1),
]  # fmt: skip
MODEL_ROWS = [
    Row("embedding.word_embeddings.weight", dim=0), Row("embedding.position_embeddings.weight"),
    Row("embedding.tokentype_embeddings.weight"), *_norm("decoder.final_layernorm"), *_norm("encoder.final_layernorm"),
    *_linear("output_layer", 0), *_linear("lm_head.output_layer", 0), *_linear("lm_head.dense", None),
    *_norm("lm_head.layer_norm"), *_linear("pooler.dense", None), *_linear("binary_head", None),
    *(Row(f"{stack}_relative_pos_emb.relative_attention_bias.weight") for stack in ("encoder", "decoder")),
]  # fmt: skip
_PREDICTION_ROWS = [*_norm("enorm"), *_norm("hnorm"), Row("eh_proj.weight", dim=0), *_norm("final_layernorm")]
VOCABULARY = (
    "embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias", "lm_head.output_layer.weight",
    "lm_head.output_layer.bias",
)  # fmt: skip
REGISTERED_TWICE = {
    "embedding.position_embeddings.weight": "position_embeddings.weight",
    "lm_head.output_layer.weight": "output_layer.weight", "lm_head.output_layer.bias": "output_layer.bias",
}  # fmt: skip
"""Tensors of T5 that its checkpoints hold under a second name too, and the optimizer's state under that alone."""
_FIRST_NAMES = {second: first for first, second in REGISTERED_TWICE.items()}

_BY_THEIRS = {row.theirs or row.ours: row for row in LAYER_ROWS}
_BY_OURS: dict[str, Row] = {}
for _row in LAYER_ROWS:  # the first of two rows is what Transformer Engine's layers, the default there, are saved as
    _BY_OURS.setdefault(_row.ours, _row)
_MODEL = {row.ours: row for row in MODEL_ROWS}
_PREDICTION = {row.ours: row for row in _PREDICTION_ROWS}

_OLD_NAMES = [
    (r"^module\.", ""), (r"^language_model\.(?:(?:encoder|transformer|decoder)\.)", "decoder."),
    (r"^language_model\.", ""), (r"\.final_norm\.", ".final_layernorm."),
    (r"^(..coder\.layers\.\d+)\.attention\.", r"\1.self_attention."), (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."), (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."), (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(?:layernorm|norm)\.", ".pre_mlp_layernorm."), (r"\.transformer_layer\.", ".mtp_model_layer."),
    (r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", r".mlp.experts.experts.\2.\3\1"),
    (r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".mlp.experts.experts.\1.\2\3"),
]  # fmt: skip
"""Names before Megatron Core, in DistributedDataParallel, and of experts one by one (``weight7``), as they are now."""

_OLD_NAMES_OF_ENCODERS = [
    (r"^module\.", ""), (r"^language_model\.(?:encoder|transformer)\.", "encoder."), (r"^language_model\.", ""),
    (r"^lm_head\.(?:layer)?norm\.", "lm_head.layer_norm."),
    (r"^(decoder\.layers\.\d+\.)post_attention_(?:layer)?norm\.", r"\1pre_cross_attn_layernorm."),
    (r"\.post_inter_attention_(?:layer)?norm\.", ".pre_mlp_layernorm."), (r"\.inter_attention\.", ".cross_attention."),
    (r"\.cross_attention\.query\.", ".cross_attention.linear_q."),
    (r"\.cross_attention\.key_value\.", ".cross_attention.linear_kv."),
    (r"\.cross_attention\.dense\.", ".cross_attention.linear_proj."),
]  # fmt: skip
"""What is otherwise where ``language_model.encoder`` is one; applied before the others."""

_NO_WEIGHT = re.compile(r"_extra_state|inv_freq|rng_state|rerun_state|local_tokens_per_expert|word_embeddings_for_head")


@dataclass(frozen=True)
class Place:
    """Where one of their tensors belongs: our name (without ``model.``), its row, and which expert it is."""

    name: str
    row: Row
    expert: int | None = None


def is_no_weight(name: str) -> bool:
    """Caches and states of other kinds that are kept among the weights."""
    return _NO_WEIGHT.search(name) is not None


def family_of(names: Collection[str]) -> str:
    """Which kind of model has tensors of these names, of any version."""
    if any("cross_attention." in name or "inter_attention." in name for name in names):
        return "t5"
    return "bert" if any("lm_head.dense." in name for name in names) else "gpt"


def names_of_today(named: Mapping[str, T], family: str) -> dict[str, T]:
    """Tensors of an encoder or of an encoder and a decoder under names that :func:`find_place` knows, each once."""
    if family == "gpt":
        return dict(named)
    result: dict[str, T] = {}
    for name, tensor in named.items():
        for pattern, replacement in _OLD_NAMES_OF_ENCODERS:
            name = re.sub(pattern, replacement, name)
        if name == "lm_head.bias":
            name = "lm_head.output_layer.bias" if family == "t5" else "output_layer.bias"
        if family == "t5":
            name = _FIRST_NAMES.get(name, name)
        result.setdefault(name, tensor)
    return result


def find_place(name: str) -> Place:
    """The place of their tensor ``name``, whose layer number is that of the whole model.

    Raises:
        CheckpointError: the table has no such name.
    """
    current = name
    for pattern, replacement in _OLD_NAMES:
        current = re.sub(pattern, replacement, current)
    expert = None
    if match := re.fullmatch(r"(.*\.mlp\.experts\.experts\..*?\.(?:weight|bias))(\d+)", current):
        current, expert = match[1], int(match[2])
    if current in _MODEL:
        return Place(current, _MODEL[current])
    if (match := LAYER.fullmatch(current)) and match[2] in _BY_THEIRS:
        row = _BY_THEIRS[match[2]]
        return Place(match[1] + row.ours, row, expert)
    if (match := re.fullmatch(r"(mtp\.layers\.\d+\.)(.+)", current)) and match[2] in _PREDICTION:
        return Place(current, _PREDICTION[match[2]])
    raise CheckpointError(f"the tensor {name!r:.120} has no counterpart here: its layer is not one that this model has")


def their_name(name: str, experts: bool) -> tuple[str, Row]:
    """The ``torch_dist`` name and row of our weight ``name`` (without ``model.``); ``experts``: its layer has some."""
    if name in _MODEL:
        return name, _MODEL[name]
    if (match := LAYER.fullmatch(name)) and match[2] in _BY_OURS:
        row = _BY_OURS[match[2]]
        inside = match[2] if experts and match[2].startswith("pre_mlp_layernorm.") else row.theirs or row.ours
        return match[1].replace("mtp_model_layer", "transformer_layer") + inside, row
    if (match := re.fullmatch(r"(mtp\.layers\.\d+\.)(.+)", name)) and match[2] in _PREDICTION:
        return name, _PREDICTION[match[2]]
    raise CheckpointError(f"the tensor {name} has no counterpart in Megatron-LM")


def our_shape(place: Place, shape: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[int, ...]:
    """``shape``, as they have the whole tensor (of all experts), as we have it; the vocabulary without padding."""
    start, dims = shape[:1] if place.row.experts else (), shape[1:] if place.row.experts else shape
    parts = split_parts(place.row, settings)
    if parts > 1:
        if dims[0] % parts:
            raise CheckpointError(f"{place.name} has shape {list(shape)}, which {parts} {place.row.fold} do not divide")
        dims = (parts, dims[0] // parts, *dims[1:])
    elif place.row.fold == "groups":
        dims = (1, *dims)
    if place.name in VOCABULARY and settings.get("vocab_size"):
        dims = (min(settings["vocab_size"], dims[0]), *dims[1:])
    return (*start, *dims)


def split_parts(row: Row, settings: Mapping[str, Any]) -> int:
    """Into how many equal parts we cut their first dimension."""
    if row.fold == "groups":
        grouped = settings.get("group_query_attention") and settings.get("num_query_groups")
        return settings["num_query_groups"] if grouped else settings["num_attention_heads"]
    return 2 if row.fold == "gate" and is_gated(settings) else 1


def is_gated(settings: Mapping[str, Any]) -> bool:
    """Whether feed-forward networks have a gate, by the arguments of either program."""
    return any(settings.get(name) for name in ("swiglu", "quick_geglu", "geglu"))


# ---- settings

_RENAMED = {"num_experts": "num_moe_experts", "layernorm_epsilon": "norm_epsilon"}
_NOT_TAKEN = {
    "load", "save", "world_size", "rank", "local_rank", "data_parallel_size", "params_dtype", "iteration",
    "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "ckpt_step", "pretrained_checkpoint",
    "transformer_impl", "use_checkpoint_args", "finetune", "no_load_optim", "no_load_rng", "spec", "padded_vocab_size",
    "exit_on_missing_checkpoint",
}  # fmt: skip
"""Settings of the run, not of the model or its training."""


def settings_of(args: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Our settings by the names of theirs: plain values alone. ``tensors``: their names and global shapes, from which
    the size of the padded vocabulary follows where the arguments do not say it.

    ``vocab_size`` is the true one where the arguments hold it, else the padded one.
    """
    family = family_of(tensors)
    settings: dict[str, Any] = {"model_family": family}
    for name, value in args.items():
        kinds = (str, int, float, bool, type(None))
        plain = isinstance(value, kinds) or (isinstance(value, list) and all(isinstance(item, kinds) for item in value))
        finite = not isinstance(value, int | float) or (abs(value) < 1e300)
        if plain and finite and name not in _NOT_TAKEN and not name.startswith("_"):
            settings[_RENAMED.get(name, name)] = value
    rows = next((shape[0] for name, shape in tensors.items() if name.endswith("word_embeddings.weight")), 0)
    padded = args.get("padded_vocab_size") or rows
    true = args.get("vocab_size")
    settings["vocab_size"] = true if isinstance(true, int) and 0 < true <= padded else padded
    if family == "bert":
        settings["bert_binary_head"] = "binary_head.weight" in tensors
        if "embedding.position_embeddings.weight" in tensors:  # its program learns positions, whatever its flag says
            settings["position_embedding_type"] = "learned_absolute"
    if family == "t5":  # whose program gives the decoder as many layers as the encoder has, whatever its flag says
        settings["decoder_num_layers"] = len(layers_of(tensors, "decoder"))
    return settings


def layers_of(names: Iterable[str], stack: str) -> list[int]:
    """Numbers of the layers of ``stack`` (``encoder``, ``decoder``) that tensors belong to."""
    return sorted({int(name.split(".")[2]) for name in names if name.startswith(f"{stack}.layers.")})


def padded_size(size: int, multiple: int) -> int:
    """Rows of their word embedding."""
    return math.ceil(size / multiple) * multiple
