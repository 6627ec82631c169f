"""Every contradiction is named with its flag, its value, the reason and a way out; consistent settings pass."""

import os

import pytest

from megatron.core.config.cli import ConfigError, flags_of
from megatron.core.config.problems import collect_rules
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.data import parse_split
from megatron.training.config.flat import FlatConfig
from megatron.training.config.pretrain_config import compose
from megatron.training.config.resolve import resolve
from megatron.training.notices import notices
from megatron.training.rules import checkpoints as rules_checkpoints
from megatron.training.rules import data as rules_data
from megatron.training.rules.run_all import RULES, check

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32"
BATCH = "--micro-batch-size 2 --lr 1e-3 --train-iters 10"
SAMPLES = "--micro-batch-size 2 --lr 1e-3 --train-samples 100"
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"
TINY = f"{MODEL} {BATCH} {DATA}"
DYNAMIC = '{"rope_type":"dynamic","factor":2,"original_max_position_embeddings":16}'
LONGROPE = (
    '{"rope_type":"longrope","short_factor":[1],"long_factor":[2],"attention_factor":1,'
    '"original_max_position_embeddings":16}'
)
ONE_NORM = "--use-parallel-residual --share-parallel-norm"


def problems(text, world_size=1, base=TINY, **options):
    try:
        return [str(item) for item in check(resolve(parse_args((base + " " + text).split(), **options), world_size))]
    except ConfigError as error:  # values that no other setting could make sensible are found in reading
        return [str(item) for item in error.problems]


FINE = [
    "",
    "--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope --no-position-embedding",
    "--disable-bias-linear --add-qkv-bias --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1",
    "--norm-placement sandwich --geglu --attn-logit-softcapping 50 --final-logit-softcapping 30 --softmax-scale 0.1"
    " --apply-embedding-scaling --position-embedding-type rope --window-size 7,0 --rotary-base-local 10000",
    "--norm-placement post --normalization RMSNorm --qk-layernorm --qk-layernorm-across-heads"
    " --fp32-residual-connection",
    "--use-parallel-residual --hidden-size 66 --kv-channels 16",
    "--geglu --exact-gelu",
    "--fp16 --loss-scale 128 --global-batch-size 16 --clip-grad 0",
    "--group-query-attention --num-query-groups 2 --qk-layernorm --untie-embeddings-and-output-weights",
    "--num-query-groups 4",
    "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --grad-reduce-in-bf16 --exp-avg-dtype bf16"
    " --exp-avg-sq-dtype bf16 --adam-beta2 0.95",
    "--position-embedding-type yarn --yarn-original-max-position-embeddings 16 --rotary-scaling-factor 2",
    "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 32 --rotary-percent 0.5",
    f"--position-embedding-type rope --rope-parameters {DYNAMIC}",
    "--window-size 7,0 --window-attn-skip-freq 2",
    "--position-embedding-type rope --no-rope-freq 2",
    "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2",
    "--lr-decay-style cosine --lr-warmup-fraction 0.1 --min-lr 1e-4",
    "--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.1",
    "--global-batch-size 8 --rampup-batch-size 2 2 40",
    "--step-batch-size-schedule 0:2,64:4",
    "--save x --save-interval 5 --save-retain-interval 10 --load x --log-progress --no-save-optim --no-load-rng",
    "--eval-interval 5 --eval-iters 2 --full-validation --no-masked-softmax-fusion --no-rope-fusion --spec local",
    "--tensorboard-dir x --log-params-norm --log-throughput --profile --use-pytorch-profiler --optimizer sgd",
    "--calculate-per-token-loss --no-gradient-accumulation-fusion --no-persist-layer-norm --attention-backend unfused",
    "--ckpt-format torch_dist --ckpt-fully-parallel-load --auto-detect-ckpt-format --rerun-mode disabled",
    "--distributed-backend gloo --distributed-timeout-minutes 5 --manual-gc --manual-gc-interval 10 --exit-interval 5",
]


