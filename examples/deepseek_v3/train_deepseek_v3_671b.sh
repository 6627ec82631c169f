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

MODEL=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006 --bf16
)
ATTENTION=(
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --rope-type rope
)
EXPERTS=(
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq '([0]*3+[1]*58)' --moe-router-dtype fp32 --moe-router-score-function sigmoid
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall
)
PREDICTION=(--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3)
TRAINING=(  # 14.8 T tokens
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-15360}" --train-iters 235240
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --recompute-granularity selective --recompute-modules layernorm mlp moe core_attn mla_up_proj
)
launch pretrain_gpt.py "${MODEL[@]}" "${ATTENTION[@]}" "${EXPERTS[@]}" "${PREDICTION[@]}" "${TRAINING[@]}" "$@"
