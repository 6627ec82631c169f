"""The recipes of examples/: checked at real size without a GPU, trained small by torchrun and under Slurm."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron.training.config.named_models import named_models

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples").glob("*/train_*.sh"))

PARAMETERS = {
    "train_gpt3_175b_distributed": 174_604_259_328,
    "train_llama3_8b": 8_030_261_248,
    "train_llama3_8b_fp8": 8_030_261_248,
    "train_llama3_70b": 70_553_706_496,
    "train_llama3_405b": 405_853_388_800,
    "train_nemotron4_340b": 341_029_195_776,
    "train_mixtral_8x7b_distributed": 46_702_792_704,
    "train_qwen3_30b_a3b": 30_532_122_624,
    "train_qwen3_vl_8b": 8_767_123_696,
    "train_qwen35_9b": 8_953_803_264,
    "train_qwen35_35b_a3b": 34_660_610_688,
    "train_nemotron3_nano_30b_a3b": 31_577_937_344,
    "train_bert_340m_distributed": 336_226_108,
    "train_t5_220m_distributed": 221_246_888,
    "train_deepseek_v3_671b": 682_636_472_320,  # 671,026,404,352 and the layer of multi-token prediction
}
SMALL = {
    "--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4", "--seq-length": "32",
    "--max-position-embeddings": "32", "--vocab-size": "300", "--micro-batch-size": "1", "--global-batch-size": "4",
    "--eval-iters": "0", "--num-workers": "0",
}  # fmt: skip
SMALLER = {
    "--ffn-hidden-size": "64", "--decoder-num-layers": "1", "--decoder-seq-length": "32",
    "--num-query-groups": "2", "--train-samples": "8", "--train-iters": "2",
    "--lr-decay-samples": "8", "--lr-warmup-samples": "4", "--lr-warmup-iters": "1",
    "--kv-channels": "16", "--num-experts": "16", "--moe-ffn-hidden-size": "32",
    "--moe-shared-expert-intermediate-size": "32", "--moe-layer-freq": "1", "--q-lora-rank": "24",
    "--kv-lora-rank": "16", "--qk-head-dim": "8", "--qk-pos-emb-head-dim": "4", "--v-head-dim": "8",
    "--linear-num-key-heads": "2", "--linear-num-value-heads": "4", "--linear-attention-freq": "2",
    "--hybrid-layer-pattern": "ME", "--mamba-num-heads": "8",
    "--vision-num-layers": "1", "--vision-hidden-size": "32", "--vision-num-attention-heads": "2",
    "--vision-ffn-hidden-size": "64", "--vision-deepstack-layers": "0", "--image-token-id": "1",
    "--mrope-section": "4 2 2", "--images-per-row": "1", "--img-h": "64", "--img-w": "64",
}  # fmt: skip
"""Sizes that only some recipes give."""

SRUN = """#!/usr/bin/env python3
import os, re, signal, subprocess, sys
options = [word for word in sys.argv[1:sys.argv.index("bash")]]
nodes, per_node = (int(re.search(rf"--{name}=(\\d+)", " ".join(options))[1]) for name in ("nodes", "ntasks-per-node"))
tasks = []
for rank in range(nodes * per_node):
    task = {"STEP_ID": 0, "NTASKS": nodes * per_node, "PROCID": rank, "LOCALID": rank % per_node}
    env = {**os.environ, **{f"SLURM_{name}": str(value) for name, value in task.items()}}
    tasks.append(subprocess.Popen(sys.argv[sys.argv.index("bash"):], env=env))
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
"""Like Slurm's srun: one task per rank with its rank in the environment; signals are sent to all tasks."""

SCONTROL = '#!/bin/sh\nif [ "$1" = show ]; then echo 127.0.0.1; else echo "scontrol $*"; fi\n'


def name_of(recipe):
    return recipe.stem


def text_of(recipe):
    """Return the script with the flags of its named model."""
    text = recipe.read_text()
    return " ".join(
        [text, *(word for name in re.findall(r"--model ([\w.-]+)", text) for word in named_models()[name].flags)]
    )


def small(recipe):
    text = text_of(recipe)
    sizes = {**SMALL, **{flag: value for flag, value in SMALLER.items() if flag in text}}
    return [word for flag, value in sizes.items() for word in (flag, *value.split())]


