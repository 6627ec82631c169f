#!/usr/bin/env bash
# Nemotron-4 340B on 48 nodes of 8 GPUs with 80 GB. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=nemotron4-340b --nodes=48 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@600 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

NNODES=${NNODES:-48} TP=${TP:-8} PP=${PP:-12}
TOKENIZER_TYPE=HuggingFaceTokenizer VOCAB_SIZE=256000

MODEL=(--model nemotron4-340b --seq-length 4096 --bf16 --recompute-granularity selective --recompute-modules layernorm mlp_act)
TRAINING=(  # 1 T tokens
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-2304}" --train-iters 105964
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
)
launch pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
