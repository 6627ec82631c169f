"""Model family: one table of settings and weights, used for both import and export. Torch-free.

Names and shapes of local tensors come from the model descriptions (``megatron/core/models/*/description.py``), so an
incomplete table fails at the first model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from megatron.core.config.attention import AttentionConfig
from megatron.core.config.cli import group_flags
from megatron.core.config.errors import UserError
from megatron.core.config.hybrid import HybridConfig
from megatron.core.config.linear_attention import LinearAttentionConfig
from megatron.core.config.mla import LatentAttentionConfig
from megatron.core.config.moe import MoEConfig
from megatron.core.config.mtp import MTPConfig
from megatron.core.config.mup import MupConfig
from megatron.core.config.network import NetworkSizeConfig, ScaledOutputConfig
from megatron.core.config.optional import MultiplierConfig
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.config.vision import VisionConfig
from megatron.core.description.model import weight_shapes
from megatron.core.models.registry import get_family
from megatron.export.hf.attention_settings import with_exported_length
from megatron.export.hf.layouts import TensorLayout
from megatron.export.hf.settings import Ignored, Rule, Same, Table, refuse

GROUPS = (
    NetworkSizeConfig,
    MultiplierConfig,
    MupConfig,
    ScaledOutputConfig,
    AttentionConfig,
    LatentAttentionConfig,
    LinearAttentionConfig,
    HybridConfig,
    MoEConfig,
    MTPConfig,
    VisionConfig,
)
ELSEWHERE: dict[str, object] = {
    "vocab_size": None,
    "max_position_embeddings": None,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "untie_embeddings_and_output_weights": False,
    "group_query_attention": False,
    "model_family": "gpt",
    "bert_binary_head": True,
    "bert_num_tokentypes": None,
    "decoder_num_layers": None,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
}
"""Settings of the training program that define the model, with their defaults."""
_SIZES = {
    "vocab_size": 2**31 - 1,
    "max_position_embeddings": 2**31 - 1,
    "decoder_num_layers": 2048,
    "bert_num_tokentypes": 2**16,
    "num_moe_experts": 4096,
    "relative_attention_num_buckets": 2**16,
    "relative_attention_max_distance": 2**31 - 1,
}
"""Maximum values of sizes that have no range: they bound the plan of all layers and experts."""
_OPTIONAL_SIZES = ("decoder_num_layers", "num_moe_experts", "bert_num_tokentypes")
WITHOUT_MEANING = {"apply_query_key_layer_scaling"}
"""Settings in the description that affect the computation method, but not its result."""

OUTER = ("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings")
"""Keys of ``config.json`` that are never within a part."""

PASSIVE = {
    "model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
    "initializer_range", "use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "cls_token_id", "unk_token_id", "decoder_start_token_id", "return_dict", "id2label", "label2id",
    "num_labels", "tokenizer_class",
    "keys_to_ignore_at_inference", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "max_length", "min_length", "num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "do_sample", "task_specific_params", "_commit_hash",
    "chunk_size_feed_forward", "attn_implementation", "_attn_implementation_autoset", "gradient_checkpointing",
}  # fmt: skip
"""Keys of config.json, for all families, that do not affect the model's output."""


@dataclass(frozen=True)
class Container:
    """Larger models, of images and text, that contain a family's model."""

    model_type: str
    base: str
    """Prefix of the text model's tensors, in place of the family's."""
    tower: str
    """Prefix of tensors that are not loaded."""


