"""The layout check trains adapters of a random base, and next to a random reference model or teacher."""

import math

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.core.config.cli import ConfigError
from megatron.tools import verify_layout

FLAGS = (
    "--seq-length 64 --micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-4 --bf16"
    " --tokenizer-type HuggingFaceTokenizer --tokenizer-model none --data-path none --load-hf FOLDER"
)
ADAPTERS = "--lora-rank 4 --lora-alpha 16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64))
    model.save_pretrained(saved := tmp_path_factory.mktemp("model"))
    return saved


def run(flags, folder, capsys):
    """Exit code and output of two steps on two ranks."""
    argv = f"{FLAGS} {flags}".replace("FOLDER", str(folder)).split()
    code = verify_layout.main([*argv, "--world-size", "2", "--steps", "2"])
    return code, capsys.readouterr().out


def first_loss(output):
    return float(next(line.split()[1] for line in output.splitlines() if line.split()[:1] == ["1"]))


@pytest.mark.parametrize(
    "flags",
    [
        f"{ADAPTERS} --lora-use-dora --tensor-model-parallel-size 2",
        f"{ADAPTERS} --lora-dropout 0.1 --lora-target-modules *.layers.3.*.linear_qkv --use-torch-fsdp2",
    ],
)
def test_adapters_equal_one_rank(flags, folder, capsys):
    code, output = run(flags, folder, capsys)
    assert code == 0 and "adapter.lora_" in output and ".weight" not in output


@pytest.mark.parametrize(
    ("flags", "is_equal_at_start"),
    [
        ("--dpo --tensor-model-parallel-size 2", False),
        ("--dpo --dpo-reference-load FOLDER --pipeline-model-parallel-size 2", False),
        (f"--dpo --dpo-reference model {ADAPTERS} --use-distributed-optimizer", False),
        (f"--dpo {ADAPTERS} --context-parallel-size 2", True),
    ],
)
def test_preference_pairs_equal_one_rank(flags, is_equal_at_start, folder, capsys):
    """The loss of a pair is log 2 if model and reference are equal. Then rewards are 0 up to rounding, and the share of
    positive ones depends on the layout: a reference model has other weights."""
    code, output = run(flags, folder, capsys)
    assert code == 0 and "\nequal: " in output
    assert (abs(first_loss(output) - math.log(2)) < 1e-7) is is_equal_at_start


def test_students_of_a_teacher_equal_one_rank(folder, capsys):
    flags = "--export-kd-teacher-load FOLDER --pipeline-model-parallel-size 2 --kd-loss reverse-kl --kd-temperature 2"
    code, output = run(f"{flags} --kd-layer-pairs 3:4 final:final:mse", folder, capsys)
    assert code == 0 and "a model of 4 layers" in output and first_loss(output) > 1e-4
    with pytest.raises(ConfigError, match="--kd-layer-pairs 2:4:cosine: is on pipeline stages 0 and 1"):
        run(f"{flags} --kd-layer-pairs 2:4", folder, capsys)


@pytest.mark.parametrize(
    ("flags", "changes", "difference"),
    [
        (ADAPTERS, {"lora_alpha": 17.0}, "adapter.lora_b differs by"),
        ("--dpo", {"dpo_beta": 0.2}, "step 1: dpo loss is"),
        ("--export-kd-teacher-load FOLDER", {"kd_temperature": 2.0}, "step 1: distillation loss is"),
    ],
)
def test_another_scale_on_one_rank_exits_with_1(flags, changes, difference, folder, capsys, monkeypatch):
    correct = verify_layout.one_rank
    monkeypatch.setattr(verify_layout, "one_rank", lambda cfg: correct(cfg).with_settings(**changes))
    code, output = run(f"{flags} --tensor-model-parallel-size 2", folder, capsys)
    assert code == 1 and difference in output
