"""Flags of Megatron-LM for its server become flags of ``megatron serve``."""

import pytest

from megatron.core.config.errors import UserError
from megatron.tools.serve import parse_command_line
from megatron.tools.text_generation_server import serve_arguments

EXAMPLE = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size=1 --num-layers 24 --hidden-size 1024 --load run
    --num-attention-heads 16 --max-position-embeddings 1024 --tokenizer-type GPT2BPETokenizer --fp16
    --micro-batch-size 1 --seq-length 1024 --vocab-file v.json --merge-file m.txt --seed 42 --use_checkpoint_args
    --inference-max-requests 12 --temperature 1.0 --top_p 0.9 --out-seq-length 100
"""


def test_the_example_of_megatron_lm_starts_the_server(capsys):
    args = parse_command_line(serve_arguments(EXAMPLE.split()))
    assert (args.load, args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == ("run", 2, 1)
    assert (args.port, args.max_sequences, args.host) == (5000, 12, "127.0.0.1")
    notice = capsys.readouterr().err
    assert "--num-layers" in notice and "--top_p" in notice and "--load" not in notice and notice.count("\n") == 1
    args = parse_command_line(serve_arguments(["--load", "run", "--port=81", "--max_requests", "3"]))
    assert (args.port, args.max_requests) == (81, 3) and capsys.readouterr().err == ""


@pytest.mark.parametrize(("words", "problem"), [
    ("--load run --num-layer 3", "--num-layer: unknown flag; did you mean --num-layers"), ("run", "run"),
])  # fmt: skip
def test_unknown_flags_are_named(words, problem):
    with pytest.raises(UserError, match=problem):
        serve_arguments(words.split())
