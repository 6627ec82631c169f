"""Recording of tensor operations on a CPU, in place of a CUDA graph."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.random import philox
from megatron.core.tensor_parallel import cross_entropy, layers
from tests.unit_tests.core.transformer.moe.test_host_reads import Reads, Waits


class Tape(TorchDispatchMode):
    """Stand-in for a CUDA graph: operations, and the tensors that each operation read and wrote."""

    def __init__(self):
        super().__init__()
        self.calls, self.made, self.before = [], set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, function._schema
        inputs = {argument.name: x for argument, x in zip(schema.arguments, args)} | kwargs
        written = [inputs[argument.name] for argument in schema.arguments
                   if argument.name in inputs and argument.alias_info and argument.alias_info.is_write]  # fmt: skip
        self.before += [(x, x.clone()) for x in written if x.untyped_storage().data_ptr() not in self.made]
        out = function(*args, **kwargs)
        if not any(argument.alias_info for argument in schema.returns):
            new = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
            self.made |= {x.untyped_storage().data_ptr() for x in new}
            self.calls.append((function, args, kwargs, new))
        elif written:
            self.calls.append((function, args, kwargs, []))
        return out

    def undo(self):
        """Recording changes nothing."""
        for x, value in reversed(self.before):
            x.copy_(value)

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, retained in self.calls:
            out = function(*args, **kwargs)
            for old, x in zip(retained, out if isinstance(out, tuple | list) else [out]):
                old.copy_(x.reshape(old.shape))  # torch squeezes some results in place


def record_tape(run, stream):
    """Also sees that the host reads nothing, and that no shape depends on values."""
    reads, waits, tape = Reads(), Waits(), Tape()
    with reads, waits, tape:
        outputs = run()
    tape.undo()
    assert (reads.found, waits.found) == ([], [])

    def replay():
        tape.replay()
        return outputs

    return replay


def run_as_on_a_device(monkeypatch):
    """Let CPUs run the operations of a device: no checks of ids, and random numbers by torch."""
    for module in (layers, cross_entropy):
        monkeypatch.setattr(module, "check_ids", lambda *_: None)
    monkeypatch.setattr(philox, "_array", lambda values: values)
