"""The name by which existing programs import :mod:`megatron.compat.yaml_arguments`."""

from megatron.compat.yaml_arguments import *  # noqa: F403
