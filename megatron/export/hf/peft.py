"""Low-rank adapters in the files of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

  base_model.model.<module>.lora_A.weight [r, in]    ….lora_B.weight [out, r]    ….lora_magnitude_vector [out]

PEFT has one adapter per Hugging Face module. A local weight that stacks n matrices has n adapters:

  1 matrix per module (q_proj)                    one adapter each
  n matrices per module (c_attn, in_proj_qkv)     block matrix, an adapter of rank n r; import copies an A of rank r
  1 matrix, several modules                       B is cut by rows, every module gets A; cannot be imported

A module without an adapter has A = B = 0, which training keeps.

Routed experts are 3-D parameters in transformers 5, with PEFT's ``target_parameters``: one adapter per expert.

  ….mlp.experts[.base_layer].lora_A.weight [E r, in]    ….lora_B.weight [out, r E]

``base_layer`` is in the keys of the first parameter (``gate_up_proj``) if both have adapters.

PEFT takes target modules that are named as matrices of routed experts (``gate_proj``) for those, and leaves out the
adapters of dense layers and shared experts of that name. Their weights are ``target_parameters``, too."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.config.errors import UserError, listed
from megatron.core.dist_checkpointing.files import read_json
from megatron.core.models.adapters.lora import block_matrix, matrix_numbers
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import read_safetensors
from megatron.export.hf.conversion import HFTensor, Placement

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LEAVES = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
UNSUPPORTED = (
    "modules_to_save", "trainable_token_indices", "lora_bias", "use_qalora", "use_bdlora", "layer_replication",
    "megatron_config", "alora_invocation_tokens",
)  # fmt: skip
"""Keys that change the meaning of the tensors."""
OF_CHANGED_BASES = ("olora", "pissa", "corda", "loftq", "lora_ga")
"""Beginnings of init_lora_weights with which PEFT changes the weights of the base."""


class Adapter(NamedTuple):
    """Adapters of one local weight [*lead, in] that stacks n matrices."""

    a: Tensor
    """[n, r, in]; of experts: n is their number."""
    b: Tensor
    """[*lead, r]."""
    magnitude: Tensor | None = None
    """[*lead]; None: no DoRA."""


class LoraSettings(NamedTuple):
    """Settings that all adapters of a folder share."""

    rank: int
    alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    parameters: tuple[str, ...] = ()
    """Names of experts' parameters with adapters; suffixes select several."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


def _module(part: HFTensor) -> str:
    return part.name.removesuffix(".weight")


def _key(part: HFTensor) -> str:
    """Return the beginning of PEFT's keys. transformers adds ``model.`` to LLaVA's towers in full names only."""
    outer = "model." if part.name.startswith(("vision_tower.", "multi_modal_projector.")) else ""
    return f"{PREFIX}{outer}{_module(part)}"


RENAMED = {
    "model.language_model.": "model.",
    "backbone.": "model.",
    ".block_sparse_moe.": ".mlp.",
    ".forget_gate.": ".",
}
"""Parts of names that differ between Hugging Face files and modules, or between classes of a model."""


def common_name(name: str) -> str:
    """Return a name that is equal for all names of a module."""
    for part, replacement in RENAMED.items():
        name = name.replace(part, replacement)
    return name


def _rows(part: HFTensor, tensor: Tensor, columns: int) -> Tensor:
    """Return the rows of ``tensor`` [*lead, columns] that one HF tensor holds, in its order."""
    return torch.cat([view.reshape(-1, columns) for view in part.views(tensor)])


def _numbers(placement: Placement, matrices: Sequence[int]) -> list[Tensor]:
    """Return the index of the matrix of each row of each HF tensor of a local weight."""
    lead = placement.shape[:-1]
    numbers = matrix_numbers(matrices, math.prod(lead)).view(*lead, 1)
    return [_rows(part, numbers, 1).flatten() for part in placement.parts]


