"""An unpickler that builds tensors and plain data and calls nothing that a file names.

Numbers, text, lists, dictionaries and a short table of constructors written here are all that exists. A class of
another program (an enum of Megatron-LM's arguments, a record of torch.distributed.checkpoint) becomes an inert
:class:`Record`; what the standard library, numpy and torch define beyond the table is refused by name. pickle's machine
is the one in pure Python: every step that calls or sets something is replaced here, and a crafted file cannot make it
allocate more than it holds.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError

MAX_PICKLE_BYTES = 2**31
_OWN_KEYS = (str, int, float, bool, bytes, type(None), torch.dtype)


@dataclass(eq=False)
class Record:
    """What a file says of an object whose class is not built: the class, the arguments, the attributes."""

    kind: str
    args: tuple = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]


@dataclass(frozen=True)
class Kind:
    """A class or function that a pickle names; ``build`` makes its values from plain arguments."""

    name: str
    build: Callable[..., Any]


@dataclass(frozen=True)
class Storage:
    """Numbers of one type in a record of the file."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class StoredTensor:
    """A strided view of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    if not isinstance(storage, Storage):
        raise CheckpointDamagedError("a tensor without a storage")
    shape, stride = tuple(shape), tuple(stride)
    if len(shape) != len(stride) or any(type(n) is not int or not 0 <= n < 2**62 for n in (offset, *shape, *stride)):
        raise CheckpointDamagedError(f"a tensor of malformed shape {shape!r:.60}")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride))
    if 0 not in shape and last >= storage.numel:
        raise CheckpointDamagedError(f"a tensor of shape {shape!r:.60} that its storage of {storage.numel} cannot hold")
    return StoredTensor(storage, offset, shape, stride)


def _array(_kind: Any, _shape: Any, _code: Any) -> Record:
    return Record("numpy.ndarray")


def _scalar(kind: Any, data: Any) -> Any:
    code = kind.args[0] if isinstance(kind, Record) and kind.args else ""
    if code not in ("f4", "f8", "i4", "i8", "b1", "u4", "u8") or not isinstance(data, bytes):
        raise CheckpointDamagedError("a number of numpy of an unknown type")
    return np.frombuffer(data, dtype=code, count=1)[0].item()


def _encoded(text: str, _encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


def _table(*args: Any) -> dict:
    return {_checked_key(key): value for key, value in (args[0] if args else ())}


_BUILT: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _table, "collections.defaultdict": lambda *_: {},
    "builtins.set": tuple, "builtins.frozenset": tuple, "builtins.list": list, "builtins.tuple": tuple,
    "builtins.complex": lambda *args: Record("builtins.complex", args),
    "builtins.bytearray": lambda *args: args[0] if args and isinstance(args[0], bytes) else _encoded(*args),
    "builtins.bytes": lambda *args: args[0] if args else b"",
    "_codecs.encode": _encoded,
    "torch.Size": tuple, "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": lambda _function, _type, args, _state: _tensor(*args),
    "numpy._core.multiarray.scalar": _scalar, "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray._reconstruct": _array, "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.numeric._frombuffer": lambda *_: Record("numpy.ndarray"),
}  # fmt: skip
"""What a pickle may have built, by the functions here. ``dict`` and ``tuple`` stand for their relatives."""

_INERT = (
    "argparse.Namespace", "torch.device", "torch.serialization._get_layout", "numpy.ndarray", "numpy.dtype",
    "pathlib.PosixPath", "pathlib.PurePosixPath", "datetime.timedelta", "types.SimpleNamespace", "signal.Signals",
    "torch.Tensor", "torch.nn.parameter.Parameter", "torch.torch_version.TorchVersion", "_io.BytesIO",
)  # fmt: skip
_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "IntStorage": torch.int32, "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}  # fmt: skip


def find_kind(module: str, name: str) -> Any:
    """What ``module.name`` becomes: a :class:`Kind`, or the dtype itself.

    Raises:
        CheckpointError: it is not in the table, and not a class of another program.
    """
    module = "builtins" if module == "__builtin__" else module
    full = f"{module}.{name}"
    if full in _BUILT:
        return Kind(full, _BUILT[full])
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return Kind(full, lambda *_: None)
    if module == "torch" and isinstance(found := torch.__dict__.get(name), torch.dtype):
        return found
    top = module.partition(".")[0]
    foreign = top not in sys.stdlib_module_names and top not in ("torch", "numpy")
    if full in _INERT or foreign or module.startswith("torch.distributed.checkpoint."):
        return Kind(full, lambda *args: Record(full, args))
    raise CheckpointError(f"refuses the pickle: it asks for {full!r:.120}, and only tensors and plain data are read")


def _checked_key(key: Any, depth: int = 0) -> Any:
    """Hashing a tuple of tuples recurses in C without a bound."""
    if isinstance(key, tuple) and depth < 3:
        for item in key:
            _checked_key(item, depth + 1)
    elif not isinstance(key, (*_OWN_KEYS, Record, Kind)):
        raise CheckpointDamagedError(f"a pickle with a {type(key).__name__} for a key")
    return key


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """The steps of pickle's machine that call, look up or set anything are replaced; the others only move data."""

    dispatch = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        return find_kind(module, name)

    def persistent_load(self, pid: Any) -> Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], Kind)):
            raise CheckpointDamagedError("a persistent id that is no storage")
        dtype = _STORAGES.get(pid[1].name.rpartition(".")[2])
        if dtype is None or not isinstance(pid[2], str) or type(pid[4]) is not int or not 0 <= pid[4] < 2**62:
            raise CheckpointDamagedError(f"a storage of unknown type {pid[1].name!r:.60}")
        return Storage(pid[2], dtype, pid[4])

    def _call(self, kind: Any, args: Any) -> Any:
        if not isinstance(kind, Kind) or not isinstance(args, tuple):
            raise CheckpointDamagedError(f"a pickle that calls a {type(kind).__name__}")
        return kind.build(*args)

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def load_newobj_ex(self) -> None:
        _keywords, args, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(self._call(kind, args))

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Record):
            return  # attributes of a dictionary or tensor: nothing here reads them
        table = state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) else state
        if isinstance(table, dict):
            target.attributes.update({key: value for key, value in table.items() if isinstance(key, str)})
        else:
            target.attributes["state"] = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._table()[_checked_key(key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        table = self._table()
        for key, value in zip(items[::2], items[1::2]):
            table[_checked_key(key)] = value

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({_checked_key(key): value for key, value in zip(items[::2], items[1::2])})

    def _table(self) -> dict:
        target = self.stack[-1]
        if isinstance(target, Record):
            target = target.attributes
        if not isinstance(target, dict):
            raise CheckpointDamagedError(f"a pickle that sets an entry of a {type(target).__name__}")
        return target

    def load_append(self) -> None:
        value = self.stack.pop()
        self._sequence().append(value)

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._sequence().extend(items)

    def _sequence(self) -> list:
        target = self.stack[-1]
        if isinstance(target, Record):
            target = target.attributes.setdefault("items", [])
        if not isinstance(target, list):
            raise CheckpointDamagedError(f"a pickle that appends to a {type(target).__name__}")
        return target

    def load_frozenset(self) -> None:
        self.stack.append(tuple(self.pop_mark()))

    def load_empty_set(self) -> None:
        self.stack.append([])

    def refuse(self) -> None:
        raise CheckpointError("refuses the pickle: it uses an instruction of old or foreign pickles")

    for _code, _step in (
        (pickle.REDUCE, load_reduce), (pickle.NEWOBJ, load_reduce), (pickle.NEWOBJ_EX, load_newobj_ex),
        (pickle.BUILD, load_build), (pickle.SETITEM, load_setitem), (pickle.SETITEMS, load_setitems),
        (pickle.DICT, load_dict), (pickle.APPEND, load_append), (pickle.APPENDS, load_appends),
        (pickle.ADDITEMS, load_appends), (pickle.EMPTY_SET, load_empty_set), (pickle.FROZENSET, load_frozenset),
        (pickle.INST, refuse), (pickle.OBJ, refuse), (pickle.EXT1, refuse), (pickle.EXT2, refuse),
        (pickle.EXT4, refuse), (pickle.PERSID, refuse), (pickle.NEXT_BUFFER, refuse), (pickle.READONLY_BUFFER, refuse),
    ):  # fmt: skip
        dispatch[_code[0]] = _step  # type: ignore[assignment]


def unpickle(data: bytes, where: str) -> Any:
    """The plain data and :class:`StoredTensor` that ``data`` describes.

    Raises:
        CheckpointError: it asks for anything else, named; or it is no complete pickle.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except CheckpointError as error:
        raise type(error)(f"{where}: {error}") from None
    except Exception as error:  # a crafted file fails in as many ways as pickle's machine has steps
        raise CheckpointDamagedError(f"{where}: damaged: not a complete pickle ({type(error).__name__})") from None
