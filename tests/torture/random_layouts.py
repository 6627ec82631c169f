"""Random layouts of random models against one rank: three and more axes at once, which the table has in few rows.

A case draws a model of ``tests/test_utils/layout_table.py`` or of the tests of linear attention, up to four ranks, and
flags of parallelism, recomputation, offload and overlap. Counts layouts that equal one rank and layouts that the flags'
rules reject; any other is a failure. Models whose experts drop tokens are not drawn: which ones depends on the layout.
"""

import contextlib
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.config.errors import UserError
from tests.functional_tests import test_linear_attention_training as linear
from tests.test_utils.gloo_pool import RankPool
from tests.test_utils.layout_table import ENCODER_FAMILIES, MODELS, layout_flags
from tests.test_utils.layouts import FEW_STEPS, Layout, Matrix, configure
from tests.torture.common import Cases, Failure
from tests.torture.layouts import Worker

HYBRID = {row.model: row.precision for row in linear.LAYOUTS.values()}
RANKS = ["tp2", "tp2 sp", "tp2 sp", "cp2", "pp2", "dp2", "tp4 sp", "cp4", "pp4", "ep2", "ep2 tp2 sp", "ep2 etp1 tp2 sp"]
AXES = {
    "cp": ["comm:a2a", "comm:allgather", "comm:p2p"],
    "pp": ["vpp2", "zb", "zb-h2", "vpp2 overlap-p2p-communication", "account-for-loss-in-pipeline-split"],
    "sp": ["halves"],
    "": [
        "zero", "gather", "overlap", "fsdp", "recompute", "recompute-full", "recompute-all", "offload",
        "offload offload-overlap", "offload-activations", "chunks8", "mb1", "mb2", "invariant",
        "recompute modules:core_attn,layernorm", "recompute modules:mlp", "zero ddp-num-buckets:3",
    ],
}  # fmt: skip
"""Words of layouts that a word with the prefix makes possible."""


def draw(random):
    """Return a row."""
    if random.random() < 0.25:
        model, family = random.choice(sorted(HYBRID)), "gpt"
    else:
        name = random.choice([name for name in sorted(MODELS) if "capacity-factor" not in MODELS[name]])
        model, family = MODELS[name], name.partition("-")[0]
    words = random.choice(RANKS).split()
    if random.random() < 0.5:
        words += random.choice(RANKS).split()
    for prefix, choices in AXES.items():
        if any(word.startswith(prefix) for word in words):
            words += " ".join(random.sample(choices, min(random.choice([0, 1, 1, 2]), len(choices)))).split()
    sizes = {word[:-1]: int(word[-1]) for word in words if word[:-1] in ("tp", "cp", "pp", "ep", "dp")}
    world_size = max(sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1), 1)
    if "ep" in sizes and world_size % sizes["ep"]:
        world_size *= 2
    fixed = ("dp", "mb") if "--micro-batch-size" in model else ("dp",)
    words = [word for word in dict.fromkeys(words) if not word.startswith(fixed)]
    if "--num-layers" not in model and "--hybrid-layer-pattern" not in model:
        model += f" --num-layers {4 if 'pp' in sizes else 2}"
    layout = layout_flags(" ".join(words))
    if "--micro-batch-size" not in layout + model:
        layout += f" --micro-batch-size {random.choice([1, 2, 4])}"
    family = family if family in ENCODER_FAMILIES else "gpt"
    precision = HYBRID.get(model, "fp32" if "--fp8" in model else "bf16" if "--bf16" in model else "fp64")
    steps = 1 if "--fp8" in model else FEW_STEPS  # in fp8, rounding errors of a step become larger ones of the next
    return Layout(model, layout, world_size, precision, steps=steps, family=family)


def case(number, random, folder, tally):
    """One layout."""
    row = draw(random)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            configure(row.argv, row.world_size, row.precision, row.family)
            configure(row.reference.argv, 1, row.precision, row.family)
    except (UserError, SystemExit):
        return tally.add("layouts", "rejected")
    if row.world_size > 4:
        return tally.add("layouts", "not tried: more than 4 ranks")
    if Worker.matrix is None:
        Worker.matrix = Matrix(RankPool())
    try:
        verdict = Worker.matrix.verdict(row)
    except Exception as error:
        tally.add("layouts", "ERROR")
        raise Failure(f"{row}: {str(error)[-3000:]}") from error
    if not verdict.equal:
        tally.add("layouts", "FAILED")
        raise Failure(f"{row}: " + "\n".join(map(str, verdict.differences[:5])))
    tally.add("layouts", "equal to one rank")


def main():
    cases = Cases(__doc__, count=300, workers=1)
    return cases.run(case, finish=lambda: Worker.matrix and Worker.matrix.pool.close())


if __name__ == "__main__":
    sys.exit(main())
