"""Image files, read with Pillow. Torch-free. Only this file imports it, when an image is read.

Pixels equal the pixels of ``transformers``: the first frame, turned as its EXIF orientation says, in RGB (alpha
channels are dropped, a transparent color is white), resized with bicubic interpolation."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import numpy as np

from megatron.core.config.errors import UserError
from megatron.core.safe_files import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

Source: TypeAlias = str | bytes
"""Path or content of a file."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Others start programs (EPS) or are rare."""
MAX_PIXELS = 1 << 27
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""Forms with 8 bits per channel or fewer."""
ORIENTATION = 0x0112
SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations that exchange height and width."""


class ImageError(Exception):
    """An image that cannot be read; its text is the reason."""


def _opened(file: BinaryIO) -> PillowImage:
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("images need Pillow, which is not installed: pip install pillow") from error
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageError(f"has more than {MAX_PIXELS} pixels") from error
    except Exception as error:  # damaged bytes cause errors of many classes
        raise ImageError(f"is no readable image of {', '.join(FORMATS)}") from error
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(f"has more than {MAX_PIXELS} pixels")
    if image.mode not in MODES:
        raise ImageError(f"has pixels of the form {image.mode}, not 8 bits per channel")
    return image


def _file(source: Source) -> BinaryIO:
    return BytesIO(source) if isinstance(source, bytes) else open_regular(source)


def image_size(source: Source) -> tuple[int, int]:
    """Return height and width of an image file, without decoding it. Raises ImageError."""
    try:
        with _file(source) as file:
            image = _opened(file)
            is_sideways = image.getexif().get(ORIENTATION) in SIDEWAYS
            return (image.width, image.height) if is_sideways else (image.height, image.width)
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror or error})") from error


def read_image(
    source: Source, height: int, width: int, *, fit: str = "stretch", color: tuple[int, ...] = (0, 0, 0)
) -> np.ndarray:
    """Return the pixels of an image file, resized, uint8 [height, width, 3]. Raises ImageError.

    Args:
        fit: ``stretch``; ``crop``: cover the size with the same ratio of sides, and cut the center out; ``pad``: make a
            square with borders of ``color``, then ``crop``."""
    try:
        with _file(source) as file:
            image = _opened(file)
            from PIL import Image, ImageOps

            upright = ImageOps.exif_transpose(image).convert("RGB")
            if upright.info.get("transparency") is not None:
                keyed = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", keyed.size, "white"), keyed).convert("RGB")
            if fit == "pad":
                upright = _square(upright, color)
            if fit != "stretch":
                return _cropped(upright, height, width)
            return np.asarray(upright.resize((width, height), Image.Resampling.BICUBIC))
    except ImageError:
        raise
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror or error})") from error
    except Exception as error:  # as above
        raise ImageError(f"is damaged ({error})") from error


def _square(image: PillowImage, color: tuple[int, ...]) -> PillowImage:
    from PIL import Image

    side = max(image.size)
    square = Image.new("RGB", (side, side), color)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _cropped(image: PillowImage, height: int, width: int) -> np.ndarray:
    from PIL import Image

    if image.height * width <= image.width * height:
        size = height * image.width // image.height, height
    else:
        size = width, width * image.height // image.width
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    resized = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(resized.crop((left, top, left + width, top + height)))
