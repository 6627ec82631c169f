"""The published mbridge and Megatron Bridge convert tiny Hugging Face models to this library and back. Skipped if they
are not installed; their names and calls have separate tests (``tests/unit_tests/compat``,
``core/config/test_megatron_lm_fields.py``, ``core/models/test_engine_names.py``)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def installed(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@installed("mbridge")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Qwen3Moe"])
def test_mbridge_converts_without_changes(tmp_path, family, ranks):
    result = convert(tmp_path, family, ranks, "mbridge_run.py", str(tmp_path / "target"))
    assert result["difference"] < 1e-5 and result["names"] and all(result["same"])


@installed("megatron.bridge")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_megatron_bridge_converts_without_changes(tmp_path, family, ranks):
    result = convert(tmp_path, family, ranks, "megatron_bridge_run.py")
    assert result["difference"] < 1e-5 and result["names"] and all(result["same"])


def convert(tmp_path, family, ranks, program, *arguments):
    """Run a program of ``tests/test_utils`` on a tiny model of ``family``; return what it prints."""
    import transformers

    sizes = SIZES | (EXPERTS if family == "Qwen3Moe" else {})
    config = getattr(transformers, f"{family}Config")(**sizes, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path / "source")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
               f"tests/test_utils/{program}", str(tmp_path / "source"), *arguments]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(next(line for line in finished.stdout.splitlines() if line.startswith('{"difference"')))
