"""Alias of :mod:`megatron.compat.yaml_arguments` for programs that import it by this name."""

from megatron.compat.yaml_arguments import *  # noqa: F403
