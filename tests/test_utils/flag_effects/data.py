"""Data, tokenizers, evaluation."""

import re
from unittest import mock

from tests.test_utils.flag_effects.rows import Probe, changes, finished, gives, keeps, keeps_to_rounding, row
from tests.test_utils.flag_effects.tokenizers import WITHOUT
from tests.test_utils.flag_effects.training import iterations


def positions_restart(base, run):
    finished(run)
    for batch in run.batches:
        for tokens, positions in zip(batch.tokens, batch.positions):
            for place in range(1, len(tokens)):
                assert positions[place] == (0 if tokens[place - 1] == 63 else positions[place - 1] + 1)


def documents_apart(base, run):
    """Boundaries of the flattened micro-batch: after each end of document, and between its rows."""
    finished(run)
    for batch in run.batches:
        tokens = [token for row in batch.tokens for token in row]
        expected = {0, *(place + 1 for place, token in enumerate(tokens) if token == 63)}
        assert batch.documents is not None and set(batch.documents) == expected | set(range(0, len(tokens) + 1, 16))


def no_loss_after(token, among="tokens"):
    """The loss mask is 0 exactly at the positions of this id."""

    def leaves_out(_, run):
        finished(run)
        result = 0
        for batch in run.batches:
            for ids, mask in zip(getattr(batch, among), batch.loss_mask):
                assert mask == [float(item != token) for item in ids]
                result += ids.count(token)
        assert result

    return leaves_out


def padding_is_masked(padding):
    """Labels equal to the padding id become 0 with loss mask 0."""

    def masks(base, run):
        finished(base, run)
        for before, after in zip(base.batches, run.batches):
            for old, new, mask in zip(before.labels, after.labels, after.loss_mask):
                assert [(0, 0.0) if label == padding else (label, 1.0) for label in old] == list(zip(new, mask))
        assert any(0.0 in mask for batch in run.batches for mask in batch.loss_mask)

    return masks


def evaluated(count):
    """Samples of validation and test that an evaluation reads."""
    return gives(lambda run: len(run.evaluated), count)


def evaluations(*numbers):
    """Iterations after which there was an evaluation on validation data."""
    return gives(lambda run: run.column("iteration", "valid"), list(numbers))


def loaders(cfg):
    """Worker processes of the loader."""
    from megatron.training.data.loader import build_loader

    loader = build_loader(range(8), [[0, 1]], cfg.data.num_workers, False)
    return getattr(loader, "loader", loader).num_workers


def names(run):
    return run.column("dataset", "valid")


EVAL = "--eval-iters 1"
SEPARATE = "--train-data-path {data}"
SPLIT_FREE = "--data-path --split"
TWO_SETS = f"{SEPARATE} --valid-data-path {{tiny}} {{tinier}} --eval-iters 1 --full-validation"
BLEND = "--data-path 0.5 {data} 0.5 {other}"
DATA = [
    row("--data-path {other}", changes("tokens"), keeps("initial")),
    row("--split 20,40,40", changes("tokens", "evaluations"), base=EVAL),
    row("--train-data-path {other}", changes("tokens"), drop=SPLIT_FREE),
    row("--valid-data-path {other}", evaluations(2), base=f"{SEPARATE} {EVAL}", without=SPLIT_FREE),
    row("--test-data-path {other}", gives(lambda run: len(run.column("lm loss", "test")), 1),
        base=f"{SEPARATE} --valid-data-path {{data}} {EVAL}", without=SPLIT_FREE),
    row("--data-args-path {list}", changes("tokens"), drop="--data-path"),
    row("--per-split-data-args-path {splits}", changes("tokens"), drop=SPLIT_FREE),
    row("--mock-data", changes("tokens"), drop="--data-path"),
    row("--data-cache-path {out}/cache", gives(lambda run: any("cache/" in name for name in run.files), True)),
    # once before the model is built, to see what is wrong with it
    row("--no-mmap-bin-files", gives(lambda run: run.called, {"FileTokens.__init__": 2}), keeps("weights"),
        count=("megatron.data.indexed_dataset:MemoryMappedTokens.__init__",
                                 "megatron.data.indexed_dataset:FileTokens.__init__")),
    row("--seq-length 8", gives(lambda run: len(run.tokens[0][0]), 8)),
    row("--encoder-seq-length 8", gives(lambda run: len(run.tokens[0][0]), 8), drop="--seq-length"),
    row("--dataloader-type cyclic", changes("tokens"), keeps("initial")),
    Probe("--num-workers 3", loaders, 3),
    row("--reset-position-ids", positions_restart),
    row("--reset-attention-mask", documents_apart, changes("losses"), keeps("tokens")),
    row("--eod-mask-loss", no_loss_after(63), keeps("tokens")),
    row("--num-dataset-builder-threads 3", gives(lambda run: "3" in run.arguments, True), keeps("tokens"), base=BLEND,
        count=("concurrent.futures:ThreadPoolExecutor.__init__",)),
    row("--mid-level-dataset-surplus 100", gives(lambda run: "samples in 3 epoch(s)" in run.log, True), base=BLEND),
    row("--allow-ambiguous-pad-tokens", padding_is_masked(63), base="--null-tokenizer-pad-id 63"),
    row("--null-tokenizer-eod-id 5", no_loss_after(5), base="--eod-mask-loss"),
    row("--null-tokenizer-pad-id 7", padding_is_masked(7)),
]  # fmt: skip
BYTES = "--tokenizer-type ByteLevelTokenizer"
"""The data as text: characters 0 to 62, which 63 ends."""
MARKS = [f"--fim-{role}-token <0xF{number}>" for number, role in enumerate(("prefix", "middle", "suffix", "pad"))]
MARKS.append("--fim-eod-token <0x3F>")
FIM = " ".join(["--fim-data --fim-rate 1", BYTES, *MARKS])


