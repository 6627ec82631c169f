"""Settings of the data: files, splits and loading."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Dim, Range


def parse_split(text: str) -> list[float]:
    """Parse ``"949,50,1"``; return exactly three floats (train, validation, test), not normalized, with 0 for missing
    ones. Accepts ``/`` as separator, stray quotes and spaces. Raises ``ValueError`` with the reason for more than
    three, negative, non-finite or all-zero numbers."""
    parts = [part for part in text.strip("'\" ").replace("/", ",").split(",") if part.strip("'\" ")]
    try:
        shares = [float(part.strip("'\" ")) for part in parts]
    except ValueError:
        raise ValueError("must be up to three numbers such as 949,50,1") from None
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < math.inf:  # a NaN's sum is no number
        raise ValueError("must be up to three numbers, none negative and not all 0, such as 949,50,1")
    return shares + [0.0] * (3 - len(shares))


@dataclass(kw_only=True)
class DataConfig(FlagGroup):
    """Data and loader"""

    data_path: list[str] | None = flag("--data-path", nargs="*", metavar="[WEIGHT] PREFIX")
    """Data sets: one prefix, several, or pairs of weight and prefix; --split divides each into train, validation and
    test. A prefix is what tools/preprocess_data.py wrote, without .bin or .idx."""

    split: str | None = flag("--split", check=parse_split)
    """Shares of training, validation and test documents of --data-path, such as 949,50,1; default: 969,30,1."""

    train_data_path: list[str] | None = flag("--train-data-path", nargs="*", metavar="[WEIGHT] PREFIX")
    """Training data, like --data-path but not split."""

    valid_data_path: list[str] | None = flag("--valid-data-path", nargs="*", metavar="[WEIGHT] PREFIX")
    """Validation data, like --data-path but not split."""

    test_data_path: list[str] | None = flag("--test-data-path", nargs="*", metavar="[WEIGHT] PREFIX")
    """Test data, like --data-path but not split."""

    data_args_path: str | None = None
    """File with the arguments of --data-path, for very long lists."""

    per_split_data_args_path: str | None = None
    """JSON file with the lists "train", "valid" and "test", each like --train-data-path."""

    mock_data: bool = False
    """Train on generated tokens; no data path is needed."""

    data_cache_path: str | None = None
    """Directory for index caches; default: next to the data."""

    mmap_bin_files: bool = True
    """Memory-map .bin files, instead of reading them."""

    seq_length: Dim = flag()
    """Tokens per sequence. Required."""

    encoder_seq_length: Dim = flag()
    """Tokens per encoder sequence; alias of --seq-length."""

    dataloader_type: Literal["single", "cyclic", "external"] | None = None
    """single (default): one pass in the data set's shuffled order; cyclic: endless epochs, each reshuffled; external:
    the script provides its iterator. Equal speed."""

    num_workers: Annotated[int, Range(0, 1024)] = 2
    """Loader processes per rank; 0 loads in the training process."""

    num_dataset_builder_threads: Annotated[int, Range(1, 1024)] = 1
    """Threads that build the indices of a blend."""

    mid_level_dataset_surplus: Annotated[float, Range(0, 100)] = 0.005
    """Fraction of extra samples that each set of a blend prepares."""

    allow_ambiguous_pad_tokens: bool = False
    """Do not mask padding in the loss if its id is also an ordinary token's, such as end of document."""
