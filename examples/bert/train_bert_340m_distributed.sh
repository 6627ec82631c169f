#!/usr/bin/env bash
# BERT-large (340M) on one node of 8 GPUs. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=bert-340m --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@600 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

TOKENIZER_TYPE=${TOKENIZER_TYPE:-BertWordPieceLowerCase} VOCAB_SIZE=30522

MODEL=(--model bert-large --seq-length 512 --attention-dropout "${ATTENTION_DROPOUT:-0}" --bf16)
TRAINING=(  # 1 M steps of 256 sequences, as the paper
    --micro-batch-size "${MBS:-32}" --global-batch-size "${GBS:-256}" --train-iters 1000000
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-decay-iters 990000 --lr-warmup-iters 10000
    --weight-decay 0.01 --clip-grad 1.0
)
launch pretrain_bert.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
