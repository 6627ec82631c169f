"""Full runs of the program compared with the reference (``tests/reference``): results and differences."""

import math
import struct
from pathlib import Path

import numpy as np

from tests.test_utils.layouts import narrow_fp8_experts

VOCAB_SIZE = 61  # not divisible by anything
BASE = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--max-position-embeddings", "36", "--vocab-size", str(VOCAB_SIZE), "--micro-batch-size", "4",
    "--global-batch-size", "4", "--train-iters", "20", "--lr", "5e-3", "--eval-iters", "2", "--adam-eps", "1e-5",
]  # fmt: skip
"""eps: an entry of the gradient that is zero in exact arithmetic (the bias of keys) is rounding noise, which Adam
with a smaller eps would blow up."""
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
MEMORIES = (".expert_bias", ".last_choices")
"""Suffixes of router state other than weights."""
TOKENIZER = ["--tokenizer-type", "NullTokenizer"]
PROGRAM_ONLY = ["--num-workers", "0", "--log-interval", "1", "--log-params-norm"]


def corpora():
    """Documents of 4 to 70 tokens by name of the file; each document counts upwards in a step drawn for it."""
    generator = np.random.default_rng(5)
    result = {}
    for name, count in {"a": 60, "b": 25, "c": 12}.items():
        lengths, starts, steps = (generator.integers(*bounds, count) for bounds in ((3, 70), (0, 60), (1, 9)))
        documents = [(start + step * np.arange(length)) % 60 for length, start, step in zip(lengths, starts, steps)]
        result[name] = [np.append(document, VOCAB_SIZE - 1) for document in documents]
    return result


