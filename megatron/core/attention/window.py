"""Per-layer patterns of sliding windows and rotary embeddings. Torch-free."""

from __future__ import annotations

Window = tuple[int, int]
"""Number of visible keys to the left and right of a query; -1 is unlimited."""


def layer_window(window: Window | None, skip: int | list[int] | None, layer_number: int) -> Window | None:
    """Return the window of layer ``layer_number`` (from 1); None for full attention. ``skip`` n: every n-th layer has
    no window; ``skip`` list: one entry per layer, 0 for no window; the last entry applies to all further layers."""
    if window is None or window == (-1, -1):
        return None
    if skip is None:
        return window
    has_window = layer_number % skip != 0 if isinstance(skip, int) else bool(skip[min(layer_number, len(skip)) - 1])
    return window if has_window else None


def has_rotation(without: int | list[int] | None, layer_number: int) -> bool:
    """Return whether layer ``layer_number`` (from 1) applies rotary embeddings. ``without`` n: every n-th layer does
    not; ``without`` list: entry 1 for no rotary embedding, and the last entry is valid for all further layers."""
    if without is None:
        return True
    if isinstance(without, int):
        return layer_number % without != 0
    return not without[min(layer_number, len(without)) - 1]
