"""Runs that are compared with the reference: settings that differ from every default, one or a few per row.

Each setting of model, optimizer, schedule, data and evaluation has a value in some row that is not its default and
that affects the results (an epsilon that is large, a clamp that acts, an original context shorter than
the sequence); rows are otherwise as small as ``reference_runs.BASE``. A row is flags, and a precision where that is
not fp64.
"""

DATA = "--data-path a --split 70,20,10"
WHOLE = "--full-validation --eval-interval 8"
RAGGED = f"--data-path a --split 60,30,10 {WHOLE}"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
UNTIED = "--untie-embeddings-and-output-weights"
ROPE = "--position-embedding-type rope --kv-channels 16"
YARN = (
    "--position-embedding-type yarn --kv-channels 16 --rotary-base 50 --rotary-scaling-factor 4"
    " --yarn-original-max-position-embeddings 16"
)
GROUPS = "--group-query-attention --num-query-groups"
LLAMA = f"{ROPE} --swiglu --normalization RMSNorm --disable-bias-linear {UNTIED} {GROUPS} 2"
WARMUP = "--lr-warmup-iters 5"
PACKED = "--reset-position-ids --reset-attention-mask"
FEW, SOME = "--train-iters 6", "--train-iters 10"

NETWORK = {
    "all-defaults": "--adam-eps 1e-8 --hidden-dropout 0.1",
    "head-size": f"--kv-channels 12 {GROUPS} 2 --init-method-std 0.05",
    "one-group": "--group-query-attention --qk-layernorm --norm-epsilon 0.05",
    "query-key-norms-decayed": "--qk-layernorm --normalization RMSNorm --apply-wd-to-qk-layernorm --weight-decay 0.5",
    "query-key-norms-without-weights": "--qk-l2-norm --norm-epsilon 0.01",
    "rms-norm": "--normalization RMSNorm --norm-epsilon 0.03",
    "no-bias-in-norms": f"--disable-norm-bias --norm-placement sandwich --init-method-std 0.1 {DROPOUT}",
    "layer-norm-1p": "--apply-layernorm-1p --squared-relu --weight-decay 0.2",
    "residual-behind-the-norm": "--apply-residual-connection-post-layernorm --hidden-dropout 0.2",
    "no-biases": "--disable-bias-linear --ffn-hidden-size 40",
    "query-key-value-biases": f"{LLAMA} --add-qkv-bias --ffn-hidden-size 24",
    "gelu-by-erf": "--no-bias-gelu-fusion --init-method-std 0.2",
    "swiglu": f"{LLAMA} --embedding-init-method-std 0.3",
    "swiglu-clamped": "--swiglu --activation-func-clamp-value 0.05 --glu-linear-offset 0.5 --init-method-std 0.1",
    "quick-geglu": "--quick-geglu --glu-linear-offset 1 --init-method-std 0.1",
    "quick-geglu-clamped": "--quick-geglu --activation-func-clamp-value 0.1 --init-method-std 0.1 --add-qkv-bias",
    "window": "--num-layers 3 --window-size 5,0 --window-attn-skip-freq 2",
    "window-in-layers": "--num-layers 3 --window-size 3,0 --window-attn-skip-freq [1,0,1]",
    "xavier": f"--init-method-xavier-uniform {UNTIED} {GROUPS} 1",
    "xavier-but-embeddings": "--init-method-xavier-uniform --embedding-init-method-std 0.1 --seed 2",
    "initial-values": f"--init-method-std 0.1 --embedding-init-method-std 0.5 {UNTIED} --num-layers 3 --seed 77",
    "odd-sizes": "--max-position-embeddings 50 --num-layers 1 --hidden-size 24 --num-attention-heads 3 --seq-length 19"
    " --make-vocab-size-divisible-by 7",
    "dropout": "--hidden-dropout 0.3 --attention-dropout 0.2 --seed 5",
    "dropout-of-groups": f"{LLAMA} --hidden-dropout 0.05 --attention-dropout 0.4 --seq-length 21",
    "layer-scaling": f"--apply-query-key-layer-scaling {DROPOUT}",
    "micro-batches": f"--micro-batch-size 1 --cross-entropy-chunk-tokens 5 --recompute-activations {DROPOUT}",
}
POSITIONS = {
    "no-positions": "--position-embedding-type none",
    "rotary-share": f"{ROPE} --rotary-percent 0.5 --rotary-base 100",
    "rotary-interleaved": f"{ROPE} --rotary-interleaved --rotary-percent 0.25 --seed 9",
    "rotary-interpolated": f"{ROPE} --rotary-seq-len-interpolation-factor 3",
    "layers-without-rotation": f"{ROPE} --num-layers 4 --no-rope-freq 2 --init-method-std 0.3",
    "listed-layers-without-rotation": f"{ROPE} --num-layers 3 --no-rope-freq [1,0,1] --window-size 5,0 --rotary-base 50"
    " --init-method-std 0.3",
    "llama-3-scaling": f"{ROPE} --use-rope-scaling --rope-scaling-factor 32 --rotary-base 500000",
    "llama-3-scaling-by-8": f"{ROPE} --use-rope-scaling --rotary-base 300000 --rotary-interleaved",
    "yarn": f"{YARN} --yarn-beta-fast 1.5 --yarn-beta-slow 0.1 --mscale 0.7 --mscale-all-dim 0.3",
    "yarn-unrounded": f"{YARN} --yarn-beta-fast 2 --no-yarn-correction-range-round-to-int --rotary-percent 0.75",
}
FAMILIES = {
    "granite": "--embedding-multiplier 3 --residual-multiplier 0.3 --logits-scaling 5 --softmax-scale 0.2 --swiglu"
               f" --init-method-std 0.3 {ROPE} {DROPOUT}",
    "granite-in-chunks": f"{ROPE} --embedding-multiplier 0.5 --residual-multiplier 2 --logits-scaling 0.3"
                         " --mtp-num-layers 1 --final-logit-softcapping 0.5 --cross-entropy-chunk-tokens 7"
                         " --norm-placement sandwich",
    "gemma": f"--geglu --apply-layernorm-1p --apply-embedding-scaling --init-method-std 0.1 {ROPE} {DROPOUT}",
    "gemma-2": "--geglu --glu-linear-offset 0.3 --norm-placement sandwich --attn-logit-softcapping 0.3"
               " --final-logit-softcapping 0.5 --softmax-scale 0.4 --init-method-std 0.3 --window-size 5,0"
               f" --window-attn-skip-freq 2 {DROPOUT}",
    "gemma-3": f"{ROPE} --qk-layernorm --norm-placement sandwich --window-size 5,0 --window-attn-skip-freq [0,1]"
               " --rotary-base 1000 --rotary-base-local 20 --rotary-seq-len-interpolation-factor 4"
               " --init-method-std 0.3",
    "olmo-2": f"{LLAMA} --norm-placement post --qk-layernorm --qk-layernorm-across-heads --init-method-std 0.1",
    "olmo-2-decayed": "--normalization RMSNorm --norm-placement post --qk-layernorm --qk-layernorm-across-heads"
                      f" --apply-layernorm-1p --apply-wd-to-qk-layernorm --weight-decay 0.5 {DROPOUT}",
    "gpt-neox": f"{ROPE} --rotary-percent 0.25 --use-parallel-residual --no-bias-gelu-fusion {UNTIED} {DROPOUT}",
    "phi": f"{ROPE} --rotary-percent 0.5 --use-parallel-residual --share-parallel-norm --output-layer-bias {UNTIED}"
           f" --init-method-std 0.1 {DROPOUT}",
    "opt": f"--relu --learned-position-offset 2 --output-layer-bias --init-method-std 0.1 {DROPOUT}",
    "gpt-neox-capped-in-chunks": "--use-parallel-residual --final-logit-softcapping 0.5 --init-method-std 0.3"
                                 " --cross-entropy-chunk-tokens 7",
}  # fmt: skip
OPTIMIZER = {
    "betas": "--adam-beta1 0.7 --adam-beta2 0.95 --adam-eps 1e-3",
    "clipped": "--clip-grad 0.1 --weight-decay 0.5 --optimizer sgd --lr 0.5",
    "clipped-at-times": "--clip-grad 0.55 --optimizer sgd --lr 0.5 --sgd-momentum 0.5",
    "never-clipped": "--clip-grad 100 --optimizer sgd --lr 0.3",
    "not-clipped": "--clip-grad 0 --optimizer sgd --lr 0.3 --weight-decay 0.1",
    "sgd-without-momentum": "--optimizer sgd --sgd-momentum 0 --lr 0.5",
    "decay-ramp-linear": "--start-weight-decay 0.1 --end-weight-decay 0.9 --weight-decay-incr-style linear",
    "decay-ramp-cosine": "--start-weight-decay 0.0 --end-weight-decay 2.0 --weight-decay-incr-style cosine",
    "decoupled-rates": f"--decoupled-lr 2e-2 --decoupled-min-lr 1e-2 --min-lr 1e-4 {UNTIED} {WARMUP}"
                       " --lr-warmup-init 1e-4",
    "muon": f"--optimizer muon --lr 1e-3 --weight-decay 0.3 {LLAMA}",
    "muon-variants": "--optimizer muon --lr 1e-2 --muon-momentum 0.8 --muon-nesterov --muon-no-split-qkv"
                     " --muon-scale-mode unit_rms_norm --muon-coefficient-type cans --muon-num-ns-steps 6",
    "muon-heads": f"--optimizer muon --lr 1e-2 {LLAMA} --muon-split-qkv-per-head --muon-split-gate-up"
                  " --muon-scale-mode shape_scaling --muon-coefficient-type cubic5 --decoupled-lr 1e-3",
    "lion": f"--optimizer lion --lr 1e-3 --lion-beta1 0.8 --lion-beta2 0.9 --weight-decay 0.3 {LLAMA}",
    "muon-lion": f"--optimizer muon --muon-scalar-optimizer lion --lr 1e-3 --muon-extra-scale-factor 0.2 {LLAMA}",
    "adamuon": f"--optimizer adaptive_muon --lr 1e-3 --muon-extra-scale-factor 0.05 --adaptive-muon-eps 1e-4 {LLAMA}",
    "normuon-experts": "--optimizer adaptive_muon --adaptive-muon-moment2-method normuon --adaptive-muon-beta2 0.8"
                       " --lr 1e-3 --num-experts 4 --moe-ffn-hidden-size 24 --swiglu --disable-bias-linear",
    "muon-latent": "--optimizer muon --lr 1e-3 --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 20"
                   " --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 10 --muon-split-qkv-per-head"
                   " --muon-coefficient-type polar_express --muon-num-ns-steps 9",
    "muon-experts": "--optimizer muon --lr 5e-3 --muon-extra-scale-factor 0.2 --num-experts 4 --moe-ffn-hidden-size 24"
                    " --swiglu --muon-coefficient-type simple --disable-bias-linear"
                    " --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",
    "decoupled-rate-tied": "--decoupled-lr 1e-3 --min-lr 5e-4 --lr-decay-style cosine",
}  # fmt: skip
SCHEDULE = {
    "constant": f"--lr-decay-style constant {WARMUP} --lr-warmup-init 1e-3",
    "linear": "--min-lr 1e-3 --lr-decay-iters 15 --lr-warmup-fraction 0.3",
    "cosine": f"--lr-decay-style cosine --min-lr 1e-3 --lr-decay-iters 17 {WARMUP}",
    "inverse-square-root": f"--lr-decay-style inverse-square-root {WARMUP} --min-lr 3e-3",
    "inverse-square-root-without-warmup": "--lr-decay-style inverse-square-root",
    "wsd-exponential": f"--lr-decay-style WSD --lr-wsd-decay-iters 8 {WARMUP}",
    "wsd-linear": "--lr-decay-style WSD --lr-wsd-decay-iters 7 --lr-wsd-decay-style linear --lr-decay-iters 18",
    "wsd-cosine": "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-wsd-decay-style cosine --min-lr 1e-3",
    "wsd-minus-sqrt": "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style minus_sqrt",
    "in-samples": "--train-samples 83 --lr-warmup-samples 13 --lr-decay-samples 71 --lr-decay-style cosine",
    "wsd-in-samples": "--train-samples 80 --lr-decay-style WSD --lr-wsd-decay-samples 33",
    "ramp-up": f"--global-batch-size 8 --micro-batch-size 2 --rampup-batch-size 2 2 50 {WARMUP} {DROPOUT}",
    "batch-steps": "--step-batch-size-schedule 0:2,0.5K:4,2K:8 --micro-batch-size 2 --weight-decay 0.3",
    "batch-lowered": f"--global-batch-size 7 --micro-batch-size 2 --decrease-batch-size-if-needed {WARMUP}",
    "skipped-iterations": f"--iterations-to-skip 3 4 11 {WARMUP} {DROPOUT}",
}
SAMPLES = {
    "packed": f"{PACKED} --eod-mask-loss {DROPOUT} --seed 3",
    "packed-in-micro-batches": f"{PACKED} --eod-mask-loss --micro-batch-size 1",
    "only-positions-restart": "--reset-position-ids",
    "loss-mask": "--eod-mask-loss --optimizer sgd --lr 0.5 --eval-interval 4",
    "padding": "--null-tokenizer-eod-id 7 --null-tokenizer-pad-id 3 --eod-mask-loss --reset-position-ids",
    "padding-that-ends-documents": "--null-tokenizer-pad-id 60 --reset-attention-mask",
    "ambiguous-padding": "--null-tokenizer-pad-id 60 --allow-ambiguous-pad-tokens --eval-interval 7",
    "epochs": "--data-path c --split 50,25,25 --seed 4321",
    "last-epoch-apart": "--data-path c --split 98,1,1 --eval-iters 0 --train-iters 29 --seq-length 17",
    "blend": "--data-path 0.6 a 0.3 b 0.1 c --split 60,20,20 --mid-level-dataset-surplus 0.3 --train-iters 30",
    "blend-by-size": "--train-data-path a b --valid-data-path b c --test-data-path c --eval-iters 30",
    "blends-per-split": "--train-data-path 0.5 a 0.5 b --valid-data-path 0.2 c 0.8 b",
    "cyclic": "--data-path c --split 60,20,20 --dataloader-type cyclic --seed 6",
}
EVALUATION = {
    "evaluation": f"--eval-interval 3 --start-eval-at-iter 7 --eval-iters 3 {DROPOUT}",
    "evaluation-batches": "--eval-interval 6 --eval-global-batch-size 6 --eval-micro-batch-size 3 --eod-mask-loss",
    "ragged": f"{RAGGED} --eval-global-batch-size 8 --eod-mask-loss",
    "ragged-in-micro-batches": f"{RAGGED} --eval-micro-batch-size 1 --eval-global-batch-size 16 {DROPOUT}",
    "several-sets": f"--train-data-path a --valid-data-path b c a {WHOLE} --multiple-validation-sets"
                    " --validation-set-names small smaller own --eod-mask-loss",
    "unnamed-sets": f"--train-data-path a --valid-data-path c b {WHOLE} --multiple-validation-sets",
}  # fmt: skip
MOE = f"{FEW} --num-experts 4 --moe-ffn-hidden-size 24 --init-method-std 0.1"
EIGHT = f"{FEW} --num-experts 8 --moe-ffn-hidden-size 12 --init-method-std 0.1 --disable-bias-linear --swiglu"
BALANCED = "--moe-router-load-balancing-type"
GROUP_CHOICE = "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2"
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.0625"
SHARED = "--moe-shared-expert-intermediate-size 20 --disable-bias-linear"
MIXTURES = {
    "experts": f"{MOE} --weight-decay 0.5 --train-iters 20",
    "experts-in-fp32": (f"{EIGHT} --moe-aux-loss-coeff 0.1 {WARMUP} --clip-grad 0.5", "fp32"),
    "as-wide-as-a-dense-layer": f"{FEW} --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax"
                                " --ffn-hidden-size 20",
    "softmax-of-all": f"{LLAMA} {MOE} --moe-router-pre-softmax --moe-router-topk 3 {DROPOUT}",
    "balancing-loss": f"{MOE} --moe-aux-loss-coeff 0.3 --micro-batch-size 2 --quick-geglu",
    "balancing-loss-of-one-choice": f"{EIGHT} --moe-aux-loss-coeff 0.5 --moe-router-topk 1 --moe-router-pre-softmax"
                                    " --eod-mask-loss --micro-batch-size 1",
    "balancing-loss-of-sequences": f"{EIGHT} {BALANCED} seq_aux_loss --moe-aux-loss-coeff 0.4 --eod-mask-loss",
    "balancing-loss-of-batches": f"{EIGHT} {BALANCED} global_aux_loss --moe-aux-loss-coeff 0.2 --iterations-to-skip 3"
                                 " --global-batch-size 8",
    "balancing-losses": f"{EIGHT} {SIGMOID} {BALANCED} global_aux_loss aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1"
                        " 0.3 0.2 --moe-z-loss-coeff 0.01 --micro-batch-size 2 --optimizer sgd --lr 0.3 --train-iters"
                        " 20",
    "z-loss": f"{MOE} --moe-z-loss-coeff 0.05 --moe-layer-freq 2 --num-layers 3 --squared-relu --eod-mask-loss",
    "not-balanced": f"{MOE} {BALANCED} none --moe-router-topk-scaling-factor 2.5 --seed 4",
    "sinkhorn": f"{EIGHT} {BALANCED} sinkhorn --micro-batch-size 2 --eval-interval 4",
    "sinkhorn-of-one-choice": f"{MOE} {BALANCED} sinkhorn --moe-router-topk 1",
    "quantiles": f"{EIGHT} {BALANCED} quantile_balancing --moe-z-loss-coeff 0.01 --micro-batch-size 2",
    "quantiles-of-sigmoid": f"{EIGHT} {BALANCED} quantile_balancing --moe-router-quantile-balancing-ema 0.25"
                            " --moe-router-score-function sigmoid --moe-router-topk 1 --micro-batch-size 4"
                            " --eval-interval 4",
    "sigmoid": f"{EIGHT} --moe-router-score-function sigmoid --moe-router-topk 3 --moe-aux-loss-coeff 0.1",
    "selection-bias": f"{EIGHT} {SIGMOID} {DROPOUT} --micro-batch-size 1 --moe-router-dtype fp64",
    "selection-bias-in-groups": f"{EIGHT} {SIGMOID} {GROUP_CHOICE} --moe-router-topk-scaling-factor 1.5 {SHARED}",
    "square-root-of-softplus": f"{EIGHT} {SIGMOID} --moe-router-score-function sqrtsoftplus --moe-router-topk 1"
                               " --moe-aux-loss-coeff 0.1",
    "groups": f"{EIGHT} {GROUP_CHOICE} --moe-aux-loss-coeff 0.2",
    "groups-by-their-best": f"{EIGHT} {SIGMOID} {GROUP_CHOICE} --moe-router-group-score-topk 1",
    "groups-by-two-scores": f"{EIGHT} {SIGMOID} --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 2"
                            " --moe-router-group-score-topk 2",
    "groups-of-softmax": f"{EIGHT} {GROUP_CHOICE} --moe-router-pre-softmax --moe-router-topk-scaling-factor 3",
    "capacity": f"{MOE} --moe-expert-capacity-factor 0.8 --micro-batch-size 2 --moe-aux-loss-coeff 0.1"
                " --eval-interval 4 --eval-micro-batch-size 1",
    "capacity-in-order": f"{EIGHT} --moe-expert-capacity-factor 0.5 --moe-token-drop-policy position {SIGMOID}",
    "capacity-filled-up": f"{EIGHT} --moe-expert-capacity-factor 1.1 --moe-pad-expert-input-to-capacity"
                          " --moe-token-dispatcher-type alltoall --moe-router-pre-softmax",
    "shared-expert": f"{MOE} {SHARED} --moe-layer-freq [0,1] --recompute-activations",
    "shared-expert-with-gate": f"{EIGHT} {SHARED} --moe-shared-expert-gate --weight-decay 0.5 --moe-layer-freq 2",
    "xavier-experts": f"{MOE} --init-method-xavier-uniform {SHARED} --moe-shared-expert-gate --adam-eps 1e-4",
    "sinks": f"{LLAMA} {FEW} --softmax-type learnable --init-method-std 0.3 --attention-dropout 0.2 --weight-decay 0.5",
    "sinks-at-zero": f"{FEW} --softmax-type off-by-one {PACKED} --window-size 6,0",
    "gpt-oss": f"{MOE} --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 0.3 --softmax-type learnable"
               f" --window-size 5,0 --window-attn-skip-freq 2 {GROUPS} 2 --normalization RMSNorm",
}  # fmt: skip
LATENT = (
    f"{FEW} {UNTIED} --multi-latent-attention --kv-lora-rank 12 --qk-head-dim 10 --qk-pos-emb-head-dim 8 --v-head-dim 6"
)
DEEPSEEK = f"{LATENT} --q-lora-rank 14 --qk-layernorm --normalization RMSNorm {EIGHT} {SIGMOID} {GROUP_CHOICE} {SHARED}"
STRETCHED = (
    "--rotary-base 50 --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16 --yarn-beta-fast 1.5"
    " --init-method-std 0.3"
)
AHEAD = f"{FEW} --position-embedding-type rope --mtp-num-layers"
LATENTS = {
    "latent-attention": f"{LATENT} --position-embedding-type rope --rope-type rope --weight-decay 0.5"
                        " --rotary-scaling-factor 4 --mscale-all-dim 1 --rotary-percent 0.5 --init-method-std 0.3",
    "latent-attention-yarn": f"{LATENT} --position-embedding-type rope --q-lora-rank 14 --qk-layernorm {STRETCHED}"
                             f" --mscale 0.7 --mscale-all-dim 0.9 {DROPOUT}",
    "latent-attention-packed": f"{LATENT} --rope-type rope --position-embedding-type none --q-lora-rank 10"
                               f" --rotary-base 100 {PACKED} --softmax-type learnable --init-method-std 0.3"
                               " --norm-epsilon 0.02 --qk-layernorm",
    "latent-attention-with-experts": f"{DEEPSEEK} --position-embedding-type rope --rope-type yarn {STRETCHED} --mscale"
                                     " 0.5 --mscale-all-dim 1 --moe-layer-freq [0,1] --apply-wd-to-qk-layernorm"
                                     f" {BALANCED} seq_aux_loss --moe-aux-loss-coeff 0.05 --recompute-activations",
}  # fmt: skip
AHEADS = {
    "tokens-ahead": f"{AHEAD} 1 --mtp-loss-scaling-factor 0.4 --eval-interval 4",
    "tokens-ahead-at-learned-positions": f"{FEW} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.7 --init-method-std"
                                         " 0.3",
    "more-tokens-ahead": f"{AHEAD} 2 {UNTIED} --disable-bias-linear --eod-mask-loss --micro-batch-size 2 --clip-grad"
                         " 0.5",
    "experts-ahead": f"{AHEAD} 2 --mtp-loss-scaling-factor 0.3 {EIGHT} --moe-aux-loss-coeff 0.2 --moe-layer-freq [0,1]",
    "one-layer-for-all-tokens-ahead": f"{AHEAD} 3 --mtp-use-repeated-layer --mtp-loss-scaling-factor 0.6 {EIGHT}"
                                      " --moe-aux-loss-coeff 0.3 --moe-z-loss-coeff 0.05 --moe-layer-freq [0,1]",
    "deepseek": f"{DEEPSEEK} {AHEAD} 1 --rope-type yarn {STRETCHED} --mscale 0.7 --mscale-all-dim 1 --moe-layer-freq"
                f" [0,1] {BALANCED} seq_aux_loss --moe-aux-loss-coeff 0.05",
}  # fmt: skip
FP16 = "--fp16 --optimizer sgd --lr 0.3 --init-method-std 0.1"
PRECISION = {
    "fp32": (f"{DROPOUT} {WARMUP} --eval-interval 5", "fp32"),
    "fp32-llama": (f"{LLAMA} --eod-mask-loss --clip-grad 0.5", "fp32"),
    "fp32-sgd": ("--optimizer sgd --lr 0.3 --norm-epsilon 0.02", "fp32"),
    "bf16": (f"--bf16 {DROPOUT} --eval-interval 5 --adam-eps 1e-2", "bf16"),
    "bf16-llama": (f"--bf16 {LLAMA} --seed 8 --optimizer sgd --lr 0.3", "bf16"),
    "fp16-static": (f"{FP16} --loss-scale 256 {DROPOUT} --optimizer adam --lr 5e-3 --adam-eps 1e-2", "fp16"),
    "fp16-dynamic": (f"{FP16} --loss-scale-window 3 --initial-loss-scale 16384 --hysteresis 1", "fp16"),
    "fp16-patient": (f"{FP16} --loss-scale-window 4 --initial-loss-scale 4194304 --hysteresis 3", "fp16"),
    "fp16-bounded": (
        f"{FP16} --initial-loss-scale 5200000 --min-loss-scale 1300000 --hysteresis 1 --optimizer adam --lr 5e-3"
        " --adam-eps 1e-2",
        "fp16",
    ),
    "bf16-experts": (
        f"--bf16 {EIGHT} --moe-router-dtype fp32 {BALANCED} global_aux_loss --moe-aux-loss-coeff 0.1"
        " --optimizer sgd --lr 0.3",
        "bf16",
    ),
    "fp16-experts": (
        f"{FP16} {EIGHT} {SIGMOID} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --loss-scale-window 2"
        " --initial-loss-scale 4194304 --hysteresis 1",
        "fp16",
    ),
    "fp16-layer-scaling": (f"{FP16} --apply-query-key-layer-scaling --loss-scale 64 --num-layers 3", "fp16"),
}
HYBRID, E4M3 = "--fp8-format hybrid --fp8-recipe", "--fp8-format e4m3 --fp8-recipe"
WIDE = "--hidden-size 128 --ffn-hidden-size 128"
WIDE_EXPERTS = "--moe-ffn-hidden-size 96"
FP8 = {
    "fp8-delayed": f"{HYBRID} delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max --fp8-margin 1"
    f" {DROPOUT} --eval-interval 5 --iterations-to-skip 4",
    "fp8-delayed-e4m3": f"{E4M3} delayed {LLAMA} --ffn-hidden-size 48 --micro-batch-size 2",
    "fp8-delayed-newest": f"{HYBRID} delayed --fp8-amax-history-len 4 --micro-batch-size 1 --optimizer sgd --lr 0.3",
    "fp8-tensorwise": f"{HYBRID} tensorwise --micro-batch-size 1 --eval-micro-batch-size 2 {DROPOUT}",
    "fp8-tensorwise-e4m3": f"{E4M3} tensorwise --num-layers 5 --first-last-layers-bf16 --num-layers-at-start-in-bf16 2"
    " --num-layers-at-end-in-bf16 0 --recompute-activations",
    "fp8-tensorwise-both-ends": f"{HYBRID} tensorwise {LLAMA} --num-layers 4 --first-last-layers-bf16 --no-fp8-wgrad",
    "fp8-blockwise": f"{HYBRID} blockwise {WIDE} {DROPOUT}",
    "fp8-blockwise-e4m3": f"{E4M3} blockwise {WIDE} {LLAMA} --kv-channels 64 --add-qkv-bias --seq-length 64"
    " --micro-batch-size 2 --max-position-embeddings 64",
    "fp8-blockwise-bf16-gradients": f"{E4M3} blockwise {WIDE} --no-fp8-wgrad --micro-batch-size 1",
    "fp8-experts": f"{HYBRID} tensorwise {EIGHT} --moe-shared-expert-intermediate-size 32 --moe-layer-freq [0,1]"
    " --mtp-num-layers 1",
    "fp8-wide-experts": f"{HYBRID} tensorwise {EIGHT} {WIDE_EXPERTS} --moe-shared-expert-intermediate-size 32"
    " --moe-layer-freq [0,1] --moe-expert-capacity-factor 1.0 --micro-batch-size 2",
    "fp8-wide-experts-delayed": f"{HYBRID} delayed {FEW} --num-experts 4 {WIDE_EXPERTS} --fp8-amax-history-len 3"
    " --fp8-amax-compute-algo max --micro-batch-size 1 --no-fp8-wgrad",
    "fp8-latents": f"{HYBRID} delayed --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --v-head-dim 8"
    " --qk-pos-emb-head-dim 16 --rope-type rope --q-lora-rank 16 --qk-layernorm",
    "fp8-fp32": (f"{HYBRID} delayed {DROPOUT} --optimizer sgd --lr 0.3", "fp32"),
    "fp8-bf16": (f"{HYBRID} tensorwise --bf16 {LLAMA} --optimizer sgd --lr 0.3", "bf16"),
    "fp8-bf16-delayed": (f"{E4M3} delayed --bf16 --optimizer sgd --lr 0.1", "bf16"),
    "fp8-bf16-blockwise": (f"{E4M3} blockwise {WIDE} --bf16 --optimizer sgd --lr 0.1", "bf16"),
}


def _complete(row, more=""):
    """The data that most rows take, no dropout where a row names none."""
    flags, precision = row if isinstance(row, tuple) else (row, "fp64")
    data = "" if "data-path" in flags else DATA
    return f"{data} {'' if 'all-defaults' in flags else NO_DROPOUT} {more} {flags}".split(), precision


ITERATIONS = {
    FEW: (NETWORK, POSITIONS, FAMILIES, FP8), SOME: (OPTIMIZER, MIXTURES, LATENTS, AHEADS), "": (
        SCHEDULE, SAMPLES, EVALUATION, PRECISION)
}  # fmt: skip
ROWS = {
    name: _complete(row, iterations)
    for iterations, groups in ITERATIONS.items()
    for group in groups
    for name, row in group.items()
}
"""Name -> (flags after ``BASE``, precision). A few iterations show what a network computes; schedules and data take
``BASE``'s."""
