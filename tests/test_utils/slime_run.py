"""Run the Megatron backend of a checkout of slime on a CPU: ``python -m tests.test_utils.slime_run CHECKOUT MODEL``.

Parses flags with slime's parser, starts its program, loads the Hugging Face folder MODEL by its loader, computes
log-probabilities with its ``forward_only`` and trains one step with its ``train_one_step``. Packages that only serve
rollouts (ray, sglang, torch_memory_saver and others) are replaced by empty modules. Prints one JSON line.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
from types import ModuleType
from unittest.mock import MagicMock

CHECKOUT, MODEL = sys.argv[1:3]
ABSENT = (
    "ray", "sglang", "sglang_router", "torch_memory_saver", "wandb", "httpx", "pybase64", "tqdm", "triton", "xxhash",
)  # fmt: skip


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of the packages in ABSENT that are not installed: every name is a mock."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=f"{spec.name}.{name}")
        return module

    def exec_module(self, module):
        pass


def main():
    import numpy
    import torch

    sys.meta_path.append(Empty())
    sys.path.insert(0, CHECKOUT)
    from slime.utils import accelerator

    accelerator.current_device = accelerator.device = lambda *_: "cpu"
    accelerator.synchronize = accelerator.empty_cache = lambda *_: None
    flags = json.loads(sys.stdin.read())
    sys.argv = ["train.py", *flags, "--hf-checkpoint", MODEL, "--load", MODEL, "--debug-train-only"]
    from slime.utils.arguments import parse_args

    args = parse_args()
    args.rank, args.world_size = 0, 1
    from megatron.core import mpu
    from megatron.core.parallel_state import start_single_process_group

    start_single_process_group()
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils import model as slime_model
    from slime.backends.megatron_utils.data import DataIterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    slime_model.clear_memory = lambda *_, **__: None
    version, numpy.__version__ = numpy.__version__, "1.26"  # slime checks for numpy 1
    initialize.init(args)
    numpy.__version__ = version
    chunks, optimizer, scheduler, _ = slime_model.initialize_model_and_optimizer(args, "actor")
    tokens = [torch.tensor(row) for row in ([3, 9, 4, 4, 20, 7, 31], [5, 1, 2, 8, 50])]
    lengths = [len(row) for row in tokens]
    responses = [length - 2 for length in lengths]
    data = {
        "tokens": tokens,
        "total_lengths": lengths,
        "response_lengths": responses,
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in responses],
        "rollout_mask_sums": torch.tensor(responses, dtype=torch.float32),
        "advantages": [torch.linspace(-1, 1, length) for length in responses],
    }
    iterator = [DataIterator(data, micro_batch_indices=[[0], [1]])]
    stored = slime_model.forward_only(get_log_probs_and_entropy, args, chunks, iterator, [2])
    data["log_probs"] = stored["log_probs"]
    iterator[0].reset()
    config = slime_model.get_model_config(chunks[0])
    config.grad_scale_func, config.timers = optimizer.scale_loss, None
    config.finalize_model_grads_func = slime_model.finalize_model_grads
    metrics, norm = slime_model.train_one_step(args, 0, 0, iterator, chunks, optimizer, scheduler, 2, 2)
    assert mpu.is_pipeline_last_stage()
    result = {"log_probs": [part.tolist() for part in stored["log_probs"]], "norm": float(norm)}
    print(json.dumps(result | {name: float(value) for name, value in metrics.items()}))


if __name__ == "__main__":
    main()
