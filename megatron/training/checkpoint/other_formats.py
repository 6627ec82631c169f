"""Weights in other formats (Hugging Face): settings become defaults, tensors are checked against the model description.

No model is built here; the description lists the required tensors."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from megatron.core.config import cli
from megatron.core.config.attention import AttentionConfig
from megatron.core.config.errors import UserError, counted, listed
from megatron.core.config.hybrid import HybridConfig
from megatron.core.config.linear_attention import LinearAttentionConfig
from megatron.core.config.mla import LatentAttentionConfig
from megatron.core.config.model_parallel_config import PrecisionConfig
from megatron.core.config.moe import MoEConfig
from megatron.core.config.mtp import MTPConfig
from megatron.core.config.mup import MupConfig
from megatron.core.config.network import NetworkSizeConfig
from megatron.core.config.optional import CustomLayersConfig, MultiplierConfig, RopeScalingConfig
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.config.vision import PIXELS
from megatron.core.description.model import weight_shapes
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.dist_checkpointing.reader import load_from
from megatron.core.distributed import unwrapped
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.registry import families
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.core.sharding.sharded_tensor import ShardedTensor, module_tensors
from megatron.export.hf import load_hf, load_hf_settings
from megatron.export.interchange import COUNTER, Interchange, differences
from megatron.export.native import InterchangeReader
from megatron.training.arguments import flag_specs
from megatron.training.checkpoint.settings import LAYOUT
from megatron.training.config.network import ModelConfig
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.stored_settings import ARCHITECTURE, SIZES, refuse_other_family

logger = logging.getLogger(__name__)

GROUPS = (
    NetworkSizeConfig,
    MultiplierConfig,
    MupConfig,
    AttentionConfig,
    LatentAttentionConfig,
    LinearAttentionConfig,
    HybridConfig,
    MoEConfig,
    MTPConfig,
    PrecisionConfig,
    ModelConfig,
    RopeScalingConfig,
    CustomLayersConfig,
    TokenizerConfig,
)
COMPUTATION = {
    "transformer_impl",
    "attention_backend",
    "flash_attention_version",
    "moe_token_dispatcher_type",
    "moe_fusion",
    "moe_static_rows",
    "overlap_moe_expert_parallel_comm",
    "moe_shared_expert_overlap",
    "deterministic_mode",
    "encoder_num_layers",
}
OF_FAMILIES = {name for family in families().values() for name in family.weight_settings}
OF_GROUPS = {field.name for group in GROUPS for field in dataclasses.fields(group)}
MODEL = {"seq_length", *PIXELS, *OF_FAMILIES, *OF_GROUPS} - {*LAYOUT, *COMPUTATION}
"""Settings of a model, excluding its parallel layout and kernels."""
FIXED = {*ARCHITECTURE, *SIZES, "vocab_size"} - {"seq_length", "decoder_seq_length", "max_position_embeddings"}
"""Settings in which the command line must not contradict the weights."""
WORDS = "model.embedding.word_embeddings.weight"
OUTPUT = "model.output_layer.weight"


def with_settings(cfg: PretrainConfig, settings: Mapping[str, object], where: str | os.PathLike) -> PretrainConfig:
    """Return ``cfg`` (parsed, not yet resolved) with the ``settings`` in `MODEL` that the command line does not set.
    CheckpointError if explicit flags contradict settings in `FIXED`, or for another family."""
    refuse_other_family(settings, cfg.model_family, where)
    specs = flag_specs(cfg.model_family)
    flags = {spec.field: spec.names[0] for spec in specs}
    plain = json.loads(json.dumps({name: settings[name] for name in MODEL & flags.keys() & settings.keys()}))
    values, problems = cli.read_mapping(specs, plain)
    if problems:
        raise CheckpointDamagedError(f"{where}: settings that cannot be read: {'; '.join(map(str, problems))}")
    contradicted = [name for name in sorted(values.keys() & cfg.explicit) if getattr(cfg.flat, name) != values[name]]
    if wrong := [name for name in contradicted if name in FIXED]:
        current = cfg.flat.values()
        both = "; ".join(f"{flags[name]} is {current[name]!r}, there it is {values[name]!r}" for name in wrong)
        raise CheckpointError(f"{where} is another model than these flags describe: {both}; remove these flags")
    cfg = cfg.with_settings(**{name: value for name, value in values.items() if name not in cfg.explicit})
    # a rule requires kv_lora_rank to be explicit, because its default fits no published model
    size = values.keys() & {"kv_lora_rank"} if cfg.model.multi_latent_attention else set()
    return cfg.with_settings(explicit=cfg.explicit | size)


def expected_tensors(cfg: PretrainConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of the model in ``cfg``. Raises CheckpointError for undescribed layers."""
    model = cfg.describe(vocab_size)
    if model.unknown:
        raise CheckpointError(f"--spec: {', '.join(model.unknown)} has no describe(config, place) to check weights by")
    biased = cfg.model.moe_router_enable_expert_bias or "quantile_balancing" in cfg.model.moe_router_load_balancing_type
    return {f"model.{name}": shape for name, shape in weight_shapes(model, expert_bias=biased).items()}


