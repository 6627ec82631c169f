#!/usr/bin/env bash
# Nemotron 3 Nano on 2 nodes of 8 GPUs with 80 GB. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=nemotron3-nano --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@600 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

NNODES=${NNODES:-2} TP=${TP:-1} PP=${PP:-2} EP=${EP:-8}
TOKENIZER_TYPE=HuggingFaceTokenizer VOCAB_SIZE=131072

MODEL=(--model nemotron-3-nano --seq-length 4096 --bf16)
TRAINING=(  # 1 T tokens
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-512}" --train-iters 476837
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --recompute-granularity selective --recompute-modules ssm mamba_norm_out
)
launch pretrain_hybrid.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
