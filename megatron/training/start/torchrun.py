"""torchrun for ``megatron pretrain --nproc N``: the reason of a failure is the last line, its exit code is returned."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: Sequence[str]) -> int:
    """Run torchrun with ``argv`` in this process; return 0, or the exit code of the process that failed first. Omits
    torchrun's traceback and table: each process has reported its own failure on stderr."""
    try:
        run.run(run.parse_args(list(argv)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message["message"] if isinstance(failure.message, dict) else failure.message
        if message.startswith("To enable traceback"):  # of torch, about its decorator
            message = f"exit code {failure.exitcode}, see above"
        where = "" if message.startswith("rank ") else f"rank {rank} failed first: "
        sys.stderr.write(f"error: {where}{message}\n")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:  # after torchrun has stopped the processes
        sys.stderr.write(f"stopped by {error.sigval.name}\n")
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