@pytest.mark.parametrize("text", FINE)
def test_consistent_settings_pass(text):
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # model
        ("--num-layers 0", "--num-layers 0: must be at least 1"),
        # formats of optimizer state
        ("--exp-avg-dtype bf16", "--exp-avg-dtype bf16: requires --use-precision-aware-optimizer"),
        ("--use-precision-aware-optimizer --exp-avg-dtype fp8", "--exp-avg-dtype fp8: is not available: it would"),
        ("--use-precision-aware-optimizer --exp-avg-sq-dtype bf16", "--exp-avg-sq-dtype bf16: has 8 significant bits"),
        ("--use-precision-aware-optimizer --main-params-dtype fp16", "--main-params-dtype fp16: is not available"),
        ("--use-precision-aware-optimizer --main-grads-dtype bf16", "--main-grads-dtype bf16: must equal the dtype in"),
        ("--use-precision-aware-optimizer --optimizer sgd", "--use-precision-aware-optimizer: requires --opt"),
        ("--use-precision-aware-optimizer --optimizer muon", "--use-precision-aware-optimizer: requires --opt"),
        # QK-Clip
        ("--qk-clip --qk-layernorm", "--qk-clip: has no effect on normalized queries and keys; remove it"),
        ("--qk-clip --attn-logit-softcapping 5", "--qk-clip: contradicts --attn-logit-softcapping"),
        ("--qk-clip-alpha 2", "--qk-clip-alpha 2: must be at least 0 and at most 1"),
        ("--log-max-attention-logit --transformer-impl transformer_engine", "--log-max-attention-logit: is not supp"),
        # Muon
        ("--optimizer muon --muon-num-ns-steps 0", "--muon-num-ns-steps 0: must be at least 1"),
        ("--optimizer muon --muon-momentum 1", "--muon-momentum 1: must be at least 0 and less than 1"),
        ("--optimizer muon --muon-extra-scale-factor 0", "--muon-extra-scale-factor 0: must be positive"),
        ("--optimizer muon --muon-scale-mode huge", "--muon-scale-mode huge: "),
        ("--optimizer muon --muon-coefficient-type aol", "--muon-coefficient-type: exists in Megatron-LM, is not"),
        ("--optimizer muon --muon-coefficient-type cubic5 --muon-num-ns-steps 4", "--muon-num-ns-steps 4: must be 5"),
        ("--optimizer lion --lion-beta1 1", "--lion-beta1 1: must be at least 0 and less than 1"),
        ("--optimizer muon --muon-fp32-matmul-prec low", "--muon-fp32-matmul-prec low: has no meaning in torch"),
        ("--optimizer muon --muon-use-syrk --muon-fp32-matmul-prec high", "--muon-use-syrk: requires"),
        ("--optimizer muon --muon-no-split-qkv --muon-split-qkv-per-head", "--muon-split-qkv-per-head: contradicts"),
        ("--num-attention-heads 5", "--hidden-size 64: is not a multiple of --num-attention-heads 5; nearest width"),
        ("--num-query-groups 2", "--num-query-groups 2: requires --group-query-attention; add that flag"),
        ("--group-query-attention --num-query-groups 3", "--num-query-groups 3: does not divide"),
        ("--mtp-use-repeated-layer", "--mtp-use-repeated-layer: requires --mtp-num-layers; add --mtp-num-layers N"),
        ("--seq-length 64", "--max-position-embeddings 32: is smaller than --seq-length 64; give at least 64"),
        ("--no-position-embedding", "--no-position-embedding: contradicts learned positions"),
        ("--use-rope-scaling", "--use-rope-scaling: needs rotary positions; --position-embedding-type rope"),
        ("--position-embedding-type rope --rotary-percent 0", "--rotary-percent 0: must be more than 0"),
        ("--position-embedding-type rope --rotary-percent 0.2", "--rotary-percent 0.2: rotates 3 of 16 channels"),
        ("--position-embedding-type yarn", "--yarn-original-max-position-embeddings: is required"),
        ("--swiglu --squared-relu", "--squared-relu: contradicts --swiglu; give one activation"),
        ("--activation-func-clamp-value 7", "--activation-func-clamp-value 7.0: needs a gated activation"),
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq 2: requires --window-size"),
        ("--window-size 7,0 --window-attn-skip-freq [1,0,1]", "--window-attn-skip-freq 1 0 1: has 3 entries for 2"),
        ("--hidden-dropout 1", "--hidden-dropout 1: must be at least 0 and less than 1"),
        ("--qk-layernorm --qk-l2-norm", "--qk-l2-norm: contradicts --qk-layernorm"),
        ("--geglu --swiglu", "--geglu: contradicts --swiglu"),
        ("--relu --swiglu", "--relu: contradicts --swiglu"),
        ("--exact-gelu --swiglu", "--exact-gelu: contradicts --swiglu"),
        ("--qk-layernorm-across-heads --normalization RMSNorm", "--qk-layernorm-across-heads: requires"),
        ("--qk-layernorm --qk-layernorm-across-heads", "--qk-layernorm-across-heads: is not supported with --norm"),
        ("--use-parallel-residual --apply-residual-connection-post-layernorm", "--use-parallel-residual: contradicts"),
        ("--norm-placement post --apply-residual-connection-post-layernorm", "--norm-placement post: contradicts"),
        ("--share-parallel-norm", "--share-parallel-norm: requires --use-parallel-residual; add that flag"),
        (f"{ONE_NORM} --norm-placement sandwich", "--share-parallel-norm: contradicts --norm-placement sandwich"),
        (f"{ONE_NORM} --recompute-granularity selective --recompute-modules layernorm",
         "--share-parallel-norm: contradicts layernorm in --recompute-modules"),
        ("--output-layer-bias --logits-scaling 2", "--output-layer-bias: contradicts --logits-scaling; remove one"),
        ("--learned-position-offset 2 --position-embedding-type rope",
         "--learned-position-offset 2: requires learned positions; remove it"),
        ("--rotary-base-local 100 --window-size 7,0", "--rotary-base-local 100.0: needs rotary positions"),
        ("--rotary-base-local 100", "--rotary-base-local 100.0: requires --window-size; add --window-size"),
        ("--no-rope-freq 2", "--no-rope-freq 2: needs rotary positions; add --position-embedding-type rope"),
        ("--no-rope-freq [1] --position-embedding-type rope", "--no-rope-freq 1: has 1 entries for 2 layers"),
        (f"--rope-parameters {DYNAMIC}",
         f"--rope-parameters {DYNAMIC}: requires --position-embedding-type rope; add it"),
        (f"--rope-parameters {DYNAMIC} --position-embedding-type rope --use-rope-scaling",
         "--use-rope-scaling: is not supported with --rope-parameters; remove one of the two"),
        (f"--rope-parameters {DYNAMIC} --position-embedding-type rope --rotary-seq-len-interpolation-factor 2",
         "--rotary-seq-len-interpolation-factor 2: is not supported with --rope-parameters"),
        (f"--rope-parameters {DYNAMIC} --position-embedding-type rope --use-varlen-dataset",
         "--use-varlen-dataset: is not supported with --rope-parameters, which depends on the length"),
        (f"--rope-parameters {DYNAMIC} --position-embedding-type rope --kv-channels 2",
         f"--rope-parameters {DYNAMIC}: needs at least 4 rotated"),
        (f"--rope-parameters {LONGROPE} --position-embedding-type rope",
         f"--rope-parameters {LONGROPE}: has 1 factors for 8 rotated channel pairs per head; give 8"),
        ("--softmax-scale 0", "--softmax-scale 0: must be"),
        ("--fp16 --bf16", "--fp16: contradicts --bf16; choose one of the two"),
        ("--loss-scale 8", "--loss-scale 8.0: requires --fp16"),
        ("--grad-reduce-in-bf16", "--grad-reduce-in-bf16: requires --bf16"),
        ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16: contradicts"),
        # batches and duration
        ("--global-batch-size 3", "--global-batch-size 3: 3 is not a multiple of micro batch size 2 x"),
        ("--global-batch-size 8 --rampup-batch-size 2 4 40", "--rampup-batch-size 2 4 40: the way from 2"),
        ("--global-batch-size 8 --rampup-batch-size 2 1 40", "--rampup-batch-size 2 1 40: 3 is not a multiple"),
        ("--global-batch-size 8 --step-batch-size-schedule 0:8", "--step-batch-size-schedule 0:8: contradicts"),
        ("--step-batch-size-schedule 5:8", "--step-batch-size-schedule 5:8: the first threshold is 5, it must be 0"),
        ("--step-batch-size-schedule 0:3", "--step-batch-size-schedule 0:3: 3 is not a multiple"),
        ("--eval-global-batch-size 3", "--eval-global-batch-size 3: 3 is not a multiple"),
        ("--train-samples 10", "--train-samples 10: contradicts --train-iters; give one of the two"),
        ("--train-iters 0", "--train-iters 0: must be at least 1"),
        ("--lr-warmup-samples 4", "--lr-warmup-samples 4: does not go with --train-iters; use --lr-warmup-iters"),
        ("--lr-decay-samples 4", "--lr-decay-samples 4: does not go with --train-iters; use --lr-decay-iters"),
        # schedule and optimizer
        ("--lr 0", "--lr 0: must be positive"),
        ("--min-lr 1", "--min-lr 1.0: must be between 0 and --lr 0.001"),
        ("--lr-warmup-init 1", "--lr-warmup-init 1.0: must be between 0 and --lr 0.001"),
        ("--lr-warmup-iters 10", "--lr-warmup-iters 10: must be less than the decay length of 10 iters"),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", "--lr-warmup-iters 1: contradicts --lr-warmup-fraction"),
        ("--lr-decay-style WSD", "--lr-wsd-decay-iters: is required by --lr-decay-style WSD"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "--lr-wsd-decay-iters 11: must be between 1 and"),
        ("--weight-decay-incr-style linear", "--start-weight-decay: is required by --weight-decay-incr-style linear"),
        ("--end-weight-decay 0.5", "--end-weight-decay 0.5: contradicts a constant --weight-decay 0.01"),
        ("--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler", "--override-opt_param-scheduler: "),
        ("--adam-beta2 1", "--adam-beta2 1: must be at least 0 and less than 1"),
        ("--iterations-to-skip 0 3", "--iterations-to-skip 0 3: must be at least 1"),
        # checkpoints, evaluation, logs
        ("--save x --save-interval 5 --save-retain-interval 12", "--save-retain-interval 12: is not a multiple"),
        ("--ckpt-step 5", "--ckpt-step 5: needs --load DIRECTORY"),
        ("--save x --max-failed-saves 0", "--max-failed-saves 0: must be at least 1"),
        ("--start-over", "--start-over: needs --save DIRECTORY"),
        ("--save x --load x --start-over", "--start-over: contradicts --load x, which continues from there"),
        ("--finetune", "--finetune: needs --load DIRECTORY or --pretrained-checkpoint DIRECTORY"),
        ("--multiple-validation-sets", "--multiple-validation-sets: requires --full-validation"),
        ("--validation-set-names a", "--validation-set-names a: requires --multiple-validation-sets"),
        ("--log-interval 0", "--log-interval 0: must be at least 1"),
        ("--wandb-project p", "--wandb-exp-name: is required by --wandb-project"),
        ("--profile --profile-step-start 5 --profile-step-end 5", "--profile-step-end 5: must be larger"),
        ("--profile --profile-ranks 3", "--profile-ranks 3: must be below the number of ranks, 1"),
        # data
        ("--data-path x", "--mock-data: contradicts --data-path; give one source of data"),
        ("--encoder-seq-length 16", "--encoder-seq-length 16: contradicts --seq-length 32"),
        ("--eval-iters 99999999999", "--eval-iters 99999999999: is 199,999,999,998 samples; their order"),
        ("--train-iters 99999999999", "--train-iters 99999999999: is 199,999,999,998 samples"),
        ("--num-workers -1", "--num-workers -1: must be at least 0"),
        ("--vocab-file /nowhere/vocab.json", "--vocab-file /nowhere/vocab.json: there is no such file"),
        ("--vocab-file /tmp", "--vocab-file /tmp: is not a file; give a file"),
        (f"--load {__file__}/x", f"--load {__file__}/x: cannot be opened (Not a directory)"),
        (f"--non-persistent-global-ckpt-dir {__file__}/x", f"--non-persistent-global-ckpt-dir {__file__}/x: cannot be"),
        ("--tokenizer-type GPT2BPETokenizer", "--vocab-file: is required by --tokenizer-type GPT2BPETokenizer"),
        ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-model: is required by --tokenizer-type HuggingFace"),
    ],
)  # fmt: skip
def test_contradiction_is_named(text, problem):
    result = problems(text)
    assert any(item.startswith(problem) for item in result), result


