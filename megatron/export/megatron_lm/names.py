"""Table of tensor names, splits and settings of Megatron-LM and local checkpoints, used by both readers and the writer.

Both store a layer's weights in the same element order: query, key and value interleaved by query group, gate before
value. Differences: a group of gated attention has all queries, then all gates (locally each query head is followed by
its gate); local shapes are [groups, …, hidden] and [2, width, hidden], the experts of a layer are one tensor,
norms have separate names, and the vocabulary is not padded. The projections of Mamba-2 and of gated delta nets are
sections here (all of z, then all of x …), each split by tensor parallelism, and interleaved by groups of heads locally.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.interchange import Settings

T = TypeVar("T")
MAX_LAYERS = 10_000
_DEPTH = r"mtp\.layers\.\d+\.mtp_model_layer(?:\.layers\.\d+)?"
LAYER = re.compile(rf"((?:model\.)?(?:(?:en|de)coder\.layers\.\d+|{_DEPTH})\.)(.+)")
SECTIONS = {
    "mamba": ("z", "x", "B", "C", "dt"),
    "mamba_conv": ("x", "B", "C"),
    "delta": ("query", "key", "value", "z", "beta", "alpha"),
    "delta_conv": ("query", "key", "value"),
}
"""Fold of a tensor with sections -> suffixes of the sections' names in ``torch_dist``."""


@dataclass(frozen=True)
class Row:
    """One parameter: its name within a layer (or the model), and how tensor-parallel ranks split it."""

    local: str
    megatron: str = ""
    """Name in ``torch_dist`` if it differs from the local name."""
    dim: int | None = None
    """Dimension of Megatron-LM's shape that tensor parallelism splits; None: replicated."""
    fold: str = ""
    """Split of Megatron-LM's first dimension (of one expert) in the local shape: ``groups``, ``gate``, sections
    (``SECTIONS``) or none."""
    experts: bool = False
    """Whether the local tensor has a leading expert dimension."""


def _linear(name: str, dim: int | None, fold: str = "", megatron: str = "", experts: bool = False) -> list[Row]:
    """The bias of a row-parallel layer is replicated."""
    megatron = megatron or name
    return [
        Row(f"{name}.weight", f"{megatron}.weight", dim, fold, experts),
        Row(f"{name}.bias", f"{megatron}.bias", 0 if dim == 0 else None, fold, experts),
    ]


def _norm(name: str, megatron: str = "") -> list[Row]:
    return [Row(f"{name}.{kind}", f"{megatron or name + '.'}{kind}") for kind in ("weight", "bias")]


