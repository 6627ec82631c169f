"""Adapters of a LoRA run: write PEFT's files, read them, or merge them into the weights.

    megatron lora export --load RUN --save PEFT_FOLDER        PeftModel.from_pretrained(base, PEFT_FOLDER)
    megatron lora import --load PEFT_FOLDER --base MODEL --save CHECKPOINT
    megatron lora merge --load RUN --save HF_FOLDER           a full model, for any program

RUN is the --save folder of a run with --lora-rank, or the result of an import. Its checkpoint names the base model,
which --base replaces if it was moved. Merged weights are W + B A alpha / r, computed in fp32 and rounded once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import one_hot

from megatron.core.config.commands import tool_parser
from megatron.core.config.errors import UserError
from megatron.core.config.lora import SETTINGS
from megatron.core.description.model import Param
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.adapters.experts import merged_experts
from megatron.core.models.adapters.lora import Factors, matrix_numbers, merged_weight
from megatron.core.models.adapters.transform import linear_weights
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import Target
from megatron.export.hf.conversion import Placement, placements
from megatron.export.hf.family import complete
from megatron.export.hf.peft import CONFIG, WEIGHTS, Adapter, LoraSettings, load_peft, short_names, to_peft
from megatron.export.hf.registry import family_for, read_config
from megatron.export.interchange import Interchange
from megatron.export.native import InterchangeReader
from megatron.tools.checkpoint import formats
from megatron.tools.checkpoint.convert import completed, write, write_native
from megatron.tools.checkpoint.formats import say
from megatron.training.checkpoint.base_weights import base_identity
from megatron.training.config.pretrain_config import PretrainConfig

MODULE = ".adapter."
MAX_BYTES = 4 * 10**9


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of this tool."""
    arguments = tool_parser(__doc__)
    arguments.add_argument("action", choices=("export", "import", "merge"), help="what to write")
    arguments.add_argument("--load", required=True, metavar="DIR", help="--save folder of a run, or PEFT folder")
    arguments.add_argument("--save", required=True, metavar="DIR", help="the folder to create")
    arguments.add_argument("--base", metavar="DIR", help="base model; default: the one that the checkpoint names")
    arguments.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to read; default: the latest")
    arguments.add_argument("--saver", default="hf", choices=("hf", "native"), help="format of a merged model")
    return arguments


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Put ``flag`` in front of the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{flag} {error}") from None


class Base(NamedTuple):
    """Base model of adapters."""

    folder: str
    model: Interchange
    cfg: PretrainConfig
    identity: str

    @property
    def plan(self) -> list[Placement]:
        """Hugging Face tensors of every weight."""
        settings = complete(self.model.settings)
        config = self.model.assets.get("hf/config.json")
        kind = None if config is None else read_config(config).get("model_type")
        return placements(family_for(settings, kind), settings)

    @property
    def weights(self) -> dict[str, Param]:
        """Weights that support adapters, by name."""
        return {param.name: param for param in linear_weights(self.cfg.describe(self.model.settings["vocab_size"]))}

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """``Param.matrices`` by name."""
        return {name: param.matrices for name, param in self.weights.items()}


def open_base(folder: str, model_family: str | None = None) -> Base:
    """Open a base model of any format. UserError if it does not exist or does not fit its settings."""
    loader, model = formats.open_checkpoint(folder, "auto", model_family=model_family)
    model.tensors = {name: tensor for name, tensor in model.tensors.items() if name.startswith("model.")}
    model.objects = {}
    cfg = completed(model, [], loader, folder)
    return Base(folder, model, cfg, base_identity(InterchangeReader(model, folder), cfg.model.hidden_size))


def load_adapters(folder: str, step: int | None, base: str | None) -> tuple[dict[str, Adapter], LoraSettings, Base]:
    """Read the adapters of a checkpoint by weight name, their settings, and their base. CheckpointError if it has none,
    or if ``base`` (None: the folder that the checkpoint names) is another model."""
    with naming("--load"):
        _, source = formats.open_checkpoint(folder, "native", step)
    stored, args = source.objects.get("base"), source.settings
    if not isinstance(stored, dict) or not isinstance(args.get("lora_rank"), int):
        raise CheckpointError(f"--load {folder}: contains no adapters; give the folder of a run with --lora-rank")
    with naming("--base" if base else f"--load {folder}: its base, which --base replaces,"):
        opened = open_base(base or str(stored.get("folder")), args.get("model_family"))
        if opened.identity != stored.get("identity"):
            raise CheckpointError(f"{opened.folder}: is not the base that the adapters of {folder} were trained on")
    rank, variants = args["lora_rank"], (bool(args["lora_use_rslora"]), bool(args["lora_use_dora"]))
    adapters = {}
    for name in source.tensors:
        module, _, leaf = name.removeprefix("model.").rpartition(MODULE)
        if name.startswith("model.") and leaf == "lora_a":
            parts = (source.tensors.get(f"model.{module}{MODULE}lora_{part}") for part in ("a", "b", "magnitude"))
            a, b, magnitude = (None if part is None else part.read() for part in parts)
            assert a is not None and b is not None
            adapters[f"{module}.weight"] = Adapter(a, b, magnitude)
    lora = LoraSettings(rank, float(args.get("lora_alpha") or rank), *variants)
    return adapters, lora, opened


