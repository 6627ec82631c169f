"""Comparison of the logits of ``transformers`` and this project for the weights of a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.files import read_json
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.sharding.sharded_tensor import module_tensors
from megatron.core.tokenizers.simple import NullTokenizer
from megatron.export.files import Target
from megatron.export.hf import save_hf
from megatron.export.hf.conversion import placements, to_hf
from megatron.export.hf.family import complete
from megatron.export.hf.quantization import weight_format, without_quantization
from megatron.export.hf.reader import read_weights
from megatron.export.hf.registry import find_family, read_config
from megatron.export.hf.settings import Table
from megatron.export.hf.side_files import CONFIG
from megatron.export.interchange import Interchange
from megatron.export.native import InterchangeReader
from megatron.tools.checkpoint.compare_ids import compare_ids
from megatron.tools.checkpoint.formats import say
from megatron.tools.checkpoint.small_model import random_weights, shrink, small_config, tokens_needed
from megatron.training.checkpoint.other_formats import WORDS
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.stored_settings import config_to_dict
from megatron.training.tasks.language_model import task_class

LARGEST = 1_000_000_000
"""Maximum number of parameters of a model that is compared without --check-logits: 8 GB in fp32 for both models."""
TOLERANCE = 1e-4
"""Permitted error relative to the largest logit, up to position 256; it grows linearly with later positions."""
LENGTH = 32
AFFORDABLE = 2e12
"""Maximum of parameters times tokens for sequences longer than ``LENGTH``: about a minute on a CPU."""


def compare_with_transformers(folder: str, local: Interchange, cfg: PretrainConfig, *, always: bool = False) -> int:
    """Compare the logits of both implementations and print the differences; return 1 if they exceed ``TOLERANCE``.
    Differences of token ids are only printed.

    First compares a small random model with the same settings, on a sequence longer than its windows; then, if that is
    equal, the model itself if it has at most ``LARGEST`` parameters or ``always`` is set. ``folder`` is the HF model,
    ``local`` the local one. Returns 0 with a message if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        say("logits not compared: transformers is not installed; pip install transformers, then convert again to check")
        return 0
    if ids := compare_ids(folder):
        say(ids)
    if compare_settings(folder, local, cfg):
        return 1
    count = sum(math.prod(tensor.shape) for tensor in local.tensors.values())
    if count > LARGEST and not always:
        say(f"logits not compared: {count:,} parameters; --check-logits does it, in {8 * count / 1e9:.0f} GB of memory")
        return 0
    settings = _model_settings(local, cfg)
    length = min(tokens_needed(settings, read_config(Path(folder) / CONFIG)), max(LENGTH, int(AFFORDABLE / count)))
    with _without_quantization(folder) as place:
        return _compare("logits against transformers", place, local, cfg, length)


@contextmanager
def _without_quantization(folder: str) -> Iterator[str]:
    """Yield ``folder``; of quantized weights a temporary copy in bf16, because transformers would also quantize
    activations (on GPUs), and rejects incomplete blocks."""
    config = read_json(Path(folder) / CONFIG)
    if weight_format(config) is None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as parent, Target(Path(parent) / "bf16") as target:
        target.write_shards(read_weights(Path(folder))[0])
        target.write_json(CONFIG, without_quantization(config))
        target.publish()
        yield str(target.final)


def compare_settings(folder: str, local: Interchange, cfg: PretrainConfig) -> int:
    """Compare a small random model in a temporary folder; return 1 if the logits differ, else 0."""
    settings, config = _model_settings(local, cfg), without_quantization(read_config(Path(folder) / CONFIG))
    family = find_family(config)
    small = shrink(settings)
    with tempfile.TemporaryDirectory() as parent:
        model, place = random_weights(family, small), Path(parent) / "small"
        model.assets[f"hf/{CONFIG}"] = Path(folder) / CONFIG
        save_hf(model, place, family=family.model_type)
        (place / CONFIG).write_text(json.dumps(small_config(family, config, settings, small)), encoding="utf-8")
        changed = {name: value for name, value in small.items() if value != settings[name]}
        few = cfg.with_settings(**changed)
        what = "settings against transformers (small random model)"
        return _compare(what, str(place), model, few, tokens_needed(small, config))


