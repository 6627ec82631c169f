"""Loss scaling for fp16 training: constant and dynamic. The scale keeps small gradients representable."""

from __future__ import annotations

from typing import Any

from megatron.core.config.errors import UserError


class ConstantGradScaler:
    """Constant loss scale (--loss-scale). Raises UserError unless it is positive."""

    def __init__(self, scale: float) -> None:
        if scale <= 0:
            raise UserError(f"--loss-scale {scale}: must be positive")
        self.scale = float(scale)

    def update(self, found_inf: bool) -> None:
        """Do nothing; the scale is constant."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scale as a plain float."""
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the checkpoint: a constant scale comes from the flags."""


class DynamicGradScaler:
    """Dynamic loss scale: shrinks after overflows, grows after a window of finite steps. From the ``hysteresis``-th
    overflow since the last growth on, each overflow multiplies the scale by ``backoff_factor`` in (0, 1), down to
    ``min_scale``. ``growth_interval`` consecutive steps without overflow multiply it by ``growth_factor`` > 1 and reset
    the hysteresis. UserError if an argument is out of range."""

    def __init__(
        self, initial_scale: float = 2.0**32, min_scale: float = 1.0, growth_factor: float = 2.0,
        backoff_factor: float = 0.5, growth_interval: int = 1000, hysteresis: int = 2,
    ) -> None:  # fmt: skip
        if not 0 < min_scale <= initial_scale:
            raise UserError(f"--min-loss-scale {min_scale}: must be in (0, --initial-loss-scale {initial_scale}]")
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise UserError(f"growth factor {growth_factor} must exceed 1 and back-off {backoff_factor} be in (0, 1)")
        if growth_interval <= 0 or hysteresis <= 0:
            raise UserError(f"--loss-scale-window {growth_interval}, --hysteresis {hysteresis}: both must be positive")
        self.scale = float(initial_scale)
        self.min_scale, self.growth_factor, self.backoff_factor = float(min_scale), growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.growth_tracker = 0
        self.hysteresis_tracker = hysteresis

    def update(self, found_inf: bool) -> None:
        """Update scale and counters after a step. No collective: all ranks must pass the same ``found_inf``."""
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.hysteresis
            self.scale *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and both counters as plain numbers."""
        return {
            "scale": self.scale, "growth_tracker": self.growth_tracker, "hysteresis_tracker": self.hysteresis_tracker,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scale and both counters from the dictionary of :meth:`state_dict`; KeyError if one is missing.
        Windows, factors and bounds stay as constructed, and the scale is not clamped to them."""
        self.scale = float(state_dict["scale"])
        self.growth_tracker = int(state_dict["growth_tracker"])
        self.hysteresis_tracker = int(state_dict["hysteresis_tracker"])
