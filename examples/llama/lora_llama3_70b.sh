#!/usr/bin/env bash
# Adapters (LoRA) of LLaMA-3 70B on one node of 8 GPUs with 80 GB.
# HF_MODEL names the model's folder, DATA_PATH a JSON lines file. README.md: how to start it.
#SBATCH --job-name=lora-70b --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@300 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

NNODES=${NNODES:-1} TP=${TP:-8} PP=${PP:-1} VOCAB_SIZE=128256
fine_tune --sft --lora-rank 16 --lora-alpha 32 --seq-length 8192 --lr 1e-4 --min-lr 1e-5 \
    --recompute-granularity selective --recompute-modules layernorm mlp_act "$@"
