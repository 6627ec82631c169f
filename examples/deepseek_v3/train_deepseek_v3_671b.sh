#!/usr/bin/env bash
# DeepSeek-V3 671B on 64 nodes of 8 GPUs with 80 GB. README.md beside it: what it needs and costs, how to start it.
#SBATCH --job-name=deepseek-v3 --nodes=64 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --signal=B:USR1@600 --requeue --open-mode=append
set -euo pipefail
root=$(dirname "$0")/../..
[ -f "$root/examples/launch.sh" ] || root=$SLURM_SUBMIT_DIR  # sbatch runs a copy: submit from the top of the repository
. "$root/examples/launch.sh"

NNODES=${NNODES:-64} TP=${TP:-1} PP=${PP:-16} EP=${EP:-32} SCHEDULE=${SCHEDULE:-1f1b}
TOKENIZER_TYPE=HuggingFaceTokenizer VOCAB_SIZE=129280

MODEL=(--model deepseek-v3 --seq-length 4096 --bf16)
TRAINING=(  # 14.8 T tokens
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-15360}" --train-iters 235240
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --recompute-granularity selective --recompute-modules layernorm mlp moe core_attn mla_up_proj
)
launch pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "$@"
