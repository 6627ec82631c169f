"""Host memory of offloaded tensors."""

import os

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.host_memory import HostMemory, pages_of_this_process


def resident_pages():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1])


def test_a_forked_process_does_not_have_the_pages():
    """A kernel copies pinned pages at a fork: workers of a data loader would double the memory."""
    size = 64 << 20
    tensor = pages_of_this_process(size, torch.float32)
    assert tensor.dtype == torch.float32 and tensor.numel() == size and not tensor.any()
    tensor.fill_(2.0)
    ordinary = torch.full_like(tensor, 3.0)
    pid = os.fork()
    if not pid:
        with open("/proc/self/maps", encoding="ascii") as file:
            ranges = [[int(x, 16) for x in line.split()[0].split("-")] for line in file]
        mapped = [any(a <= x.data_ptr() < b for a, b in ranges) for x in (tensor, ordinary)]
        os._exit(mapped != [False, True])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tensor[-1] == 2.0
    before = resident_pages()
    del tensor
    assert before - resident_pages() >= size * 4 // os.sysconf("SC_PAGE_SIZE") // 2


def test_memory_that_the_host_does_not_have_is_one_message(monkeypatch):
    memory = HostMemory(torch.device("cpu"))
    monkeypatch.setattr(memory, "_pins", True)
    with pytest.raises(UserError, match=r"cannot pin 1073741824.0 GiB .*lower --optimizer-offload-fraction"):
        memory.zeros(1 << 58, torch.float32)
