"""``--save-hf-interval``: checkpoints as Hugging Face folders, beside the run's own."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.export.hf import save_hf
from megatron.core.export.native import load_native
from megatron.training.hooks.base import Hook
from megatron.training.train_state import TrainState

logger = logging.getLogger(__name__)


class HuggingFaceHook(Hook):
    """Converts every checkpoint whose iteration is a multiple of ``interval`` to ``<save>/hf/iter_…``, once it is
    complete. One rank does, behind training: the others would wait in a collective, which has a timeout. A conversion
    that fails is reported and costs nothing else."""

    def __init__(self, save: str, interval: int) -> None:
        self.save, self.interval = save, interval
        self._thread: threading.Thread | None = None

    def on_saved(self, state: TrainState) -> None:
        if state.iteration % self.interval == 0:
            self._wait()
            name = f"iter_{state.iteration:07d}"
            self._thread = threading.Thread(target=self._convert, args=(name,), name="conversion", daemon=True)
            self._thread.start()

    def on_train_end(self, state: TrainState) -> None:
        self._wait()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _convert(self, name: str) -> None:
        try:
            convert_to_hf(Path(self.save) / name, Path(self.save) / "hf" / name)
        except (UserError, OSError) as error:
            logger.error("--save-hf-interval: %s was not converted: %s", name, error)


def convert_to_hf(checkpoint: str | os.PathLike, folder: str | os.PathLike) -> None:
    """The weights of a native checkpoint as a Hugging Face folder, of which the name appears when it is complete."""
    interchange = load_native(checkpoint)
    weights = {name: tensor for name, tensor in interchange.tensors.items() if name.startswith("model.")}
    interchange.tensors, interchange.objects = weights, {}
    if os.path.isdir(folder):  # of a history that this run has left
        numbers = (f"{folder}-set-aside-{number:03d}" for number in itertools.count(1))
        os.rename(folder, next(name for name in numbers if not os.path.lexists(name)))
    save_hf(interchange, folder)
    logger.info("  wrote %s in Hugging Face's format", folder)