def to_peft(
    plan: Iterable[Placement],
    adapters: Mapping[str, Adapter],
    lora: LoraSettings,
    base: str,
    matrices: Mapping[str, Sequence[int]],
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Convert ``adapters`` by local weight name to (PEFT tensors by key, ``adapter_config.json``). ``base``: the folder
    or name of the base model; ``matrices``: ``Param.matrices`` by weight name. UserError for a weight that the plan
    lacks, such as experts' weights."""
    placements = {placement.name: placement for placement in plan}
    stacked = {name: parameter for name in placements if (parameter := expert_parameter(placements[name]))}
    supported = stacked.keys() | {name for name in placements if ".experts." not in name}
    if missing := sorted(adapters.keys() - supported):
        raise UserError(f"PEFT's files cannot contain adapters of {listed(missing)}")
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    nested = {stacked[name].rpartition(".")[0] for name in stacked.keys() & adapters if name.endswith("fc2.weight")}
    for name, adapter in adapters.items():
        if name in stacked:
            count, rank, _ = adapter.a.shape
            low, high = _expert_keys(stacked[name], nested)
            tensors[low] = adapter.a.flatten(0, 1).contiguous()
            tensors[high] = adapter.b.view(count, -1, rank).permute(1, 2, 0).flatten(1).contiguous()
            continue
        for part, (a, b, magnitude) in _parts(placements[name], adapter, matrices[name]):
            if not (a.any() or b.any()) and magnitude is None:
                continue  # a module without an adapter
            ranks[_module(part)] = len(a)
            for leaf, value in (("a", a), ("b", b), ("magnitude", magnitude)):
                if value is not None:
                    tensors[f"{_key(part)}.{LEAVES[leaf]}"] = value.contiguous()
    parts = [part for placement in placements.values() for part in placement.parts]
    named_as_experts = {_last(_module(part)) for part in parts if part.expert is not None}
    unsafe = sorted(module for module in ranks if _last(module) in named_as_experts)
    if rejected := sorted(module for module in ranks if module.endswith(".mixer.out_proj")):
        raise UserError(f"PEFT rejects adapters of {listed(rejected)}; write the full model with megatron lora merge")
    if unsafe and lora.use_dora:
        raise UserError(f"PEFT cannot read DoRA of {listed(unsafe)}; write the full model with megatron lora merge")
    config = _config(lora, base, ranks, {_module(part) for part in parts}, unsafe)
    parameters = [parameter for name, parameter in stacked.items() if name in adapters]
    if parameters or unsafe:
        names = short_names(parameters, stacked.values())
        config["target_parameters"] = names + [f"{_name(module)}.weight" for module in unsafe]
    return tensors, config


def _name(module: str) -> str:
    """Return the end of a module's name in transformers, which PEFT compares; files differ."""
    name = module.removeprefix("backbone.").replace("language_model.model.", "language_model.")
    return name.replace(".block_sparse_moe.", ".mlp.").replace(".self_attn.f_", ".self_attn.forget_gate.f_")


def _last(module: str) -> str:
    return module.rpartition(".")[-1]


def expert_parameter(placement: Placement) -> str | None:
    """Return the full name of the 3-D parameter [E, out, in] that holds a weight of experts in transformers 5; None for
    other weights and for files that stack experts themselves, whose layouts differ."""
    part = placement.parts[0]
    if part.expert is None or not placement.name.endswith(".weight"):
        return None
    module = part.name.partition(f".experts.{part.expert}.")[0].replace(".block_sparse_moe", ".mlp")
    gated = "gate_up_proj" if len(part.layout.names) > 1 else "up_proj"
    return f"{module}.experts.{'down_proj' if placement.name.endswith('linear_fc2.weight') else gated}"


def _expert_keys(parameter: str, nested: Collection[str]) -> tuple[str, str]:
    """Return the keys of A and B of an experts' parameter; ``nested``: modules in which the last one has adapters."""
    module, _, name = parameter.rpartition(".")
    inner = ".base_layer" if name != "down_proj" and module in nested else ""
    return f"{PREFIX}{module}{inner}.{LEAVES['a']}", f"{PREFIX}{module}{inner}.{LEAVES['b']}"


def _parts(
    placement: Placement, adapter: Adapter, matrices: Sequence[int]
) -> Iterable[tuple[HFTensor, tuple[Tensor, Tensor, Tensor | None]]]:
    """Yield (HF tensor, (A [r', in], B [out, r'], magnitude [out] or None)) for each HF tensor of a local weight."""
    a, b, magnitude = adapter
    for part, numbers in zip(placement.parts, _numbers(placement, matrices)):
        stacked = numbers.unique()
        high = block_matrix(_rows(part, b, a.shape[1]), (numbers.unsqueeze(-1) == stacked).to(b.dtype))
        norms = None if magnitude is None else _rows(part, magnitude.unsqueeze(-1), 1).flatten()
        yield part, (a[stacked].flatten(0, 1), high, norms)


def _config(
    lora: LoraSettings, base: str, ranks: Mapping[str, int], modules: set[str], parameters: Collection[str]
) -> dict[str, object]:
    """Return ``adapter_config.json``. ``parameters``: names of ``ranks`` that are no target modules."""
    larger = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    alphas = {module: lora.scale * (rank**0.5 if lora.use_rslora else rank) for module, rank in larger.items()}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
        "lora_alpha": lora.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": [_name(module) for module in short_names(ranks.keys() - parameters, modules)],
        "use_rslora": lora.use_rslora, "use_dora": lora.use_dora, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "modules_to_save": None, "rank_pattern": larger, "alpha_pattern": alphas,
    }  # fmt: skip