def _model_settings(local: Interchange, cfg: PretrainConfig) -> dict[str, object]:
    return complete({**config_to_dict(cfg.flat), "vocab_size": local.tensors[WORDS].shape[0]})


def _compare(what: str, folder: str, local: Interchange, cfg: PretrainConfig, length: int) -> int:
    """Return 1 if a difference exceeds the tolerance, which grows with the position. Sets HF_HUB_OFFLINE."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # tables of the heads that a folder lacks
    rows, shape = local.tensors[WORDS].shape[0], (1 if length > 512 else 2, length)
    tokens = torch.randint(rows, shape, generator=torch.Generator().manual_seed(1))
    decoded = cfg.family.peer_inputs(tokens)
    with torch.no_grad():
        kind, more = getattr(transformers, cfg.family.auto_model), {}
        config = read_config(Path(folder) / CONFIG)
        if config["model_type"] not in transformers.CONFIG_MAPPING:  # model types defined by the folder's remote code
            kind = getattr(transformers, find_family(config).architecture)
            more["config"] = kind.config_class.from_dict({**config, "model_type": kind.config_class.model_type})
        reference, report = kind.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, **more
        )
        _fill_missing(reference, report["missing_keys"], config, local)
        expected = reference.eval()(tokens, **decoded).logits.float()
        del reference
        logits = our_logits(local, cfg, tokens)
    error_bs, scale = (logits - expected).abs().amax(-1), expected.abs().max().item()
    agree = ((logits.argmax(-1) == expected.argmax(-1)) & error_bs.isfinite()).float().mean().item()
    # rotary angles are rounded in fp32: the error grows with the position. Encoders attend to later positions too, so
    # that all of their logits get the limit of the last position
    last_s = torch.arange(length) if cfg.family.is_causal else torch.full((length,), length)
    limit_s = TOLERANCE * max(scale, 1) * (last_s / 256).clamp_min(1)
    error, verdict = error_bs.max().item(), "equal" if bool((error_bs <= limit_s).all()) else "DIFFERENT"
    say(
        f"{what}, {tokens.numel()} tokens in fp32: {verdict}; largest difference {error:.2e} of {scale:.2f}, same next"
        f" token {agree:.1%}"
    )
    return int(verdict == "DIFFERENT")


def _fill_missing(reference: torch.nn.Module, names: Collection[str], config: Table, local: Interchange) -> None:
    """Both models begin weights that the HF folder lacks at random."""
    if names:
        settings = complete({**local.settings, "vocab_size": local.tensors[WORDS].shape[0]})
        weights = to_hf(placements(find_family(config), settings), local.tensors)
        state = reference.state_dict()
        for name in weights.keys() & set(names):
            state[name].copy_(weights[name].read())


def our_logits(weights: Interchange, cfg: PretrainConfig, tokens: torch.Tensor) -> torch.Tensor:
    """Build this project's model in fp32 without dropout, load ``weights`` and return fp32 logits [b, s, vocabulary].
    T5's encoder receives ``tokens`` [b, s], its decoder the tokens of ``peer_inputs``."""
    rows = weights.tensors[WORDS].shape[0]
    plain = cfg.with_settings(bf16=False, fp16=False, attention_dropout=0.0, hidden_dropout=0.0)
    model = task_class(cfg.model_family)(plain, NullTokenizer(rows)).model_provider().eval()
    model.float()
    reader = InterchangeReader(weights, "")
    for tensor in module_tensors(model, prefix="model.", groups=SINGLE_PROCESS).values():
        reader.read_into(tensor)
    assert cfg.family.logits is not None
    return cfg.family.logits(model, cfg, tokens).float()[..., :rows]