def export_adapters(args: argparse.Namespace) -> None:
    """Write the adapters of a checkpoint as a PEFT folder."""
    adapters, lora, base = load_adapters(args.load, args.ckpt_step, args.base)
    tensors, config = to_peft(base.plan, adapters, lora, base.folder, base.matrices)
    with Target(args.save) as target:
        target.write(WEIGHTS, {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}, {"format": "pt"})
        target.write_json(CONFIG, config)
        target.publish()
    modules = sum("lora_A" in name for name in tensors)
    say(f"{args.save}: complete, adapters of {modules} modules, for PeftModel.from_pretrained(base, {args.save!r})")


def import_adapters(args: argparse.Namespace) -> None:
    """Write the adapters of a PEFT folder as a checkpoint of weights."""
    if args.base is None:
        raise UserError("--base: is required to import adapters; give the folder of the base model")
    with naming("--base"):
        base = open_base(args.base)
    with naming("--load"):
        adapters, lora = load_peft(Path(args.load), base.plan, base.matrices)
    tensors: dict[str, LazyTensor] = {}
    for name, adapter in adapters.items():
        for leaf, value in zip(adapter._fields, adapter):
            if value is not None:
                tensors[f"model.{name.removesuffix('.weight')}{MODULE}lora_{leaf}"] = LazyTensor.of(value)
    layers, every_layer = ([name.removesuffix(".weight") for name in names] for names in (adapters, base.weights))
    settings = (lora.rank, lora.alpha, short_names(layers, every_layer), lora.use_rslora, lora.use_dora)
    model = Interchange(
        {**base.model.settings, **dict(zip(SETTINGS, settings))},
        tensors,
        {"base": {"folder": str(Path(base.folder).absolute()), "identity": base.identity}},
        base.model.assets,
    )
    with Target(args.save) as target:
        write_native(model, target, MAX_BYTES)
        target.publish()
    say(f"{args.save}: complete, {len(adapters)} adapted layers; train with --load {args.save} and the base's flag")


def merge(args: argparse.Namespace) -> None:
    """Write the base with merged adapters, one tensor in memory at a time."""
    adapters, lora, base = load_adapters(args.load, args.ckpt_step, args.base)
    tensors = dict(base.model.tensors)
    for name, adapter in adapters.items():
        weight, param = tensors[f"model.{name}"], base.weights[name]
        values: Callable[..., Tensor] = partial(merged_rows, weight, adapter, lora.scale)
        if not param.is_expert:
            values = partial(merged, weight, adapter, lora.scale, param.matrices)
        rows = values if param.is_expert else None
        tensors[f"model.{name}"] = replace(weight, read=values, read_rows=rows)
    model = replace(base.model, tensors=tensors)
    with Target(args.save) as target:
        write(model, args.saver, target, formats.total_bytes(tensors), MAX_BYTES, allow_non_finite=False)
    say(f"{args.save}: complete, {base.folder} with {len(adapters)} merged layers, format {args.saver}")


def merged_rows(stored: LazyTensor, adapter: Adapter, scale: float, start: int = 0, stop: int | None = None) -> Tensor:
    """Return the weight of experts ``start`` to ``stop`` with their adapters."""
    experts = slice(start, len(adapter.a) if stop is None else stop)
    weight = stored.rows(experts.start, experts.stop)
    base, a, b = (tensor.flatten(1, -2) for tensor in (weight, adapter.a[experts], adapter.b[experts]))
    return merged_experts(base, a, b, scale).view(weight.shape)


def merged(stored: LazyTensor, adapter: Adapter, scale: float, matrices: Sequence[int]) -> Tensor:
    """Return a weight [*lead, in] with its adapters; ``matrices``: ``Param.matrices``."""
    weight = stored.read()
    a, b = (tensor.flatten(0, -2) for tensor in (adapter.a, adapter.b))
    factors = Factors(a, b, one_hot(matrix_numbers(matrices, len(b)), len(matrices)), scale)
    magnitude = None if adapter.magnitude is None else adapter.magnitude.flatten()
    return merged_weight(weight.flatten(0, -2), factors, magnitude, SINGLE_PROCESS.tp).view(weight.shape)


ACTIONS = {"export": export_adapters, "import": import_adapters, "merge": merge}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one action; return 0. Raises UserError if the input cannot be used."""
    args = parser().parse_args(argv)
    ACTIONS[args.action](args)
    return 0
