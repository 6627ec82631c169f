"""Spellings that command lines in circulation still use: from older releases, from forks, from guides.

Each is rewritten into today's flags, accepted with a notice because there is nothing left to choose, or refused with
the flag to use instead. The table is also printed in docs/reference/flags.md.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from megatron.core.config.cli import Problem, Segment, segments

OPERANDS = "*"


@dataclass(frozen=True)
class Retired:
    """What becomes of one spelling: ``to`` today's tokens (``*`` stands for the operands), or a note, or a refusal."""

    to: tuple[str, ...] = ()
    ignored: str = ""
    refused: str = ""
    program: str = ""
    """The program that the flag belongs to, if not Megatron-LM."""

    @property
    def reason(self) -> str:
        """Why it is refused."""
        return f"is a flag of {self.program}" if self.program else "is not a flag any more"

    @property
    def meaning(self) -> str:
        """For the flag reference and for notices."""
        if self.to:
            return "means " + " ".join("..." if token == OPERANDS else token for token in self.to)
        if self.ignored:
            return f"accepted without effect: {self.ignored}"
        return f"refused: {self.refused}" + f" (a flag of {self.program})" * bool(self.program)


def _to(*tokens: str) -> Retired:
    return Retired(to=tokens)


def _renamed(name: str) -> Retired:
    return Retired(to=(name, OPERANDS))


def _ignored(reason: str) -> Retired:
    return Retired(ignored=reason)


def _refused(fix: str) -> Retired:
    return Retired(refused=fix)


def _of(program: str, fixes: dict[str, str]) -> dict[str, Retired]:
    return {name: Retired(refused=fix, program=program) for name, fix in fixes.items()}


_LORA = "all weights are trained: there are no adapters"
_FULL = ("--recompute-granularity", "full", "--recompute-method")
_CONTIGUOUS = _ignored("gradients always lie in contiguous buffers")
_SPLIT_MODEL = _refused("encoder and decoder share one pipeline; lay it out with --pipeline-model-parallel-layout")
_DEEPSPEED = _refused("a flag of DeepSpeed; --use-distributed-optimizer shards the optimizer")

