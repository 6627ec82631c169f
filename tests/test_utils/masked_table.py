"""Runs of BERT and T5 that are compared with the reference: settings that differ from every default that
``reference_table.ROWS`` cannot set, and GPT settings that interact with new components (padding masks, cross-attention,
two stacks, two losses). A row is flags, and a precision if it is not fp64.
"""

from tests.test_utils.reference_table import DROPOUT, GROUPS, NO_DROPOUT, UNTIED, WARMUP, WHOLE

ROPE = "--position-embedding-type rope --kv-channels 16"
RMS = "--normalization RMSNorm --disable-bias-linear"
MODERN = f"{ROPE} {RMS} --bert-no-binary-head --mask-prob 0.3"
RELATIVE = "--position-embedding-type relative"
BUCKETS = "--relative-attention-num-buckets 8 --relative-attention-max-distance 12"
FP16 = "--fp16 --optimizer sgd --lr 0.3 --init-method-std 0.1 --loss-scale 256"
BLENDS = {
    "blend": "--data-path 0.6 a 0.3 b 0.1 c --split 60,20,20 --mid-level-dataset-surplus 0.3",
    "blend-by-size": "--train-data-path a b --valid-data-path b c --test-data-path c --eval-iters 3",
    "several-sets": f"--train-data-path a --valid-data-path b c {WHOLE} --multiple-validation-sets",
    "epochs": "--data-path c --split 50,25,25 --seed 4321 --train-iters 15",
    "cyclic": "--data-path c --split 60,20,20 --dataloader-type cyclic --seed 6",
    "whole-evaluation": f"--data-path a --split 60,30,10 {WHOLE} --eval-micro-batch-size 1 --eval-global-batch-size 16"
                        f" {DROPOUT}",
}  # fmt: skip
BOTH = {
    **BLENDS,
    "all-defaults": "--adam-eps 1e-8 --hidden-dropout 0.1",
    "never-short": "--short-seq-prob 0 --mask-prob 0.2 --seed 9",
    "always-short": "--short-seq-prob 0.9 --mask-prob 0.1 --micro-batch-size 1 --train-iters 20",
    "dropout": "--hidden-dropout 0.3 --attention-dropout 0.2 --seed 5 --micro-batch-size 2",
    "gelu-by-erf": "--no-bias-gelu-fusion --init-method-std 0.2",
    "residual-behind-the-norm": f"--apply-residual-connection-post-layernorm --no-bias-gelu-fusion {DROPOUT}",
    "sandwich": "--norm-placement sandwich --init-method-std 0.3 --apply-embedding-scaling",
    "untied": f"{UNTIED} --init-method-xavier-uniform --embedding-init-method-std 0.1",
    "groups": f"{GROUPS} 2 --kv-channels 12 --ffn-hidden-size 40 --num-layers 3",
    "query-key-norms": "--qk-layernorm --normalization RMSNorm --norm-epsilon 0.03 --squared-relu",
    "no-positions": "--position-embedding-type none --softmax-scale 0.7 --init-method-std 0.3",
    "rotary-interleaved": f"{ROPE} --rotary-interleaved --rotary-percent 0.5 --rotary-base 100 --init-method-std 0.2",
    "capped-in-chunks": "--final-logit-softcapping 0.5 --cross-entropy-chunk-tokens 7 --init-method-std 0.3",
    "rates": f"--decoupled-lr 2e-2 --decoupled-min-lr 1e-2 --min-lr 1e-4 {WARMUP} --weight-decay 0.5 {UNTIED}",
    "clipped": "--clip-grad 0.1 --optimizer sgd --lr 0.5 --weight-decay 0.5",
    "ramp-up": f"--global-batch-size 8 --micro-batch-size 2 --rampup-batch-size 2 2 40 {WARMUP} {DROPOUT}",
    "recomputed": f"--recompute-activations --micro-batch-size 1 {DROPOUT} --lr-decay-style cosine",
    "fp32": (f"{DROPOUT} {WARMUP} --eval-interval 5", "fp32"),
    "bf16": (f"--bf16 {DROPOUT} --eval-interval 5 --adam-eps 1e-2", "bf16"),
    "fp16": (f"{FP16} {DROPOUT} --optimizer adam --lr 5e-3 --adam-eps 1e-2", "fp16"),
}
BERT = {
    **BOTH,
    "no-binary-head": f"--bert-no-binary-head {DROPOUT} --eval-interval 4",
    "no-binary-head-in-fp32": ("--bert-no-binary-head --disable-bias-linear", "fp32"),
    "many-masks": "--mask-prob 0.6 --seq-length 44",
    "few-masks": "--mask-prob 0.04 --micro-batch-size 1 --seq-length 40 --eval-interval 3",
    "batches-without-masks": "--global-batch-size 1 --micro-batch-size 1 --short-seq-prob 0.9 --mask-prob 0.1"
                             f" --train-iters 20 --seq-length 16 --eval-interval 5 {DROPOUT}",
    "windows": "--window-size 3,5 --window-attn-skip-freq [1,0] --init-method-std 0.3",
    "narrow-windows": f"--window-size 2,2 --num-layers 3 --window-attn-skip-freq 2 --init-method-std 0.2 {DROPOUT}",
    "modern": f"{MODERN} --swiglu --num-layers 3 --window-size 4,4 --window-attn-skip-freq [0,1,1] --rotary-base 1000"
              " --rotary-base-local 20 --init-method-std 0.2",
    "modern-gelu": f"{MODERN} --geglu --window-size 5,5 --window-attn-skip-freq [0,1] --rotary-base 160000"
                   f" --rotary-base-local 10000 {DROPOUT}",
    "modern-bert": f"{MODERN} --geglu --exact-gelu --embed-layernorm --init-method-std 0.2 {DROPOUT}",
    "roberta": "--bert-no-binary-head --bert-num-tokentypes 1 --learned-position-offset 2 --init-method-std 0.1"
               f" {DROPOUT}",
    "odd-sizes": "--num-layers 1 --hidden-size 24 --num-attention-heads 3 --seq-length 19",
    "parallel": "--use-parallel-residual --init-method-std 0.1",
    "packed": f"--use-packed-sequence --hidden-dropout 0.1 --data-path a --split 60,30,10 {WHOLE} --short-seq-prob 0.5",
    "packed-modern": f"--use-packed-sequence --data-path a --split 60,30,10 {MODERN} --geglu --hidden-dropout 0.1"
                     " --window-size 4,4 --window-attn-skip-freq [0,1] --rotary-base-local 20 --init-method-std 0.2",
}  # fmt: skip
T5 = {
    **BOTH,
    "relative": f"{RELATIVE} --init-method-std 0.3",
    "relative-buckets": f"{RELATIVE} {BUCKETS} --init-method-std 0.3 --num-layers 3 --seq-length 44 {DROPOUT}",
    "t5": f"{RELATIVE} {BUCKETS} {RMS} --relu --softmax-scale 1 --kv-channels 12 --init-method-std 0.1",
    "t5-v1.0": f"{RELATIVE} {RMS} --relu --softmax-scale 1 --scale-decoder-outputs --init-method-std 0.1",
    "t5-v1.1": f"{RELATIVE} {RMS} --geglu {UNTIED} --softmax-scale 1 --kv-channels 10 --norm-epsilon 1e-3 {DROPOUT}",
    "t5-in-fp32": (f"{RELATIVE} {RMS} --swiglu --micro-batch-size 2", "fp32"),
    "rotary": f"{ROPE} {RMS} --swiglu {UNTIED} {DROPOUT}",
    "decoder-is-deeper": f"--decoder-num-layers 3 --num-layers 1 {DROPOUT}",
    "encoder-is-deeper": f"--encoder-num-layers 3 --decoder-num-layers 1 --encoder-seq-length 40 {DROPOUT}",
    "many-spans": "--mask-prob 0.5 --decoder-seq-length 44 --seq-length 26",
    "few-spans": "--mask-prob 0.04 --micro-batch-size 1 --eval-interval 3",
    "odd-sizes": "--num-layers 1 --hidden-size 24 --num-attention-heads 3 --seq-length 19 --decoder-seq-length 13",
}


def _complete(row):
    flags, precision = row if isinstance(row, tuple) else (row, "fp64")
    data = "" if "data-path" in flags else "--data-path a --split 70,20,10"
    return f"{data} {'' if 'all-defaults' in flags else NO_DROPOUT} {flags}".split(), precision


ROWS = {kind: {name: _complete(row) for name, row in rows.items()} for kind, rows in (("bert", BERT), ("t5", T5))}
"""Kind -> name -> (flags after the common flags, precision)."""