def write(prefix: Path, documents) -> None:
    """The pair of files of a corpus (docs/reference/data_format.md): uint16 tokens, one sequence per document."""
    lengths = np.array([len(document) for document in documents])
    offsets = 2 * (np.cumsum(lengths) - lengths)
    Path(f"{prefix}.bin").write_bytes(np.concatenate(documents).astype("<u2").tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(documents), len(documents) + 1)
    arrays = lengths.astype("<i4"), offsets.astype("<i8"), np.arange(len(documents) + 1).astype("<i8")
    Path(f"{prefix}.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))


def write_corpora(folder):
    for name, documents in corpora().items():
        write(Path(folder) / name, documents)


def with_folder(argv, folder):
    """Return ``argv`` with the names of corpora and vocabulary replaced by their paths in ``folder``."""
    return [str(Path(folder) / word) if word in ("a", "b", "c", "vocab.txt") else word for word in argv]


def program(rank, world_size, argv, fp64, folder, save, kind="gpt", vocab_size=VOCAB_SIZE):
    """A task of the pool: a whole run. (records of metrics.jsonl, initial weights, final ones: arrays by name)."""
    from megatron.core.dist_checkpointing import CheckpointReader
    from megatron.training.arguments import parse_args
    from megatron.training.observe.metrics import read_metrics
    from megatron.training.run import run
    from megatron.training.tasks.language_model import task_class

    initial = {}

    class Recording(task_class(kind)):
        def model_provider(self, *args, **kwargs):
            model = super().model_provider(*args, **kwargs)
            for name, weight in model.named_parameters():
                padded = "word_embeddings" in name or "output_layer" in name
                initial[name] = weight.detach()[: vocab_size if padded else None].double().numpy().copy()
            return model

    argv = [*with_folder(argv, folder), *PROGRAM_ONLY, "--save", save, "--data-cache-path", f"{folder}/cache"]
    with narrow_fp8_experts():
        code = run(parse_args(argv, model_family=kind).with_settings(fp64=fp64), Recording)
    assert code == 0, f"the run ended with code {code}"
    (checkpoint,) = Path(save).glob("iter_*")
    reader = CheckpointReader(checkpoint)
    prefix = "optimizer.main_param." if any("main_param" in name for name in reader.names) else "model."
    memories = [name for name in reader.names if name.startswith("model.") and name.endswith(MEMORIES)]
    names = {*memories, *(name for name in reader.names if name.startswith(prefix))}
    final = {
        name.removeprefix(prefix).removeprefix("model."): reader.read(name).double().numpy() for name in sorted(names)
    }
    return list(read_metrics(f"{save}/metrics.jsonl")), initial, final


TOLERANCE = {
    "fp64": (1e-10, 1e-13, 1e-9), "fp32": (2e-5, 1e-6, 2e-4), "bf16": (2e-2, 1e-2, 5e-2), "fp16": (5e-3, 1e-3, 2e-2),
}  # fmt: skip
"""Largest relative difference of losses and norms, initial weights, final weights (relative to a tensor's largest
entry). The reference computes in fp64 for every precision."""


def command_line(flags):
    """BASE and a row's flags, which win; one of the two ways to give a duration."""
    base = BASE
    if "--train-samples" in flags:
        at = base.index("--train-iters")
        base = base[:at] + base[at + 2 :]
    if "--step-batch-size-schedule" in flags:
        at = base.index("--global-batch-size")
        base = base[:at] + base[at + 2 :]
    return [*base, *flags]


def overflows(records):
    """Iterations whose gradients were not finite."""
    return [record["iteration"] for record in records if record["kind"] == "train" and record["skipped"]]


def compare(actual, expected, precision):
    """Differences between a run of the program and the reference's, one line each."""
    records, initial, final = actual
    loss_limit, initial_limit, final_limit = TOLERANCE[precision]
    lines = list(_compare_steps([item for item in records if item["kind"] == "train"], expected.steps, loss_limit))
    evaluated = {(item["kind"], item["iteration"], item.get("dataset")): item
                 for item in records if item["kind"] != "train"}  # fmt: skip
    if evaluated.keys() != expected.evaluations.keys():
        lines.append(f"evaluations {sorted(map(str, evaluated))}, not {sorted(map(str, expected.evaluations))}")
    for key, means in expected.evaluations.items():
        for loss, value in means.items() if key in evaluated else ():
            if not _close(evaluated[key].get(loss, math.nan), value, loss_limit):
                lines.append(f"evaluation {key}: {loss} {evaluated[key].get(loss)!r}, not {value!r}")
    lines += _compare_weights("initial", initial, expected.initial, initial_limit)
    lines += _compare_weights("final", _with_shares(final), expected.final | dict(_memories(expected)), final_limit)
    return lines


def _memories(expected):
    """Yield final router state other than weights, under the program's names."""
    for at, router in expected.routers.items():
        if router.has_bias:
            yield f"{at}.router.expert_bias", router.bias
        if "global_load_balancing_loss" in expected.steps[0]:
            yield f"{at}.router.last_choices", router.shares


def _with_shares(final):
    """Counts of choices as shares, where choices are counted."""
    counted = {name: value for name, value in final.items() if not name.endswith(".last_choices") or value.any()}
    return {name: value / value.sum() if name.endswith(".last_choices") else value for name, value in counted.items()}


def _close(actual, expected, limit):
    if math.isnan(expected):  # the mean of none
        return math.isnan(actual)
    return abs(actual - expected) <= limit * max(abs(expected), 1e-3)


EXACT = ("consumed_samples", "global_batch_size", "num_tokens", "loss_scale", "skipped")


def _compare_steps(actual, expected, limit):
    if len(actual) != len(expected):
        yield f"{len(actual)} iterations, not {len(expected)}"
    for iteration, (one, other) in enumerate(zip(actual, expected), start=1):
        assert one["iteration"] == iteration
        for name, value in other.items():
            if name not in one:
                yield f"iteration {iteration}: no {name}, should be {value}"
            elif not (one[name] == value if name in EXACT else _close(one[name], value, limit)):
                yield f"iteration {iteration}: {name} {one[name]!r}, not {value!r}"
        for name in ("lm loss", "grad_norm"):
            if name in one and name not in other:
                yield f"iteration {iteration}: {name} {one[name]!r}, should be none"


def _compare_weights(when, actual, expected, limit):
    if actual.keys() != expected.keys():
        yield f"{when} weights: {sorted(actual.keys() ^ expected.keys())} on one side only"
    for name in actual.keys() & expected.keys():
        want = expected[name].numpy().reshape(-1)
        difference = np.abs(actual[name].reshape(-1) - want).max()
        if not difference <= limit * max(np.abs(want).max(), 1e-2):
            yield f"{when} {name}: off by {difference:.3g} of {np.abs(want).max():.3g}"
