"""Which layers have a sliding window. Torch-free."""

from __future__ import annotations

Window = tuple[int, int]
"""Keys seen to the left and right of a query; -1 is unlimited."""


def layer_window(window: Window | None, skip: int | list[int] | None, layer_number: int) -> Window | None:
    """The window of layer ``layer_number`` (from 1): every ``skip``-th layer, or those with a 0 in a list, have
    none. Layers behind the list's are as its last."""
    if window is None or window == (-1, -1):
        return None
    if skip is None:
        return window
    has_window = layer_number % skip != 0 if isinstance(skip, int) else bool(skip[min(layer_number, len(skip)) - 1])
    return window if has_window else None
