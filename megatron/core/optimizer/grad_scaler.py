"""Loss scales of fp16 training: a factor on the loss that keeps small gradients representable."""

from __future__ import annotations

from typing import Any

from megatron.core.config.errors import UserError


class ConstantGradScaler:
    """A fixed scale (--loss-scale)."""

    def __init__(self, scale: float) -> None:
        if scale <= 0:
            raise UserError(f"--loss-scale {scale}: must be positive")
        self.scale = float(scale)

    def update(self, found_inf: bool) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A constant comes from the flags, not from a checkpoint."""


class DynamicGradScaler:
    """Backs off at overflows and grows back.

    ``hysteresis`` overflows without a growth between them halve the scale (and so does each further one);
    ``growth_interval`` steps without overflow double it and restore the patience.

    Args:
        initial_scale: --initial-loss-scale.
        min_scale: --min-loss-scale, never undercut.
        growth_factor, backoff_factor: above and below 1.
        growth_interval: --loss-scale-window.
        hysteresis: --hysteresis.
    """

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
        """After a step that overflowed, or did not."""
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
        """Plain numbers."""
        return {
            "scale": self.scale, "growth_tracker": self.growth_tracker, "hysteresis_tracker": self.hysteresis_tracker,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.scale = float(state_dict["scale"])
        self.growth_tracker = int(state_dict["growth_tracker"])
        self.hysteresis_tracker = int(state_dict["hysteresis_tracker"])
