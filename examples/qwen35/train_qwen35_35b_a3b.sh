#!/usr/bin/env bash
# Qwen3.5-35B-A3B, its text part, on 4 nodes of 8 GPUs with 80 GB. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=qwen35-35b-a3b --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@600 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

NNODES=${NNODES:-4} TP=${TP:-1} PP=${PP:-2} EP=${EP:-8}
TOKENIZER_TYPE=HuggingFaceTokenizer VOCAB_SIZE=248320

MODEL=(--model qwen3.5-35b-a3b --seq-length 4096 --bf16)
TRAINING=(  # 1 T tokens
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-512}" --train-iters 476837
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --recompute-granularity selective --recompute-modules delta_rule gdn_norm_out
)
launch pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
