#!/usr/bin/env bash
# Adapters (LoRA) of LLaMA-3 70B on one node of 8 GPUs with 80 GB.
# HF_MODEL names the model's folder, DATA_PATH a JSON lines file. README.md: how to start it.
#SBATCH --job-name=lora-70b --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@300 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

: "${HF_MODEL:?set it to the folder of LLaMA-3 70B in the format of Hugging Face}"
NNODES=${NNODES:-1} TP=${TP:-8} PP=${PP:-1} SPLIT=${SPLIT:-1}
TOKENIZER_TYPE=HuggingFaceTokenizer TOKENIZER_MODEL=${TOKENIZER_MODEL:-$HF_MODEL} VOCAB_SIZE=128256

MODEL=(--load-hf "$HF_MODEL" --seq-length 8192 --bf16 --sft --lora-rank 16 --lora-alpha 32)
LENGTH=(--num-epochs "${EPOCHS:-1}")
if [ -z "${DATA_PATH:-}" ]; then LENGTH=(--train-iters 100); fi  # random tokens
TRAINING=(
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-64}" "${LENGTH[@]}"
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction 0.03 --weight-decay 0 --clip-grad 1.0
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 0
    --recompute-granularity selective --recompute-modules layernorm mlp_act
)
launch pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
