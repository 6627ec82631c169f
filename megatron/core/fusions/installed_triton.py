"""Triton, and its language, where it is installed: CPU builds of torch come without it."""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None
