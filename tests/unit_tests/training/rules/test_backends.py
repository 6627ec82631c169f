"""Options that a backend does not support are rejected with the reason; missing packages are named."""

import pytest

from megatron.core.config.cli import ConfigError
from megatron.core.tokenizers.simple import NullTokenizer
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.resolve import needs_built_in_layers, resolve
from megatron.training.notices import notices
from megatron.training.rules import backends as rules_backends
from megatron.training.rules.run_all import check, unmet_requirements
from megatron.training.tasks.gpt import GPTTask
from tests.test_utils import fake_apex

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
)
ENGINE = "--transformer-impl transformer_engine "
EXPERTS = "--num-experts 4 --swiglu --bf16"


def problems(text, world_size=1, family="gpt"):
    return [str(item) for item in check(resolve(parse_args((TINY + text).split(), model_family=family), world_size))]


def bad_value(text):
    with pytest.raises(ConfigError) as error:
        parse_args((TINY + text).split())
    return str(error.value)


@pytest.fixture
def everything_installed(monkeypatch):
    monkeypatch.setattr(rules_backends, "is_installed", lambda module: True)
    monkeypatch.setattr(rules_backends, "installed_versions", lambda: (2, 3, 4))
    monkeypatch.setattr(rules_backends, "what_is_missing", lambda part: None)
    monkeypatch.setattr(rules_backends, "gpu_present", lambda: True)


BUILT_IN = [
    ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --micro-batch-size 2", 2),
    ("--fp32-residual-connection", 1),
    ("--use-torch-fsdp2 --ckpt-format torch_dist", 2),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --global-batch-size 8", 2),
    ("--pipeline-model-parallel-size 2 --delay-wgrad-compute --global-batch-size 8", 2),
    ("--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 1", 2),
    ("--recompute-activations --recompute-modules layernorm", 1),
]


@pytest.mark.parametrize(("text", "world_size"), BUILT_IN)
def test_built_in_layers_accept_settings_that_transformer_engine_rejects(text, world_size):
    """The package need not be there then; one notice names the replacement and the reason."""
    assert problems(f"{ENGINE} {text}", world_size) == []
    inputs = parse_args((TINY + ENGINE + text).split())
    resolved = validate_args(inputs, world_size)
    assert resolved.model.transformer_impl == "local"
    flag = next(word for word in text.split() if word in " ".join(needs_built_in_layers(resolved.flat)))
    (sentence,) = [notice for notice in notices(inputs, resolved) if "are used instead" in notice]
    assert sentence.startswith("--transformer-impl transformer_engine: built-in layers") and flag in sentence


def test_attention_with_dropout_is_built_in(everything_installed):
    given = parse_args((TINY + ENGINE).split())
    resolved = validate_args(given, 1)
    assert resolved.model.transformer_impl == "transformer_engine" and resolved.model.attention_dropout == 0.1
    assert [item for item in notices(given, resolved) if item.startswith("--attention-dropout 0.1: built-in attention")]


def test_flash_attention_of_a_version_is_not_for_transformer_engine(everything_installed):
    (actual,) = problems(f"{ENGINE} --attention-dropout 0 --flash-attention-version 2 --bf16")
    assert actual.startswith("--flash-attention-version 2: has no effect on --transformer-impl")


def test_settings_that_transformer_engine_can_do_pass(everything_installed):
    assert problems(f"{ENGINE} --attention-dropout 0 --bf16 --swiglu --window-size 7,0") == []
    assert problems(f"{ENGINE} --attention-dropout 0.1 --attention-backend local") == []


