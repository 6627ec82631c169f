"""--save-hf-interval: convert checkpoints to Hugging Face folders."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from pathlib import Path

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing.files import read_json
from megatron.export.hf import save_hf
from megatron.export.hf.registry import read_config
from megatron.export.hf.side_files import CONFIG
from megatron.export.native import load_native
from megatron.training.hooks.base import Hook
from megatron.training.observe.kinds.save import SAVE
from megatron.training.observe.records import Record, RecordKind

logger = logging.getLogger(__name__)


class HuggingFaceHook(Hook):
    """Converts each complete checkpoint whose iteration is a multiple of ``interval`` to ``<save>/hf/iter_…``. One rank
    does so in a background thread: other ranks would wait in a collective until its time-out. If a conversion fails,
    training continues and the run ends with a non-zero exit code. ``source``: folder of --load-hf, whose model_type is
    used if several types fit the model; of a model of images and text, the folder that is copied."""

    kinds = (SAVE,)

    def __init__(self, save: str, interval: int, source: str | None = None, model_family: str | None = None) -> None:
        self.save, self.interval = save, interval
        self.model_type, self.original = None, None
        if source is not None:
            self.model_type = read_config(Path(source) / CONFIG, model_family).get("model_type")
            has_images = "vision_config" in read_json(Path(source) / CONFIG)
            self.original = source if has_images else None
        self._thread: threading.Thread | None = None

    def on_record(self, kind: RecordKind, record: Record) -> None:
        """Start the conversion of a due checkpoint in the background. First waits for the previous conversion."""
        if record["iteration"] % self.interval == 0:
            self._wait()
            name = f"iter_{record['iteration']:07d}"
            self._thread = threading.Thread(target=self._convert, args=(name,), name="conversion", daemon=True)
            self._thread.start()

    def on_end(self) -> None:
        self._wait()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _convert(self, name: str) -> None:
        """Background thread. Logs any error and appends it to ``self.failure``; never raises."""
        try:
            convert_to_hf(Path(self.save) / name, Path(self.save) / "hf" / name, self.model_type, self.original)
        except Exception as error:  # an exception that ends a thread would go unnoticed
            is_expected = isinstance(error, UserError | OSError)
            reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
            message = f"--save-hf-interval: {name} was not converted: {reason}"
            logger.error(message, exc_info=not is_expected)
            self.failure = f"{self.failure}; {message}" if self.failure else message


def convert_to_hf(
    checkpoint: str | os.PathLike, folder: str | os.PathLike, model_type: str | None = None, original: str | None = None
) -> None:
    """Write the weights of a native checkpoint, without optimizer state, as a Hugging Face folder, which appears only
    when complete; an existing one is renamed before to ``<folder>-set-aside-<number>``. ``model_type`` selects among
    types that fit the model. ``original``: see :func:`megatron.export.hf.save_hf`."""
    interchange = load_native(checkpoint)
    weights = {name: tensor for name, tensor in interchange.tensors.items() if name.startswith("model.")}
    interchange.tensors, interchange.objects = weights, {}
    if os.path.isdir(folder):  # from a history that was abandoned
        numbers = (f"{folder}-set-aside-{number:03d}" for number in itertools.count(1))
        os.rename(folder, next(name for name in numbers if not os.path.lexists(name)))
    save_hf(interchange, folder, preferred=model_type, original=original)
    logger.info("  wrote %s in Hugging Face's format", folder)
