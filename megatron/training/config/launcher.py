"""Environment variables that a launcher (torchrun, srun) sets, and checks of them. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron.core.config.cli import Problem
from megatron.core.config.errors import UserError

_RANGES = {
    "WORLD_SIZE": (1, 2**20),
    "RANK": (0, 2**20 - 1),
    "LOCAL_RANK": (0, 2**20 - 1),
    "LOCAL_WORLD_SIZE": (1, 2**20),
    "MASTER_PORT": (0, 2**16 - 1),
}

TASKS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "SLURM_NTASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
"""Number of processes that srun or mpirun started, and the variable with the number of this one."""


def environment_problems() -> list[Problem]:
    """Every variable that is no number in its range, or contradicts another one."""
    return list(_problems())


def _problems() -> Iterator[Problem]:
    """Yield a problem per launcher variable (``_RANGES``) that is set but is no integer in its range, and for a RANK or
    LOCAL_RANK that is not below its world size. Unset variables are no problem."""
    fix = "the launcher sets it; unset it for a run without one"
    readable = {}
    for name, (low, high) in _RANGES.items():
        text = os.environ.get(name)
        if text is None:
            continue
        value = _integer(text)
        if value is None or not low <= value <= high:
            yield Problem(f"environment variable {name}", f"must be an integer from {low} to {high}", text, fix)
        else:
            readable[name] = value
    for inner, outer in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if inner in readable and readable[inner] >= readable.get(outer, 2**20):
            reason = f"must be less than {outer} {readable[outer]}"
            yield Problem(f"environment variable {inner}", reason, readable[inner], fix)


def check_launch() -> None:
    """Raise UserError if the launcher's variables are incomplete, or if several processes were started without a rank:
    each of them would train the whole model for itself. For programs that start torch.distributed here."""
    is_set = {name: name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    started = "torchrun and megatron pretrain --nproc set it"
    size = launched_world_size() or 1
    if is_set["RANK"]:
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if not is_set[name]:
                raise UserError(f"environment variable {name}: is not set though RANK is; {started}, or unset RANK")
        return
    if size > 1:
        raise UserError(f"environment variable RANK: is not set though WORLD_SIZE is {size}; {started}, or unset both")
    for name, ranks in TASKS.items():
        if (_integer(os.environ.get(name, "")) or 1) > 1:
            raise UserError(
                f"environment variable {name} {os.environ[name]}: several processes were started without RANK, and each"
                f" would train the full model into the same folders; set RANK from {ranks}, WORLD_SIZE, LOCAL_RANK,"
                f" MASTER_ADDR and MASTER_PORT, or start torchrun once per host; for one process, unset {name}"
            )


def _integer(text: str) -> int | None:
    return int(text) if len(text) < 20 and text.strip().removeprefix("-").isdecimal() else None


def launched_world_size() -> int | None:
    """Ranks that the launcher started; None without one."""
    return _integer(os.environ.get("WORLD_SIZE", ""))


def launched_rank() -> int:
    """Return this process's rank as set by the launcher; 0 without a launcher, or if it is not a number."""
    return _integer(os.environ.get("RANK", "")) or 0


def is_first_rank() -> bool:
    """Whether this process speaks for all."""
    return launched_rank() == 0


def local_rank() -> int:
    """Rank within this node; 0 without a launcher, or where it cannot be read."""
    return _integer(os.environ.get("LOCAL_RANK", "")) or 0