@pytest.mark.parametrize(
    ("base", "flags"),
    [
        ("", {"--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings", "--seq-length",
              "--micro-batch-size", "--train-iters", "--lr", "--data-path", "--tokenizer-type"}),
        (f"{MODEL} {DATA} --skip-train", {"--micro-batch-size"}),
        (f"{MODEL} {BATCH} --mock-data --tokenizer-type NullTokenizer", {"--vocab-size"}),
    ],
)  # fmt: skip
def test_everything_that_is_required_is_named_at_once(base, flags):
    assert {problem.split(":")[0] for problem in problems("", base=base)} == flags


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--split 0,1,1 --data-path x", "--split 0,1,1: leaves no training data"),
        ("--split 1,0,0 --data-path x --eval-interval 5", "--split 1,0,0: leaves no validation data; --eval-iters 0"),
        ("--split a --data-path x", "--split a: must be up to three numbers"),
        ("--split 1,1,1 --train-data-path x", "--split 1,1,1: contradicts --train-data-path"),
        ("--valid-data-path x", "--train-data-path: is required with --valid-data-path"),
        ("--train-data-path x --eval-interval 5", "--valid-data-path: is required for evaluation"),
        ("--train-data-path x --data-path y", "--train-data-path x: contradicts --data-path"),
    ],
)
def test_data_contradiction_is_named(text, problem):
    result = problems(text, base=f"{MODEL} {BATCH} --tokenizer-type ByteLevelTokenizer")
    assert len(result) == 1 and result[0].startswith(problem), result


