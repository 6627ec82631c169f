#!/usr/bin/env bash
# T5-base (220M) on one node of 8 GPUs. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=t5-220m --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@600 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

TOKENIZER_TYPE=${TOKENIZER_TYPE:-BertWordPieceCase} VOCAB_SIZE=29096  # 28,996 words and 100 sentinels

MODEL=(
    --num-layers 12 --decoder-num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64
    --ffn-hidden-size 3072 --seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512
    --init-method-std 0.015 --attention-dropout "${ATTENTION_DROPOUT:-0}" --bf16
)
TRAINING=(
    --micro-batch-size "${MBS:-64}" --global-batch-size "${GBS:-2048}" --train-iters 1000000
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-decay-iters 1000000 --lr-warmup-iters 10000
    --weight-decay 0.01 --clip-grad 1.0
)
launch pretrain_t5.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
