"""Smaller models from trained ones. Megatron-LM's package of this name runs NVIDIA's ModelOpt, which is not used."""