@dataclass(frozen=True)
class Family:
    """Table of one HF ``model_type``."""

    model_type: str
    architecture: str
    config: tuple[Rule, ...]
    weights: Mapping[str, TensorLayout | str]
    """Local name without ``.weight`` or ``.bias``, with ``*`` or a number for the layer -> HF layout.

    In HF names, ``{before}`` is the index of the previous layer (after all layers: of the last layer)."""
    names: Callable[[Table], Mapping[str, TensorLayout | str]] = lambda settings: {}
    """Entries of ``weights`` that depend on the settings."""
    unused: tuple[str, ...] = ()
    """Patterns of HF tensors to ignore (masks, rotary tables); ``{num_layers}`` is the number of layers."""
    base: str = "model."
    """Prefix of all names except the output layer's; some files omit it."""
    container: Container | None = None
    """Larger models whose files are read too."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of names in older or newer files -> prefixes of the family."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in the files -> of modules in transformers, where these differ."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Objects of ``config.json`` -> their ``model_type``; the first one has the text model. Rules read the keys of the
    first as they are, of the others with the object's name and a dot in front."""
    outer: tuple[str, ...] = ()
    """Keys next to ``parts``."""
    alternatives: Mapping[str, TensorLayout] = field(default_factory=dict)
    """Entries of ``weights`` for files that contain a tensor of the first one."""
    repeated: Mapping[str, str] = field(default_factory=dict)
    """Tensors in every multi-token prediction layer (``*``) -> the tensor that they duplicate."""
    counts_if_held: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that are ignored unless the files contain this tensor."""
    model_family: str = "gpt"
    """Local model family: gpt, bert, t5 or vlm."""
    also_read: tuple[str, ...] = ()
    """Other accepted ``architectures``: with the same weights, or without some of the ``heads``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name suffixes in older files -> current suffixes."""
    heads: tuple[tuple[str, ...], ...] = ()
    """HF modules of each head that a folder may omit; an omitted head is initialized randomly."""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a folder may omit -> the tensor that is copied instead."""
    layers_per_block: int = 1
    """Local layers that one HF layer contains."""
    models: str = ""
    """Names of published models, for the reference page."""
    limits: tuple[str, ...] = ()
    """Unsupported features in addition to the limits of ``config``, for the reference page."""
    blank: Callable[[Mapping[str, object]], dict[str, tuple[int, ...]]] = lambda settings: {}
    """HF tensors without a local counterpart for these settings: must be zero on import, written as zeros."""

    def flat(self, config: Table) -> Table:
        """Return a ``config.json`` with the keys of ``parts`` as rules read them. UserError for other values."""
        if not self.parts:
            return config
        text = next(iter(self.parts))
        result: dict[str, object] = {}
        for part in self.parts:
            if not isinstance(content := config.get(part, {}), dict):
                raise refuse(part, content, "expected an object")
            result |= content if part == text else {f"{part}.{name}": value for name, value in content.items()}
        result[f"{text}.model_type"] = result.pop("model_type", None)
        return {**result, **{name: value for name, value in config.items() if name not in self.parts}}

    def nested(self, config: Table) -> dict[str, object]:
        """Return the ``config.json`` of which ``config`` is the flat form."""
        if not self.parts:
            return {**config}
        text = next(iter(self.parts))
        result: dict[str, Any] = {part: {"model_type": kind} for part, kind in self.parts.items()}
        for name, value in config.items():
            part, dot, key = name.partition(".")
            if dot and part in result:
                result[part][key] = value
            elif name in (*self.outer, *OUTER):
                result[name] = value
            else:
                result[text][name] = value
        return result

    @property
    def passive(self) -> set[str]:
        """Return the keys of config.json that are copied unchanged."""
        return PASSIVE.union(*(rule.hf_keys for rule in self.config if isinstance(rule, Ignored)))

    def unknown_keys(self, config: Table) -> list[str]:
        """Return the keys of ``config`` that no rule reads, except null, false and empty ones."""
        read_keys = set().union(*(rule.hf_keys for rule in self.config))
        unread = (
            name for name, value in config.items() if value not in (None, False, [], {}) and name not in read_keys
        )
        return [name for name in unread if name.rpartition(".")[2] not in PASSIVE]

    def load_settings(self, config: Mapping[str, object]) -> dict[str, object]:
        """Convert a ``config.json`` to command-line settings and ``model_family``, without defaults (:func:`complete`
        adds them).

        Raises:
            UserError: the first problem: a value that cannot be represented or is out of range, contradicting keys, or
                all unknown keys.
            TypeError, LookupError, ArithmeticError: a value of a type that a rule cannot compute with."""
        settings: dict[str, object] = {}
        sizes = [rule for rule in self.config if isinstance(rule, Same)]
        for rules in (sizes, [rule for rule in self.config if rule not in sizes]):
            for rule in rules:
                for name, value in rule.load(config).items():
                    if settings.setdefault(name, value) != value:
                        raise refuse(rule.hf_keys[0], value, f"but another key makes {name} {settings[name]!r:.200}")
            _check_kinds(settings)  # before other rules compute with them
        if unknown := self.unknown_keys(config):
            values = ", ".join(f"{name} is {config[name]!r:.200}" for name in unknown)
            raise UserError(
                f"{values}, which no setting of {self.model_type} represents; remove keys without effect on the model"
            )
        return {**settings, "model_family": self.model_family}

    def save_settings(self, settings: Mapping[str, object]) -> dict[str, object]:
        """Convert completed settings to a ``config.json``. Raises UserError with all unsupported ones."""
        if settings["model_family"] != self.model_family:
            raise refuse("model_family", settings["model_family"], f"the family has {self.model_family!r} alone")
        settings = with_exported_length(settings)
        config: dict[str, object] = {"model_type": self.model_type}
        problems = list(self._save_rules(settings, config)) + list(self._without_rule(settings))
        if problems:
            raise UserError("; ".join(dict.fromkeys(problems)))
        return {"architectures": [self.architecture], **config}

    def _save_rules(self, settings: Mapping[str, object], config: dict[str, object]) -> Iterator[str]:
        """Fill ``config`` in place; yield every problem as text instead of raising, so that all are reported."""
        for rule in self.config:
            try:
                for name, value in rule.save(settings).items():
                    if config.setdefault(name, value) != value:
                        raise refuse(rule.settings[0], value, f"but another setting makes {name} {config[name]!r}")
            except UserError as error:
                yield str(error)
            except (TypeError, ArithmeticError):  # a rule computes with a setting that is None for this model
                yield str(refuse(rule.settings[0], settings[rule.settings[0]], "which the family does not support"))

    def _without_rule(self, settings: Table) -> Iterator[str]:
        """Yield as text every setting that no rule of the family reads and that differs from its default."""
        if "quantile_balancing" in settings["moe_router_load_balancing_type"]:
            yield "moe_router_load_balancing_type is 'quantile_balancing', whose bias no family supports"
        covered = WITHOUT_MEANING.union(*(rule.settings for rule in self.config))
        dense = settings["num_moe_experts"] is None and not settings["hybrid_layer_pattern"]
        if "num_moe_experts" in covered and dense:
            yield "num_moe_experts is None, the family has experts"
        defaults = {**_defaults(), **ELSEWHERE}
        for name in dict.fromkeys((*described(settings)[1], "hybrid_layer_pattern")):
            if name not in covered and settings[name] != defaults[name]:
                yield str(refuse(name, settings[name], f"the family has {defaults[name]!r} alone"))

    def stored_as(self, names: Iterable[str]) -> Family:
        """Return the family with the layouts of files with the tensors ``names``."""
        for layout in self.alternatives.values():
            pattern = re.escape(layout.names[0]).replace(r"\*", r"\d+")
            if any(re.fullmatch(pattern, name) for name in names):
                return replace(self, weights={**self.weights, **self.alternatives})
        return self

    def family_names(self, names: Iterable[str]) -> dict[str, str]:
        """Return the tensors ``names`` of a file -> their names in the family's files, without a tower's tensors."""
        box = self.container
        if box is None:
            return {name: self._with_prefix(name) for name in names}
        inside = (name for name in names if not name.startswith(box.tower))
        return {name: re.sub(f"^{re.escape(box.base)}", self.base, name) for name in inside}

    def _with_prefix(self, name: str) -> str:
        old = next((old for old in self.prefixes if name.startswith(old)), "")
        return self.prefixes.get(old, "") + name.removeprefix(old)

    def module_names(self, names: Iterable[str]) -> list[str]:
        """Return ``names`` of modules in the files, then names in transformers that differ."""
        files = dict.fromkeys(names)
        for part, other in self.modules.items():
            files |= dict.fromkeys(name.replace(part, other, 1) for name in list(files) if part in name)
        return list(files)

    def tied(self, settings: Mapping[str, object]) -> dict[str, str]:
        """Return {output layer name: embedding name} if they are tied, else an empty dict."""
        head, words = (f"{self.weights[name]}.weight" for name in ("output_layer", "embedding.word_embeddings"))
        return {} if settings["untie_embeddings_and_output_weights"] else {head: words}

    def copies(self, settings: Table) -> dict[str, str]:
        """Return duplicate HF tensors of multi-token prediction layers -> the tensor that each equals."""
        first, tied = settings["num_layers"], self.tied(settings)
        layers = map(str, range(first, first + (settings.get("mtp_num_layers") or 0)))
        return {name.replace("*", n): tied.get(same, same) for n in layers for name, same in self.repeated.items()}

    def layouts(self, settings: Table) -> Iterator[tuple[str, tuple[int, ...], TensorLayout]]:
        """Yield (local name, unpadded global shape, HF layout with layer numbers inserted) for every tensor;
        multi-token prediction layers are numbered after the decoder's. UserError for a tensor that the family lacks."""
        weights = {**self.weights, **self.names(settings)}
        for name, shape in described(settings)[0].items():
            match = re.fullmatch(r"(encoder|decoder|mtp|vision\.blocks)\.layers\.(\d+)\.(.*)", name)
            layer, patterns = "", [name]
            if match:
                number = int(match[2]) // self.layers_per_block
                layer = str(number + (settings["num_layers"] if match[1] == "mtp" else 0))
                rest = match[3].removeprefix("mtp_model_layer.")
                patterns.append(f"{match[1] if rest == match[3] else 'decoder'}.layers.*.{rest}")
            keys = [(key, end) for pattern in patterns for key, end in ((pattern, ""), _stem(pattern))]
            key, end = next(((key, end) for key, end in keys if key in weights), ("", ""))
            if not key:
                raise UserError(f"{self.model_type} has no tensor for {name}")
            layout = weights[key]
            layout = TensorLayout(layout) if isinstance(layout, str) else layout.of(shape)
            before = str(int(layer or settings["num_layers"]) - 1)
            names = [pattern.replace("{before}", before).replace("*", layer, 1) for pattern in layout.names]
            yield name, shape, layout.renamed([f"{pattern}{end}" for pattern in names])


