"""Rank of ``test_mbridge.py``: Megatron Bridge loads a tiny Hugging Face model into a local model and exports it. It
imports Transformer Engine and calls CUDA; machines without them get stand-ins here."""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron.core import parallel_state
from tests.test_utils.mbridge_run import without_gpu


class EmptyPackage(types.ModuleType):
    """Has a subclass of Module under every capitalized name, and an empty package under the others."""

    __path__: list[str] = []
    __version__ = "2.12.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {}) if name[0].isupper() else EmptyPackage(name)


class EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``transformer_engine`` and the modules below it."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "transformer_engine":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return EmptyPackage(spec.name)

    def exec_module(self, module):
        pass


def main(source: str) -> None:
    """Print the largest difference of logits, and which exported tensors have the bytes of the folder."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    if importlib.util.find_spec("transformer_engine") is None:
        sys.meta_path.append(EmptyPackages())
    if not torch.cuda.is_available():
        without_gpu()
        scatter = dist.scatter  # gloo ignores strides; copies to a GPU have none
        dist.scatter = lambda out, parts, **kwargs: scatter(out, parts and [x.contiguous() for x in parts], **kwargs)
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(source)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size = size
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.load_hf_weights(model)
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model[0].eval()(tokens, torch.arange(16).expand(2, -1), None)
        expected = original(tokens).logits
    parts = [torch.empty_like(logits) for _ in range(size)]
    dist.all_gather(parts, logits.contiguous())
    difference = (torch.cat(parts, -1)[..., :128] - expected).abs().max().item()
    before, after = original.state_dict(), dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    if dist.get_rank() == 0:
        same = [torch.equal(after[name], tensor) for name, tensor in before.items()]
        print(json.dumps({"difference": difference, "same": same, "names": before.keys() == after.keys()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
