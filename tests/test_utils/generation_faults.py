"""Faults in the generator's order of sums, which ``tools/verify_generation.py`` must find."""

from megatron.core.fusions import batch_invariant_attention, batch_invariant_product


def split_k():
    """Add the sums of two halves of K, as split-K GEMMs do, where the definition adds one sum."""
    from megatron.core.tensor_parallel import batch_invariant

    full = batch_invariant_product.batch_invariant_product

    def split(x, weight, parts=1, dtype=None):
        return full(x, weight, 2 if parts == 1 else parts, dtype)

    batch_invariant.batch_invariant_product = split


def other_key_blocks():
    """Attend to keys in blocks of another size."""
    batch_invariant_attention.ROWS = 16
