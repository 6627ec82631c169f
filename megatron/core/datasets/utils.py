"""Re-exports for programs that import these names; ``megatron.data`` implements them."""

import logging

from megatron.data.blend import Split, get_blend_from_list, normalize
from megatron.data.helpers import has_extension

__all__ = ["Split", "compile_helpers", "get_blend_from_list", "normalize"]

logger = logging.getLogger(__name__)


def compile_helpers() -> None:
    """Say which index builders are in use. Nothing is compiled at run time: installation did, where it could."""
    builders = "the C++ extension" if has_extension() else "numpy (the C++ extension was not built: same results)"
    logger.info("dataset index builders: %s", builders)
