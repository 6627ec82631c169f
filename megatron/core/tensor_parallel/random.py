"""Seeds of torch's own generators, for programs and modules that draw from them.

The library itself draws nothing from them: initial weights and dropout masks are functions of seed and position
(``megatron.core.random.philox``) and are the same for any layout.
"""

from __future__ import annotations

import torch


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch on the CPU and on every GPU; the same on all ranks."""
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
