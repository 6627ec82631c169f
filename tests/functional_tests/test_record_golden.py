"""Golden bytes of the reports of a run: both files of records, events of TensorBoard, lines of the console.

The run is real. Definitions of this module replace its measured numbers before they are reported, so that
the stored bytes depend on neither processor nor clock; what is still measured (times, memory, versions) is masked. The
stored files thus hold formats, names and order. ``python -m tests.functional_tests.test_record_golden`` writes them.
"""

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megatron.training.observe.records import kinds
from tests.test_utils.tiny_tokenizers import byte_level_bpe

GOLDEN = Path(__file__).parent / "golden_records"
FILES = ("metrics.jsonl", "timing.jsonl", "tensorboard.txt", "console.txt")
RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32"
    " --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 5 --eval-iters 1 --eval-interval 3"
    " --num-workers 0 --log-interval 2 --mock-data --position-embedding-type rope --save-interval 4 --log-throughput"
    " --timing-log-level 1 --log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard"
    " --log-world-size-to-tensorboard --log-timers-to-tensorboard --iterations-to-skip 2 --sample-tokens 4"
    " --log-layer-statistics-interval 2 --console lines --tokenizer-type HuggingFaceTokenizer"
)
MASKS = (
    (rb'"(time|bytes|gb_per_second|mem-[a-z-]+|optimizer|forward-backward)": [\d.e+-]+', rb'"\1": 0'),
    (rb'"(environment|settings)": \{[^}]*\}', rb'"\1": {}'),
    (rb"(0 (?:settings|environment)/text_summary \[b.\| name \| value \|).*", rb"\1"),
    (rb" \[\d{4}-[^\]]*\]", b" [TIME]"),
    (rb"( \.+: )\([\d., ]+\)", rb"\1(TIME)"),
    (rb"((?:optimizer|forward-backward)-time(?: vs samples)?) [\d.e-]+", rb"\1 TIME"),
    (rb"(save-checkpoint-gb-per-second(?: vs samples)?) [\d.e+-]+", rb"\1 RATE"),
)


def loss_at(iteration):
    return 8.0 / iteration


def evaluated_loss(iteration):
    return 2.0 + 1.0 / iteration


@contextlib.contextmanager
def defined_values():
    """Replace what a run measures by definitions."""
    import torch

    from megatron.training.checkpoint.checkpointer import Checkpointer
    from megatron.training.evaluate import Evaluator
    from megatron.training.generation.text_samples import TextSamples
    from megatron.training.observe.step_parts import StepMarks
    from megatron.training.step import TrainStep
    from megatron.training.trainer import Trainer

    evaluate, write_texts, save = Evaluator.evaluate, TextSamples.__call__, Checkpointer.start_save
    train_step, iterations = TrainStep.run, []

    def defined_step(self):
        metrics, i = train_step(self), self.state.iteration
        iterations.append(i)
        if not metrics.skipped:
            metrics.losses = {"lm loss": torch.tensor(loss_at(i))}
            metrics.grad_norm, metrics.params_norm = torch.tensor(i + 0.5), torch.tensor(16.0)
            metrics.num_zeros = torch.tensor(3.0)
            metrics.statistics = dict.fromkeys(metrics.statistics, 0.5)
            metrics.step_marks = StepMarks(0.0, 0.125, 0.1875, 0.0625, 0.03125)
        return metrics

    def defined_evaluation(self, *arguments):
        losses = {"lm loss": evaluated_loss(iterations[-1])}
        return [replace(result, losses=losses, seconds=1.5) for result in evaluate(self, *arguments)]

    def defined_texts(self, **options):
        records = []
        for kind, values in write_texts(self, **options):
            number, final = values.get("number"), {"final": True} if "final" in values else {}
            texts = {"number": number, "prompt": values.get("prompt"), "text": f' "{number}"\n<b>'}
            values = ({"cut": True} if number == 2 else {}) | final | texts if number else {"seconds": 0.5}
            records.append((kind, values))
        return records

    def defined_save(self, *arguments, **options):
        return replace(save(self, *arguments, **options), seconds=2.0, stall=0.5)

    with (
        mock.patch.object(TrainStep, "run", defined_step),
        mock.patch.object(Trainer, "restart_timer", lambda self: 0.25),
        mock.patch.object(Evaluator, "evaluate", defined_evaluation),
        mock.patch.object(TextSamples, "__call__", defined_texts),
        mock.patch.object(Checkpointer, "start_save", defined_save),
    ):
        yield


