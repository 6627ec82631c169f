"""Print the contents of a checkpoint, or compare two checkpoints.

    python tools/checkpoint/inspect_checkpoint.py FOLDER [--norms] [--json]
    python tools/checkpoint/inspect_checkpoint.py FOLDER OTHER [--json]

With one folder: a tree of tensor names with shapes and dtypes. --norms adds the 2-norm and the largest absolute value
of each tensor, which reads all data; without it no tensor is read. With two folders (formats may differ): names that
only one contains, shapes that differ, and the size of the differences. The exit code is 1 if tensors differ; settings
that differ are only printed. Tensors are read one at a time."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.config.errors import printable
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.core.sharding.sharded_tensor import DTYPE_NAMES
from megatron.export.files import tensor_bytes
from megatron.export.interchange import Interchange
from megatron.tools.checkpoint import formats


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of this tool."""
    arguments = formats.parser(__doc__)
    arguments.add_argument("folder", help="a checkpoint of any format")
    arguments.add_argument("other", nargs="?", help="second checkpoint to compare with")
    arguments.add_argument(
        "--other-loader", default="auto", choices=(*formats.LOADERS, "auto"), help="format of the second checkpoint"
    )
    arguments.add_argument("--norms", action="store_true", help="read all values: 2-norm and largest absolute value")
    arguments.add_argument("--tolerance", type=float, default=0.0, help="ignore differences up to this size")
    arguments.add_argument("--json", action="store_true", help="print JSON")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Print the tensors of a checkpoint, or the differences of two. Return the exit code: 1 if names, shapes or values
    of two differ, else 0. Raises UserError if one cannot be opened."""
    args = parser().parse_args(argv)
    kind, source = formats.open_checkpoint(args.folder, args.loader, args.ckpt_step)
    if args.other is not None:
        return compare(args, source, formats.open_checkpoint(args.other, args.other_loader)[1])
    progress = formats.CopyProgress("read", formats.total_bytes(source.tensors) if args.norms else 0)
    tensors = progress.watch(source.tensors)
    rows = {name: row(tensor, args.norms) for name, tensor in formats.in_order(tensors)}
    if args.norms:
        progress.finish()
    summary = {
        "folder": args.folder,
        "format": kind,
        "tensors": len(rows),
        "parameters": sum(math.prod(t.shape) for name, t in source.tensors.items() if name.startswith("model.")),
        "bytes": formats.total_bytes(source.tensors),
    }
    if "iteration" in source.objects:
        summary["iteration"] = source.objects["iteration"]
    if args.json:
        print(formats.as_json({**summary, "settings": shown_settings(source), "notes": source.notes, "names": rows}))
        return 0
    print("  ".join(f"{key} {value:,}" if type(value) is int else f"{key} {value}" for key, value in summary.items()))
    for note in source.notes:
        print(f"note: {note}")
    print_tree(rows)
    return 0


def shown_settings(source: Interchange) -> dict[str, object]:
    """Return the settings that are not None, False or empty, sorted by name."""
    return {name: value for name, value in sorted(source.settings.items()) if value not in (None, False, [], {})}


def row(tensor: LazyTensor, norms: bool) -> dict[str, object]:
    """Describe a tensor: shape, dtype name, bytes; with ``norms``, read it and add its 2-norm and absolute maximum."""
    dtype, num_bytes = DTYPE_NAMES[tensor.dtype], tensor_bytes(tensor)
    fields: dict[str, object] = {"shape": list(tensor.shape), "dtype": dtype, "bytes": num_bytes}
    if norms:
        values = tensor.read()
        fields["norm"] = math.sqrt(sum(float(part.double().square().sum()) for part in parts(values)))
        fields["largest"] = max((float(part.double().abs().max()) for part in parts(values)), default=0.0)
    return fields


def parts(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a tensor into flat, non-empty chunks of at most 2**22 elements, so that a float64 copy takes 32 MiB."""
    return [part for part in values.reshape(-1).split(1 << 22) if part.numel()]


