"""T5 models."""
