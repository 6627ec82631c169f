"""The tool finds trainer and generator equal in batch-invariant mode, and a planted change of the order of sums."""

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.tools import verify_generation
from megatron.tools.verify_layout import VOCAB_SIZE
from megatron.training.arguments import parse_args
from tests.test_utils import generation_faults
from tests.unit_tests.tools.test_verify_layout import LLAMA

INVARIANT = [*LLAMA, "--batch-invariant-mode"]
EXPERTS = ["--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "512",
           "--moe-token-dispatcher-type", "alltoall"]  # fmt: skip


def test_equal_bits_exit_with_0(capsys):
    layout = ["--tensor-model-parallel-size", "2", "--context-parallel-size", "2", "--sequence-parallel"]
    layout += ["--generator-tp", "4"]
    assert verify_generation.main([*INVARIANT, *layout]) == 0
    out = capsys.readouterr().out
    assert "trainer: 4 ranks = tensor 2 x context 2" in out and "\nequal: all bits of" in out and "bfloat16" in out


def test_a_generator_with_more_tensor_parallel_ranks_than_the_trainer(capsys):
    layout = ["--expert-model-parallel-size", "2", "--generator-tp", "2"]
    assert verify_generation.main([*INVARIANT, *EXPERTS, *layout]) == 0
    assert "\nequal: all bits of" in capsys.readouterr().out


def test_prompts_in_chunks_of_every_named_size_are_compared(capsys):
    assert verify_generation.main([*INVARIANT, "--num-sequences", "2", "--chunk-tokens", "5", "33"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" … ")[0] for line in lines[1:4]] == [
        "trainer", "generator, chunks of 5 tokens", "generator, chunks of 33 tokens",
    ]  # fmt: skip
    assert [line.split(", ")[1] for line in lines[4:]] == ["chunks of 5 tokens", "chunks of 33 tokens"]


def test_random_weights_at_full_size(capsys):
    sizes = ["--num-layers", "1", "--hidden-size", "64", "--ffn-hidden-size", "64", "--seq-length", "32", "--full-size"]
    assert verify_generation.main([*INVARIANT, *sizes, "--vocab-size", "64", "--num-sequences", "2"]) == 0
    assert "width 64" in capsys.readouterr().out


def test_experts_and_stages_exit_with_0(capsys):
    layout = ["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    assert verify_generation.main([*INVARIANT, *EXPERTS, *layout]) == 0
    assert "\nequal: all bits of" in capsys.readouterr().out


@pytest.mark.gpu
def test_equal_bits_on_gpus(capsys):
    ranks = str(min(torch.cuda.device_count(), 2))
    for name in ("tensor-model-parallel-size", "context-parallel-size"):
        assert verify_generation.main([*INVARIANT, f"--{name}", ranks, "--generator-tp", ranks, "--gpus"]) == 0
        assert "\nequal: all bits of" in capsys.readouterr().out


def test_chunks_without_tokens_are_rejected():
    with pytest.raises(UserError, match=r"--chunk-tokens \[4, 0\]: must be at least 1"):
        verify_generation.main([*INVARIANT, "--chunk-tokens", "4", "0"])


def test_more_ranks_than_gpus_are_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"--gpus: 2 ranks of one side, but 1 GPU here"):
        verify_generation.main([*INVARIANT, "--tensor-model-parallel-size", "2", "--gpus"])


def test_without_the_mode_the_difference_is_shown(capsys):
    assert verify_generation.main([*LLAMA, "--tensor-model-parallel-size", "2"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT in" in out and "add --batch-invariant-mode" in out


@pytest.mark.parametrize("fault", [generation_faults.split_k, generation_faults.other_key_blocks])
def test_a_planted_order_of_sums_is_found(fault):
    flags = [flag for flag in INVARIANT if flag != "--bf16"]
    trainer = verify_generation.small_settings(parse_args(flags, needs_data=False), 1, 1)
    generator = verify_generation.generator_settings(trainer, 1)
    (difference,) = verify_generation.verify(trainer, 1, generator, 1, VOCAB_SIZE, 3, prepare=fault).values()
    assert difference.different_rows > 0 and 0 < difference.largest < 1e-2


def test_weights_of_a_run_are_loaded_onto_both_sides(tmp_path, capsys):
    saved = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "8", "--seq-length", "32",
             "--max-position-embeddings", "32", "--mock-data",
             "--tokenizer-type", "NullTokenizer", "--vocab-size", "64",
             "--micro-batch-size", "2", "--train-iters", "2", "--eval-iters", "0", "--lr", "1e-2",
             "--save", str(tmp_path)]  # fmt: skip
    from megatron.training.run import run
    from megatron.training.tasks.gpt import GPTTask

    run(parse_args(saved), GPTTask)
    capsys.readouterr()
    flags = [*saved[:-2], "--load", str(tmp_path), "--full-size", "--batch-invariant-mode"]
    assert verify_generation.main([*flags, "--tensor-model-parallel-size", "2", "--generator-tp", "1"]) == 0
    assert "\nequal: all bits of" in capsys.readouterr().out
