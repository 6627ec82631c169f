"""Entry scripts of earlier years import this module; what it held is ``megatron.core`` now. There is nothing else."""

from typing import Any, NoReturn


class GPTModel:
    """Named in annotations; ``--use-legacy-models``, which would build it, has no effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("megatron.compat.legacy_model.GPTModel is gone: use megatron.core.models.gpt.GPTModel")
