"""Supervised fine-tuning with the whole program: layouts, packing, resume, flags of Megatron-LM."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch

from tests.test_utils.chats import CHATML, sums, tokenizer_folder, write_lines
from tests.test_utils.gpt_runs import MODEL_FLAGS, read_records, train, train_with_errors
from tests.test_utils.hf_folders import LLAMA, tiny_llama

SFT = [
    "--sft", "--micro-batch-size", "1", "--global-batch-size", "4", "--seq-length", "96",
    "--max-position-embeddings", "96", "--log-interval", "1", "--train-iters", "4", "--eval-iters", "0",
    "--position-embedding-type", "rope",
]  # fmt: skip
DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
EXACT = ["--attention-dropout", "0", "--hidden-dropout", "0"]
EXPERTS = [
    "--num-experts", "4", "--moe-ffn-hidden-size", "24", "--moe-router-topk", "2",
    "--moe-router-load-balancing-type", "none",
]  # fmt: skip
TP2, CP2, PP2 = (f"--{name}-parallel-size 2" for name in ("tensor-model", "context", "pipeline-model"))
LAYOUTS = {
    "tp2+sp": (2, f"{TP2} --sequence-parallel"),
    "cp2": (2, CP2),
    "cp2 all-to-all": (2, f"{CP2} --cp-comm-type a2a"),
    "pp2": (2, PP2),
    "dp2 zero": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "dp2 fsdp2": (2, "--use-torch-fsdp2"),
    "tp2+sp cp2": (4, f"{TP2} --sequence-parallel {CP2}"),
    "cp2 dp2 zero": (4, f"{CP2} --use-distributed-optimizer"),
    "pp2 dp2": (4, PP2),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags of the conversations and their tokenizer."""
    folder = tmp_path_factory.mktemp("chats")
    path = write_lines(folder / "chats.jsonl", sums(60))
    model = tokenizer_folder(folder / "tokenizer")
    files = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model, "--vocab-size", "1024"]
    return [*SFT, *files, "--train-data-path", path]


