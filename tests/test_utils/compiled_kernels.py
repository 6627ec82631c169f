"""Kernels that write where they have read, compiled for Hopper GPUs; run as a script, it needs no GPU.

Every thread of a program may read an address that one of them writes. Where the compiler reads a value twice, once for
each distribution over threads that it is needed in, a late thread may find the new one.
"""

import json
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.core.fusions import (
    adam,
    address_table,
    column_sum,
    embedding_gradient,
    merge_attention,
    muon_update,
    sum_parts,
)

HOPPER = GPUTarget("cuda", 90, 32)
TRITON_TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}


def compiled(kernel, types, constants, num_warps):
    """Pointers and numbers that are not named in ``types`` are int32; all are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    return triton.compile(
        ASTSource(
            kernel, signature, {(names.index(name),): value for name, value in constants.items()},
            {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] in "*i"},
        ),
        target=HOPPER, options={"num_warps": num_warps},
    )  # fmt: skip


def merging(block, channels):
    types = {"out": "*fp32", "lse": "*fp32", "block_out": f"*{block}", "block_lse": "*fp32"}
    constants = {"CHANNELS": channels, "PADDED": triton.next_power_of_2(channels), "ROWS": merge_attention._ROWS}
    return compiled(merge_attention._merge_kernel, types, constants, merge_attention._NUM_WARPS)


def adding_columns(total):
    constants = {"ADDS": True, "STEPS": 2, "ROWS": column_sum._ROWS, "COLUMNS": column_sum._COLUMNS}
    return compiled(column_sum._sum_rows, {"x": "*bf16", "sums": f"*{total}"}, constants, column_sum._NUM_WARPS)


def adding_rows(total):
    types = {"grad": "*bf16", "sorted_ids": "*i32", "order": "*i64", "ends": "*i32", "total": f"*{total}"}
    constants = {"ROWS": embedding_gradient.ROWS, "COLUMNS": embedding_gradient.COLUMNS}
    return compiled(embedding_gradient._add_runs, types, constants, embedding_gradient.NUM_WARPS)


def adding_parts(part):
    types = {"total": "*fp32", "part": f"*{part}", "out": "*fp32"}
    return compiled(sum_parts._sum_kernel, types, {"ELEMENTS": sum_parts._ELEMENTS}, sum_parts._NUM_WARPS)


def layout(weight, kept_bits, operands):
    return {
        "WEIGHT": TRITON_TYPES[weight], "KEPT_BITS": kept_bits, "AVOID_TIES": kept_bits == 16, "ALIGNMENT": 16,
        "FIELDS": 3 + operands, "BLOCK": address_table.BLOCK,
    }  # fmt: skip


def updating(weight, kept_bits, first, second):
    numbers = ("lr", "decay", "beta1", "rest1", "beta2", "rest2", "eps")
    types = {"table": "*i64", "chunks": "*i32", "scalars": "*fp32", **dict.fromkeys(numbers, "fp32")}
    constants = {
        "GRADIENT": tl.float32, "FIRST": TRITON_TYPES[first], "SECOND": TRITON_TYPES[second], "DECOUPLED": True,
        **layout(weight, kept_bits, 3),
    }  # fmt: skip
    return compiled(adam._adam_kernel, types, constants, address_table.NUM_WARPS)


def moving(weight, kept_bits, decoupled):
    types = {"table": "*i64", "chunks": "*i32", "scalars": "*fp32", "decay": "fp32", "momentum": "fp32", "rest": "fp32"}
    constants = {"GRADIENT": tl.float32, "NESTEROV": True, "DECOUPLED": decoupled, **layout(weight, kept_bits, 3)}
    return compiled(muon_update._advance_kernel, types, constants, address_table.NUM_WARPS)


def applying(weight, kept_bits, factor):
    types = {"table": "*i64", "chunks": "*i32", "scalars": "*fp32", "rate": "fp32", "decay": "fp32"}
    constants = {"FACTOR": TRITON_TYPES[factor], **layout(weight, kept_bits, 1)}
    return compiled(muon_update._apply_kernel, types, constants, address_table.NUM_WARPS)


CASES = {
    **{f"merge {block} {channels}": (merging, block, channels)
       for block in ("fp32", "bf16") for channels in (8, 80, 128)},
    **{f"columns {total}": (adding_columns, total) for total in ("fp32", "bf16")},
    **{f"rows {total}": (adding_rows, total) for total in ("fp32", "bf16")},
    **{f"parts {part}": (adding_parts, part) for part in ("fp32", "bf16")},
    "adam": (updating, "fp32", 0, "fp32", "fp32"), "adam, master": (updating, "bf16", 32, "fp32", "fp32"),
    "adam, remainder": (updating, "bf16", 16, "fp32", "fp32"),
    "adam, 16-bit moments": (updating, "bf16", 16, "bf16", "bf16"),
    "adam, one 16-bit moment": (updating, "fp16", 32, "bf16", "fp32"),
    "muon, before": (moving, "bf16", 16, True), "muon, before, l2": (moving, "bf16", 16, False),
    **{f"muon, after {bits} {factor}": (applying, "bf16" if bits else "fp32", bits, factor)
       for bits in (0, 16, 32) for factor in ("bf16", "fp32")},
}  # fmt: skip


def facts(kernel):
    """Return the number of reads that the compiler duplicated, and the order of reads (r), barriers (|), writes (w)."""
    written, created = (len(re.findall(r"\btt\.load\b", kernel.asm[form])) for form in ("ttir", "ttgir"))
    steps = re.findall(r"\b(?:ld\.global|st\.global|bar\.sync)\b", kernel.asm["ptx"])
    order = "".join({"l": "r", "s": "w", "b": "|"}[step[0]] for step in steps)
    return {"doubled": created - written, "order": order}


if __name__ == "__main__":
    print(json.dumps({name: facts(make(*choices)) for name, (make, *choices) in CASES.items()}))