@pytest.fixture(scope="module")
def environment(warm_python):
    """The environment of a user: nothing set that a recipe or a launcher reads."""
    ours = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES", "TP", "PP", "SAVE", "DATA_PATH"}
    retained = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("SLURM_")}
    return {**retained, "PYTHON": warm_python, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def start(recipe, *flags, env, cwd):
    return subprocess.run(["bash", recipe, *flags], env=env, cwd=cwd, capture_output=True, text=True, timeout=240)


def test_there_are_recipes():
    assert {name_of(recipe) for recipe in RECIPES} == set(PARAMETERS)


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_recipe_fits_its_gpus_at_real_size(recipe, environment, tmp_path):
    """The sbatch node count matches the defaults; every rank leaves 9 of 80 GB to NCCL and CUDA."""
    result = start(recipe, "--dry-run", env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"{PARAMETERS[name_of(recipe)]:,}, " in result.stdout
    totals = re.findall(r"^ +(?:pipeline rank \d+|every rank) +(?:[\d.]+ +){5}([\d.]+)", result.stdout, re.MULTILINE)
    assert max(map(float, totals)) < 71
    nodes = int(re.search(r"^#SBATCH .*--nodes=(\d+)", recipe.read_text(), re.MULTILINE)[1])
    assert f"ranks                      {nodes * 8} = " in result.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_recipe_trains_small_under_torchrun(recipe, environment, tmp_path):
    layout = {"GPUS_PER_NODE": "2", "NNODES": "1", "TP": "2", "PP": "1", "SAVE": "checkpoints"}
    if "--num-experts" in text_of(recipe):
        layout["EP"] = "2"
    env = {**environment, **layout, "MASTER_PORT": str(20000 + os.getpid() % 10000)}
    result = start(recipe, *small(recipe), env=env, cwd=tmp_path)
    assert result.returncode == 0 and "2 ranks = tensor 2" in result.stdout, result.stdout + result.stderr
    assert re.findall(r"iteration +(\d+)/ +2 ", result.stdout) == ["1", "2"]
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "2"


FINE_TUNING = sorted(path for path in (ROOT / "examples").glob("*/*.sh") if path not in RECIPES)
FINE_TUNED = {
    # script: (ranks, GiB of the rank with the most, trained parameters in millions)
    "sft_llama3_8b": (8, 50.23, 8030),
    "lora_llama3_8b": (8, 52.19, 42),
    "dpo_llama3_8b": (8, 58.75, 8030),
    "sft_llama3_70b": (32, 60.92, 70554),
    "lora_llama3_70b": (8, 32.48, 207),
    "dpo_llama3_70b": (8, 32.48, 207),
}
LLAMA = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
}
"""Sizes in the models' own config.json."""


@pytest.mark.parametrize("recipe", FINE_TUNING, ids=name_of)
def test_fine_tuning_recipe_fits_its_gpus_at_real_size(recipe, environment, tmp_path):
    ranks, most, trained = FINE_TUNED[name_of(recipe)]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "vocab_size": 128256, "attention_bias": False,
    }  # fmt: skip
    size = name_of(recipe).rpartition("_")[2]
    (tmp_path / "config.json").write_text(json.dumps({**config, **LLAMA[size]}))
    result = start(recipe, "--dry-run", env={**environment, "HF_MODEL": str(tmp_path)}, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    totals = re.findall(r"^ +(?:pipeline rank \d+|every rank) +(?:[\d.]+ +){5}([\d.]+)", result.stdout, re.MULTILINE)
    assert max(map(float, totals)) == pytest.approx(most, rel=0.02)
    assert f"ranks                      {ranks} = " in result.stdout
    parameters = int(re.search(r"parameters +([\d,]+)", result.stdout)[1].replace(",", ""))
    base = {"8b": 8_030_261_248, "70b": 70_553_706_496}[size]
    assert parameters - (0 if trained > 1000 else base) == pytest.approx(trained * 1e6, rel=0.01)
    assert f"--nodes={ranks // 8} " in recipe.read_text()
    assert ("companion reference" in result.stdout) == (name_of(recipe) == "dpo_llama3_8b")


def test_fine_tuning_recipe_without_a_model_names_the_variable(environment, tmp_path):
    assert {name_of(recipe) for recipe in FINE_TUNING} == {*FINE_TUNED}
    result = start(FINE_TUNING[0], "--dry-run", env=environment, cwd=tmp_path)
    assert result.returncode != 0 and "HF_MODEL: set it to the folder of" in result.stderr


def test_wrong_settings_end_before_any_rank_starts(environment, tmp_path):
    result = start(RECIPES[0], "--nope", "--hidden-size", "100", env={**environment, "NNODES": "2"}, cwd=tmp_path)
    assert result.returncode == 2 and "--nope: unknown flag" in result.stderr


def test_your_data_and_tokenizer_are_named_by_variables(environment, tmp_path):
    env = {**environment, "DATA_PATH": "0.3 a 0.7 b", "TOKENIZER_MODEL": "tokenizer.json", "PYTHON": "echo"}
    result = start(RECIPES[0], "--dry-run", env=env, cwd=tmp_path)
    assert "--data-path 0.3 a 0.7 b --split 99,1,0 --tokenizer-type" in result.stdout
    assert "--tokenizer-model tokenizer.json" in result.stdout and "--mock-data" not in result.stdout


@pytest.fixture
def slurm(environment, tmp_path):
    """A batch script's environment on two nodes of one GPU, with stand-ins for Slurm's programs."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "gpu:1",
           "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(ROOT)}  # fmt: skip
    return {**environment, **job, "PATH": f"{tmp_path}{os.pathsep}{environment['PATH']}", "PP": "2", "SAVE": "saved"}


def test_a_job_whose_time_is_up_saves_and_queues_again(slurm, tmp_path):
    """sbatch runs a copy of the script in another folder; only the batch script receives the signal."""
    recipe = ROOT / "examples" / "llama" / "train_llama3_8b.sh"
    copy = tmp_path / "slurm_script"
    copy.write_text(recipe.read_text())
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(["bash", copy, *small(recipe), "--train-iters", "100000"], env=slurm, cwd=tmp_path,
                               stdout=log, stderr=subprocess.STDOUT)  # fmt: skip
        try:
            deadline = time.monotonic() + 200
            while "iteration        3/" not in (tmp_path / "log").read_text():
                assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.2)
            job.send_signal(signal.SIGUSR1)
            code = job.wait(120)
        finally:
            job.kill()
    text = (tmp_path / "log").read_text()
    assert code == 0 and f"scontrol requeue {slurm['SLURM_JOB_ID']}" in text, text
    assert "successfully saved checkpoint" in text and "2 ranks = tensor 1 x context 1 x data 1 x pipeline 2" in text


def test_a_failing_rank_fails_the_job_which_is_not_queued_again(slurm, tmp_path):
    recipe = ROOT / "examples" / "llama" / "train_llama3_8b.sh"
    result = start(recipe, *small(recipe), "--load", "nothing", "--exit-on-missing-checkpoint", env=slurm, cwd=tmp_path)
    assert result.returncode != 0 and "requeue" not in result.stdout, result.stdout + result.stderr
