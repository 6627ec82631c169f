"""Enumerations of settings that this library names by strings, or does not have."""

from enum import Enum


class Fp8Recipe(str, Enum):
    """Recipes of fp8. Settings accept delayed, tensorwise and blockwise."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"


class LayerType(Enum):
    """Kinds of entries of a pipeline layout."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5
