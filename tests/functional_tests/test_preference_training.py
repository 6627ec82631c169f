"""Preference pairs with the whole program: TRL and a loop of ``transformers``, packing, resume, layouts, bad files."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.test_utils.chats import MISTRAL, preferences, tokenizer_folder, write_lines
from tests.test_utils.gpt_runs import read_records, train, train_with_errors
from tests.test_utils.hf_folders import LLAMA, tiny_llama, weights_in

PAIRS = 12
LENGTH = "192"
DPO = [
    *LLAMA, "--dpo", "--micro-batch-size", "1", "--global-batch-size", "4", "--seq-length", LENGTH,
    "--max-position-embeddings", LENGTH, "--log-interval", "1", "--train-iters", "3", "--eval-iters", "0",
    "--lr-warmup-iters", "0", "--lr", "1e-3",
]  # fmt: skip
EXACT = [
    "--attention-dropout", "0", "--hidden-dropout", "0", "--clip-grad", "0", "--lr-decay-style", "constant",
    "--weight-decay", "0",
]  # fmt: skip
DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
TP2, CP2, PP2 = (f"--{name}-parallel-size 2" for name in ("tensor-model", "context", "pipeline-model"))
LORA = "--lora-rank 4 --lora-alpha 16"
FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a tiny model with a tokenizer."""
    folder = tiny_llama(tmp_path_factory.mktemp("model") / "hf", 1024)
    tokenizer_folder(folder, MISTRAL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "attention_dropout": 0.0, "max_position_embeddings": int(LENGTH)})
    )
    return folder


def flags_of(model, path):
    files = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model), "--vocab-size", "1024"]
    return [*DPO, *files, "--load-hf", str(model), "--train-data-path", path]


@pytest.fixture(scope="module")
def data(model, tmp_path_factory):
    return flags_of(model, write_lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", preferences(PAIRS)))


def records(pool, folder, ranks, flags):
    assert set(pool.run(train, ranks, [*flags, "--save", str(folder)])) == {0}
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "train"]


def all_rows(data):
    """Flags of a global batch of all rows of an epoch."""
    from megatron.training.arguments import parse_args, validate_args
    from tests.test_utils.flag_effects.sft import epoch_rows

    cfg = validate_args(parse_args([*data, "--global-batch-size", "8", *EXACT]), 1, announce=False)
    return ["--global-batch-size", str(len(epoch_rows(cfg)))]


# ---- other programs


def examples(model, lines):
    """Token ids and completion masks of each chosen and rejected sequence, by ``apply_chat_template``."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    for line in lines:
        for name in ("chosen", "rejected"):
            encoded = tokenizer.apply_chat_template(
                [*line["prompt"], *line[name]], chat_template=MISTRAL, return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip
            yield torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"])


def log_probs(model, sequences):
    """Sum of the log-probabilities of each completion, and its number of tokens."""
    sums, lengths = [], []
    for ids, mask in sequences:
        losses = F.cross_entropy(model(ids[None]).logits[0, :-1].double(), ids[1:], reduction="none")
        sums.append(-(losses * mask[1:]).sum())
        lengths.append(mask[1:].sum())
    return torch.stack(sums), torch.stack(lengths)


DEFINITIONS = {
    "sigmoid": lambda chosen, rejected, lengths: torch.log1p(torch.exp(-0.1 * (chosen - rejected))),
    "hinge": lambda chosen, rejected, lengths: (1 - 0.1 * (chosen - rejected)).clamp(min=0),
    "ipo": lambda chosen, rejected, lengths: (chosen / lengths[::2] - rejected / lengths[1::2] - 5) ** 2,
}


@pytest.mark.parametrize("loss, steps", [("sigmoid", 10), ("hinge", 3), ("ipo", 3)])
def test_training_equals_a_loop_of_transformers(gloo_pool, model, data, tmp_path, loss, steps):
    """Each sequence alone, the mean loss of all pairs, AdamW: losses, rewards and final weights."""
    transformers = pytest.importorskip("transformers")
    flags = [*data, *EXACT, *all_rows(data), "--dpo-loss", loss, "--train-iters", str(steps)]
    logged = records(gloo_pool, tmp_path, 1, [*flags, "--save-interval", str(steps), "--save-hf-interval", str(steps)])
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2)
    )
    sequences = list(examples(model, preferences(PAIRS)))
    num_tokens = sum(int(mask.sum()) for _, mask in sequences)
    with torch.no_grad():
        fixed, lengths = log_probs(reference, sequences)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0)
    for record in logged:
        ratios = log_probs(policy, sequences)[0] - fixed
        chosen, rejected = ratios[::2], ratios[1::2]
        mean = DEFINITIONS[loss](chosen, rejected, lengths).mean()
        expected = {
            "dpo loss": mean,
            "rewards/chosen": 0.1 * chosen.mean(),
            "rewards/rejected": 0.1 * rejected.mean(),
            "rewards/margins": 0.1 * (chosen - rejected).mean(),
            "rewards/accuracies": (chosen > rejected).double().mean(),
        }
        for name, value in expected.items():
            if record["iteration"] > 1 or name != "rewards/accuracies":  # equal models: differences are rounding
                assert record[name] == pytest.approx(value.item(), rel=1e-5, abs=1e-5), (record["iteration"], name)
        assert record["num_tokens"] == num_tokens
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
    trained = weights_in(tmp_path / "hf" / f"iter_{steps:07d}")
    for name, weight in policy.state_dict().items():
        np.testing.assert_allclose(trained[name].float(), weight, atol=2e-5, err_msg=name)


def test_training_equals_trl(gloo_pool, model, data, tmp_path):
    """DPOTrainer on all pairs per step: losses and rewards of ten steps."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = MISTRAL
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2)
    )
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=PAIRS, max_steps=10, learning_rate=1e-3,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0, use_cpu=True, bf16=False, logging_steps=1,
        report_to=[], save_strategy="no", max_length=None, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model=policy, ref_model=reference, args=arguments, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(preferences(PAIRS)),
    )  # fmt: skip
    trainer.train()
    expected = [entry for entry in trainer.state.log_history if "loss" in entry]
    flags = [*data, *EXACT, *all_rows(data), "--train-iters", "10"]
    logged = records(gloo_pool, tmp_path / "out", 1, flags)
    assert len(expected) == len(logged) == 10
    for record, entry in zip(logged, expected):
        assert record["dpo loss"] == pytest.approx(entry["loss"], rel=1e-4)
        for name in FIGURES if record["iteration"] > 1 else ():
            assert record[name] == pytest.approx(entry[name], rel=1e-4, abs=1e-5), (record["iteration"], name)


