#!/usr/bin/env bash
# LLaMA-3 8B on one node of 8 GPUs with 80 GB. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=llama3-8b --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@300 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

NNODES=${NNODES:-1} TP=${TP:-1} PP=${PP:-2}
TOKENIZER_TYPE=HuggingFaceTokenizer VOCAB_SIZE=128256

MODEL=(--model llama3-8b --seq-length 8192 --bf16)
TRAINING=(  # 1 T tokens
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-128}" --train-iters 953674
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
)
launch pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
