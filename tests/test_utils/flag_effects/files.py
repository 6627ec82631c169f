"""Files that rows name in braces: data sets, a checkpoint, tokenizers, lists of paths."""

import json
import shlex
import shutil

from tests.test_utils.flag_effects import sft, tokenizers
from tests.test_utils.flag_effects.observe import MODEL
from tests.test_utils.flag_effects.rows import Row
from tests.test_utils.gpt_runs import VOCAB_SIZE, write_dataset
from tests.test_utils.hf_folders import tiny_llama


def write(folder):
    """Name in braces -> path."""
    places = {"data": write_dataset(folder / "data"), "other": write_dataset(folder / "other", seed=1)}
    places |= {name: write_dataset(folder / name, count) for name, count in (("tiny", 4), ("tinier", 2))}
    texts = {
        "list.txt": str(places["other"]),
        "splits.json": json.dumps({name: [str(places["other"])] for name in ("train", "valid", "test")}),
        "settings.yaml": "norm_epsilon: 0.1\n",
        "nccl.yaml": "dp: {max_ctas: 4}\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        places[name.partition(".")[0]] = folder / name
    places["hf"] = tiny_llama(folder / "hf", VOCAB_SIZE)
    for name in ("tokenizers", "sft"):
        (folder / name).mkdir()
    return places | tokenizers.write(folder / "tokenizers") | sft.write(folder / "sft")


def write_checkpoints(runs):
    """The folder of a run that stopped after two iterations of three, each saved; and a copy for a run to write to."""
    row = Row("--save {out}", (), base="--save-interval 1 --train-iters 3 --exit-interval 2")
    (run,) = runs.of(row, [*shlex.split(MODEL), *shlex.split(f"{row.base} {row.changed}")])
    assert run.code == 0 and set(run.saved) == {1, 2}, run.errors
    folder = runs.folder / str(runs.num_runs)
    return {"checkpoint": folder, "used": shutil.copytree(folder, runs.folder / "used")}
