"""The counters that move during training. They are all that a checkpoint needs, beside tensors, to go on."""

from dataclasses import asdict, dataclass

from megatron.core.config.errors import UserError


@dataclass
class TrainState:
    """Progress of a run. Everything the schedules need is a function of ``consumed_train_samples``."""

    iteration: int = 0
    """Completed iterations, the skipped ones included."""
    consumed_train_samples: int = 0
    """Samples taken from the training data set, also those of skipped iterations."""
    skipped_train_samples: int = 0
    """The part of them whose iteration did not update the weights (--iterations-to-skip)."""
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    """Updates refused because of an overflow under a dynamic loss scale."""
    floating_point_operations: float = 0.0
    """Model FLOPs so far, summed over all ranks."""

    def to_dict(self) -> dict:
        """Plain numbers, for the checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "TrainState":
        """Inverse of :meth:`to_dict`; an unknown or missing counter is a ``ValueError``."""
        names = set(cls.__dataclass_fields__)
        if set(values) != names:
            raise UserError(f"train state has counters {sorted(values)}, expected {sorted(names)}")
        return cls(**values)