def no_such_token(base, run):
    """The run names a token that the tokenizer does not have."""
    finished(base)
    assert run.code != 0 and "<none>: is not a token of the tokenizer" in run.errors


def marked(share, mark=0xF0, first=True):
    """``share`` of the samples hold (or begin with) the id."""

    def count(run):
        samples = [row for batch in run.batches for row in batch.tokens]
        return sum(row[0] == mark if first else mark in row for row in samples) / len(samples)

    return gives(count, share)


FILL_IN = [
    row(f"--fim-data --fim-rate 1 {' '.join(MARKS)}", marked(1), changes("losses"), base=BYTES, without=WITHOUT),
    row("--fim-rate 1e-9", marked(0), base=FIM, without=WITHOUT),
    row("--fim-spm-rate 1", gives(lambda run: [ids[1] for batch in run.tokens for ids in batch], [0xF2] * 8), base=FIM,
        without=WITHOUT),
    row("--fim-fragment-rate 1", marked(1), base=f"{FIM} --fim-split-sample <0x0A> --fim-fragment-rate 0",
        without=WITHOUT),
    row("--fim-split-sample <0x0A> --fim-fragment-rate 0", changes("tokens"), base=FIM, without=WITHOUT),
    row("--fim-no-prefix ''", marked(0), base=FIM, without=WITHOUT),
    row("--fim-prefix-token <0xFA>", marked(1, 0xFA), base=FIM, without=WITHOUT),
    row("--fim-middle-token <0xFA>", changes("tokens"), base=FIM, without=WITHOUT),
    row("--fim-suffix-token <0xFA>", changes("tokens"), base=FIM, without=WITHOUT),
    row("--fim-pad-token <none>", no_such_token, base=FIM, without=WITHOUT),
    row("--fim-eod-token <eod>", changes("tokens"), base=FIM, without=WITHOUT),
]  # fmt: skip
TASKS = "--eval-tasks one --eval-tasks-interval 2"


def task_scores(attribute):
    """An attribute of the object that scores tasks, without the harness."""

    def ask(cfg):
        from megatron.training.generation import task_scores

        with mock.patch.multiple(task_scores, find_tasks=lambda flag, names, path: path, LiveEngine=mock.Mock()):
            return getattr(task_scores.TaskScores(cfg, None, object()), attribute)

    return ask


def scored_iterations(cfg):
    from megatron.training.exits.conditions import every

    return [number for number in range(1, 5) if every(cfg.validation.eval_tasks_interval, number)]


def texts_in(run):
    """Iteration and number of words of each sample in the log."""
    return [
        (int(place), len(text.split()))
        for place, text in re.findall(r'sample 1 at iteration (\d+) .*"(.*)"\n', run.log)
    ]


def other_text(base, run):
    finished(base, run)
    first, second = (re.findall(r"sample 1 at .*", item.log) for item in (base, run))
    assert first and len(first) == len(second) and first != second


SAMPLE = "--sample-prompts 5 --sample-tokens 9"
EVALUATION = [
    row("--eval-iters 2", evaluated(16), base=EVAL),
    row("--eval-interval 1", evaluations(1, 2, 2), base=EVAL),
    row("--start-eval-at-iter 2", evaluations(2, 2), base=f"{EVAL} --eval-interval 1"),
    Probe("--eval-tasks one two --eval-tasks-interval 2", task_scores("_names"), ["one", "two"]),
    Probe("--eval-tasks-interval 2 --eval-tasks one", scored_iterations, [2, 4]),
    Probe("--eval-tasks-limit 3", task_scores("_limit"), 3, base=TASKS),
    Probe("--eval-tasks-path here", task_scores("_manager"), "here", base=TASKS),
    row("--sample-prompts 5", gives(texts_in, [(2, 15)]), keeps("records", "weights")),
    row("--sample-interval 1", gives(texts_in, [(1, 9), (2, 9)]), base=SAMPLE),
    row("--sample-tokens 3", gives(texts_in, [(2, 3)]), base=SAMPLE),
    row("--sample-temperature 3", other_text, base=SAMPLE),
    row("--eval-global-batch-size 8", evaluated(16), base=EVAL),
    row("--eval-micro-batch-size 4", gives(lambda run: {len(b.samples) for b in run.batches if not b.training}, {4}),
        keeps("evaluated"), keeps_to_rounding("evaluations"), base=EVAL),
    row("--skip-train", iterations(), keeps("initial"), base=EVAL),
    row("--full-validation", gives(lambda run: len(run.evaluated) > 30, True), base=EVAL),
    row("--multiple-validation-sets", gives(names, ["0", "1"]), base=TWO_SETS, without=SPLIT_FREE),
    row("--validation-set-names near far", gives(names, ["near", "far"]),
        base=f"{TWO_SETS} --multiple-validation-sets", without=SPLIT_FREE),
]  # fmt: skip
ROWS = [*DATA, *FILL_IN, *EVALUATION]
