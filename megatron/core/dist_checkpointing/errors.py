"""Errors of checkpoints. Every message names the file or tensor, and the reason."""

from megatron.core.config.errors import UserError


class CheckpointError(UserError):
    """A checkpoint cannot be read, or does not fit what should be loaded from it."""


class CheckpointDamagedError(CheckpointError):
    """Files of a checkpoint are missing, foreign or changed since they were written; an earlier one may be whole."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written (disk full, no permission …). What was there before is untouched."""
