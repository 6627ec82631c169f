"""The call stack in docs/developers/life_of_a_batch.md is that of a run."""

import sys
import traceback
from pathlib import Path
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

import pretrain_gpt
from tests.test_utils.gpt_runs import MODEL_FLAGS

ROOT = Path(__file__).parents[2]


class FirstBatchedGemm(TorchDispatchMode):
    """Keeps the calls of this repository, ``file: function``, that lead to the first batched GEMM: QK^T."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.calls and "aten.bmm" in str(function):
            # an environment may be inside of the repository
            local = (frame for frame in traceback.extract_stack() if "site-packages" not in frame.filename)
            frames = [frame for frame in local if Path(frame.filename).is_relative_to(ROOT)]
            first = [frame.name for frame in frames].index("main")
            calls = [f"{Path(frame.filename).relative_to(ROOT)}: {frame.name}" for frame in frames[first:-1]]
            self.calls = [frame for frame in calls if not frame.endswith(": call")]  # a frame only before Python 3.11
        return function(*args, **(kwargs or {}))


def calls_to_attention(rank, world_size):
    flags = ["--mock-data", "--train-iters", "1", "--lr-warmup-iters", "0", "--eval-iters", "0"]
    argv = ["pretrain_gpt.py", *MODEL_FLAGS, *flags, "--attention-backend", "unfused"]
    with patch.object(sys, "argv", argv), FirstBatchedGemm() as actual:
        assert pretrain_gpt.main() == 0
    return actual.calls


def test_the_documented_calls_lead_from_main_to_the_first_attention_gemm(gloo_pool):
    page = (ROOT / "docs/developers/life_of_a_batch.md").read_text().partition("## Call stack")[2]
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    documented = [f"{file.strip().strip('`')}: {function.strip().strip('`')}" for file, function in rows]
    (calls,) = gloo_pool.run(calls_to_attention, 1)
    assert documented == calls
