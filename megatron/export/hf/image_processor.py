"""Settings of the image processor in a folder of a Hugging Face model. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.config.errors import UserError
from megatron.core.safe_files import MAX_TEXT_BYTES, parse_json, read_file

FILES = ("preprocessor_config.json", "processor_config.json")
"""The second has the settings under ``image_processor``."""


def read_image_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of sizes and colors that the first of these files has; none without a file. Raises UserError
    for a damaged file."""
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        return {}
    try:
        values = parse_json(read_file(path, MAX_TEXT_BYTES).decode())
        values = values.get("image_processor", values)
        size = values.get("size") or {}
        size = size if "longest_edge" in size else {}  # else the length of a side, not a number of pixels
        settings = {
            "image_min_pixels": values.get("min_pixels") or size.get("shortest_edge"),
            "image_max_pixels": values.get("max_pixels") or size.get("longest_edge"),
            "image_mean": values.get("image_mean"),
            "image_std": values.get("image_std"),
        }
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as the settings of an image processor ({error})") from None
    return {name: value for name, value in settings.items() if value is not None}
