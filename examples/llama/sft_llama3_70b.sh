#!/usr/bin/env bash
# Supervised fine-tuning of LLaMA-3 70B on four nodes of 8 GPUs with 80 GB.
# HF_MODEL names the model's folder, DATA_PATH a JSON lines file. README.md: how to start it.
#SBATCH --job-name=sft-70b --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@300 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

: "${HF_MODEL:?set it to the folder of LLaMA-3 70B in the format of Hugging Face}"
NNODES=${NNODES:-4} TP=${TP:-8} PP=${PP:-2} SPLIT=${SPLIT:-1}
TOKENIZER_TYPE=HuggingFaceTokenizer TOKENIZER_MODEL=${TOKENIZER_MODEL:-$HF_MODEL} VOCAB_SIZE=128256

MODEL=(--load-hf "$HF_MODEL" --seq-length 8192 --bf16 --sft)
LENGTH=(--num-epochs "${EPOCHS:-1}")
if [ -z "${DATA_PATH:-}" ]; then LENGTH=(--train-iters 100); fi  # random tokens
TRAINING=(
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-64}" "${LENGTH[@]}"
    --lr 5e-6 --min-lr 5e-7 --lr-decay-style cosine --lr-warmup-fraction 0.03 --weight-decay 0 --clip-grad 1.0
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 0
    --recompute-granularity selective --recompute-modules layernorm mlp_act
)
launch pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
