#!/usr/bin/env bash
# GPT-3 175B on 16 nodes of 8 GPUs with 80 GB. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=gpt3-175b --nodes=16 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@600 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

NNODES=${NNODES:-16} TP=${TP:-8} PP=${PP:-16}
TOKENIZER_TYPE=GPT2BPETokenizer VOCAB_SIZE=50257

MODEL=(--model gpt3-175b --seq-length 2048 --bf16)
TRAINING=(  # 300 B tokens
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-1536}" --train-samples 146484375
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-decay-samples 126953125 --lr-warmup-samples 183105
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
)
launch pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
