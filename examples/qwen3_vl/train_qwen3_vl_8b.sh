#!/usr/bin/env bash
# Qwen3-VL-8B with its vision tower, on one node of 8 GPUs with 80 GB. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=qwen3-vl-8b --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@600 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

NNODES=${NNODES:-1} TP=${TP:-2} PP=${PP:-1}
TOKENIZER_TYPE=HuggingFaceTokenizer VOCAB_SIZE=151936

MODEL=(--model qwen3-vl-8b --seq-length 4096 --bf16)
if [ -n "${DATA_PATH:-}" ]; then MODEL+=(--sft); fi  # conversations with images
TRAINING=(  # rows have 5 images of 512 x 512 pixels: 31 % of the tokens
    --images-per-row 5 --img-h 512 --img-w 512
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-256}" --train-iters 20000
    --lr 2e-5 --min-lr 2e-6 --lr-decay-style cosine --lr-warmup-iters 500
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
)
launch pretrain_vlm.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