_ATTENTION = "self_attention."
LAYER_ROWS = [
    *_linear(f"{_ATTENTION}linear_qkv", 0, "groups"),
    *_linear(f"{_ATTENTION}linear_proj", 1),
    *_norm("input_layernorm", f"{_ATTENTION}linear_qkv.layer_norm_"),
    *_norm("input_layernorm"),
    *_norm("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_"),
    *_norm("pre_mlp_layernorm"),
    *_norm(f"{_ATTENTION}q_layernorm"),
    *_norm(f"{_ATTENTION}k_layernorm"),
    *_norm(f"{_ATTENTION}q_layernorm", f"{_ATTENTION}linear_q_up_proj.layer_norm_"),
    *_norm(f"{_ATTENTION}kv_layernorm", f"{_ATTENTION}linear_kv_up_proj.layer_norm_"),
    *_norm(f"{_ATTENTION}kv_layernorm"),
    Row(f"{_ATTENTION}core_attention.softmax_offset", dim=0),
    *(Row(f"{_ATTENTION}{name}.weight", dim=0) for name in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")),
    *(Row(f"{_ATTENTION}{name}.weight") for name in ("linear_q_down_proj", "linear_kv_down_proj")),
    *_linear("mlp.linear_fc1", 0, "gate"),
    *_linear("mlp.linear_fc2", 1),
    *_linear("mlp.experts.linear_fc1", 0, "gate", "mlp.experts.experts.linear_fc1", True),
    *_linear("mlp.experts.linear_fc2", 1, "", "mlp.experts.experts.linear_fc2", True),
    *_linear("mlp.shared_experts.linear_fc1", 0, "gate"),
    *_linear("mlp.shared_experts.linear_fc2", 1),
    Row("mlp.shared_experts.gate_weight"),
    *_norm("norm", "mixer.in_proj.layer_norm_"),
    *_norm("norm"),
    *_norm("input_layernorm", f"{_ATTENTION}in_proj.layer_norm_"),
    *(Row(f"mixer.{name}", dim=0) for name in ("dt_bias", "A_log", "D", "norm.weight")),
    *(Row(f"mixer.conv1d.{kind}", dim=0, fold="mamba_conv") for kind in ("weight", "bias")),
    *(Row(f"{_ATTENTION}{name}", dim=0) for name in ("dt_bias", "A_log")),
    Row(f"{_ATTENTION}conv1d.weight", dim=0, fold="delta_conv"),
    Row(f"{_ATTENTION}norm.weight", f"{_ATTENTION}out_norm.weight"),
    Row("mixer.in_proj.weight", dim=0, fold="mamba"),
    Row(f"{_ATTENTION}in_proj.weight", dim=0, fold="delta"),
    *(Row(f"{mixer}out_proj.weight", dim=1) for mixer in ("mixer.", _ATTENTION)),
    *_linear("mlp.router", None),
    Row("mlp.router.expert_bias"),
    *_norm("pre_cross_attn_layernorm"),
    *_linear("cross_attention.linear_q", 0),
    *_linear("cross_attention.linear_kv", 0, "groups"),
    *_linear("cross_attention.linear_proj", 1),
]
MODEL_ROWS = [
    Row("embedding.word_embeddings.weight", dim=0),
    Row("embedding.position_embeddings.weight"),
    Row("embedding.tokentype_embeddings.weight"),
    *_norm("decoder.final_layernorm"),
    *_norm("encoder.final_layernorm"),
    *_linear("output_layer", 0),
    *_linear("lm_head.output_layer", 0),
    *_linear("lm_head.dense", None),
    *_norm("lm_head.layer_norm"),
    *_linear("pooler.dense", None),
    *_linear("binary_head", None),
    *(Row(f"{stack}_relative_pos_emb.relative_attention_bias.weight") for stack in ("encoder", "decoder")),
]
_PREDICTION_ROWS = [*_norm("enorm"), *_norm("hnorm"), Row("eh_proj.weight", dim=0), *_norm("final_layernorm")]
VOCABULARY = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
    "lm_head.output_layer.weight",
    "lm_head.output_layer.bias",
)
REGISTERED_TWICE = {
    "embedding.position_embeddings.weight": "position_embeddings.weight",
    "lm_head.output_layer.weight": "output_layer.weight",
    "lm_head.output_layer.bias": "output_layer.bias",
}
"""T5 tensors that checkpoints also store under a second name; optimizer state uses only the second name."""
_FIRST_NAMES = {second: first for first, second in REGISTERED_TWICE.items()}

_BY_MEGATRON_NAME = {row.megatron or row.local: row for row in LAYER_ROWS}
_BY_LOCAL_NAME: dict[str, Row] = {}
for _row in LAYER_ROWS:  # the first of two rows is what Transformer Engine's layers, the default there, are saved as
    _BY_LOCAL_NAME.setdefault(_row.local, _row)
_MODEL = {row.local: row for row in MODEL_ROWS}
_PREDICTION = {row.local: row for row in _PREDICTION_ROWS}

