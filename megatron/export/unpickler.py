"""Safe unpickler: builds tensors and plain data, never calls functions named by a file, and does bounded work.

Supports numbers, text, lists, dictionaries and the constructors of a short table in this module. Classes of other
programs (an enum in Megatron-LM's arguments, a record of torch.distributed.checkpoint) become inert :class:`Record`
objects. Other names of the standard library, numpy and torch are rejected. Based on pickle's pure-Python unpickler,
with every opcode replaced that calls, looks up or sets something.

A few bytes of a pickle can cause exponential work: nested lists with shared elements, a constructor applied repeatedly
to one long list, hashes of nested tuples. Therefore the number of items that constructors produce, and the size of the
result when expanded to a tree (the cost of printing it or writing it as JSON), are limited in proportion to the file.
"""

from __future__ import annotations

import pickle
import reprlib
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError

MAX_DEPTH = 100
"""Maximum nesting of lists, tuples and dictionaries; checkpoints have about ten levels."""
MAX_DIMS = 32
MAX_TUPLE_KEYS = 1000
"""Maximum number of tuple keys per file: crafted tuples with equal hashes make a dictionary's cost quadratic."""
ITEMS_PER_BYTE = 2
"""Items that constructors may process per byte of the file; regular files process every item once or twice."""
TREE_ITEMS_PER_BYTE = 16
"""Tree items per byte: a reference to a shared object takes two bytes, the object (shape, file name) a few items."""
FREE_ITEMS = 50_000
_KEYS = (str, int, float, bool, bytes, type(None), torch.dtype)
_MAX_INT = sys.hash_info.modulus
"""Modulus of integer hashes: smaller integers hash to themselves; all multiples hash to 0 (hash collisions)."""


@dataclass(eq=False)
class Record:
    """Inert replacement of an object: class name, constructor arguments and attributes."""

    kind: str
    args: tuple = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]


@dataclass(frozen=True)
class Kind:
    """A class or function named in a pickle; ``build`` replaces its constructor."""

    name: str
    build: Callable[..., object]