# ---- layouts, packing, resume


@pytest.mark.parametrize("flags", ["", LORA], ids=["model", "base"])
def test_first_loss_is_ln_2(gloo_pool, data, tmp_path, flags):
    first = records(gloo_pool, tmp_path, 1, [*data, *EXACT, *flags.split(), "--train-iters", "1"])[0]
    assert first["dpo loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert first["rewards/margins"] == 0 and first["num_tokens"] > 8


LAYOUTS = {
    "tp2+sp": (2, f"{TP2} --sequence-parallel"),
    "cp2": (2, CP2),
    "pp2": (2, PP2),
    "dp2 zero": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "dp2 fsdp2": (2, "--use-torch-fsdp2"),
    "pp2 cp2": (4, f"{PP2} {CP2}"),
}


@pytest.fixture(scope="module")
def one_rank(gloo_pool, data, tmp_path_factory):
    """Function from further flags to the records of one rank, run once."""
    runs = {}

    def run(flags):
        if flags not in runs:
            runs[flags] = records(gloo_pool, tmp_path_factory.mktemp("one"), 1, [*data, *DROPOUT, *flags.split()])
        return runs[flags]

    return run


@pytest.mark.parametrize("name, kind", zip(LAYOUTS, ["model", "base"] * len(LAYOUTS)))
def test_layout_equals_one_rank(gloo_pool, data, one_rank, tmp_path, name, kind):
    """The full program; ``test_preference_layouts.py`` has both kinds of references in every layout."""
    reference = LORA if kind == "base" else ""
    ranks, layout = LAYOUTS[name]
    many = records(gloo_pool, tmp_path, ranks, [*data, *DROPOUT, *layout.split(), *reference.split()])
    one = one_rank(reference)
    assert len(one) == len(many) == 3
    for first, second in zip(one, many):
        assert first["num_tokens"] == second["num_tokens"]
        for figure in ("dpo loss", "grad_norm", *FIGURES[:3]):
            np.testing.assert_allclose(second[figure], first[figure], rtol=5e-5, atol=5e-6, err_msg=figure)


@pytest.mark.parametrize("layout", ["", CP2, PP2], ids=["one rank", "cp2", "pp2"])
def test_packed_rows_train_as_separate_rows(gloo_pool, data, tmp_path, layout):
    runs = []
    for kind, flags in (
        ("packed", all_rows(data)),
        ("separate", ["--no-sft-packing", "--global-batch-size", str(PAIRS)]),
    ):
        flags = [*data, *EXACT, *flags, *layout.split(), "--train-iters", "3"]
        runs.append(records(gloo_pool, tmp_path / kind, 2 if layout else 1, flags))
    packed, separate = runs
    assert packed[0]["num_tokens"] == separate[0]["num_tokens"] > 2 * PAIRS
    for first, second in zip(packed, separate):
        for name in ("dpo loss", "grad_norm", *FIGURES[:3]):
            np.testing.assert_allclose(first[name], second[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("flags", ["", LORA], ids=["model", "base"])
def test_a_resume_writes_the_same_bytes(gloo_pool, data, tmp_path, flags):
    flags = [*data, *DROPOUT, *flags.split(), "--train-iters", "4"]
    complete = records(gloo_pool, tmp_path / "complete", 2, flags)
    records(gloo_pool, tmp_path / "parts", 2, [*flags, "--exit-interval", "2"])
    parts = records(gloo_pool, tmp_path / "parts", 2, [*flags, "--load", str(tmp_path / "parts")])
    assert len(complete) == 4 and json.dumps(complete) == json.dumps(parts)


def test_validation_reports_the_figures(gloo_pool, model, tmp_path):
    path = write_lines(tmp_path / "pairs.jsonl", preferences(PAIRS))
    flags = [*flags_of(model, path), *EXACT, "--valid-data-path", path, "--full-validation", "--eval-interval", "2"]
    assert gloo_pool.run(train, 1, [*flags, "--train-iters", "2", "--save", str(tmp_path / "out")]) == [0]
    valid = [record for record in read_records(tmp_path / "out" / "metrics.jsonl") if record["kind"] == "valid"]
    assert valid and {"dpo loss", *FIGURES} <= valid[0].keys() and valid[0]["rewards/margins"] > 0


# ---- wrong input


@pytest.mark.parametrize(
    "line, reason",
    [
        ({"question": "a", "answer": "b"}, "has no chosen and no rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "must all be texts, or all lists of messages"),
        ('{"chosen": "' + "x" * (9 << 20) + '"}\n', "is longer than 8 MiB"),
    ],
    ids=["keys", "types", "long line"],
)
def test_bad_line_ends_the_run_with_one_message(gloo_pool, model, tmp_path, line, reason):
    path = write_lines(tmp_path / "bad.jsonl", [*preferences(3), line])
    results = gloo_pool.run(train_with_errors, 2, [*flags_of(model, path), *EXACT, "--save", str(tmp_path / "out")])
    assert {code for code, _ in results} == {2}
    texts = [text for _, text in results if "bad.jsonl" in text]
    assert len(texts) == 1 and texts[0].count("line 4: ") == 1 and reason in texts[0]


# ---- stored values of the reference


@pytest.mark.parametrize("name", ["one rank", *LAYOUTS])
def test_stored_reference_equals_a_model(gloo_pool, model, one_rank, tmp_path, name):
    """Also with adapters; values are computed in this layout, then read by another process."""
    path = write_lines(tmp_path / "pairs.jsonl", preferences(PAIRS))
    ranks, layout = LAYOUTS.get(name, (1, ""))
    stored = [*flags_of(model, path), *DROPOUT, *layout.split(), "--dpo-reference", "stored"]
    many = records(gloo_pool, tmp_path / "first", ranks, stored)
    values = sorted((tmp_path / "pairs.jsonl.cache").glob("*reference-train-losses.npy"))
    assert len(values) == 1
    stamp = values[0].stat().st_mtime_ns
    again = records(gloo_pool, tmp_path / "second", ranks, stored)
    assert again == many and values[0].stat().st_mtime_ns == stamp
    for first, second in zip(one_rank(""), many, strict=True):
        for figure in ("dpo loss", "grad_norm", *FIGURES[:3]):
            np.testing.assert_allclose(second[figure], first[figure], rtol=5e-5, atol=5e-6, err_msg=figure)


def test_stored_values_of_another_model_precision_or_split_are_not_used(gloo_pool, model, tmp_path):
    path, other = write_lines(tmp_path / "pairs.jsonl", preferences(PAIRS)), tmp_path / "other"
    shutil.copytree(model, other)
    (other / "model.safetensors").touch()
    flags = [*flags_of(model, path), *EXACT, "--train-iters", "6", "--dpo-reference", "stored"]  # whole epochs
    split = ["--data-path" if flag == "--train-data-path" else flag for flag in flags]
    changed = ["--dpo-reference-load", str(other)], ["--bf16"], ["--split", "60,40,0"]
    runs = flags, [*flags, *changed[0]], [*flags, *changed[1]], [*split, *changed[2]]
    for number, argv in enumerate(runs, 1):
        records(gloo_pool, tmp_path / str(number), 1, argv)
        assert len(list((tmp_path / "pairs.jsonl.cache").glob("*reference-train-losses.npy"))) == number


def test_validation_does_not_count_rows_that_pad_a_batch(gloo_pool, model, tmp_path):
    path = write_lines(tmp_path / "pairs.jsonl", preferences(PAIRS))
    flags = [*flags_of(model, path), *EXACT, "--valid-data-path", path, "--full-validation", "--train-iters", "2"]
    means = []
    for size in ("1", "7"):
        folder = tmp_path / size
        argv = [*flags, "--eval-interval", "2", "--eval-global-batch-size", size, "--save", str(folder)]
        assert gloo_pool.run(train, 1, argv) == [0]
        means.append([x for x in read_records(folder / "metrics.jsonl") if x["kind"] == "valid"][0]["rewards/margins"])
    assert means[0] == pytest.approx(means[1], rel=1e-6) and means[0] > 0
