"""BERT models."""

from megatron import serve_other_names

serve_other_names(__name__)