def train_with_output(rank, world_size, argv):
    """Return the exit code and the log."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = train(rank, world_size, argv)
    return code, output.getvalue()


def records(pool, folder, ranks, flags):
    assert set(pool.run(train, ranks, [*flags, "--save", str(folder)])) == {0}
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "train"]


@pytest.fixture(scope="module")
def one_rank(gloo_pool, data, tmp_path_factory):
    """Function from further flags to the records of one rank, run once."""
    runs = {}

    def run(*flags):
        if flags not in runs:
            runs[flags] = records(gloo_pool, tmp_path_factory.mktemp("one"), 1, [*data, *flags])
        return runs[flags]

    return run


def assert_same(one, many):
    assert len(one) == len(many) > 0
    for first, second in zip(one, many):
        assert first["num_tokens"] == second["num_tokens"]
        for name in ("lm loss", "grad_norm"):
            np.testing.assert_allclose(second[name], first[name], rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(gloo_pool, data, one_rank, tmp_path, name):
    ranks, layout = LAYOUTS[name]
    flags = [*DROPOUT, *(["--untie-embeddings-and-output-weights"] if "fsdp2" in name else [])]
    many = records(gloo_pool, tmp_path, ranks, [*data, *flags, *layout.split()])
    assert_same(one_rank(*flags), many)


def test_expert_parallel_ranks_equal_one(gloo_pool, data, one_rank, tmp_path):
    flags = [*DROPOUT, *EXPERTS]
    assert_same(one_rank(*flags), records(gloo_pool, tmp_path, 2, [*data, *flags, "--expert-model-parallel-size", "2"]))


MODELS = {
    "predicting further tokens": "--mtp-num-layers 1",
    "window": "--window-size 8,0",
    "latent attention": "--multi-latent-attention --kv-lora-rank 20 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 10",
    "experts": " ".join(EXPERTS),
}
SAME = {"one rank": "", "tp2+sp": LAYOUTS["tp2+sp"][1], "cp2": CP2, "pp2": PP2} | MODELS


@pytest.mark.parametrize("name", SAME)
def test_packed_rows_train_as_separate_rows(gloo_pool, data, tmp_path, name):
    """Every conversation of the file in one global batch, packed or each in a row: the same losses and gradients."""
    ranks, runs = 2 if name in ("tp2+sp", "cp2", "pp2") else 1, []
    data = [*data[:-1], write_lines(tmp_path / "chats.jsonl", sums(16))]
    for kind, flags in (("packed", []), ("separate", ["--no-sft-packing", "--micro-batch-size", "4"])):
        size = {"packed": rows(data), "separate": 16}[kind]
        flags = [*data, *EXACT, *flags, *SAME[name].split(), "--global-batch-size", str(size), "--train-iters", "2"]
        flags += ["--lr-warmup-iters", "0"]
        runs.append(records(gloo_pool, tmp_path / kind, ranks, flags))
    packed, separate = runs
    assert packed[0]["num_tokens"] == separate[0]["num_tokens"] > 60
    for first, second in zip(packed, separate):
        for value in ("lm loss", "grad_norm"):
            np.testing.assert_allclose(first[value], second[value], rtol=3e-6, err_msg=value)


def rows(data, length=96):
    """Rows of an epoch."""
    from megatron.core.datasets.conversations.packing import best_fit_decreasing
    from megatron.core.datasets.conversations.prepare import prepared
    from megatron.core.tokenizers.huggingface import build_huggingface

    arrays, *_ = prepared(data[-1], build_huggingface(data[data.index("--tokenizer-model") + 1]), None)
    lengths = np.minimum(arrays["lengths"] - 1, length)
    return len(best_fit_decreasing(np.sort(lengths)[::-1].tolist(), length))


def test_two_epochs_read_all_rows_twice(data, caplog):
    """The run, not the arguments, logs the data set."""
    from megatron.training.arguments import parse_args, validate_args

    pairs = [*MODEL_FLAGS, *data]
    for flag in ("--train-iters", "--lr-warmup-iters"):
        while flag in pairs:
            del pairs[pairs.index(flag) : pairs.index(flag) + 2]
    with caplog.at_level("INFO"):
        cfg = validate_args(parse_args([*pairs, "--num-epochs", "2"]), 1, announce=False)
    assert "sequences in" not in caplog.text
    assert cfg.training.train_samples == cfg.schedule.lr_decay_samples == 2 * rows(data)
    assert cfg.training.train_iters == 2 * rows(data) // 4


def test_a_resume_writes_the_same_bytes(gloo_pool, data, tmp_path):
    """Across an epoch: 60 conversations take fewer than 8 x 8 rows."""
    flags = [*data, *DROPOUT, "--train-iters", "8"]
    complete = records(gloo_pool, tmp_path / "complete", 2, flags)
    records(gloo_pool, tmp_path / "parts", 2, [*flags, "--exit-interval", "3"])
    parts = records(gloo_pool, tmp_path / "parts", 2, [*flags, "--load", str(tmp_path / "parts")])
    assert len(complete) == 8 and json.dumps(complete) == json.dumps(parts)


def test_command_line_of_megatron_lm(gloo_pool, tmp_path):
    """Several conversations in a line, SFTTokenizer with a prompt format, --data-path with --split."""
    lines = [
        {"messages": [{"role": "system", "content": "Add."}, *a["messages"], {"role": "system", "content": "Add."},
                      *b["messages"]]}
        for a, b in zip(sums(30), sums(30, seed=1))
    ]  # fmt: skip
    path = write_lines(tmp_path / "chats.jsonl", lines)
    model = tokenizer_folder(tmp_path / "tokenizer", None)
    flags = [*SFT, "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", model, "--vocab-size", "1024",
             "--sft-tokenizer-prompt-format", "nemotron-nano-v2", "--data-path", path, "--split", "80,20,0",
             "--eval-iters", "1", "--eval-interval", "2"]  # fmt: skip
    ((code, text),) = gloo_pool.run(train_with_output, 1, [*flags, "--save", str(tmp_path / "out")])
    assert code == 0
    assert "30 lines (messages), 60 conversations" in text and "first sample" in text and "<SPECIAL_12>⟧" in text


def test_bad_line_ends_the_run_with_one_message(gloo_pool, data, tmp_path):
    path = write_lines(tmp_path / "bad.jsonl", [*sums(3), {"question": "a", "answer": "b"}])
    flags = [*data[:-1], path, "--save", str(tmp_path / "out")]
    results = gloo_pool.run(train_with_errors, 2, flags)
    assert {code for code, _ in results} == {2}
    texts = [text for _, text in results if "bad.jsonl" in text]
    assert len(texts) == 1 and texts[0].count("line 4: has no known keys") == 1


def test_losses_equal_a_loop_of_transformers(gloo_pool, tmp_path):
    """Each conversation alone, masked by ``apply_chat_template``; sums of token losses over the number of tokens in the
    loss; three steps of AdamW."""
    transformers = pytest.importorskip("transformers")
    folder, chats = tiny_llama(tmp_path / "hf", 1024), sums(24, turns=1)
    tokenizer_folder(folder, CHATML)
    path = write_lines(tmp_path / "chats.jsonl", chats)
    flags = [*SFT, *EXACT, "--load-hf", str(folder), "--train-data-path", path, "--lr-warmup-iters", "0", "--clip-grad",
             "0", "--lr-decay-style", "constant", "--weight-decay", "0", "--seq-length", "64"]  # fmt: skip
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder), "--vocab-size", "1024"]
    size = rows([*flags, path], 64)
    logged = records(gloo_pool, tmp_path / "out", 1, [*flags, *LLAMA, "--global-batch-size", str(size)])

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for record in logged:
        total, count = torch.zeros(()), 0
        for chat in chats:
            encoded = tokenizer.apply_chat_template(
                chat["messages"], chat_template=CHATML, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, mask = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"])
            losses = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
            total, count = total + (losses * mask[1:]).sum(), count + int(mask[1:].sum())
        assert record["num_tokens"] == count
        np.testing.assert_allclose(record["lm loss"], float(total) / count, rtol=1e-5)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()


def test_inspect_batch_names_lines_and_ranks(gloo_pool, data, tmp_path, capsys):
    from megatron.tools.inspect_batch import main

    records(gloo_pool, tmp_path, 2, [*data, *EXACT, "--global-batch-size", "8"])
    assert main(["--load", str(tmp_path), "--iteration", "1", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    costs = [[0, 0] for _ in range(4)]
    for sample in samples:
        assert all(text.startswith("line ") and "⟦" in text for _, text in sample["texts"])
        bounds = np.array(sample["arrays"]["cu_seqlens"])
        costs[sample["micro_batch"]][sample["rank"]] += int((np.diff(bounds)[: len(sample["texts"])] ** 2).sum())
    assert len(samples) == 8 and sorted(costs, reverse=True) == costs  # the costliest rows come first
    assert all(max(pair) < 2 * min(pair) for pair in costs)
