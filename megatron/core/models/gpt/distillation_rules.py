"""Settings in the YAML file of --export-kd-cfg, and rules of knowledge distillation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec

from megatron.core.config.distillation import DistillationConfig, LayerPair, layer_pair
from megatron.core.config.optional import used_fields
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.problems import Problems, Settings, flag_names, problem
from megatron.core.safe_files import read_text

OUTPUTS = ["output_layer", "output_layer"]
"""The only logit_layers: outputs of both models."""


_LAYER = re.compile(r"decoder\.(?:layers\.(\d+)|final_layernorm)")


class _BadFile(ValueError):
    """File that cannot be read as settings of ModelOpt."""


def derived(flat: Settings) -> dict[str, object]:
    """Return the values of the file of --export-kd-cfg for flags that the command line does not set."""
    try:
        values = {} if flat.export_kd_cfg is None else read_file(flat.export_kd_cfg)
    except _BadFile:  # a rule reports it
        return {}
    return {name: value for name, value in values.items() if name not in flat.explicit}


def read_file(path: str) -> dict[str, object]:
    """Return field -> value of ModelOpt's distillation settings in ``path``. Without skip_lm_loss the weight of the
    language-model loss is 1, and the weight of the divergence is kd_loss_scale. Raises _BadFile."""
    if find_spec("yaml") is None:
        raise _BadFile("needs the package PyYAML")
    import yaml

    try:
        content = yaml.safe_load(read_text(path)) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _BadFile(f"cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise _BadFile("must hold names and values")
    defaults = {
        "logit_layers": OUTPUTS, "intermediate_layer_pairs": [], "skip_lm_loss": True, "kd_loss_scale": 1.0,
        "logit_kl_temperature": 1.0, "logit_kl_topk": None, "kd_loss_alpha": 1.0,
    }  # fmt: skip
    if unknown := [str(name) for name in content if name not in defaults]:
        raise _BadFile(f"{unknown[0]} is not one of {', '.join(defaults)}")
    for name in ("logit_layers", "logit_kl_topk"):
        if name in content and content[name] != defaults[name]:
            raise _BadFile(f"{name} {content[name]}: only {defaults[name]} is available")
    values = {**defaults, **content}
    for name in ("kd_loss_scale", "logit_kl_temperature", "kd_loss_alpha"):
        if isinstance(values[name], bool) or not isinstance(values[name], int | float) or not values[name] > 0:
            raise _BadFile(f"{name} {values[name]}: must be a number above 0")
    if not isinstance(values["skip_lm_loss"], bool):
        raise _BadFile(f"skip_lm_loss {values['skip_lm_loss']}: must be true or false")
    scale, weight = (1.0, 0.0) if values["skip_lm_loss"] else (float(values["kd_loss_scale"]), 1.0)
    if "kd_loss_alpha" in content:  # in place of skip_lm_loss and kd_loss_scale since ModelOpt 0.48
        if values["kd_loss_alpha"] > 1 or {"skip_lm_loss", "kd_loss_scale"} & {*content}:
            raise _BadFile(
                f"kd_loss_alpha {values['kd_loss_alpha']}: must be at most 1, without skip_lm_loss and kd_loss_scale"
            )
        scale, weight = float(values["kd_loss_alpha"]), 1 - float(values["kd_loss_alpha"])
    settings: dict[str, object] = {
        "kd_temperature": float(values["logit_kl_temperature"]), "kd_loss_scale": scale, "kd_lm_loss_weight": weight,
    }  # fmt: skip
    if pairs := _layer_pairs(values["intermediate_layer_pairs"]):
        settings |= {"kd_layer_pairs": pairs, "kd_layer_loss_scale": scale}
    return settings


def _layer_pairs(entries: object) -> list[str]:
    """Return --kd-layer-pairs for ModelOpt's lists [student layer, teacher layer, loss (default cosine)]."""
    pairs = []
    for entry in entries if isinstance(entries, list) else [entries]:
        names, kind = (entry[:2], entry[2:]) if isinstance(entry, list) else ([], [])
        matches = [match for name in names if (match := _LAYER.fullmatch(str(name)))]
        if len(matches) != 2 or kind not in ([], ["cosine"], ["mse"]):
            reason = "only [decoder.layers.N, decoder.layers.M, cosine or mse] and decoder.final_layernorm"
            raise _BadFile(f"intermediate_layer_pairs {entry}: {reason} are available")
        student, teacher = (None if match[1] is None else int(match[1]) + 1 for match in matches)
        pairs.append(str(LayerPair(student, teacher, *kind)))
    return pairs


def distillation_file_is_readable(cfg: Settings) -> Problems:
    """Reject a file of --export-kd-cfg that cannot be read or has settings without an equivalent."""
    path = cfg.group(DistillationConfig).export_kd_cfg
    try:
        if path is not None:
            read_file(path)
    except _BadFile as error:
        yield problem(cfg, "export_kd_cfg", str(error), "correct the file, or use --kd-* flags")


def distillation_requires_a_teacher(cfg: Settings) -> Problems:
    """Reject settings of distillation without a teacher, and settings of stored log-probabilities without a folder."""
    settings = cfg.group(DistillationConfig)
    for field in used_fields(DistillationConfig, settings):
        if field not in cfg.explicit or field.endswith(("_load", "_dir")):  # some follow from the file
            continue
        is_of_storing = field.startswith("logits_save")
        if settings.logits_save_dir is None if is_of_storing else not settings.distills:
            flag = "--logits-save-dir" if is_of_storing else "--export-kd-teacher-load or --logits-load-dir"
            yield problem(cfg, field, f"has no effect without {flag}", "add it, or remove this")


def layer_pairs_are_valid(cfg: Settings) -> Problems:
    """Reject pairs of layers that are not pairs, twice the same, or without a teacher that runs next to the student."""
    settings = cfg.group(DistillationConfig)
    texts = settings.kd_layer_pairs or []
    try:
        if len(set(map(layer_pair, texts))) < len(texts):
            yield problem(cfg, "kd_layer_pairs", "has a pair twice", "remove one")
    except ValueError as error:
        yield problem(cfg, "kd_layer_pairs", str(error), "correct the pair")


def distillation_conflicts(cfg: Settings) -> Problems:
    """Reject distillation with other losses, and several sources of distributions."""
    settings = cfg.group(DistillationConfig)
    folders = ("export_kd_teacher_load", "logits_load_dir", "logits_save_dir")
    sources = [name for name in folders if getattr(settings, name) is not None]
    if not sources:
        return
    flag = flag_names(cfg, sources[0])
    for other in sources[1:]:
        yield problem(cfg, other, f"contradicts {flag}", "remove one of them")
    if cfg.group(PreferenceConfig).dpo:
        yield problem(cfg, "dpo", f"is another kind of training than {flag}", "remove one of them")
    if cfg.model.mtp_num_layers:
        reason = f"is not supported with {flag}: its loss is defined for the next token only"
        yield problem(cfg, "mtp_num_layers", reason, "remove it")
    if "logits" not in sources[0]:
        return
    if settings.kd_loss == "reverse-kl":
        yield problem(cfg, "kd_loss", "requires all entries of the teacher, not stored ones", "use a teacher")
    if cfg.variable_lengths.use_varlen_dataset:
        yield problem(cfg, "use_varlen_dataset", f"is not supported with {flag}", "use rows of one length")
    if cfg.data.dataloader_type == "external":
        yield problem(cfg, "dataloader_type", f"external does not number samples, as {flag} requires", "use single")