def test_split_tolerates_quotes_and_fills_up():
    assert parse_split("'949, 50,1'") == [949, 50, 1] and parse_split("1") == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--lr-warmup-iters 4", "--lr-warmup-iters 4: does not go with --train-samples; use --lr-warmup-samples"),
        ("--lr-decay-style WSD", "--lr-wsd-decay-samples: is required"),
        ("--lr-warmup-samples 100", "--lr-warmup-samples 100: must be less than the decay length of 100 samples"),
        ("--global-batch-size 200", "--train-samples 100: is less than one global batch of 200; increase it, or"),
    ],
)
def test_contradiction_of_a_run_by_samples_is_named(text, problem):
    result = problems(text, base=f"{MODEL} {SAMPLES} {DATA}")
    assert len(result) == 1 and result[0].startswith(problem), result


@pytest.mark.parametrize(
    ("text", "world_size", "problem"),
    [
        ("--qk-clip --tensor-model-parallel-size 2 --group-query-attention --num-query-groups 1", 2,
         "--qk-clip: is not supported with 1 query groups on 2 tensor-parallel ranks, which share a key"),
        ("--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode blockwise", 2,
         "--muon-tp-mode blockwise: orthogonalizes each shard separately, so that results depend on the layout"),
        ("--optimizer muon --tensor-model-parallel-size 2 --muon-no-split-qkv --group-query-attention"
         " --num-query-groups 1", 2, "--muon-no-split-qkv: is not supported with 1 query groups on 2 tensor-parallel"),
        ("--tensor-model-parallel-size 3", 3, "--num-attention-heads 4: is not a multiple"),
        ("--tensor-model-parallel-size 2", 3, "world size 3: TP 2 x PP 1 x CP 1 = 2 ranks"),
        ("--tensor-model-parallel-size 3", 3, "--ffn-hidden-size"),
        ("--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 3 --num-attention-heads 12", 4,
         "--num-query-groups 3: neither divides nor is divided by --tensor-model-parallel-size 4; nearest: 4, or a"),
        ("--tensor-model-parallel-size 2 --sequence-parallel --seq-length 31", 2, "--seq-length 31: is not a multiple"),
        ("--tp-comm-overlap --tensor-model-parallel-size 2", 2, "--tp-comm-overlap: requires --sequence-parallel"),
        ("--context-parallel-size 3", 3, "--seq-length 32: is not a multiple of 2 x --context-parallel-size 3"),
        ("--pipeline-model-parallel-size 3", 3, "--num-layers 2: 2 layers cannot fill 3 pipeline stages"),
        ("--overlap-param-gather", 1, "--overlap-param-gather: requires --use-distributed-optimizer and --overlap"),
        ("--recompute-granularity full", 1, "--recompute-method: is required by --recompute-granularity full"),
        ("--recompute-activations --recompute-modules mlp loss", 1, "--recompute-modules mlp loss: loss not available"),
        ("--offload-modules attn_norm", 1, "--offload-modules attn_norm: requires --fine-grained-activation-off"),
        ("--recompute-modules mlp", 1, "--recompute-modules mlp: requires --recompute-granularity selective"),
        ("--distribute-saved-activations --tensor-model-parallel-size 2", 2, "--distribute-saved-activations: requires "
         "--recompute-gran"),
    ],
)  # fmt: skip
def test_layout_contradiction_is_named(text, world_size, problem):
    result = problems(text, world_size)
    assert any(item.startswith(problem) for item in result), result