def train(rank, world_size, argv):
    """Return exit code and standard output of a run with defined values."""
    from megatron.training.arguments import parse_args
    from megatron.training.run import run
    from megatron.training.tasks.gpt import GPTTask

    output = io.StringIO()
    with defined_values(), contextlib.redirect_stdout(output):
        code = run(parse_args(argv), GPTTask)
    return code, output.getvalue()


def read_events(folder):
    """TensorBoard's events as lines ``step tag value`` in the order of the file; texts and settings by their repr."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    lines = []
    for path in sorted(folder.glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                content = make_ndarray(value.tensor).tolist() if value.HasField("tensor") else ""
                lines.append(f"{event.step} {value.tag} {content}")
    return "\n".join(lines).encode() + b"\n"


def reported(folder, output):
    """Masked contents of FILES."""
    contents = [(folder / name).read_bytes() for name in FILES[:2]]
    lines = output[output.index("iteration        1/") - 30 :]  # settings are logged before
    contents += [read_events(folder / "board"), re.sub(".*checkpoint.*\n|training is complete.*\n", "", lines).encode()]
    for pattern, mask in MASKS:
        contents = [re.sub(pattern, mask, content) for content in contents]
    return {name: content.replace(str(folder).encode(), b"RUN") for name, content in zip(FILES, contents)}


def arguments(folder):
    byte_level_bpe(folder / "tokenizer.json", 400)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return [*RUN.split(), "--sample-prompts", "Once upon", "é", "--tokenizer-model", str(folder), "--save", str(folder),
            "--tensorboard-dir", str(folder / "board")]  # fmt: skip


@pytest.fixture(scope="module")
def run(gloo_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    ((code, output),) = gloo_pool.run(train, 1, arguments(folder))
    assert code == 0
    return reported(folder, output)


@pytest.mark.parametrize("name", FILES)
def test_a_run_reports_the_stored_bytes(run, name):
    assert run[name].decode().splitlines() == (GOLDEN / name).read_text(encoding="utf-8").splitlines()
    assert run[name] == (GOLDEN / name).read_bytes()


def test_records_have_the_fields_that_their_kinds_declare(run):
    seen = set()
    for name in FILES[:2]:
        for record in map(json.loads, run[name].splitlines()):
            kind = kinds()[record["kind"]]
            assert kind.file == name and ("time" in record) == (name == "timing.jsonl")
            values = record.keys() - {"kind", "iteration", "consumed_samples", "time", "lm loss"}
            assert values <= kind.fields.keys(), values - kind.fields.keys()
            seen.add(kind.name)
    assert seen == {"train", "valid", "test", "sample", "start", "timing", "evaluation", "generation", "save", "end"}


def test_stored_fields_are_documented():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "logging.md").read_text(encoding="utf-8")
    for kind in kinds.__wrapped__().values():  # without kinds that other tests declare
        names = {name for name in kind.fields if name.islower()} if kind.file else set()
        missing = [name for name in {kind.name, *names} if f"`{name}`" not in page]
        assert not missing, (kind.name, missing)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as path:
        status, text = train(0, 1, arguments(Path(path)))
        assert status == 0
        GOLDEN.mkdir(exist_ok=True)
        for file_name, data in reported(Path(path), text).items():
            (GOLDEN / file_name).write_bytes(data)