def _stem(name: str) -> tuple[str, str]:
    stem, dot, suffix = name.rpartition(".")
    return stem, dot + suffix


@cache
def _defaults() -> dict[str, object]:
    return {spec.field: spec.default for spec in group_flags(*GROUPS) if not spec.field.endswith("parallel_size")}


def _check_kinds(settings: Mapping[str, object]) -> None:
    """Raise UserError for a setting of the wrong type or range: config.json may contain any value."""
    for spec in group_flags(*GROUPS):
        value = settings.get(spec.field)
        if value is None or spec.nargs is not None or spec.type_name == "custom":
            continue
        kinds = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}.get(spec.type_name, (object,))
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if reason := spec.refusal(value) if fits else f"is no {spec.type_name}":
            raise refuse(spec.field, value, f"as config.json has it: {reason}")
    for name, limit in _SIZES.items():
        value = settings.get(name, 1)
        if value is None and name in _OPTIONAL_SIZES:
            continue
        if type(value) is not int or not 1 <= value <= limit:
            raise refuse(name, value, f"as config.json has it: must be a positive integer, at most {limit}")


def complete(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return ``settings`` with defaults and derived values; raise ConfigError for impossible sizes."""
    values = {**_defaults(), **ELSEWHERE, **settings}
    if values["num_query_groups"] is None and values["group_query_attention"]:
        values["num_query_groups"] = 1
    config = transformer_config(values)
    return {**values, **{name: getattr(config, name) for name in _defaults().keys() & _config_fields()}}


def transformer_config(settings: Table) -> TransformerConfig:
    """Build the library's TransformerConfig from completed ``settings``."""
    return TransformerConfig(**{name: settings[name] for name in _defaults().keys() & _config_fields()})


def _config_fields() -> set[str]:
    return {field.name for field in fields(TransformerConfig)}


def described(settings: Table) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Return (unpadded global tensor shapes by name, names of the settings that define the model)."""
    config = transformer_config(settings)
    run = {name: value for name, value in settings.items() if not hasattr(config, name)}
    run |= {"seq_length": 1, "decoder_seq_length": 1, "make_vocab_size_divisible_by": 1, "spec": None, "mask_prob": 0.1}
    rest = SimpleNamespace(**run)  # stands in for all groups of a run's configuration but the model's
    names = ("embeddings", "data", "custom_layers", "masked_data")
    cfg = SimpleNamespace(model=config, **dict.fromkeys(names, rest), group=lambda kind: rest)
    model = get_family(settings["model_family"]).describe(cfg, settings["vocab_size"])
    return weight_shapes(model, expert_bias=settings["moe_router_enable_expert_bias"]), model.settings