RETIRED: dict[str, Retired] = {
    # batch, schedule, optimizer
    "--batch-size": _renamed("--micro-batch-size"),
    "--train-iterations": _renamed("--train-iters"),
    "--learning-rate": _renamed("--lr"),
    "--warmup": _refused("--lr-warmup-fraction or --lr-warmup-iters"),
    "--override-lr-scheduler": _to("--override-opt_param-scheduler"),
    "--use-checkpoint-lr-scheduler": _to("--use-checkpoint-opt_param-scheduler"),
    "--cpu-optimizer": _to("--optimizer-cpu-offload"),
    "--cpu-optimizer-type": _ignored("--optimizer chooses the kind, --optimizer-cpu-offload where it runs"),
    "--muon-use-nesterov": _refused("--muon-nesterov in Megatron-LM; not available here"),
    "--no-weight-decay-cond-type": _refused("biases and normalization weights are never decayed"),
    # precision
    "--fp8-hybrid": _to("--fp8-format", "hybrid"),
    "--fp8-e4m3": _to("--fp8-format", "e4m3"),
    "--fp8-interval": _ignored("scales are updated in every step"),
    "--min-scale": _renamed("--min-loss-scale"),
    "--fp32-allreduce": _to("--accumulate-allreduce-grads-in-fp32"),
    "--no-query-key-layer-scaling": _ignored("the scaling is off unless asked for"),
    "--embedding-weights-in-fp32": _refused("weights keep one format; the optimizer's copy is float32"),
    # recomputation
    "--checkpoint-activations": _to(*_FULL, "uniform", "--recompute-num-layers", "1"),
    "--activations-checkpoint-method": _to(*_FULL, OPERANDS),
    "--checkpoint-method": _renamed("--recompute-method"),
    "--checkpoint-granularity": _renamed("--recompute-granularity"),
    "--activations-checkpoint-num-layers": _renamed("--recompute-num-layers"),
    "--checkpoint-num-layers": _renamed("--recompute-num-layers"),
    "--distribute-checkpointed-activations": _to("--distribute-saved-activations"),
    "--moe-layer-recompute": _to("--recompute-granularity", "selective", "--recompute-modules", "moe"),
    # model
    "--layernorm-epsilon": _renamed("--norm-epsilon"),
    "--use-rotary-position-embeddings": _to("--position-embedding-type", "rope"),
    "--model-spec": _renamed("--spec"),
    "--intermediate-size": _renamed("--ffn-hidden-size"),
    "--openai-gelu": _refused("leave it out: GELU is the default activation"),
    "--onnx-safe": _ignored("nothing depends on it"),
    "--use-flash-attn": _ignored("--attention-backend chooses the kernel, by itself a flash one where it can"),
    "--use-mcore-models": _ignored("there is only one set of models"),
    "--use-legacy-models": _refused("leave it out: there is only one set of models"),
    "--bias-gelu-fusion": _ignored("on unless --no-bias-gelu-fusion"),
    "--bias-dropout-fusion": _ignored("on unless --no-bias-dropout-fusion"),
    "--scaled-masked-softmax-fusion": _ignored("on unless --no-masked-softmax-fusion"),
    "--scaled-upper-triang-masked-softmax-fusion": _ignored("on unless --no-masked-softmax-fusion"),
    "--no-scaled-masked-softmax-fusion": _to("--no-masked-softmax-fusion"),
    # parallelism
    "--model-parallel-size": _renamed("--tensor-model-parallel-size"),
    "--expert-parallel": _refused("--expert-model-parallel-size N says over how many ranks"),
    "--moe-extended-tp": _refused("--expert-tensor-parallel-size N"),
    "--standalone-embedding-stage": _to("--account-for-embedding-in-pipeline-split"),
    "--pipeline-model-parallel-split-rank": _SPLIT_MODEL,
    "--encoder-pipeline-model-parallel-size": _SPLIT_MODEL,
    "--encoder-tensor-model-parallel-size": _SPLIT_MODEL,
    "--ddp-impl": _ignored("there is one implementation"),
    "--use-contiguous-buffers-in-ddp": _CONTIGUOUS,
    "--use-contiguous-buffers-in-local-ddp": _CONTIGUOUS,
    "--no-contiguous-buffers-in-local-ddp": _CONTIGUOUS,
    "--overlap-p2p-communication": _ignored("on unless --no-overlap-p2p-communication"),
    "--deallocate-pipeline-outputs": _ignored("always on"),
    "--no-scatter-gather-tensors-in-pipeline": _ignored("stages never send what the other side can gather"),
    "--no-async-tensor-model-parallel-allreduce": _ignored("overlap never changes results"),
    "--no-delay-grad-reduce": _ignored("reductions start when gradients are complete"),
    "--delay-grad-reduce": _ignored("reductions start when gradients are complete"),
    "--delay-param-gather": _ignored("gathers start when weights are needed"),
    "--align-param-gather": _ignored("on unless --no-align-param-gather"),
    "--align-grad-reduce": _ignored("on unless --no-align-grad-reduce"),
    "--use-custom-fsdp": _to("--use-megatron-fsdp"),
    "--deepspeed": _DEEPSPEED,
    "--deepspeed-config": _DEEPSPEED,
    "--zero-stage": _DEEPSPEED,
    "--no-pipeline-parallel": _ignored("there is none unless --pipeline-model-parallel-size asks for it"),
    # mixture of experts
    "--moe-router-padding-for-fp8": _to("--moe-router-padding-for-quantization"),
    "--moe-token-dropping": _refused("--moe-expert-capacity-factor F drops tokens beyond that capacity"),
    "--moe-router-topk-limited-devices": _refused("--moe-router-num-groups and --moe-router-group-topk"),
    "--moe-use-legacy-grouped-gemm": _ignored("--moe-grouped-gemm has one implementation"),
    "--moe-enable-deepep": _refused("--moe-token-dispatcher-type flex"),
    # data and tokenizers
    "--data-impl": _ignored("data is always memory-mapped .bin/.idx"),
    "--mmap-warmup": _ignored("the operating system reads ahead"),
    "--skip-mmap-warmup": _ignored("the operating system reads ahead"),
    "--renormalize-blend-weights": _ignored("weights are always normalized"),
    "--val-data-path": _renamed("--valid-data-path"),
    "--s3-cache-path": _refused("copy the data to a local or mounted directory; object storage is not available"),
    "--vocab": _renamed("--vocab-file"),
    "--legacy-tokenizer": _ignored("there is one set of tokenizers"),
    "--tiktoken-special-tokens": _renamed("--tokenizer-special-tokens"),
    "--tokenizer-hf-use-fast": _ignored("on unless --tokenizer-hf-no-use-fast"),
    "--tokenizer-hf-include-special-tokens": _ignored("on unless --tokenizer-hf-no-include-special-tokens"),
    # checkpoints and logging
    "--use-dist-ckpt": _ignored("--ckpt-format chooses the format"),
    "--dist-ckpt-format": _ignored("--ckpt-format chooses the format"),
    "--ckpt-fully-parallel-save": _ignored("on unless --no-ckpt-fully-parallel-save"),
    "--enable-one-logger": _ignored("there is no such service"),
    "--log-batch-size-to-tensorboard": _ignored("always logged"),
    "--log-learning-rate-to-tensorboard": _ignored("always logged"),
    "--no-log-learnig-rate-to-tensorboard": _ignored("the learning rate is always logged"),
    "--verify-integrity": _ignored("what is loaded is always verified"),
    # other programs
    **_of("fine-tuning programs", dict.fromkeys(("--lora-rank", "--lora-r", "--lora-alpha", "--lora-dropout",
        "--lora-target-modules", "--use-lora", "--use-peft", "--qlora"), _LORA)),
    **_of("Hugging Face's Trainer", {
        "--per-device-train-batch-size": "--micro-batch-size",
        "--per-device-eval-batch-size": "--eval-micro-batch-size",
        "--gradient-accumulation-steps": "--global-batch-size says how many sequences an update takes, over all ranks",
        "--num-train-epochs": "--train-samples or --train-iters",
        "--max-steps": "--train-iters",
        "--warmup-steps": "--lr-warmup-iters",
        "--warmup-ratio": "--lr-warmup-fraction",
        "--lr-scheduler-type": "--lr-decay-style",
        "--logging-steps": "--log-interval",
        "--save-steps": "--save-interval",
        "--eval-steps": "--eval-interval",
        "--max-grad-norm": "--clip-grad",
        "--output-dir": "--save",
        "--resume-from-checkpoint": "--load",
        "--gradient-checkpointing": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--model-name-or-path": "the model's sizes are flags, and weights of other programs cannot be loaded yet",
        "--max-seq-length": "--seq-length",
    }),
    **_of("nanoGPT", {
        "--n-layer": "--num-layers", "--n-head": "--num-attention-heads", "--n-embd": "--hidden-size",
        "--block-size": "--seq-length", "--max-iters": "--train-iters",
    }),
    **_of("torchrun", dict.fromkeys(("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port",
        "--rdzv-endpoint", "--rdzv-backend", "--standalone"), "give it before the script, behind the word torchrun")),
    "--inference-max-batch-size": _renamed("--inference-max-requests"),
}
"""By normalized spelling (``-`` for ``_``, lower case)."""

RENAMED: dict[str, str] = {name: entry.to[0] for name, entry in RETIRED.items() if entry.to[1:] == (OPERANDS,)}
"""Plain renames, which hold in YAML files too."""


def modernize(found: list[Segment], known: Container[str]) -> tuple[list[Segment], list[str], list[Problem]]:
    """Rewrite retired spellings of a command line; names in ``known`` are left alone.

    What comes of a rewrite goes to the front, so that today's spelling wins where both are given.

    Returns:
        the command line in today's flags, one notice per retired spelling, and the refusals.
    """
    rewritten: list[str] = []
    kept: list[Segment] = []
    notices: list[str] = []
    problems: list[Problem] = []
    for segment in found:
        entry = None if segment.name in known else RETIRED.get(segment.name.lower())
        if entry is None:
            kept.append(segment)
        elif entry.refused:
            problems.append(Problem(segment.typed, entry.reason, fix=entry.refused))
        else:
            notices.append(f"{segment.typed} {entry.meaning}")
            for token in entry.to:
                rewritten += segment.operands if token == OPERANDS else [token]
    front, bad_operands = segments(rewritten)
    return front + kept, notices, problems + bad_operands
