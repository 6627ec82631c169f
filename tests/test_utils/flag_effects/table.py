"""The whole table: all rows, and the flags that have none, each with the reason."""

from tests.test_utils.flag_effects import (
    checkpoints,
    data,
    experts,
    fp8,
    layouts,
    masked,
    network,
    optimizer,
    positions,
    sft,
    tokenizers,
    training,
    vision,
)

TABLE = [
    *network.ROWS, *positions.ROWS, *optimizer.ROWS, *training.ROWS, *data.ROWS, *checkpoints.ROWS, *layouts.ROWS,
    *tokenizers.ROWS, *experts.ROWS, *masked.ROWS, *fp8.ROWS, *sft.ROWS, *vision.ROWS,
]  # fmt: skip

EXEMPT: dict[str, str] = {}