def check_tensors(
    tensors: Mapping[str, LazyTensor], expected: Mapping[str, tuple[int, ...]], where: str | os.PathLike
) -> None:
    """Check that names and shapes are as expected and, except counters, dtypes floating point. Every parameter except
    ``expert_bias`` must have all kinds of state of an optimizer. Reads no data. CheckpointError lists differences."""
    kinds: dict[str, set[str]] = {}  # by parameter: Muon trains some of them, Adam the others
    for _, kind, name in (name.split(".", 2) for name in tensors if name.startswith("optimizer.")):
        kinds.setdefault(name, set()).add(kind)
    optimizers = set(map(frozenset, kinds.values()))
    trained = {name[len("model.") :]: shape for name, shape in expected.items() if not name.endswith(".expert_bias")}
    state = {
        f"optimizer.{kind}.{name}": shape
        for name, shape in trained.items()
        for optimizer in optimizers
        if not (own := kinds.get(name, set()) - {"main_param"}) or own & optimizer  # every optimizer has main weights
        for kind in sorted(optimizer)
    }
    problems = differences(tensors, {**expected, **state})
    problems += [
        f"{name} holds {tensor.dtype}, expected floating point"
        for name, tensor in tensors.items()
        if not tensor.dtype.is_floating_point and not name.endswith(COUNTER)
    ]
    if problems:
        first = listed(problems, "; ")
        raise CheckpointError(
            f"{where} does not fit the model that its settings and the flags describe"
            f" ({counted(len(problems), 'problem')}): {first}{_hint(tensors, expected)}"
        )


def _hint(tensors: Mapping[str, LazyTensor], expected: Mapping[str, tuple[int, ...]]) -> str:
    if OUTPUT in expected and OUTPUT not in tensors and WORDS in tensors:
        return ". Its output layer is tied to the embedding: leave out --untie-embeddings-and-output-weights"
    if OUTPUT in tensors and OUTPUT not in expected:
        return ". It has an output layer of its own: add --untie-embeddings-and-output-weights"
    if WORDS in tensors and WORDS in expected and tensors[WORDS].shape[0] != expected[WORDS][0]:
        return f". Its vocabulary has {tensors[WORDS].shape[0]} entries: --vocab-size, or another tokenizer"
    return ""


def embedding_rows(tensors: Mapping[str, LazyTensor], where: str | os.PathLike) -> int:
    """Return the number of rows of the word embedding. Raises CheckpointError if it is missing or not 2-d."""
    if WORDS not in tensors or len(tensors[WORDS].shape) != 2:
        shape = list(tensors[WORDS].shape) if WORDS in tensors else "missing"
        raise CheckpointError(f"{where}: {WORDS} is {shape}, expected [vocabulary, hidden size]")
    return tensors[WORDS].shape[0]


def apply_hf_settings(cfg: PretrainConfig) -> PretrainConfig:
    """Return ``cfg`` (not yet resolved) with --load-hf's settings where no flag is explicit, and, without tokenizer
    flags, its tokenizer (tokenizer.json, else BERT's vocab.txt); unchanged without --load-hf. Raises UserError for an
    unreadable folder, another family, and flags that contradict the weights (``FIXED``); other explicit flags win."""
    folder = cfg.checkpoint.load_hf
    if folder is None:
        return cfg
    if not {"tokenizer_type", "tokenizer_model", "vocab_file"} & cfg.explicit:
        cfg = cfg.with_settings(**_tokenizer_settings(Path(folder)))
    try:
        settings = load_hf_settings(folder, cfg.model_family)
    except UserError as error:
        raise UserError(f"--load-hf {error}") from None
    return with_settings(cfg, settings, f"--load-hf {folder}")


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return settings for tokenizer.json, else for the vocab.txt of older BERT folders (default: lower-case)."""
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    vocabulary, config = folder / "vocab.txt", folder / "tokenizer_config.json"
    if not vocabulary.is_file():
        return {}
    kind = "LowerCase" if not config.is_file() or read_json(config).get("do_lower_case", True) else "Case"
    return {"tokenizer_type": f"BertWordPiece{kind}", "vocab_file": str(vocabulary), "vocab_extra_ids": 0}


def load_hf_weights(
    folder: str,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    groups: ProcessGroups,
    includes: Callable[[str], bool] = bool,
    *,
    model_family: str | None = None,
) -> InterchangeReader:
    """Fill this rank's shards of the tensors that ``includes`` selects by global name from a Hugging Face folder, one
    tensor at a time, and return the folder's reader; reset the optimizer's main parameters. Collective: CheckpointError
    on all ranks if names or shapes differ from the model; before that UserError on each rank that cannot read the
    folder, read as ``model_family``. Warns of tensors left out and of optional modules that begin random."""
    interchange: Interchange = load_hf(folder, model_family)
    logger.info(" loading weights from the Hugging Face folder %s", folder)
    tensors: dict[str, ShardedTensor] = {}
    for chunk in chunks:
        tensors |= module_tensors(unwrapped(chunk), prefix="model.", groups=groups, includes=includes)
    reader = InterchangeReader(interchange, folder)
    load_from(reader, tensors, group=groups.world)
    if optimizer is not None:
        optimizer.reload_model_params()
    for note in interchange.notes if groups.world.is_first else ():
        logger.warning("--load-hf: %s", note)
    elements = sum(math.prod(tensor.shape) for tensor in interchange.tensors.values())
    logger.info("  successfully loaded %d parameters from %s", elements, folder)
    return reader
