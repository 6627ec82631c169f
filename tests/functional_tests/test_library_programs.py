"""Programs that use the library without the training program, under torchrun on two CPU ranks; keywords they pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core import parallel_state
from megatron.core.groups.nccl_options import read_nccl_settings

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
config = TransformerConfig(num_layers=2, hidden_size=96, num_attention_heads=12, use_cpu_initialization=True,
                           pipeline_dtype=torch.float16)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=50257,
                 max_sequence_length=1024)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

tokens = torch.arange(8).view(2, 4)
for step in range(3):
    optimizer.zero_grad()
    loss = model(tokens, torch.arange(4).expand(2, 4), labels=tokens + 1).mean()
    loss.backward()
    optimizer.step()
print("loss of the last step", loss.item() < 10.9, flush=True)
"""


def torchrun(*command, python=sys.executable):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    finished = subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment, timeout=300)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished


def test_the_simple_loop_trains_and_its_checkpoint_holds_the_model(warm_python, tmp_path):
    command = ["examples/run_simple_mcore_train_loop.py", "--checkpoint", str(tmp_path / "saved")]
    out = torchrun(*command, python=warm_python).stdout
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("iteration")]
    assert len(losses) == 5 and losses[-1] < losses[0] and "the checkpoint holds the model" in out
    assert (tmp_path / "saved" / "metadata.json").exists()


def test_the_program_of_the_guides_runs_unchanged(tmp_path):
    """It neither starts torch.distributed, nor names the layout in its configuration, nor pads its vocabulary: what
    is done for it is in the log once, though the program has not set up any logging."""
    (tmp_path / "program.py").write_text(PROGRAM)
    finished = torchrun(str(tmp_path / "program.py"))
    # the two ranks write to one pipe word by word
    assert [finished.stdout.count(words) for words in ("loss of the last step", "True", "False")] == [2, 2, 0]
    assert finished.stderr.count("padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)") == 1
    assert finished.stderr.count("starting torch.distributed with gloo, world size 2") == 1


def test_library_destroys_the_process_group_at_exit(tmp_path):
    """Threads of gloo that outlived the interpreter aborted every second program of four ranks, after its last line."""
    (tmp_path / "program.py").write_text("""
import atexit
import torch.distributed
atexit.register(lambda: print(f"runs at exit: {torch.distributed.is_initialized()}\\n", end="", flush=True))
from megatron.core import parallel_state
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
""")
    assert torchrun(str(tmp_path / "program.py")).stdout.count("runs at exit: False") == 2


def _keywords(rank, world_size, path):
    groups = parallel_state.initialize_model_parallel(
        1, 2, order="tp-cp-ep-pp-dp", nccl_communicator_config_path=path, distributed_timeout_minutes=5,
        get_embedding_ranks=print, create_gloo_process_groups=True, use_sharp=False,
    )  # fmt: skip
    return groups.pp.ranks


def test_keywords_of_programs_are_taken(gloo_pool, tmp_path):
    path = tmp_path / "nccl.yaml"
    path.write_text("tp: {cga_cluster_size: 2, max_ctas: 8, min_ctas: 2}\ndp: {max_ctas: 4}\n")
    assert read_nccl_settings(str(path), ["tp", "dp"])["dp"] == {"max_ctas": 4}
    assert gloo_pool.run(_keywords, 4, str(path)) == [(0, 1), (0, 1), (2, 3), (2, 3)]
    with pytest.raises(TypeError, match="no arguments tensor_parallel"):
        parallel_state.initialize_model_parallel(tensor_parallel=2)


def test_mistakes_in_nccl_settings_are_all_named(tmp_path):
    path = tmp_path / "nccl.yaml"
    path.write_text("tensor: {max_ctas: 4}\ntp: {max_cta: 4}\n")
    with pytest.raises(ValueError, match=r"tensor: no such group.*tp\.max_cta: choose from"):
        read_nccl_settings(str(path), ["tp", "dp"])
