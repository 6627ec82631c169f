"""The library; ``compat/names.tsv`` has further names of Megatron-LM's package."""

from megatron import serve_other_names

serve_other_names(__name__)