def short_names(chosen: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return last parts of the ``chosen`` modules' names if they select no others of ``modules``, else full names.
    The last two parts for experts, ``experts.linear_fc1``, whose last part selects dense layers only."""

    def last_part(module: str) -> str:
        parent, _, last = module.rpartition(".")
        return f"experts.{last}" if parent.endswith(".experts") else last

    chosen = set(chosen)
    unchosen = {last_part(module) for module in set(modules) - chosen}
    return sorted({module if (last := last_part(module)) in unchosen else last for module in chosen})


def load_peft(
    folder: Path, plan: Iterable[Placement], matrices: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Adapter], LoraSettings]:
    """Read a PEFT folder: (adapters by local weight name, their settings). ``matrices``: ``Param.matrices`` by name of
    each weight that supports adapters. UserError for adapters that local ones cannot represent, or missing or wrong
    tensors."""
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise UserError(f"{folder}: holds no {file}; give the folder of PEFT's save_pretrained")
    lora = _read_config(folder / CONFIG)
    tensors = {common_name(key): tensor for key, tensor in read_safetensors(folder / WEIGHTS).items()}
    adapters: dict[str, Adapter] = {}
    used: set[str] = set()
    inner = f".base_layer.{LEAVES['a']}"
    nested = {key.removesuffix(inner).removeprefix(PREFIX) for key in tensors if key.endswith(inner)}
    for placement in [placement for placement in plan if placement.name in matrices]:
        if (parameter := expert_parameter(placement)) is not None:
            keys = _expert_keys(common_name(parameter), nested)
            if any(f".{common_name(parameter)}".endswith(f".{common_name(target)}") for target in lora.parameters):
                adapters[placement.name] = _expert_adapter(placement, keys, tensors, lora, used)
        elif (adapter := _merged(placement, matrices[placement.name], tensors, lora, used)) is not None:
            adapters[placement.name] = adapter
    if foreign := sorted(tensors.keys() - used):
        raise UserError(f"{folder / WEIGHTS}: no layer that supports adapters has {listed(foreign, most=4)}")
    if not adapters:
        raise UserError(f"{folder / WEIGHTS}: holds no adapters")
    return adapters, lora


def _read_config(path: Path) -> LoraSettings:
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {config.get('peft_type')!r:.80}; only LORA can be imported")
    used = [name for name in UNSUPPORTED if config.get(name)]
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list):
        raise UserError(f"{path}: target_parameters is {parameters!r:.80}, expected a list of names")
    used += ["bias"] * (config.get("bias", "none") != "none")
    used += ["init_lora_weights"] * str(config.get("init_lora_weights")).lower().startswith(OF_CHANGED_BASES)
    if used:
        values = listed(f"{name} {config[name]!r:.80}" for name in used)
        raise UserError(f"{path}: {values} not supported; train the adapter without")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise UserError(f"{path}: r is {rank!r:.80} and lora_alpha {alpha!r:.80}; both must be positive numbers")
    variants = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    lora = LoraSettings(rank, float(alpha), *variants, tuple(map(str, parameters)))
    ranks, alphas = (config.get(f"{kind}_pattern") or {} for kind in ("rank", "alpha"))
    if not _keeps_scale(lora, ranks, alphas):
        patterns = f"rank_pattern {ranks!r:.80}, alpha_pattern {alphas!r:.80}"
        raise UserError(f"{path}: {patterns}: modules with another scale are not supported; train the adapter without")
    return lora


def _keeps_scale(lora: LoraSettings, ranks: object, alphas: object) -> bool:
    """Return whether modules with other ranks have the scale of the rest, as block matrices have."""
    if not (isinstance(ranks, dict) and isinstance(alphas, dict)):
        return False
    pairs = [(ranks.get(module, lora.rank), alphas.get(module, lora.alpha)) for module in ranks | alphas]
    return all(
        isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)
        and math.isclose(lora._replace(rank=rank, alpha=alpha).scale, lora.scale)
        for rank, alpha in pairs
    )  # fmt: skip


def _merged(
    placement: Placement, matrices: Sequence[int], tensors: Mapping[str, LazyTensor], lora: LoraSettings, used: set[str]
) -> Adapter | None:
    """Return the adapter of one local weight, None without one. Adds the keys that it read to ``used``."""
    keys = [[f"{common_name(_key(part))}.{leaf}" for leaf in LEAVES.values()] for part in placement.parts]
    present = [part_keys[0] in tensors for part_keys in keys]
    if not any(present):
        return None
    parts, numbers = placement.parts, _numbers(placement, matrices)
    if (lora.use_dora and not all(present)) or sum(len(rows.unique()) for rows in numbers) > len(matrices):
        raise UserError(
            f"{WEIGHTS}: adapters of {_module(parts[present.index(True)])} cannot be imported: the model has"
            f" one matrix of {listed(map(_module, parts))}"
        )
    a = torch.zeros((len(matrices), lora.rank, placement.shape[-1]), dtype=tensors[next(iter(tensors))].dtype)
    b = torch.zeros((*placement.shape[:-1], lora.rank), dtype=a.dtype)
    magnitude = torch.zeros(placement.shape[:-1], dtype=a.dtype) if lora.use_dora else None
    for part, part_keys, rows, is_present in zip(parts, keys, numbers, present):
        if not is_present:
            continue
        stacked, out = rows.unique(), len(rows)
        is_block_matrix = tensors[part_keys[0]].shape[:1] == (len(stacked) * lora.rank,)
        num_blocks = len(stacked) if is_block_matrix else 1
        rank = num_blocks * lora.rank
        shapes = ((rank, a.shape[-1]), (out, rank), (out,))[: 3 if lora.use_dora else 2]
        for key, shape in zip(part_keys, shapes):
            _check_shape(tensors, key, shape)
        used.update(part_keys[: len(shapes)])
        low, high = (tensors[key].read() for key in part_keys[:2])
        if num_blocks > 1:
            columns, blocks = high.view(out, num_blocks, lora.rank), rows.unsqueeze(-1) == stacked
            if columns[~blocks].any():
                raise UserError(f"{WEIGHTS}: {part_keys[1]} is no block matrix of adapters of rank {lora.rank}")
            high = columns[blocks]
        a[stacked] = low.view(num_blocks, lora.rank, -1)
        _fill(part, b, high)
        if magnitude is not None:
            _fill(part, magnitude.unsqueeze(-1), tensors[part_keys[2]].read().unsqueeze(-1))
    return Adapter(a, b, magnitude)


def _expert_adapter(
    placement: Placement, keys: tuple[str, str], tensors: Mapping[str, LazyTensor], lora: LoraSettings, used: set[str]
) -> Adapter:
    """Return the adapter of one weight [E, *rows, in] of experts. Adds its ``keys``, of A and B, to ``used``."""
    count, *rows, width = placement.shape
    for key, shape in zip(keys, ((count * lora.rank, width), (math.prod(rows), lora.rank * count))):
        _check_shape(tensors, key, shape)
    used.update(keys)
    a, b = (tensors[key].read() for key in keys)
    b = b.view(-1, lora.rank, count).permute(2, 0, 1)
    return Adapter(a.view(count, lora.rank, width), b.reshape(count, *rows, lora.rank))


def _check_shape(tensors: Mapping[str, LazyTensor], key: str, shape: tuple[int, ...]) -> None:
    if key not in tensors or tuple(tensors[key].shape) != shape:
        stored = list(tensors[key].shape) if key in tensors else "missing"
        raise UserError(f"{WEIGHTS}: {key} is {stored}, expected {list(shape)}")


def _fill(part: HFTensor, local: Tensor, tensor: Tensor) -> None:
    """Copy the rows of an HF tensor [out, columns] into its views of ``local`` [*lead, columns]."""
    views = part.views(local)
    sizes = [view.numel() // view.shape[-1] for view in views]
    for view, piece in zip(views, tensor.split(sizes)):
        view.copy_(piece.reshape(view.shape))