def print_tree(rows: dict[str, dict[str, Any]]) -> None:
    """Print one line per tensor, indented by the dotted components of its name; print shared prefixes once."""
    above: list[str] = []
    for name, row in rows.items():
        *path, leaf = name.split(".")
        common = next((i for i, (a, b) in enumerate(zip(above, path)) if a != b), min(len(above), len(path)))
        for depth in range(common, len(path)):
            print(f"{'  ' * depth}{path[depth]}")
        above = path
        numbers = f"  norm {row['norm']:.6g}  largest {row['largest']:.6g}" if "norm" in row else ""
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        print(f"{'  ' * len(path) + leaf:40} {shape:>24} {row['dtype']:>5}{numbers}")


def compare(args: argparse.Namespace, one: Interchange, other: Interchange) -> int:
    """Print the differences between two checkpoints; return 1 if names, shapes or values differ, else 0. Differing
    settings are printed, but do not affect the result. Reads all tensors that both contain."""
    both = [name for name, _ in formats.in_order(one.tensors) if name in other.tensors]
    progress = formats.CopyProgress("compared", formats.total_bytes({name: one.tensors[name] for name in both}))
    report: dict[str, Any] = {
        "only in the first": sorted(one.tensors.keys() - other.tensors.keys()),
        "only in the second": sorted(other.tensors.keys() - one.tensors.keys()),
        "differ": {},
        "equal": 0,
        "settings": {
            name: [one.settings[name], other.settings[name]]
            for name in sorted(one.settings.keys() & other.settings.keys())
            if one.settings[name] != other.settings[name]
        },
    }
    for name in both:
        change = difference(one.tensors[name], other.tensors[name], args.tolerance)
        progress.count(name, tensor_bytes(one.tensors[name]))
        if change:
            report["differ"][name] = change
        else:
            report["equal"] += 1
    progress.finish()
    differ = bool(report["differ"] or report["only in the first"] or report["only in the second"])
    if args.json:
        print(formats.as_json(report))
        return int(differ)
    for key in ("only in the first", "only in the second"):
        for name in report[key]:
            print(f"{key}: {name}")
    for name, change in report["differ"].items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in change.items()))
    for name, (first, second) in report["settings"].items():
        print(printable(f"setting {name}: {first} | {second}"))
    print(f"{report['equal']} tensors are equal, {len(report['differ'])} differ")
    return int(differ)


def difference(one: LazyTensor, other: LazyTensor, tolerance: float) -> dict[str, object]:
    """Read and compare two tensors in float64; return a summary of the differences beyond ``tolerance``, empty if
    equal. Pairs of NaN are equal, and only another dtype is no difference. The norm is relative to ``one``."""
    if one.shape != other.shape:
        return {"shapes": f"{list(one.shape)} | {list(other.shape)}"}
    first, second, number, largest, squares, scale = one.read(), other.read(), 0, 0.0, 0.0, 0.0
    for a, b in zip(parts(first), parts(second)):
        same = (a == b) | (a.isnan() & b.isnan())
        if bool(same.all()):
            scale += float(a.double().square().sum())
            continue
        gap = (a.double() - b.double()).abs().masked_fill(same, 0)
        number += int((gap > tolerance).sum()) + int(gap.isnan().sum())
        largest = max(largest, float(gap.nan_to_num(math.inf).max()))
        squares, scale = squares + float(gap.square().sum()), scale + float(a.double().square().sum())
    if not number:
        return {}
    kinds = {} if one.dtype == other.dtype else {"types": f"{DTYPE_NAMES[one.dtype]} | {DTYPE_NAMES[other.dtype]}"}
    relative = math.sqrt(squares / scale) if scale else math.inf
    return {"elements": number, "largest difference": largest, "relative norm": relative, **kinds}
