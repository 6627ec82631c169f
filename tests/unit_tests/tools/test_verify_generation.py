"""The tool finds trainer and generator equal in batch-invariant mode, and a planted change of the order of sums."""

import pytest

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


def test_experts_and_stages_exit_with_0(capsys):
    layout = ["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    assert verify_generation.main([*INVARIANT, *EXPERTS, *layout]) == 0
    assert "\nequal: all bits of" in capsys.readouterr().out


def test_without_the_mode_the_difference_is_shown(capsys):
    assert verify_generation.main([*LLAMA, "--tensor-model-parallel-size", "2"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT in" in out and "add --batch-invariant-mode" in out


@pytest.mark.parametrize("fault", [generation_faults.split_k, generation_faults.other_key_blocks])
def test_a_planted_order_of_sums_is_found(fault):
    flags = [flag for flag in INVARIANT if flag != "--bf16"]
    trainer = verify_generation.small_settings(parse_args(flags, needs_data=False), 1)
    generator = verify_generation.generator_settings(trainer, 1)
    found = verify_generation.verify(trainer, 1, generator, 1, VOCAB_SIZE, 3, prepare=fault)
    assert found.different_rows > 0 and 0 < found.largest < 1e-2