def test_missing_custom_layers_are_rejected():
    assert problems("--spec a b", 1) == ["--spec a b: No module named 'a'; give a module and a name in it"]
    for odd in ("../../..", "x", "a b c"):
        (problem,) = problems(f"--spec {odd}", 1)
        assert problem.startswith(f"--spec {odd}: ") and problem.endswith("; give a module and a name in it")
    for kind in ("mixed_layers", "local_layers"):  # on one rank a layer need not know of others
        assert not problems(f"--spec tests.test_utils.gated_recurrence {kind}", 1)
    assert not problems("--spec local", 1)


@pytest.mark.parametrize(
    "text",
    [
        "--fp8-dot-product-attention", "--transformer-impl inference_optimized",
        "--ckpt-convert-format torch", "--optimizer soap",
        "--position-embedding-type mrope", "--tokenizer-type MultimodalTokenizer",
        "--rerun-mode report_stats",
    ],
)  # fmt: skip
def test_unavailable_capability_is_rejected(text):
    result = [problem for problem in problems(text, 2) if "not available yet" in problem]
    assert result and all("; remove it" in problem for problem in result)


def test_scripts_with_custom_data_need_no_data_flags():
    assert problems("", base=f"{MODEL} {BATCH}", needs_data=False) == []
    assert problems("--vocab-size 1", needs_data=False) == []


