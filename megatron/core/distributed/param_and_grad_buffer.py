"""Contiguous gradient memory. One :class:`ParamAndGradBuffer` per (parameter dtype, gradient dtype) holds the gradients
of all its parameters in one flat tensor, laid out in reverse creation order (the order in which backward produces them)
and cut into buckets: the unit of one all-reduce. ``parameter.main_grad`` is a view into it.

The bucket layout depends on the parameters and the bucket size alone, not on the number of ranks, so that sums are
added up in the same order whatever overlaps with what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ALIGNMENT = 64  # elements: every parameter's gradient starts on a 256-byte boundary in fp32


class Bucket:
    """One stretch of a buffer, all-reduced at once.

    Args:
        data: the flat view of the buffer.
        parameters: those whose gradients lie in it.
    """

    def __init__(self, data: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self.data = data
        self.parameters = list(parameters)
        self.pending = len(self.parameters)
        """Gradients of the last micro-batch that have not arrived."""
        self.work: dist.Work | None = None
        self.launched = False

    def reset(self) -> None:
        """Forget the last iteration's arrivals."""
        self.pending = len(self.parameters)
        self.work, self.launched = None, False

    def launch(self, group: dist.ProcessGroup | None) -> None:
        """Start the sum over ``group`` (None: one rank, nothing to do)."""
        assert not self.launched, "a bucket was reduced twice in one iteration"
        self.launched = True
        if group is not None:
            self.work = dist.all_reduce(self.data, group=group, async_op=True)

    def wait(self) -> None:
        """Until the sum is there; on CUDA the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class ParamAndGradBuffer:
    """Gradient storage of parameters of one dtype.

    Args:
        parameters: in creation order.
        grad_dtype: of the accumulation and of the reduction.
        bucket_size: least number of elements of a bucket; None puts everything into one.
        group: the ranks over which gradients are summed; None for one rank.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], grad_dtype: torch.dtype, bucket_size: int | None,
        group: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        self.group = group
        self.parameters = list(reversed(parameters))
        starts, boundaries, total = self._layout(bucket_size)
        self.grad_data = torch.zeros(total, dtype=grad_dtype, device=self.parameters[0].device)
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[nn.Parameter, Bucket] = {}
        first = 0
        for last, (begin, end) in boundaries:
            self.buckets.append(Bucket(self.grad_data[begin:end], self.parameters[first:last]))
            first = last
        for bucket in self.buckets:
            self.bucket_of.update(dict.fromkeys(bucket.parameters, bucket))
        for parameter, start in zip(self.parameters, starts):
            view = self.grad_data[start : start + parameter.numel()].view(parameter.shape)
            parameter.main_grad = view  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def _layout(self, bucket_size: int | None) -> tuple[list[int], list[tuple[int, tuple[int, int]]], int]:
        """(start of each parameter, (one past a bucket's last parameter, its stretch) per bucket, total size)."""
        starts, boundaries = [], []
        cursor = begin = 0
        for index, parameter in enumerate(self.parameters):
            starts.append(cursor)
            cursor += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
            if bucket_size is not None and cursor - begin >= bucket_size:
                boundaries.append((index + 1, (begin, cursor)))
                begin = cursor
        if cursor > begin or not boundaries:
            boundaries.append((len(self.parameters), (begin, cursor)))
        return starts, boundaries, cursor

    def reset(self) -> None:
        """Zero gradients, no arrivals."""
        self.grad_data.zero_()
        for bucket in self.buckets:
            bucket.reset()

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Note a gradient of the last micro-batch, and start every bucket whose turn has come.

        Buckets start in their own order even when gradients arrive in another, since all ranks must start the same
        collectives in the same order.
        """
        arrived = self.bucket_of[parameter]
        if arrived.launched or arrived.pending == 0:
            raise RuntimeError("a gradient arrived after its sum began: run all but the last micro-batch in no_sync()")
        arrived.pending -= 1
        for bucket in self.buckets:
            if bucket.launched:
                continue
            if bucket.pending > 0:
                return
            bucket.launch(self.group)

    def start_sync(self) -> None:
        """Start the sums that have not started (all of them without overlap; those of unused parameters with it)."""
        for bucket in self.buckets:
            if not bucket.launched:
                bucket.launch(self.group)

    def finish_sync(self) -> None:
        """Wait for every sum."""
        for bucket in self.buckets:
            bucket.wait()


def gradient_dtype(parameter: nn.Parameter, reduce_in_fp32: bool) -> torch.dtype:
    """fp32 for half precision if ``reduce_in_fp32``, else the parameter's own dtype (fp64 stays fp64)."""
    half = parameter.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if half and reduce_in_fp32 else parameter.dtype


def group_by_dtype(
    parameters: Iterable[nn.Parameter], reduce_in_fp32: bool
) -> dict[tuple[torch.dtype, torch.dtype], list[nn.Parameter]]:
    """Parameters by (their dtype, their gradient's dtype), each list in creation order."""
    kinds: dict[tuple[torch.dtype, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, gradient_dtype(parameter, reduce_in_fp32)), []).append(parameter)
    return kinds