def test_asking_for_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(rules_backends, "is_installed", lambda module: False)
    # local layers replace Transformer Engine's, under its names
    task = GPTTask(validate_args(parse_args((TINY + ENGINE + "--attention-dropout 0").split()), 1), NullTokenizer(100))
    names = [name for name, _ in task.model_provider().named_parameters()]
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    monkeypatch.setattr(rules_backends, "installed_versions", lambda: ())
    (actual,) = problems("--flash-attention-version 2 --bf16 --attention-dropout 0")
    assert "pip install flash-attn" in actual


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--tensor-model-parallel-size 2", "contains collectives (--tensor"),
        ("--pipeline-model-parallel-size 2 --global-batch-size 8", "waits for other pipeline stages"),
        ("--reset-attention-mask", "depends on document boundaries"),
        ("--recompute-activations", "saves and restores random states"),
        ("--fine-grained-activation-offloading --offload-modules attn_norm", "copies activations to the host"),
        ("--overlap-grad-reduce", "starts gradient reductions"),
        (f"{ENGINE} --attention-dropout 0", "is untested with"),
        ("--mtp-num-layers 1", "reads the current loss scale"),
        ("--apex-parts norm adam", "is untested with --apex-parts"),
        (f"{EXPERTS} --expert-model-parallel-size 2", "reads the number of received rows on the host"),
        (f"{EXPERTS} --expert-tensor-parallel-size 2", "contains collectives (--expert-tensor"),
    ],
)
def test_cuda_graph_rejects_flags_that_it_cannot_capture(text, problem, everything_installed):
    assert problems("--cuda-graph-impl local --global-batch-size 8", 2) == []
    result = problems(f"--cuda-graph-impl local {text}", 2)
    assert len(result) == 1 and problem in result[0], result


@pytest.mark.parametrize(
    "rows",
    [
        "--moe-token-dispatcher-type allgather --moe-static-rows",
        "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
    ],
)
def test_a_cuda_graph_holds_exchanges_of_tokens_of_fixed_size(rows, everything_installed):
    assert problems(f"--cuda-graph-impl local {EXPERTS} --expert-model-parallel-size 2 {rows}", 2) == []


@pytest.mark.parametrize(
    ("family", "text", "problem"),
    [
        ("bert", "--use-packed-sequence --attention-dropout 0", "has a varying length"),
        ("bert", "--softmax-type learnable", "depends on padding lengths"),
        ("t5", "--softmax-type off-by-one --decoder-seq-length 16", "depends on padding lengths"),
    ],
)
def test_a_cuda_graph_of_padded_rows_holds_no_lengths(family, text, problem, everything_installed):
    lengths = "--decoder-seq-length 16 " * (family == "t5")
    assert problems(f"--cuda-graph-impl local {lengths}", family=family) == []
    result = problems(f"--cuda-graph-impl local {text}", family=family)
    assert len(result) == 1 and problem in result[0], result
    assert problems("--cuda-graph-impl local --softmax-type learnable") == []


def test_nccl_needs_gpus_if_a_launcher_started_the_process(monkeypatch):
    monkeypatch.setattr(rules_backends, "gpu_present", lambda: False)
    assert problems("--distributed-backend nccl") == []  # builds no process group
    monkeypatch.setenv("WORLD_SIZE", "2")
    (actual,) = problems("--distributed-backend nccl", 2)
    assert actual.startswith("--distributed-backend nccl: requires NVIDIA GPUs") and actual.endswith("use gloo")
    assert problems("--distributed-backend nccl --dry-run", 2) == []
    assert problems("--distributed-backend gloo", 2) == []
    monkeypatch.setattr(rules_backends, "gpu_present", lambda: True)
    assert problems("--distributed-backend nccl", 2) == []


def test_a_cuda_graph_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(rules_backends, "gpu_present", lambda: False)
    assert "requires an NVIDIA GPU" in problems("--cuda-graph-impl local")[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--attention-backend fused", "contradicts --attention-backend fused"),
        ("--attention-dropout 0.1", "contradicts --attention-dropout 0.1"),
        ("--context-parallel-size 2", "does not support context parallelism"),
    ],
)
def test_flash_attention_version_excludes(text, problem, everything_installed):
    result = problems(f"--flash-attention-version 3 --bf16 --attention-dropout 0 {text}", 2)
    assert len(result) == 1 and problem in result[0], result
    assert problems("--flash-attention-version 3 --attention-dropout 0")[0].endswith("--bf16")


