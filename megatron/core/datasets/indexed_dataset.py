"""The import path that programs know; see ``megatron.data.indexed_dataset``."""

from megatron.data.indexed_dataset import *  # noqa: F403
