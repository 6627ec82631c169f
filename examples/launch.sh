# Sourced by the recipes of examples/*/: starts a program with one process per GPU, by torchrun or under Slurm.
#
#   launch PROGRAM FLAGS...     --dry-run among the flags: only the report for NNODES x GPUS_PER_NODE, without a GPU
#   fine_tune FLAGS...          the model in the folder HF_MODEL, by pretrain_gpt.py
#
# A recipe sets VOCAB_SIZE, and for launch TOKENIZER_TYPE; examples/README.md lists the variables that users set.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python}

run_flags() {  # data, layout, checkpoints and log: what depends on your machine, not on the model
    if [ -n "${DATA_PATH:-}" ]; then
        FLAGS+=(--data-path $DATA_PATH --split "${SPLIT:-99,1,0}" --tokenizer-type "$TOKENIZER_TYPE")  # words: a blend
        if [ -n "${TOKENIZER_MODEL:-}" ]; then FLAGS+=(--tokenizer-model "$TOKENIZER_MODEL"); fi
        if [ -n "${VOCAB_FILE:-}" ]; then FLAGS+=(--vocab-file "$VOCAB_FILE"); fi
        if [ -n "${MERGE_FILE:-}" ]; then FLAGS+=(--merge-file "$MERGE_FILE"); fi
    else
        echo "no DATA_PATH: random tokens" >&2
        FLAGS+=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$VOCAB_SIZE")
    fi
    FLAGS+=(--tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-1}"
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
    if [ "${TP:-1}" != 1 ]; then FLAGS+=(--sequence-parallel); fi
    if [ "${PP:-1}" != 1 ]; then FLAGS+=(--pipeline-schedule "${SCHEDULE:-zero-bubble}"); fi
    if [ "${CP:-1}" != 1 ]; then FLAGS+=(--context-parallel-size "$CP"); fi
    if [ -n "${EP:-}" ]; then FLAGS+=(--expert-model-parallel-size "$EP" --expert-tensor-parallel-size "${ETP:-1}"); fi
    if [ -n "${SAVE:-}" ]; then  # the same command goes on from the last checkpoint
        FLAGS+=(--save "$SAVE" --load "${LOAD:-$SAVE}" --save-interval "${SAVE_INTERVAL:-500}"
            --tensorboard-dir "${TENSORBOARD_DIR:-$SAVE/tensorboard}")
    fi
    FLAGS+=(--log-interval 1 --log-throughput --eval-interval "${EVAL_INTERVAL:-1000}" --eval-iters 10)
}

in_slurm_batch() {  # a batch script or a shell of salloc, not a task of srun (Slurm's own steps have numbers near 2^32)
    [ -n "${SLURM_JOB_ID:-}" ] && [ "${SLURM_STEP_ID:-4294967291}" -gt 4000000000 ]
}

launch() {
    export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
    local notes program=$REPOSITORY/$1 gpus=${SLURM_GPUS_PER_NODE:-8}  # or "h100:8"
    gpus=${GPUS_PER_NODE:-${gpus##*:}}
    local nodes=${SLURM_JOB_NUM_NODES:-${NNODES:-1}}
    FLAGS=()
    run_flags
    set -- "$program" "${FLAGS[@]}" "${@:2}"  # the last of two values wins: the user's
    case " $* " in
        *" --dry-run "*) WORLD_SIZE=$((nodes * gpus)) exec "$PYTHON" "$@" ;;
    esac
    # wrong settings end here, once, before any process waits for another
    notes=$(WORLD_SIZE=$((nodes * gpus)) "$PYTHON" "$@" --dry-run 2>&1 >/dev/null) || { echo "$notes" >&2; exit 2; }
    if in_slurm_batch; then
        launch_srun "$nodes" "$gpus" "$@"
        return
    fi
    # torchrun, asked to end, gives its ranks this many seconds to save; its own 30 are too few for a large model
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
    exec "$PYTHON" -m torch.distributed.run --nproc_per_node="$gpus" --nnodes="$nodes" --node_rank="${NODE_RANK:-0}" \
        --master_addr="${MASTER_ADDR:-localhost}" --master_port="${MASTER_PORT:-29500}" "$@"
}

fine_tune() {
    : "${HF_MODEL:?set it to the folder of the model in the format of Hugging Face}"
    TOKENIZER_TYPE=HuggingFaceTokenizer TOKENIZER_MODEL=${TOKENIZER_MODEL:-$HF_MODEL} SPLIT=${SPLIT:-1}
    local length=(--num-epochs "${EPOCHS:-1}")
    if [ -z "${DATA_PATH:-}" ]; then length=(--train-iters 100); fi  # random tokens
    launch pretrain_gpt.py --load-hf "$HF_MODEL" --bf16 "${length[@]}" \
        --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-64}" \
        --lr-decay-style cosine --lr-warmup-fraction 0.03 --weight-decay 0 --clip-grad 1.0 \
        --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "$@"
}

launch_srun() {  # NODES GPUS PROGRAM FLAGS...: one task per rank, no torchrun, so that signals reach the ranks at once
    local nodes=$1 gpus=$2 again= code=0 step
    shift 2
    MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
    export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
    export LOCAL_WORLD_SIZE=$gpus
    # --cpu-bind=none: else a rank and all its data workers share one core
    srun --nodes="$nodes" --ntasks=$((nodes * gpus)) --ntasks-per-node="$gpus" --cpu-bind=none bash -c \
        'WORLD_SIZE=$SLURM_NTASKS RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' rank "$PYTHON" "$@" &
    step=$!
    # --signal=B:USR1@SECONDS, time is nearly up: all ranks save and leave, and the job queues again
    trap 'again=yes; kill -USR1 "$step"' USR1
    trap : TERM  # Slurm gives it to the ranks too: outlive them
    wait "$step" || code=$?
    while kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done  # a trap ends a wait early
    if [ -n "$again" ] && [ "$code" = 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    return "$code"
}