_OLD_NAMES = [
    (r"^module\.", ""),
    (r"^language_model\.(?:(?:encoder|transformer|decoder)\.)", "decoder."),
    (r"^language_model\.", ""),
    (r"\.final_norm\.", ".final_layernorm."),
    (r"\.mixer\.conv1d_(weight|bias)$", r".mixer.conv1d.\1"),
    (r"^(..coder\.layers\.\d+)\.attention\.", r"\1.self_attention."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(?:layernorm|norm)\.", ".pre_mlp_layernorm."),
    (r"\.transformer_layer\.", ".mtp_model_layer."),
    (r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", r".mlp.experts.experts.\2.\3\1"),
    (r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".mlp.experts.experts.\1.\2\3"),
]
"""Patterns of old names (before Megatron Core, DDP wrappers, single experts as ``weight7``) -> current names."""

_OLD_NAMES_OF_ENCODERS = [
    (r"^module\.", ""),
    (r"^language_model\.(?:encoder|transformer)\.", "encoder."),
    (r"^language_model\.", ""),
    (r"^lm_head\.(?:layer)?norm\.", "lm_head.layer_norm."),
    (r"^(decoder\.layers\.\d+\.)post_attention_(?:layer)?norm\.", r"\1pre_cross_attn_layernorm."),
    (r"\.post_inter_attention_(?:layer)?norm\.", ".pre_mlp_layernorm."),
    (r"\.inter_attention\.", ".cross_attention."),
    (r"\.cross_attention\.query\.", ".cross_attention.linear_q."),
    (r"\.cross_attention\.key_value\.", ".cross_attention.linear_kv."),
    (r"\.cross_attention\.dense\.", ".cross_attention.linear_proj."),
]
"""Renaming patterns for models whose ``language_model.encoder`` is an encoder; applied before the others."""

_NO_WEIGHT = re.compile(r"_extra_state|inv_freq|rng_state|rerun_state|local_tokens_per_expert|word_embeddings_for_head")


@dataclass(frozen=True)
class Counterpart:
    """Counterpart of a Megatron-LM tensor: local name (without ``model.``), table row, and expert index if any."""

    name: str
    row: Row
    expert: int | None = None


def is_no_weight(name: str) -> bool:
    """Whether ``name`` is a cache or other state that is stored with the weights, but is no weight."""
    return _NO_WEIGHT.search(name) is not None


def detect_family(names: Collection[str]) -> str:
    """Return the model family (gpt, bert or t5) of these tensor names, of any Megatron-LM version."""
    if any("cross_attention." in name or "inter_attention." in name for name in names):
        return "t5"
    return "bert" if any("lm_head.dense." in name for name in names) else "gpt"


def current_names(named: Mapping[str, T], family: str) -> dict[str, T]:
    """Rename BERT's and T5's tensors to names that :func:`find_place` knows (the first of equal ones)."""
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


def find_place(name: str) -> Counterpart:
    """Return the counterpart of the Megatron-LM tensor ``name``, in today's or older spelling, with a global layer
    number. Raises CheckpointError if the table has no such name."""
    current = name
    for pattern, replacement in _OLD_NAMES:
        current = re.sub(pattern, replacement, current)
    expert = None
    if match := re.fullmatch(r"(.*\.mlp\.experts\.experts\..*?\.(?:weight|bias))(\d+)", current):
        current, expert = match[1], int(match[2])
    if current in _MODEL:
        return Counterpart(current, _MODEL[current])
    if (match := LAYER.fullmatch(current)) and match[2] in _BY_MEGATRON_NAME:
        row = _BY_MEGATRON_NAME[match[2]]
        return Counterpart(match[1] + row.local, row, expert)
    if (match := re.fullmatch(r"(mtp\.layers\.\d+\.)(.+)", current)) and match[2] in _PREDICTION:
        return Counterpart(current, _PREDICTION[match[2]])
    raise CheckpointError(f"the tensor {name!r:.120} has no counterpart here: its layer is not one that this model has")


def their_name(name: str, experts: bool) -> tuple[str, Row]:
    """Return the ``torch_dist`` name and table row of a local weight. Raises CheckpointError if Megatron-LM has no such
    tensor. ``experts``: whether its layer is MoE, where the pre-MLP norm has another name."""
    if name in _MODEL:
        return name, _MODEL[name]
    if (match := LAYER.fullmatch(name)) and match[2] in _BY_LOCAL_NAME:
        row = _BY_LOCAL_NAME[match[2]]
        inside = match[2] if experts and match[2].startswith("pre_mlp_layernorm.") else row.megatron or row.local
        return re.sub(r"mtp_model_layer\.$", "transformer_layer.", match[1]) + inside, row
    if (match := re.fullmatch(r"(mtp\.layers\.\d+\.)(.+)", name)) and match[2] in _PREDICTION:
        return name, _PREDICTION[match[2]]
    raise CheckpointError(f"the tensor {name} has no counterpart in Megatron-LM")


def our_shape(place: Counterpart, shape: tuple[int, ...], settings: Settings) -> tuple[int, ...]:
    """Convert Megatron-LM's unsharded ``shape`` (with all experts) to the local one, without vocabulary padding. Raises
    CheckpointError if it is not divisible into groups or gate halves."""
    start, dims = shape[:1] if place.row.experts else (), shape[1:] if place.row.experts else shape
    parts = split_parts(place.row, settings)
    if place.row.fold in SECTIONS:
        if dims[0] != (rows := sum(section_rows(place.row, settings))):
            raise CheckpointError(f"{place.name} has shape {list(shape)}, expected {rows} rows")
        dims = (parts, dims[0] // parts, *dims[1:])
    elif parts > 1:
        if dims[0] % parts:
            raise CheckpointError(f"{place.name} has shape {list(shape)}, which {parts} {place.row.fold} do not divide")
        dims = (parts, dims[0] // parts, *dims[1:])
    elif place.row.fold == "groups":
        dims = (1, *dims)
    if place.name in VOCABULARY and settings.get("vocab_size"):
        dims = (min(settings["vocab_size"], dims[0]), *dims[1:])
    return (*start, *dims)


def split_parts(row: Row, settings: Settings) -> int:
    """Return into how many equal parts the local shape splits Megatron-LM's first dimension (1: not split)."""
    if row.fold == "groups":
        grouped = settings.get("group_query_attention") and settings.get("num_query_groups")
        return settings["num_query_groups"] if grouped else settings["num_attention_heads"]
    if row.fold in SECTIONS:
        return settings.get("mamba_num_groups" if row.fold.startswith("mamba") else "linear_num_key_heads") or 1
    return 2 if row.fold == "gate" and is_gated(settings) else 1


def section_rows(row: Row, settings: Settings) -> list[int]:
    """Return the sizes of the sections of Megatron-LM's first dimension, up to a common factor; tensor parallelism
    splits each of them. Raises KeyError for a missing setting."""
    if row.fold.startswith("mamba"):
        channels = settings["mamba_head_dim"]
        heads = settings.get("mamba_num_heads") or 2 * settings["hidden_size"] // channels
        inner, state = heads * channels, settings["mamba_num_groups"] * settings["mamba_state_dim"]
        return [inner, inner, state, state, heads][1 if row.fold == "mamba_conv" else 0 :][: len(SECTIONS[row.fold])]
    if row.fold.startswith("delta"):
        keys, heads = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
        keys, values = keys * settings["linear_key_head_dim"], heads * settings["linear_value_head_dim"]
        return [keys, keys, values, values, heads, heads][: len(SECTIONS[row.fold])]
    return [1, 1] if row.fold == "gate" and is_gated(settings) else [1]


def reorder_gates(tensor: LazyTensor, settings: Settings, *, to_local: bool) -> LazyTensor:
    """Return ``linear_qkv`` [groups, rows, …] with the gate of each query head of a group after it, from all queries
    before all gates, or back; unchanged without gates."""
    if not settings.get("attention_output_gate"):
        return tensor
    heads = settings["num_attention_heads"] // tensor.shape[0]  # of a group: its rows are queries, gates, key, value
    channels = tensor.shape[1] // (2 * heads + 2)

    def read() -> Tensor:
        queries, key_value = tensor.read().split((2 * heads * channels, 2 * channels), 1)
        blocks = queries.unflatten(1, (2, heads, channels) if to_local else (heads, 2, channels)).transpose(1, 2)
        return torch.cat((blocks.flatten(1, 3), key_value), 1)

    return LazyTensor(tensor.shape, tensor.dtype, read)


def is_gated(settings: Settings) -> bool:
    """Whether MLPs are gated, according to the arguments of either program."""
    return any(settings.get(name) for name in ("swiglu", "quick_geglu", "geglu"))


# ---- settings

_RENAMED = {
    "num_experts": "num_moe_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
_NOT_TAKEN = {
    "load", "save", "world_size", "rank", "local_rank", "data_parallel_size", "params_dtype", "iteration",
    "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "ckpt_step", "pretrained_checkpoint",
    "transformer_impl", "use_checkpoint_args", "finetune", "no_load_optim", "no_load_rng", "spec", "padded_vocab_size",
    "exit_on_missing_checkpoint",
}  # fmt: skip
"""Arguments that are not converted: they concern the run, but neither the model nor its training."""
_NO_COUNTERPART = (
    "moe_latent_size", "enable_mhc_connections", "mrope_section", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json", "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size",
    "moe_apply_probs_on_input", "openai_gelu", "retro_add_retriever",
)  # fmt: skip
"""Arguments that change the model's output for the same weights, and have no local counterpart."""


def arguments_without_counterpart(args: Settings) -> list[str]:
    """Describe the active arguments in ``args`` whose model cannot be represented by local settings."""
    return [f"{name} is {args[name]!r:.80}" for name in _NO_COUNTERPART if args.get(name) not in (None, False, [], "")]


def convert_arguments(args: Settings, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Convert Megatron-LM's arguments to settings: plain values only.

    None means "not given": Megatron-LM then computes with the value that is the default here. ``num_query_groups``
    applies only together with ``group_query_attention``: its default of 1 is in the arguments of every run.

    Args:
        tensors: names and global shapes; the padded vocabulary is read from them if the arguments lack it.

    Returns:
        Settings; ``vocab_size`` is the true one if the arguments hold it, else the padded one.

    Raises:
        CheckpointDamagedError: a size that tensors are read with is no positive number."""
    _check_sizes(args)
    family = detect_family(tensors)
    settings: dict[str, object] = {}
    for name, value in args.items():
        if value is None or (name == "num_query_groups" and not args.get("group_query_attention")):
            continue
        kinds = (str, int, float, bool, type(None))
        plain = isinstance(value, kinds) or (isinstance(value, list) and all(isinstance(item, kinds) for item in value))
        finite = not isinstance(value, int | float) or (abs(value) < 1e300)
        if plain and finite and name not in _NOT_TAKEN and not name.startswith("_"):
            settings[_RENAMED.get(name, name)] = value
    if pattern := args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern"):
        depth, count = args.get("mtp_hybrid_override_pattern"), args.get("mtp_num_layers") or 0
        settings["hybrid_layer_pattern"] = pattern + f"/{depth}" * (count if depth and "/" not in pattern else 0)
    settings["model_family"] = family  # after the arguments, which may have this name
    rows = next((shape[0] for name, shape in tensors.items() if name.endswith("word_embeddings.weight")), 0)
    padded = args.get("padded_vocab_size") or rows
    true = args.get("vocab_size")
    settings["vocab_size"] = true if isinstance(true, int) and 0 < true <= padded else padded
    if not settings.get("num_moe_experts"):  # its parser derives the width of experts for models without any
        settings = {name: value for name, value in settings.items() if not name.startswith("moe_")}
    if family == "bert":
        settings["bert_binary_head"] = "binary_head.weight" in tensors
        if "embedding.position_embeddings.weight" in tensors:  # its program learns positions and ignores the flag
            settings["position_embedding_type"] = "learned_absolute"
    if family == "t5":  # whose program ignores the decoder's flag and uses the encoder's number of layers
        settings["decoder_num_layers"] = len(layer_indices(tensors, "decoder"))
    return settings


_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
          "padded_vocab_size")  # fmt: skip


def _check_sizes(args: Settings) -> None:
    """Raise CheckpointDamagedError unless sizes that tensors are read with are from 1 to 2^31 - 1 (or MAX_LAYERS)."""
    for name in _SIZES:
        largest = MAX_LAYERS if name == "num_layers" else 2**31 - 1
        value = args.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= largest):
            reason = f"must be an integer from 1 to {largest}; the checkpoint is damaged, copy it again"
            raise CheckpointDamagedError(f"args.{name} {value!r:.60}: {reason}")


def layer_indices(names: Iterable[str], stack: str) -> list[int]:
    """Return the sorted layer indices of ``stack`` (``encoder`` or ``decoder``) that occur in ``names``."""
    return sorted({int(name.split(".")[2]) for name in names if name.startswith(f"{stack}.layers.")})


def padded_size(size: int, multiple: int) -> int:
    """Round the vocabulary ``size`` up to ``multiple``, as Megatron-LM pads its word embedding."""
    return math.ceil(size / multiple) * multiple
