"""Triton and its language if installed, else None: CPU builds of torch do not include it."""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None
