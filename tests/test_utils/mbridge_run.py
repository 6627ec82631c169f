"""Rank of ``test_mbridge.py``: mbridge loads a tiny Hugging Face model into a local model and saves it again. This is a
separate program, since it replaces CUDA calls of mbridge on machines without a GPU."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron.core import parallel_state


def without_gpu():
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.cuda.current_device = lambda: "cpu"


def main(source: str, target: str) -> None:
    """Print the largest difference of logits, and which tensors are the same after the round trip."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    if not torch.cuda.is_available():
        without_gpu()
    from mbridge import AutoBridge

    bridge = AutoBridge.from_pretrained(source)
    bridge.dtype, bridge.hf_config.rope_theta = torch.float32, 10000.0  # transformers 5 calls it otherwise
    bridge.config = bridge._build_config()
    model = bridge.get_model(bf16=False)
    bridge.load_weights(model, source)
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model[0].eval()(tokens, torch.arange(16).expand(2, -1), None)
        expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()(tokens).logits
    parts = [torch.empty_like(logits) for _ in range(size)]
    dist.all_gather(parts, logits.contiguous())
    difference = (torch.cat(parts, -1)[..., :128] - expected).abs().max().item()
    bridge.save_weights(model, target)
    if dist.get_rank() == 0:
        before, after = (load_file(Path(folder) / "model.safetensors") for folder in (source, target))
        same = [torch.equal(after[name], tensor) for name, tensor in before.items()]
        print(json.dumps({"difference": difference, "same": same, "names": before.keys() == after.keys()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
