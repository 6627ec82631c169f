"""Index builders: which document and offset each sample starts at, which source each blended sample comes from, and the
shuffle that orders them.

The arithmetic runs in C++ (``helpers.cpp``) where the extension was built, else in numpy; both return the same bytes,
so a cache written by one is read by the other. The rules equal Megatron-LM's (docs/reference/data_format.md)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from megatron.core.config.errors import UserError

try:
    # not inside megatron: a script that runs in a checkout sees the checkout's megatron, which would hide the extension
    # of the installed package
    import megatron_data_helpers as _cpp
except ImportError:  # never built: the numpy twins below are the implementation
    _cpp = None

MAX_SOURCES = 32767  # the source number of a blended sample is stored as int16
_INT32_MAX = np.iinfo(np.int32).max


def has_extension() -> bool:
    """Whether the C++ builders are in use."""
    return _cpp is not None


def compiled(name: str) -> Callable[..., Any] | None:
    """The C++ function ``name``; None where the extension was not built, or before that function was in it."""
    return getattr(_cpp, name, None)


def shuffle(values: np.ndarray, random_state: np.random.RandomState) -> None:
    """Shuffle the 1-D ``values`` in place: same permutation, same state afterwards as ``random_state.shuffle``. Uses
    C++ for contiguous int32, uint32 and int64 arrays, if it is built."""
    functions = {"int32": "shuffle_int32", "uint32": "shuffle_uint32", "int64": "shuffle_int64"}
    name = functions.get(values.dtype.name)
    if _cpp is None or name is None or values.ndim != 1 or not values.flags.c_contiguous or len(values) >= 2**32:
        random_state.shuffle(values)
        return
    state = random_state.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        random_state.shuffle(values)
        return
    inner = state["state"]
    inner["key"] = np.ascontiguousarray(inner["key"], dtype=np.uint32)
    inner["pos"] = getattr(_cpp, name)(values, inner["key"], int(inner["pos"]))
    random_state.set_state(state)


def count_samples(num_tokens: int, sequence_length: int, drop_last_partial_sequence: bool, extra_token: int) -> int:
    """Samples of ``sequence_length`` in ``num_tokens``: each shares its extra token with the next sample's first."""
    usable = max(num_tokens - extra_token, 0)
    return usable // sequence_length if drop_last_partial_sequence else -(-usable // sequence_length)


