"""Host memory of offloaded tensors: pinned allocation, and side streams.

On a CPU "host" tensors are separate ordinary tensors and streams do nothing, so that the same code runs in tests."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron.core.config.errors import UserError


def copied(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on ``device``. A copy to a GPU goes through pinned memory: the host does not wait for kernels."""
    # the pinned copy may be freed at once: torch's host allocator reuses it only after the copy to the device
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)


class HostMemory:
    """Allocator of zeroed host tensors that live as long as this object; pinned if ``device`` is a GPU. Registers
    ordinary pages: torch's pinned allocator rounds sizes up to a power of two and keeps freed memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._pins = device, device.type == "cuda"
        self._registered: list[Tensor] = []  # alive until they are unregistered
        if self._pins:
            weakref.finalize(self, _unregister, self._registered).atexit = False

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a flat zero tensor of ``size`` elements. Raises UserError if its pages cannot be locked."""
        if not (self._pins and size):
            return torch.zeros(size, dtype=dtype)
        num_bytes = size * dtype.itemsize
        try:
            made = pages_of_this_process(size, dtype)
            status = int(torch.cuda.cudart().cudaHostRegister(made.data_ptr(), num_bytes, 0))
            problem = f"CUDA error {status}" if status else None
        except OSError as error:
            problem = str(error)
        if problem is not None:
            raise UserError(
                f"--optimizer-cpu-offload: the host cannot pin {num_bytes / 2**30:.1f} GiB ({problem}); raise the "
                "limits of the container (ulimit -l, memory) or lower --optimizer-offload-fraction"
            )
        self._registered.append(made)
        return made


def pages_of_this_process(size: int, dtype: torch.dtype) -> Tensor:
    """Return a flat zero tensor that forked processes do not have: a fork would copy all its pinned pages at once."""
    pages = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=dtype)


def _unregister(tensors: list[Tensor]) -> None:
    torch.cuda.synchronize()  # copies in flight may still use the memory
    for tensor in tensors:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
    tensors.clear()


class SideStream:
    """Side stream of ``device`` for copies to and from host memory and for other work, in the order of the calls. On a
    CPU work runs at once and events are None.

    Args:
        urgent: whether kernels of this stream get free SMs before kernels of other streams that are already queued."""

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0) if device.type == "cuda" else None

    def run(self, work: Callable[[], object], after: Iterable[torch.cuda.Event | None] = ()) -> torch.cuda.Event | None:
        """Queue the operations of ``work`` once the events ``after`` have completed. Return the event of completion.
        The caller keeps all tensors alive until then."""
        if self._stream is None:
            work()
            return None
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            work()
        return self._stream.record_event()

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[torch.cuda.Event | None] = ()
    ) -> torch.cuda.Event | None:
        """Copy ``(target, source)`` pairs like :meth:`run`."""

        def copies() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        return self.run(copies, after)

    def record_current(self) -> torch.cuda.Event | None:
        """Return an event after the work that the current stream has so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait for ``event``; the host does not wait."""
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)

    def synchronize(self) -> None:
        """Let the host wait for all work."""
        if self._stream is not None:
            self._stream.synchronize()
