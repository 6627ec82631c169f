"""A pretraining suite, and the names under which programs written for Megatron-LM import it (``compat/names.tsv``)."""

import sys

from megatron.compat.names import Finder, serve_calls, serve_other_names
from megatron.compat.namespace import open_namespace

__all__ = ["serve_calls", "serve_other_names"]
__version__ = "0.1.0"

__path__ = open_namespace(__path__)  # other distributions have modules named megatron.…

if Finder not in sys.meta_path:
    sys.meta_path.append(Finder)