@dataclass(frozen=True)
class Storage:
    """A torch storage: ``numel`` elements of ``dtype`` in the record ``key`` of the file."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class StoredTensor:
    """A strided view of a storage; offset and strides are in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(storage: object, offset: Any, shape: Any, stride: Any, *_: object) -> StoredTensor:
    """Raises CheckpointDamagedError for elements outside the storage, or overlapping views with far more elements."""
    if not isinstance(storage, Storage):
        raise CheckpointDamagedError("a tensor without a storage")
    valid = isinstance(shape, list | tuple) and isinstance(stride, list | tuple) and len(shape) <= MAX_DIMS
    if not valid or len(shape) != len(stride) or not all(_is_size(n) for n in (offset, *shape, *stride)):
        raise CheckpointDamagedError(f"a tensor of malformed shape {reprlib.repr(shape):.60}")
    count, last = 1, offset
    for n, step in zip(shape, stride):
        count, last = count * n, last + (n - 1) * step
    # limit overlapping views (stride 0): a copy of one must not take much more memory than the file has bytes
    if count and (last >= storage.numel or count > max(storage.numel, FREE_ITEMS)):
        needed = max(last + 1, count)
        raise CheckpointDamagedError(
            f"a tensor of shape {list(shape)} needs {needed} elements, its storage has {storage.numel}; the file is "
            "damaged, copy it again"
        )
    return StoredTensor(storage, offset, tuple(shape), tuple(stride))


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _tensor_with_dtype(storage: object, offset: object, shape: object, stride: object, *rest: object) -> StoredTensor:
    """Replacement of ``torch._utils._rebuild_tensor_v3``: an untyped (uint8) storage plus a dtype argument."""
    dtype = rest[2] if len(rest) > 2 else None
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise CheckpointDamagedError("a tensor without a storage")
    return _tensor(Storage(storage.key, dtype, storage.numel // dtype.itemsize), offset, shape, stride)


def _tensor_with_type(_function: object, _type: object, args: object, _state: object = None) -> StoredTensor:
    return _tensor(*args) if isinstance(args, tuple) and 4 <= len(args) < 10 else _tensor(None, 0, (), ())


def _scalar(kind: object, data: object) -> object:
    code = kind.args[0] if isinstance(kind, Record) and kind.args else ""
    if code not in ("f4", "f8", "i4", "i8", "b1", "u4", "u8") or not isinstance(data, bytes):
        raise CheckpointDamagedError("a number of numpy of an unknown type")
    return np.frombuffer(data, dtype=code, count=1)[0].item()


def _encoded(text: str, _encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


def _items(kind: type) -> Callable[..., object]:
    """Accept only lists and tuples: a string would give one item per letter."""

    def build(*args: object) -> object:
        if len(args) > 1 or not all(isinstance(item, list | tuple) for item in args):
            raise CheckpointDamagedError(f"a {kind.__name__} of something else than items")
        return kind(*args)

    return build


def _member(kind: object, name: object = None) -> object:
    """Return an inert Record of an enum member, which Python 3.11.0 to 3.11.3 pickle as getattr(class, name)."""
    if not isinstance(kind, Kind) or not isinstance(name, str):
        raise CheckpointDamagedError("an attribute of something else than a class")
    return Record(kind.name, (name,))


ORDERED = "collections.OrderedDict"
_BUILT: dict[str, Callable[..., object]] = {
    ORDERED: lambda *_: {},
    "collections.defaultdict": lambda *_: {},
    "builtins.set": _items(tuple),
    "builtins.frozenset": _items(tuple),
    "builtins.list": _items(list),
    "builtins.tuple": _items(tuple),
    "builtins.getattr": _member,
    "builtins.complex": lambda *args: Record("builtins.complex", args),
    "builtins.bytearray": lambda *args: args[0] if args and isinstance(args[0], bytes) else _encoded(*args),
    "builtins.bytes": lambda *args: args[0] if args and isinstance(args[0], bytes) else b"",
    "_codecs.encode": _encoded,
    "torch.Size": _items(tuple),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_with_dtype,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_type,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray._reconstruct": lambda *_: Record("numpy.ndarray"),
    "numpy.core.multiarray._reconstruct": lambda *_: Record("numpy.ndarray"),
    "numpy._core.numeric._frombuffer": lambda *_: Record("numpy.ndarray"),
}
"""Name in a pickle -> replacement constructor. Subclasses of dict become dicts, sets become tuples."""

_INERT = (
    "argparse.Namespace",
    "torch.device",
    "torch.serialization._get_layout",
    "numpy.ndarray",
    "numpy.dtype",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "datetime.timedelta",
    "types.SimpleNamespace",
    "signal.Signals",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.torch_version.TorchVersion",
    "_io.BytesIO",
    "functools.partial",
)
_INERT_MODULES = ("torch.distributed.checkpoint.", "torch.nn.", "torch._C._nn.")
"""Prefixes of names that a run's arguments may contain (layers, activations, initializers); they become Records."""
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


def find_kind(module: str, name: str) -> object:
    """Return the :class:`Kind` that makes plain data for names in the tables, and an inert Record for classes of other
    packages; a torch dtype is returned itself. Imports nothing. Raises CheckpointError for a name of the standard
    library, numpy or torch that is not in the tables."""
    module = "builtins" if module == "__builtin__" else module
    full = f"{module}.{name}"
    if full in _BUILT:
        return Kind(full, _BUILT[full])
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return Kind(full, lambda *_: None)
    if module == "torch" and isinstance(dtype := torch.__dict__.get(name), torch.dtype):
        return dtype
    if module == "signal" and name in signal.Signals.__members__:  # pickled by name up to Python 3.11.3
        return Record("signal.Signals", (signal.Signals[name].value,))
    top = module.partition(".")[0]
    foreign = top not in sys.stdlib_module_names and top not in ("torch", "numpy")
    if full in _INERT or foreign or full.startswith(_INERT_MODULES):
        return Kind(full, lambda *args: Record(full, args))
    raise CheckpointError(f"the pickle is rejected: it requests {full!r:.120}; only tensors and plain data are read")


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """pickle's pure-Python unpickler with all opcodes replaced that call, look up or set something."""

    dispatch = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]
    stack: list[object]
    metastack: list[list[object]]
    pop_mark: Callable[[], list[object]]

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        super().__init__(file)
        self.items_left, self.num_tuple_keys = ITEMS_PER_BYTE * num_bytes + FREE_ITEMS, 0
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> object:
        return find_kind(module, name)

    def persistent_load(self, pid: Any) -> Storage:
        """Record the storage in ``storages``, where the first of a key stays."""
        # torch before 1.6 wrote a sixth item, a view of a storage; it is None since 0.4
        valid = isinstance(pid, tuple) and (len(pid) == 5 or (len(pid) == 6 and pid[5] is None))
        if not valid or pid[0] != "storage" or not isinstance(pid[1], Kind):
            raise CheckpointDamagedError("a persistent id that is no storage")
        dtype = _STORAGES.get(pid[1].name.rpartition(".")[2])
        if dtype is None or not isinstance(pid[2], str) or not _is_size(pid[4]):
            raise CheckpointDamagedError(f"a storage of unknown type {pid[1].name!r:.60}")
        storage = Storage(pid[2], dtype, pid[4])
        self.storages.setdefault(storage.key, storage)
        return storage

    def _spend(self, items: int) -> None:
        self.items_left -= items
        if self.items_left < 0:
            raise CheckpointDamagedError("a pickle that expands to far more than its bytes")

    def _call(self, kind: object, args: object) -> object:
        """Make a tensor or plain data for known names, else an inert Record; calls nothing of the file."""
        if not isinstance(kind, Kind) or not isinstance(args, tuple):
            raise CheckpointDamagedError(f"a pickle that calls a {type(kind).__name__}")
        sized = (value for value in args if isinstance(value, str | bytes | list | tuple | dict))
        self._spend(len(args) + sum(map(len, sized)))
        if kind.name == ORDERED and args:
            return self._dictionary(value for pair in args[0] for value in _pair(pair))
        return kind.build(*args)

    def _dictionary(self, items: Iterable[object]) -> dict:
        alternating = iter(items)
        return {self._key(key): value for key, value in zip(alternating, alternating)}

    def _key(self, key: object) -> object:
        """Allow plain values and tuples, three levels deep: hashing deeper tuples recurses in C without limit."""
        if isinstance(key, tuple):
            self.num_tuple_keys += 1
            if self.num_tuple_keys > MAX_TUPLE_KEYS:
                raise CheckpointDamagedError(f"a pickle with more than {MAX_TUPLE_KEYS} tuples for keys")
        self._check_key(key, 0)
        return key

    def _check_key(self, key: object, depth: int) -> None:
        """Integers are bounded too: other keys could make hashing expensive. Counts items against the work limit."""
        if isinstance(key, tuple) and depth < 3:
            self._spend(len(key))
            for item in key:
                self._check_key(item, depth + 1)
        elif not isinstance(key, (*_KEYS, Record, Kind)) or (isinstance(key, int) and abs(key) >= _MAX_INT):
            raise CheckpointDamagedError(f"a pickle with a {type(key).__name__} for a key")

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def load_newobj_ex(self) -> None:
        _keywords, args, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(self._call(kind, args))

    def load_build(self) -> None:
        """Store the state of an object in its Record: entries with text keys of a table; of a pair whose second item is
        a table, only the second's; another state as the attribute ``state``."""
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Record):
            return  # ignore attributes of dictionaries and tensors: they are never read
        table = state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) else state
        if isinstance(table, dict):
            self._spend(len(table))
            target.attributes.update({key: value for key, value in table.items() if isinstance(key, str)})
        else:
            target.attributes["state"] = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._table()[self._key(key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._table().update(self._dictionary(items))

    def load_dict(self) -> None:
        self.stack.append(self._dictionary(self.pop_mark()))

    def _table(self) -> dict:
        """Return the dictionary on top of the stack, or the attributes of a Record."""
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
        """Return the list on top of the stack, or the list ``items`` of a Record, created if missing."""
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

    def load_mark(self) -> None:
        if len(self.metastack) > MAX_DEPTH:  # each one-byte mark allocates a list of about 200 bytes
            raise CheckpointDamagedError(f"a pickle nested deeper than {MAX_DEPTH}")
        pickle._Unpickler.load_mark(self)  # type: ignore[attr-defined]

    def load_bytearray8(self) -> None:
        # read only the bytes that exist: pickle's opcode first allocates the size that the file claims
        self.stack.append(self.read(int.from_bytes(self.read(8), "little")))  # type: ignore[attr-defined]

    def refuse(self) -> None:
        raise CheckpointError("the pickle is rejected: it uses an instruction of old or foreign pickles")

    for _code, _step in (
        (pickle.REDUCE, load_reduce), (pickle.NEWOBJ, load_reduce), (pickle.NEWOBJ_EX, load_newobj_ex),
        (pickle.BUILD, load_build), (pickle.SETITEM, load_setitem), (pickle.SETITEMS, load_setitems),
        (pickle.DICT, load_dict), (pickle.APPEND, load_append), (pickle.APPENDS, load_appends),
        (pickle.ADDITEMS, load_appends), (pickle.EMPTY_SET, load_empty_set), (pickle.FROZENSET, load_frozenset),
        (pickle.MARK, load_mark), (pickle.BYTEARRAY8, load_bytearray8),
        (pickle.INST, refuse), (pickle.OBJ, refuse), (pickle.EXT1, refuse), (pickle.EXT2, refuse),
        (pickle.EXT4, refuse), (pickle.PERSID, refuse), (pickle.NEXT_BUFFER, refuse), (pickle.READONLY_BUFFER, refuse),
        # protocol-0 text numbers and strings, and integers of over 255 bytes: their conversion takes quadratic time
        (pickle.INT, refuse), (pickle.LONG, refuse), (pickle.FLOAT, refuse), (pickle.STRING, refuse),
        (pickle.UNICODE, refuse), (pickle.PUT, refuse), (pickle.GET, refuse), (pickle.LONG4, refuse),
    ):  # fmt: skip
        dispatch[_code[0]] = _step  # type: ignore[assignment]


def _pair(pair: object) -> Any:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise CheckpointDamagedError("a dictionary of something else than pairs")
    return pair


def _children(item: Any) -> list[object]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    return [item.args, item.attributes] if isinstance(item, Record) else list(item)


def _check_tree(value: object, limit: int) -> None:
    """Shared objects count once per reference, as when the value is printed or written as JSON."""
    sizes: dict[int, tuple[int, int]] = {}  # items and depth below an object, by id
    open_ids: set[int] = set()  # ids on the path from the root to the current object
    todo = [value]

    def is_container(item: object) -> bool:
        return isinstance(item, list | tuple | dict | Record)

    def measure(item: object) -> tuple[int, int]:
        if is_container(item):
            return sizes[id(item)]
        return 1 + (len(item) // 64 if isinstance(item, str | bytes) else 0), 0

    while todo:
        item = todo[-1]
        if not is_container(item) or id(item) in sizes:
            todo.pop()
            continue
        children = _children(item)
        if id(item) not in open_ids:
            open_ids.add(id(item))
            pending = [child for child in children if is_container(child) and id(child) not in sizes]
            if len(open_ids) > MAX_DEPTH or any(id(child) in open_ids for child in pending):
                raise CheckpointDamagedError(f"a pickle nested deeper than {MAX_DEPTH}, or in itself")
            todo += pending
            continue
        todo.pop()
        open_ids.discard(id(item))
        below = [measure(child) for child in children]
        sizes[id(item)] = 1 + sum(size for size, _ in below), 1 + max((depth for _, depth in below), default=0)
        if sizes[id(item)][0] > limit or sizes[id(item)][1] > MAX_DEPTH:
            raise CheckpointDamagedError("a pickle that expands to far more than its bytes")


def unpickle(file: BinaryIO, num_bytes: int, where: str, storages: dict[str, Storage] | None = None) -> Any:
    """Read the next pickle in ``file``; return plain data in which tensors are :class:`StoredTensor`.

    Args:
        file: a stream whose ``read`` never allocates more than the bytes that exist.
        num_bytes: size of the pickle, or an upper bound; limits the work.
        where: the file name for messages.
        storages: updated in place with the storages of the pickle, by key.

    Raises:
        CheckpointError: the pickle requests another class or function (named), exceeds a limit, or is incomplete."""
    try:
        machine = _Unpickler(file, num_bytes)
        value = machine.load()
        _check_tree(value, TREE_ITEMS_PER_BYTE * num_bytes + FREE_ITEMS)
        if storages is not None:
            storages |= machine.storages
        return value
    except CheckpointError as error:
        raise type(error)(f"{where}: {error}") from None
    except Exception as error:  # a crafted file can raise any exception in pickle's opcodes
        raise CheckpointDamagedError(f"{where}: damaged: not a complete pickle ({type(error).__name__})") from None
