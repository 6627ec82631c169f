"""Checkpoint errors. Every message names the file or tensor and the reason."""

from megatron.core.config.errors import UserError


class CheckpointError(UserError):
    """A checkpoint cannot be read, or does not match the tensors requested from it."""


class CheckpointDamagedError(CheckpointError):
    """Files of a checkpoint are missing, foreign or modified; an earlier checkpoint may be intact."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written (disk full, no permission …). Existing checkpoints are unchanged."""
