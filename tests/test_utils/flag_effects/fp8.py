"""Formats, scales and layers of fp8."""

from tests.test_utils.flag_effects.layouts import calls
from tests.test_utils.flag_effects.rows import changes, keeps, keeps_to_rounding, row

HYBRID = "--fp8-format hybrid"
TENSORWISE = f"{HYBRID} --fp8-recipe tensorwise"
LONGER = "--train-iters 4 --fp8-amax-history-len"
ENDS = f"{TENSORWISE} --first-last-layers-bf16 --num-layers 4"
near = keeps_to_rounding("losses", tolerance=0.02)

ROWS = [
    row("--fp8-format e4m3", changes("losses", "gradients"), keeps("initial"), near),
    row("--fp8-recipe tensorwise", changes("losses"), near, base=HYBRID),
    row("--fp8-margin 6", changes("losses"), near, base=HYBRID),
    row("--fp8-amax-history-len 4", changes("losses"), near,
        base=f"{HYBRID} --fp8-amax-compute-algo max --train-iters 4"),
    row("--fp8-amax-compute-algo max", changes("losses"), near, base=f"{HYBRID} {LONGER} 4"),
    row("--no-fp8-wgrad", changes("gradients"), near, base=TENSORWISE),
    row("--no-fp8-weight-transpose-cache", calls("transposed"), keeps("losses", "gradients", "weights"),
        base=TENSORWISE, count=("megatron.core.fp8.gemms:transposed",)),
    row("--fp8-param-gather", changes("buckets"), keeps("losses", "weights"), ranks=2,
        base=f"{TENSORWISE} --bf16 --use-distributed-optimizer --clip-grad 0"),
    row("--first-last-layers-bf16", changes("losses"), near, base=f"{TENSORWISE} --num-layers 3"),
    row("--num-layers-at-start-in-bf16 2", changes("losses"), near, base=ENDS),
    row("--num-layers-at-end-in-bf16 2", changes("losses"), near, base=ENDS),
]  # fmt: skip