@pytest.mark.parametrize(
    ("text", "world_size", "refused"),
    [
        ("--bf16 --attention-dropout 0", 1, True), ("--bf16 --attention-dropout 0.1", 1, False),
        ("--attention-dropout 0", 1, False),
        ("--fp16 --attention-dropout 0 --seq-length 128 --max-position-embeddings 128", 1, False),
        ("--bf16 --attention-dropout 0 --context-parallel-size 2", 2, False),
        ("--bf16 --attention-dropout 0 --context-parallel-size 2 --cp-comm-type a2a", 2, True),
    ],
)  # fmt: skip
def test_cudnn_by_name_needs_lengths_that_it_takes(text, world_size, refused, everything_installed):
    """A rule about whole sequences, which all-to-all attends over too; odd blocks of rings go to the flash kernel."""
    result = problems(f"--attention-backend fused {text}", world_size)
    assert len(result) == refused and all("a multiple of 128 tokens, but --seq-length is 32" in item for item in result)


@pytest.mark.parametrize(
    ("text", "world_size", "problem"),
    [
        ("wgrad --no-gradient-accumulation-fusion", 1, "wgrad contradicts --no-gradient-accumulation-fusion"),
        ("wgrad --use-torch-fsdp2 --ckpt-format torch_dist", 2, "wgrad contradicts --use-torch-fsdp2"),
        (f"norm {ENGINE} --attention-dropout 0", 1, "norm contradicts --transformer-impl"),
        ("adam --optimizer sgd", 1, "adam contradicts --optimizer sgd"),
    ],
)
def test_parts_of_apex_without_a_place_are_rejected(text, world_size, problem, everything_installed):
    result = problems(f"--apex-parts {text}", world_size)
    assert len(result) == 1 and problem in result[0], result


def test_norms_without_biases_are_built_in_ones(everything_installed):
    messages = "--disable-norm-bias: is not supported by"
    for text in ("--apex-parts norm", ENGINE + "--attention-dropout 0"):
        (actual,) = problems(f"--disable-norm-bias {text}")
        assert actual.startswith(messages), actual
        assert problems(f"--disable-norm-bias --normalization RMSNorm {text}") == []
    assert problems("--disable-norm-bias") == []


def test_all_contradictions_of_apex_are_named_at_once(everything_installed):
    assert problems("--apex-parts wgrad norm adam --bf16") == []
    assert problems("--apex-parts adam --no-gradient-accumulation-fusion") == []
    assert problems("--apex-parts wgrad --optimizer sgd") == []
    result = problems("--apex-parts wgrad adam --optimizer sgd --no-gradient-accumulation-fusion")
    assert [item.split(": ")[0] for item in result] == ["--apex-parts wgrad adam"] * 2
    settings = resolve(parse_args((TINY + "--apex-parts adam").split()), 1).with_settings(fp64=True)
    (result,) = unmet_requirements(settings)
    assert "does not support float64" in str(result)


def test_a_missing_apex_is_one_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(rules_backends, "gpu_present", lambda: True)
    (actual,) = problems("--apex-parts wgrad norm")
    assert actual.startswith("--apex-parts wgrad norm: needs NVIDIA apex, which is not installed; APEX_CPP_EXT=1 ")
    assert "APEX_CUDA_EXT=1 pip install" in actual and actual.endswith("or remove it")
    fake_apex.install(monkeypatch, without=("amp_C",))
    assert problems("--apex-parts wgrad norm") == []
    (actual,) = problems("--apex-parts wgrad adam")
    assert actual.startswith("--apex-parts wgrad adam: adam needs amp_C, without which the installed apex was built; ")
    monkeypatch.setattr(rules_backends, "gpu_present", lambda: False)
    assert "requires an NVIDIA GPU" in problems("--apex-parts wgrad")[0]
    assert problems("--apex-parts wgrad norm adam --dry-run") == []
    assert "must be one of wgrad, norm, adam" in bad_value("--apex-parts all")


def test_version_4_serves_ranks_that_share_a_sequence(everything_installed):
    assert problems("--flash-attention-version 4 --bf16 --attention-dropout 0 --context-parallel-size 2", 2) == []