def test_nearest_sizes_count_the_data_parallel_ranks():
    assert problems("--global-batch-size 20", 4)[0].endswith("nearest valid sizes: 16 and 24")
    assert problems("--global-batch-size 1")[0].endswith("= 2; smallest valid size: 2")


def test_sequence_parallel_counts_for_nothing_on_one_tensor_parallel_rank():
    assert problems("--sequence-parallel --tp-comm-overlap") == []


def test_lowered_batches_need_not_divide():
    assert problems("--global-batch-size 3 --decrease-batch-size-if-needed") == []


LIKE_LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu"


@pytest.mark.parametrize(("text", "is_named"), [
    (LIKE_LLAMA, "--attention-dropout 0.1 (default, as in Megatron-LM): attention is unfused"),
    (f"{LIKE_LLAMA} --attention-dropout 0.2", "--attention-dropout 0.2: attention is unfused"),
    (f"{LIKE_LLAMA} --attention-dropout 0", ""),
    ("", ""),
    ("--position-embedding-type rope --normalization RMSNorm", ""),
    ("--dry-run", "--attention-dropout 0.1 (default, as in Megatron-LM): attention is unfused"),
    ("--dry-run --attention-dropout 0", ""),
])  # fmt: skip
def test_runs_like_llama_and_dry_runs_say_that_dropout_makes_attention_unfused(text, is_named):
    inputs = parse_args(f"{TINY} {text}".split())
    sentences = [item for item in notices(inputs, validate_args(inputs, 1, announce=False)) if "unfused" in item]
    assert len(sentences) == bool(is_named)
    assert all(item.startswith(is_named) and "--attention-dropout 0 uses fused kernels" in item for item in sentences)


def test_rules_have_names_and_run_once():
    rules = [*RULES, *collect_rules(rules_data)]
    assert len({rule.__name__ for rule in rules}) == len(rules) > 40


def test_an_empty_path_is_rejected():
    """`--save "$OUT"` with OUT unset is an empty path."""
    paths = {spec.field: spec for spec in flags_of(FlatConfig) if spec.field in rules_checkpoints.PATHS}
    assert paths.keys() == set(rules_checkpoints.PATHS)
    for field, spec in paths.items():
        for value in ("", "  "):
            inputs = ["a", value] if spec.nargs else value
            cfg = compose(FlatConfig(**{field: inputs}))
            [actual] = rules_checkpoints.paths_not_empty(cfg)
            assert actual.flag == spec.names[0] and "check whether a shell variable is unset" in str(actual)


