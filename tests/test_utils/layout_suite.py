"""Rows of the matrix that only ``tests/torture/layouts.py`` runs, not the suite."""

from tests.test_utils.expert_table import EXPERT_ROWS, IN_THE_SUITE
from tests.test_utils.fp8_table import FP8_IN_THE_SUITE, FP8_ROWS
from tests.test_utils.layout_table import THROUGH_COPY_ENGINES
from tests.test_utils.masked_layouts import BERT_ROWS
from tests.test_utils.masked_layouts import IN_THE_SUITE as MASKED_IN_THE_SUITE
from tests.test_utils.t5_layouts import T5_IN_THE_SUITE, T5_ROWS
from tests.test_utils.varlen_table import VARLEN_IN_THE_SUITE, VARLEN_ROWS

_LATER = set(EXPERT_ROWS) - IN_THE_SUITE | set(BERT_ROWS) - MASKED_IN_THE_SUITE | set(T5_ROWS) - T5_IN_THE_SUITE
_LATER |= set(FP8_ROWS) - FP8_IN_THE_SUITE | set(VARLEN_ROWS) - VARLEN_IN_THE_SUITE
EXTENDED = _LATER | {
    "dp4-sgd", "dp2-llama", "dp2-packed", "dp8", "zero2-overlap", "zero4-gather", "zero4-sgd", "zero2-tp2",
    "zero2-cp2", "zero1-cp2", "zero2-pp2", "zero2-pp2-vpp-gather", "tp4", "tp2-sgd", "tp2-sp-halves", "tp2-llama",
    "tp2-sp-llama", "tp4-groups-below-ranks", "tp2-sp-packed", "tp2-window", "tp2-dp2", "tp2-sp-dp2", "tp2-sp-dp4",
    "cp2-allgather", "cp2-a2a", "cp4", "cp4-allgather", "cp4-a2a", "cp2-packed", "cp2-a2a-packed", "cp2-mqa",
    "cp2-dp2", "cp2-tp2", "cp2-tp2-sp-llama", "pp4", "pp4-untied", "pp4-sgd", "pp2-llama", "pp2-packed", "pp2-vpp",
    "pp2-vpp-untied", "pp2-zero-bubble", "pp4-zero-bubble", "pp4-zero-bubble-h2", "pp4-uneven", "pp2-vpp-layout",
    "pp2-dp2", "pp2-tp2", "pp2-tp2-sp", "pp2-vpp-tp2-sp", "pp2-cp2", "pp2-tp2-sp-zero-bubble", "recompute-uniform",
    "recompute-selective-tp2-sp", "recompute-pp2-zero-bubble", "fsdp2", "fsdp4-sgd", "fsdp2-llama", "fsdp2-tp2",
    "cut-pp2", "cut-pp2-untied", "cut-pp2-llama", "cut-pp4", "cut-pp4-zero-bubble",
    "cut-pp4-three-stages-of-one-layer", "cut-pp2-vpp", "cut-pp2-tp2-sp", "sinks-zero2-cp2", "sinks-pp2-vpp-recompute",
    "mtp-tp2", "mtp-cp2", "mtp-pp2", "mtp-pp2-untied", "mtp-pp2-packed-zero-bubble", "mtp-pp4-layout",
    "mtp-pp2-tp2-sp-cp2", "mtp-recompute-tp2-sp", "mtp-chunks-pp2", "mtp-dp2-zero2", "mtp-pp2-vpp-zero2-gather",
    "mtp-repeated-fsdp2",
    "sinks-cp2-a2a", "off-by-one-cp2-packed", "mla-tp2-sp", "mla-cp2", "mla-zero2-tp2", "mla-recompute-tp2-sp",
    "mla-tp2", "mla-tp2-sp-dropout", "mla-cp2-dropout", "mla-cp2-allgather", "mla-pp2", "mla-zero2-gather", "mla-fsdp2",
    "mla-cp2-tp2-sp", "gemma-2-pp2-tp2-sp-zero-bubble", "gemma-3-cp2-pp2", "olmo-2-cp2-tp2-zero",
    "olmo-2-fsdp2-recompute", "gpt-neox-cp2-recompute", "offload-zero2-pp2-tp2-sp", "activations-cp2",
    "activations-bert-post-norm", "activations-mtp-pp2", "activations-mla-experts-ep2",
}  # fmt: skip
"""Rows that only ``tests/torture/layouts.py`` runs. 121 faults were injected (``layout_faults.py``, and changed lines
that at most 60 percent of the rows execute); the remaining rows detect every fault that any row detects. They also
execute every line that the table executes, and combine any two flags that one row combines."""

_OF_EXPERTS = set(EXPERT_ROWS) & set(THROUGH_COPY_ENGINES) - {
    "pp2-vpp-ep2", "tp2-sp-etp1-ep2", "ep4-static-overlapped-shared",
}  # fmt: skip
_OF_ENCODERS = (set(BERT_ROWS) | set(T5_ROWS) - {"t5-pp2-zero-bubble"}) & set(THROUGH_COPY_ENGINES)
_IN_FP8 = set(FP8_ROWS) & set(THROUGH_COPY_ENGINES) - {"fp8-blockwise-tp2-sp-halves"}
EXTENDED_THROUGH_COPY_ENGINES = _OF_ENCODERS | _OF_EXPERTS | _IN_FP8 | {
    "zero2-pp2-vpp-gather", "tp2-sp", "tp2-sp-halves", "tp2-sp-packed", "tp2-sp-dp2", "pp4-untied", "pp2-vpp",
    "pp2-vpp-untied", "pp2-zero-bubble", "pp4-zero-bubble", "pp4-zero-bubble-h2", "pp2-vpp-tp2-sp",
    "pp2-tp2-sp-zero-bubble", "pp2-tp2-sp-dp2", "recompute-modules", "recompute-pp2-zero-bubble",
    "cut-pp4-zero-bubble", "cut-pp2-vpp-zero-bubble", "mla-pp2-tp2-sp-zero-bubble", "mla-recompute-up-pp2-zero-bubble",
    "mtp-pp2-packed-zero-bubble", "mtp-pp2-vpp-zero2-gather", "sinks-pp2-vpp-recompute",
    "gemma-2-pp2-tp2-sp-zero-bubble", "gpt-neox-tp2-sp-pp2-halves",
}  # fmt: skip
"""Rows through copy engines that only ``tests/torture/layouts.py`` runs."""