def build_sample_idx(
    sizes: np.ndarray,
    document_indices: np.ndarray,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> np.ndarray:
    """Return where every sample starts in the concatenation of the documents.

    Args:
        sizes: int32[d], tokens per document of the whole data set.
        document_indices: int32 or int64[n], the document order (all epochs).
        sequence_length: tokens per sample, without the extra token.
        num_epochs, tokens_per_epoch: their product is the number of tokens in ``document_indices``.

    Returns:
        [samples + 1, 2]: position in ``document_indices`` and token offset in that document. The last row ends the last
        sample. int32 where ``document_indices`` is int32 and short enough, else int64; the values do not depend on it.
    """
    if sequence_length < 1:
        raise UserError(f"sequence_length is {sequence_length}; it must be at least 1")
    extra = int(add_extra_token_to_sequence)
    num_samples = count_samples(num_epochs * tokens_per_epoch, sequence_length, drop_last_partial_sequence, extra)
    narrow = document_indices.dtype == np.int32 and len(document_indices) <= _INT32_MAX
    documents = np.ascontiguousarray(document_indices, dtype=np.int32 if narrow else np.int64)
    if _cpp is None:
        return build_sample_idx_numpy(sizes, documents, sequence_length, num_samples, extra)
    build = _cpp.build_sample_idx_int32 if narrow else _cpp.build_sample_idx_int64
    # an .idx maps its lengths at a byte offset of 34: the copy aligns them and reads the file in order
    return build(aligned(sizes, np.int32), documents, sequence_length, num_samples, extra)


def build_sample_idx_numpy(
    sizes: np.ndarray, documents: np.ndarray, sequence_length: int, num_samples: int, extra: int
) -> np.ndarray:
    """Return the same array as ``build_sample_idx`` in C++, [samples + 1, 2] (document position, token offset) in the
    dtype of ``documents``, by searching token positions in the running sum of lengths. ``extra`` is 0 or 1. Raises
    ValueError for documents outside the data set or too few tokens."""
    if len(documents) and (int(documents.min()) < 0 or int(documents.max()) >= len(sizes)):
        raise ValueError("a document number lies outside the data set")
    result = np.zeros((num_samples + 1, 2), dtype=documents.dtype)
    if num_samples == 0:
        return result
    lengths = sizes[documents].astype(np.int64)
    ends = np.cumsum(lengths)
    boundaries = np.arange(1, num_samples + 1, dtype=np.int64) * sequence_length
    holder = np.searchsorted(ends, boundaries - (1 - extra), side="right")
    beyond = int(np.count_nonzero(holder >= len(documents)))
    if beyond > 1 or (beyond and not len(documents)):
        raise ValueError("the documents hold fewer tokens than the samples need")
    inside = num_samples - beyond
    result[1 : inside + 1, 0] = holder[:inside]
    result[1 : inside + 1, 1] = boundaries[:inside] - (ends - lengths)[holder[:inside]]
    if beyond:  # the last, partial sample ends with the last document
        result[-1] = len(documents) - 1, int(lengths[-1]) - extra
    return result


def build_blending_indices(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``size`` samples in proportion to ``weights`` (positive, sum 1).

    Step k takes the source with the largest ``weight * max(k, 1) - taken``, the first one among equals.

    Returns:
        source number int16[size] and the sample number within that source int64[size]."""
    weights = np.ascontiguousarray(weights, dtype=np.float64)
    _check_source_count(len(weights))
    if _cpp is not None:
        return _cpp.build_blending_indices(weights, size)
    return build_blending_indices_numpy(weights, size)


def build_blending_indices_numpy(
    weights: np.ndarray, size: int, limits: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same arrays as ``build_blending_indices`` in C++: (source int16, its sample int64) per sample; each
    step takes the source that is furthest below its share, the first among equals. A source at its limit is not drawn
    again; ``size`` must not exceed the sum of ``limits``."""
    drawn = np.zeros(len(weights), dtype=np.float64)
    if limits is not None:
        drawn[limits == 0] = np.inf  # infinity closes a source
    errors = np.empty_like(drawn)
    source = np.empty(size, dtype=np.int16)
    source_sample = np.empty(size, dtype=np.int64)
    for step in range(size):
        np.multiply(weights, max(float(step), 1.0), out=errors)
        np.subtract(errors, drawn, out=errors)
        winner = errors.argmax()
        source[step] = winner
        source_sample[step] = drawn[winner]
        drawn[winner] += 1.0
        if limits is not None and drawn[winner] == limits[winner]:
            drawn[winner] = np.inf
    return source, source_sample


def build_exhaustive_blending_indices(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Interleave exactly ``sizes[i]`` samples of every source i evenly, until all are used up; same arrays as above."""
    sizes = np.ascontiguousarray(sizes, dtype=np.int64)
    _check_source_count(len(sizes))
    if _cpp is not None:
        return _cpp.build_exhaustive_blending_indices(sizes)
    return build_exhaustive_blending_indices_numpy(sizes)


def build_exhaustive_blending_indices_numpy(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numpy twin of ``build_exhaustive_blending_indices``."""
    total = int(sizes.sum())
    return build_blending_indices_numpy(sizes / max(total, 1), total, sizes)


def _check_source_count(count: int) -> None:
    if not 1 <= count <= MAX_SOURCES:
        raise UserError(
            f"{count} data sources: a blend takes 1 to {MAX_SOURCES}; merge some with tools/merge_datasets.py"
        )


def aligned(values: np.ndarray, dtype: type) -> np.ndarray:
    """``values`` itself where C++ can read it in place, else a copy."""
    return np.require(values, dtype=dtype, requirements=["C", "A"])
