"""A family of models as one table: settings and weights, from which reading and writing derive. Torch-free.

What tensors a model of ours has, and their shapes, is not said here: its description tells
(``megatron/core/models/*_description.py``). So a table is complete, or the first model shows what it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import SimpleNamespace
from typing import Any

from megatron.core.config.attention import AttentionConfig
from megatron.core.config.cli import flags_of
from megatron.core.config.errors import UserError
from megatron.core.config.mla import LatentAttentionConfig
from megatron.core.config.moe import MoEConfig
from megatron.core.config.mtp import MTPConfig
from megatron.core.config.network import NetworkSizeConfig
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.export.hf.layouts import Layout
from megatron.core.export.hf.settings import Ignored, Rule, Same, refuse
from megatron.core.models.describe import describe_family, weight_shapes

GROUPS = (NetworkSizeConfig, AttentionConfig, LatentAttentionConfig, MoEConfig, MTPConfig)
ELSEWHERE: dict[str, Any] = {
    "vocab_size": None, "max_position_embeddings": None, "position_embedding_type": "learned_absolute",
    "rotary_base": 10000, "rotary_percent": 1.0, "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False, "rope_scaling_factor": 8.0, "untie_embeddings_and_output_weights": False,
    "group_query_attention": False, "model_family": "gpt", "bert_binary_head": True, "decoder_num_layers": None,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
}  # fmt: skip
"""Settings of the training program that say what a model is, with their defaults there."""
WITHOUT_MEANING = {"apply_query_key_layer_scaling"}
"""Settings that the description names and that change how a model computes, not what."""

PASSIVE = {
    "model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
    "initializer_range", "use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "cls_token_id", "unk_token_id", "decoder_start_token_id", "return_dict", "id2label", "label2id",
    "num_labels",
    "keys_to_ignore_at_inference", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "max_length", "min_length", "num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "do_sample", "task_specific_params", "_commit_hash",
    "chunk_size_feed_forward", "attn_implementation", "_attn_implementation_autoset", "gradient_checkpointing",
}  # fmt: skip
"""Keys of any config.json that do not change what the model computes."""


@dataclass(frozen=True)
class Family:
    """What ``config.json`` calls ``model_type``."""

    model_type: str
    architecture: str
    config: tuple[Rule, ...]
    weights: Mapping[str, Layout | str]
    """Our name, without ``.weight`` or ``.bias``, and with ``*`` for the layer or for one layer alone -> where it lies
    there. ``{before}`` is the number of the layer before; behind all layers, of the last one."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors that are left out: masks, tables of angles; ``{num_layers}`` is the number of layers."""
    base: str = "model."
    """Beginning of all names but the output layer's, which some files leave out."""
    repeated: Mapping[str, str] = field(default_factory=dict)
    """Tensors of every layer of multi-token prediction (``*``) that are the same as another one."""
    counts_if_held: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that count only where the files hold this tensor."""
    model_family: str = "gpt"
    """Which program trains it (``model_description.py``)."""
    also_read: tuple[str, ...] = ()
    """Other architectures whose folders hold the same weights."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Ends of names that older files have -> the ends of today."""
    optional: tuple[str, ...] = ()
    """Modules that a folder may lack: they begin at random values."""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a folder may lack -> of which one they are a copy then."""
    blank: Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]] = lambda settings: {}
    """Tensors that a model of these settings lacks: they are zero there."""

    @property
    def passive(self) -> set[str]:
        """Keys of config.json that can be handed on as they are."""
        return PASSIVE.union(*(rule.theirs for rule in self.config if isinstance(rule, Ignored)))

    def load_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of the command line for a ``config.json``.

        Raises:
            UserError: a key with a value that they cannot represent, or that no rule knows.
        """
        settings: dict[str, Any] = {}
        sizes = [rule for rule in self.config if isinstance(rule, Same)]
        for rules in (sizes, [rule for rule in self.config if rule not in sizes]):
            for rule in rules:
                for name, value in rule.load(config).items():
                    if settings.setdefault(name, value) != value:
                        raise refuse(rule.theirs[0], value, f"but another key makes {name} {settings[name]!r}")
            _check_kinds(settings)  # before other rules count with them
        known = PASSIVE.union(*(rule.theirs for rule in self.config))
        for name, value in config.items():
            if name not in known and value not in (None, False, [], {}):
                raise refuse(
                    name, value, f"which {self.model_type} has no place for; remove it if the model is the same without"
                )
        return {**settings, "model_family": self.model_family}

    def save_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The ``config.json`` of completed settings (:func:`complete`).

        Raises:
            UserError: a setting that the family does not have.
        """
        if settings["model_family"] != self.model_family:
            raise refuse("model_family", settings["model_family"], f"the family has {self.model_family!r} alone")
        config: dict[str, Any] = {"model_type": self.model_type}
        for rule in self.config:
            for name, value in rule.save(settings).items():
                if config.setdefault(name, value) != value:
                    raise refuse(rule.ours[0], value, f"but another setting makes {name} {config[name]!r}")
        if "quantile_balancing" in settings["moe_router_load_balancing_type"]:
            raise refuse("moe_router_load_balancing_type", "quantile_balancing", "whose bias no family has")
        said = WITHOUT_MEANING.union(*(rule.ours for rule in self.config))
        defaults = {**_defaults(), **ELSEWHERE}
        for name in described(settings)[1]:
            if name not in said and settings[name] != defaults[name]:
                raise refuse(name, settings[name], f"the family has {defaults[name]!r} alone")
        return {"architectures": [self.architecture], **config}

    def tied(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Name of the output layer -> that of the embedding, where they are one tensor."""
        head, words = (f"{self.weights[name]}.weight" for name in ("output_layer", "embedding.word_embeddings"))
        return {} if settings["untie_embeddings_and_output_weights"] else {head: words}

    def copies(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Tensors that layers of multi-token prediction hold again -> the one that each equals."""
        first, tied = settings["num_layers"], self.tied(settings)
        layers = map(str, range(first, first + (settings.get("mtp_num_layers") or 0)))
        return {name.replace("*", n): tied.get(same, same) for n in layers for name, same in self.repeated.items()}

    def layouts(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], Layout]]:
        """Every tensor of a model: our name, our shape, and where it lies, names of their layer filled in."""
        for name, shape in described(settings)[0].items():
            found = re.fullmatch(r"(encoder|decoder|mtp)\.layers\.(\d+)\.(.*)", name)
            layer, patterns = "", [name]
            if found:
                layer = str(int(found[2]) + (settings["num_layers"] if found[1] == "mtp" else 0))
                rest = found[3].removeprefix("mtp_model_layer.")
                patterns.append(f"{found[1] if rest == found[3] else 'decoder'}.layers.*.{rest}")
            keys = [(key, end) for each in patterns for key, end in ((each, ""), _stem(each))]
            key, end = next(((key, end) for key, end in keys if key in self.weights), ("", ""))
            if not key:
                raise UserError(f"{self.model_type} has no tensor for {name}")
            layout = self.weights[key]
            layout = Layout(layout) if isinstance(layout, str) else layout.of(shape)
            before = str(int(layer or settings["num_layers"]) - 1)
            names = [each.replace("{before}", before).replace("*", layer, 1) for each in layout.names]
            yield name, shape, layout.renamed([f"{each}{end}" for each in names])


def _stem(name: str) -> tuple[str, str]:
    stem, dot, suffix = name.rpartition(".")
    return stem, dot + suffix


@cache
def _defaults() -> dict[str, Any]:
    return {spec.field: spec.default for spec in flags_of(*GROUPS) if not spec.field.endswith("parallel_size")}


def _check_kinds(settings: Mapping[str, Any]) -> None:
    """Values of files are anything; what follows computes with them."""
    for spec in flags_of(*GROUPS):
        value = settings.get(spec.field)
        if value is None or spec.nargs is not None or spec.type_name == "custom":
            continue
        kinds = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}.get(spec.type_name, (object,))
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if reason := spec.refusal(value) if fits else f"is no {spec.type_name}":
            raise refuse(spec.field, value, f"as config.json has it: {reason}")
    for name in ("vocab_size", "max_position_embeddings"):
        if type(settings.get(name, 1)) is not int or settings.get(name, 1) < 1:
            raise refuse(name, settings[name], "as config.json has it: must be a positive integer")


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with what follows from them, and defaults for the rest. ``ConfigError``: impossible sizes."""
    values = {**_defaults(), **ELSEWHERE, **settings}
    if values["num_query_groups"] is None and values["group_query_attention"]:
        values["num_query_groups"] = 1
    config = transformer_config(values)
    return {**values, **{name: getattr(config, name) for name in _defaults()}}


def transformer_config(settings: Mapping[str, Any]) -> TransformerConfig:
    """The library's configuration of settings."""
    known = {each.name for each in fields(TransformerConfig)}
    return TransformerConfig(**{name: settings[name] for name in _defaults() if name in known})


def described(settings: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Names and global shapes of a model's tensors, and the settings that say what they mean."""
    run = SimpleNamespace(**{**settings, "seq_length": 1, "decoder_seq_length": 1, "make_vocab_size_divisible_by": 1})
    model = describe_family(transformer_config(settings), run, settings["vocab_size"])
    return weight_shapes(model, expert_bias=settings["moe_router_enable_expert_bias"]), model.settings