def test_every_flag_that_names_a_place_is_checked_for_emptiness():
    suffixes = ("_path", "_dir", "_file", "_cfg", "_checkpoint", "_config_path")
    text = {spec.field for spec in flags_of(FlatConfig) if spec.type_name == "str" and not spec.choices}
    assert {name for name in text if name.endswith(suffixes)} <= set(rules_checkpoints.PATHS)


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        ("--save-interval 5", "--save-interval 5: no effect without --save; nothing is saved"),
        ("--save-hf-interval 5", "--save-hf-interval 5: no effect without --save; nothing is saved"),
        ("--position-embedding-type rope --rope-scaling-factor 32", "--rope-scaling-factor 32: no effect without"),
        ("--recompute-granularity selective --recompute-num-layers 1", "--recompute-num-layers 1: no effect without"),
        ("--recompute-method block", "--recompute-method block: no effect without --recompute-granularity full"),
        ("--distribute-saved-activations", "distribute_saved_activations: off, as --tensor-model-parallel-size is 1"),
    ],
)
def test_flag_without_effect_is_accepted_with_one_notice(text, notice):
    inputs = parse_args(f"{TINY} {text}".split())
    resolved = validate_args(inputs, 1)
    assert resolved.checkpoint.save_interval is None
    assert resolved.model.recompute_num_layers is resolved.model.recompute_method is None
    assert len([item for item in notices(inputs, resolved) if item.startswith(notice)]) == 1


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--use-lora", "--use-lora: is a flag of fine-tuning programs; --lora-rank"),
        ("--gradient_accumulation_steps", "is a flag of Hugging Face's Trainer; --global-batch-size"),
        ("--nproc-per-node", "is a flag of torchrun; give it before the script"),
    ],
)  # fmt: skip
def test_a_flag_of_another_program_is_answered_as_such(flag, answer):
    (actual,) = problems(f"{flag} 8")
    assert answer in actual and "did you mean" not in actual


def test_integrity_is_always_verified():
    assert problems("--verify-integrity") == []


def test_an_absent_wandb_is_found_before_anything_is_built(monkeypatch):
    monkeypatch.setattr("megatron.training.rules.training.is_installed", lambda name: name != "wandb")
    result = problems("--wandb-project p --wandb-exp-name n --wandb-save-dir d")
    assert len(result) == 1 and result[0].startswith("--wandb-project p: needs the package wandb; pip install")


def test_a_folder_that_is_not_writable_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    (tmp_path / "open").mkdir()
    for name, count in (("new/folder", 1), ("open", 0), ("open/new", 0)):
        problems = list(rules_checkpoints.save_folder_writable(compose(FlatConfig(save=str(tmp_path / name)))))
        assert len(problems) == count
        assert all(f"--save {tmp_path / name}: {tmp_path} cannot be written" in str(problem) for problem in problems)
    (tmp_path / "file").touch()
    for name, reason in (
        ("/proc/x", "/proc cannot be written"),
        (tmp_path / "file/run", f"{tmp_path}/file is no folder"),
    ):
        (problem,) = rules_checkpoints.save_folder_writable(compose(FlatConfig(save=str(name))))
        assert str(problem) == f"--save {name}: {reason}; choose another folder"


@pytest.mark.parametrize("name, fix", [
    ("Qwen/Qwen3-0.6B", "run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, then give Qwen3-0.6B instead"),
    ("./nosuch/folder/x", "check the path"),
])  # fmt: skip
def test_a_hub_name_of_load_hf_gets_the_command_that_downloads_it(name, fix):
    (problem,) = rules_checkpoints.load_folders_exist(compose(FlatConfig(load_hf=name)))
    assert str(problem).startswith(f"--load-hf {name}: there is no such folder") and str(problem).endswith(fix)


def test_load_of_another_format_is_rejected(tmp_path):
    """Such a run would start from random weights."""

    def problems(**flags):
        return list(map(str, rules_checkpoints.load_of_another_format(compose(FlatConfig(**flags)))))

    for file, fix in (("config.json", "give it as --load-hf"), ("adapter_config.json", "megatron lora import")):
        folder = tmp_path / file.partition(".")[0]
        folder.mkdir()
        assert problems(load=str(folder)) == problems(load=str(tmp_path / "missing")) == []
        (folder / file).write_text("{}")
        (text,) = problems(load=str(folder))
        assert text.startswith(f"--load {folder}: ") and fix in text
        assert len(problems(load=str(folder), load_hf="base")) == (file == "adapter_config.json")
        (text,) = problems(load=str(folder / file))
        assert "is no folder; give the --save folder of a run" in text
        (folder / "iter_0000001").mkdir()
        assert problems(load=str(folder)) == []
