"""Counters that change during training; with the tensors, a checkpoint needs nothing else to resume."""

from dataclasses import asdict, dataclass

from megatron.core.config.errors import UserError


@dataclass
class TrainState:
    """Progress of a run. Schedules depend only on ``consumed_train_samples``."""

    iteration: int = 0
    """Completed iterations, including skipped ones."""
    consumed_train_samples: int = 0
    """Samples consumed from the training data set, including skipped iterations."""
    skipped_train_samples: int = 0
    """Consumed samples whose iteration did not update the weights (--iterations-to-skip)."""
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    """Optimizer steps skipped because of an overflow under a dynamic loss scale."""
    floating_point_operations: float = 0.0
    """Model FLOPs so far, summed over all ranks."""

    def to_dict(self) -> dict:
        """Return plain numbers for the checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "TrainState":
        """Inverse of :meth:`to_dict`. Raises UserError for unknown or missing counters."""
        names = set(cls.__dataclass_fields__)
        if set(values) != names:
            missing, unknown = (
                ", ".join(sorted(keys)) or "none" for keys in (names - set(values), set(values) - names)
            )
            raise UserError(
                f"train state: counters missing: {missing}; unknown: {unknown}; another version wrote the checkpoint: "
                "--finetune loads its weights only"
            )
        return cls(**values)
