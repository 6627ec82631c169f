#!/usr/bin/env bash
# From a machine with Python to a trained, resumed, evaluated and sampled GPT, in a few minutes on two CPU cores.
#
#   ./quickstart.sh [OUTPUT_DIR]        default: quickstart_run/
#
# Every step is the command a user would type; each is printed before it runs. Interrupted, it continues where it was when
# it is run again; remove OUTPUT_DIR to start again.
set -euo pipefail
cd "$(dirname "$0")"
. scripts/environment.sh

OUT=${1:-quickstart_run}
ITERS=${QUICKSTART_ITERS:-700}
PROCESSES=${QUICKSTART_PROCESSES:-2}

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }

step "environment"
use_environment mlm tokenizers tiktoken matplotlib
mkdir -p "$OUT"

once() {  # FILE COMMAND...: run COMMAND unless an earlier call completed it; FILE marks that
    if [ -e "$1" ]; then echo "complete since an earlier call: ${*:2}"; else run "${@:2}" && touch "$1"; fi
}

step "corpus: 5,000 short stories from a grammar, the same on every machine"
once "$OUT/.corpus" "$PYTHON" tools/make_corpus.py --documents stories --max-bytes 3000000 --output "$OUT/corpus.jsonl"

step "tokenizer: a byte-level BPE trained on it"
once "$OUT/.tokenizer" "$PYTHON" tools/train_tokenizer.py --input "$OUT/corpus.jsonl" --vocab-size 2048 --output "$OUT/tokenizer"

step "tokens: .bin and .idx files, as Megatron-LM writes them"
once "$OUT/.tokens" "$PYTHON" tools/preprocess_data.py --input "$OUT/corpus.jsonl" --output-prefix "$OUT/corpus" --overwrite \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$OUT/tokenizer" --append-eod --workers 2

GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if [ "$GPUS" -gt 0 ]; then PROCESSES=$((GPUS < PROCESSES ? GPUS : PROCESSES)); fi
FLAGS=(--num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 192 --max-position-embeddings 192
    --reset-attention-mask --reset-position-ids  # a sequence holds several stories, which do not see each other
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 4 --global-batch-size 8 --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine
    --train-iters "$ITERS" --lr-warmup-iters 40 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$OUT/tokenizer"
    --data-path "$OUT/corpus_text_document" --split 95,4,1 --num-workers 0
    --eval-interval 175 --eval-iters 8 --log-interval 50 --log-throughput
    --sample-prompts "Once upon a time" --sample-interval 50 --sample-temperature 0.4
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 175 --tensorboard-dir "$OUT/tensorboard")
TRAIN=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$PROCESSES" pretrain_gpt.py "${FLAGS[@]}")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

step "training: $PROCESSES processes, data parallel, leaving (as in a preempted job) half-way"
once "$OUT/.half" "${TRAIN[@]}" --exit-interval "$((ITERS / 2))"

step "the same command resumes from the checkpoint and trains to the end"
run "${TRAIN[@]}"

step "the same validation tokens under a unigram model of the training tokens"
run "$PYTHON" tools/unigram_baseline.py "${FLAGS[@]}" --metrics "$OUT/checkpoints/metrics.jsonl"

step "a sample"
run "$PYTHON" tools/generate.py --load "$OUT/checkpoints" --prompt "Once upon a time" --max-new-tokens 200 --temperature 0.4 --seed 2

step "the loss curve"
run "$PYTHON" tools/plot_metrics.py "$OUT/checkpoints" --output "$OUT/loss.png" --text

printf '\nall of it is in %s: corpus, tokenizer, data, checkpoints, metrics.jsonl, TensorBoard files, loss.png;\nopen %s in a browser: losses, and how the text of the model changed\n' "$OUT" "$OUT/checkpoints/report.html"
