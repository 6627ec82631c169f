"""Runs Megatron-LM's own unit tests against this library, in one process on a CPU, and writes the page
``docs/developers/megatron_lm_unit_tests.md``: passing tests, and reasons of the others.

    MEGATRON_LM=FOLDER python tests/megatron_lm_unit_tests.py            # all of LISTED, about 12 minutes; the page
    MEGATRON_LM=FOLDER python tests/megatron_lm_unit_tests.py FILE ...   # results of some files

FOLDER is a checkout of NVIDIA/Megatron-LM. Its ``megatron`` is not imported.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/developers/megatron_lm_unit_tests.md"
LISTED = [
    "data", "distributed/*.py", "fusions", "models/*.py", "optimizer", "pipeline_parallel", "tensor_parallel",
    "test_*.py", "tokenizers", "training", "transformer/*.py", "transformer/moe", "utils",
]  # fmt: skip
"""Tests of modules that exist here. Left out: other programs and modules (a2a_overlap, elastification, export,
generalized_tensor_parallel, inference, mimo, mfsdp, post_training, resharding, rl, ssm, telemetry), and tests that need
several GPUs (determinism, dist_checkpointing)."""

REASONS = {
    "skipped": ("Skipped by the test itself", r"^\0"),
    "name": (
        "Needs a name that does not exist here: internals, or a family or program that Megatron-LM has in addition",
        r"MissingName|has no attribute|have the attribute|No module named|cannot import|is not subscriptable|'Meta'|"
        r"BaseException type, but got|cpu_plugin|megatron_lm_plugin|assert [A-Z_]{6,}",
    ),
    "rejected": ("A capability that is rejected here with a sentence", r"not available here|not available yet"),
    "ranks": ("Needs several ranks", r"world size|world_size|optimizer instances do not divide|data-parallel ranks"),
    "machine": (
        "Needs a GPU, Transformer Engine, data of the CI, or a pytest plugin",
        r"(?i)cuda|nccl|transformer_engine|/opt/|no such file|fixture|async def|longer than",
    ),
    "signature": ("A constructor with other arguments: layers take `groups=`", r"argument|not callable"),
    "sizes": (
        "A configuration without sizes, or with values out of range: rejected when it is built",
        r"must be|sources whole|configuration is frozen|wrong fields",
    ),
    "words": ("Rejected too, in other words or by another exception", r"Regex pattern|already (set up|initiali[sz]ed)"),
}
"""{kind: (reason on the page, pattern of messages)}, first match."""

ON_PURPOSE = {
    "test_mup.py": "embeddings are recognized by their name, not by attributes of parameters; a base width that is "
    "not set stays None",
    "test_swiglu_fusion.py": "a linear offset and a clamp are computed on every path, so no path is rejected",
    "test_transformer_config.py": "flags that only select a kernel of Megatron-LM are taken or rejected by name",
    "test_bias_dropout_fusion.py": "inference does not write into its input",
    "test_bert_model.py": "the head has another class",
    "test_utils.py": "`window_attn_skip_freq` is a list of 0 and 1",
    "test_parallel_state.py": "`ProcessGroupCollection`: a group that is not set is None",
    "test_msc_utils.py": "multi-storage clients do not exist here",
    "test_grouped_mlp.py": "experts are grouped by the library; there is no switch for Transformer Engine's operations",
    "test_builder.py": "a full pass reads sources without weights",
    "test_get_batch.py": "`--sft` needs a tokenizer of text",
    "test_gpt_dataset.py": "documents are separated by `reset_attention_mask`",
    "test_param_and_grad_buffer.py": "fields of Megatron-LM's gradient buckets are not checked",
    "test_eval_batch_size.py": "weights are not rematerialized over tensor- and data-parallel ranks (GTP)",
    "test_model_parallel_config.py": "the loss has one kernel; configurations are read only after parsing",
    "test_upcycling.py": "a program starts with `parse_and_validate_args()`",
}
"""Reasons of other differences, by file."""

LARGEST = """
## Largest groups that do not pass

Tests in `fusions`, `optimizer`, `pipeline_parallel`, `transformer` and `transformer/moe` (855), groups of 12 or more:

| tests | need | reason |
|---|---|---|
| 200 | `fused_indices_to_multihot` | a kernel of DeepEP's dispatcher; this library exchanges tokens in another form |
| 98 | `fsdp_dtensor_checkpoint` | checkpoints of Megatron-FSDP are not read; FSDP2 writes the format of all layouts |
| 68 | Transformer Engine's modules, `GroupedTensor` | the tests replace attributes of modules that wrap them there |
| 66 | several ranks | one process runs the tests |
| 62 | layers without `groups=` | layers take their process groups; programs build models from specs, which pass them |
| 44 | `enable_mhc_connections`, `mtp_hsm` | do not exist here; the settings are rejected by name |
| 28 | `set_tensor_model_parallel_world_size` | `initialize_model_parallel` sets the sizes; rejected |
| 28 | `_bias_dropout_add_func` | internal; `get_bias_dropout_add` exists |
| 26 | `_set_random_seed` | internal; `model_parallel_cuda_manual_seed` and `--seed` exist |
| 14 | `FusedScaleMaskSoftmax` | the softmax is part of the attention kernels |
| 12 | `bias_swiglu_impl` | internal; the activation is part of the layer |

Tests in `data`, `distributed`, `training` and `test_*.py` (1139), groups of 11 or more:

| tests | need | reason |
|---|---|---|
| 182 | `megatron.training.models` | configuration classes of models; programs use specs or a model family |
| 164 | `instantiate_utils`, `ArgumentGroupFactory` | one nested configuration; its fields declare the flags |
| 116 | `compute_full_param_layout` and other layouts of gradient buffers | internal |
| 100 | several ranks | one process runs the tests |
| 73 | `HybridDeviceOptimizer` | optimizer state in host memory is a flag (`--optimizer-cpu-offload`) |
| 72 | samples as tensors | `dataset[i]` has numpy arrays: data sets need no torch; loaders make tensors |
| 72 | `_IndexReader` | internal; `IndexedDataset` has the counts |
| 48 | `varlen_dataset._sharegpt_to_messages` and similar | internal; conversations are read by `megatron sft` |
| 46 | a `TransformerConfig` without sizes | rejected when it is built |
| 40 | `HyperCommGrid` | groups come from `initialize_model_parallel` |
| 25 | `num_floating_point_operations`, `theoretical_memory_usage` | figures come from a model's description |
| 23 | `_build_sharded_state_dict_metadata`, runs of tests with incomplete arguments | internal |
| 16 | `optimizer_state_keys`, `emerging_optimizers` | internal; a package that is not installed |
| 13 | `set_tensor_model_parallel_world_size` and similar | `initialize_model_parallel` sets the sizes; rejected |
| 12 | `_freeze_all_model_chunks` | internal; `requires_grad` of parameters decides |
| 11 | `megatron.core.utils.torch`, `_rank_utils` | the tests replace attributes of modules |
"""
"""Read by hand at d98e8a64; a part of the page."""


def run(checkout: Path, files: list[str]) -> dict[str, list[str]]:
    """Return {test: [outcome, message]}."""
    with tempfile.TemporaryDirectory() as folder:
        for entry in checkout.iterdir():
            if entry.name != "megatron":
                Path(folder, entry.name).symlink_to(entry)
        Path(folder, "megatron").symlink_to(ROOT / "megatron")
        results = Path(folder, "results.json")
        environment = {
            **os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'tests/test_utils'}", "RESULTS": str(results),
            "TESTS": folder, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "1", "RANK": "0",
            "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": os.environ.get("MASTER_PORT", "29531"),
        }  # fmt: skip
        options = ["-p", "megatron_lm_plugin", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", *files]
        finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if not results.exists():
            raise SystemExit(f"pytest did not run: {finished.stdout[-2000:]}{finished.stderr[-2000:]}")
        return json.loads(results.read_text())


def classify(outcome: str, message: str) -> str:
    if outcome in ("passed", "skipped"):
        return outcome
    return next((kind for kind, (_, pattern) in REASONS.items() if re.search(pattern, message)), "differs")


def page(results: dict[str, list[str]], commit: str) -> str:
    """Return the page's text."""
    counts: dict[str, Counter] = defaultdict(Counter)
    for test, (outcome, message) in results.items():
        counts[test.partition("::")[0].removeprefix("tests/unit_tests/")][classify(outcome, message)] += 1
    total = sum(counts.values(), Counter())
    lines = [
        "# Megatron-LM's unit tests", "",
        f"Unit tests of Megatron-LM at {commit[:8]} against this library, one process on a CPU. This page is written",
        "by `MEGATRON_LM=FOLDER python tests/megatron_lm_unit_tests.py`, with FOLDER a checkout. GPUs are replaced by",
        "the CPU, NCCL by gloo; names that are missing raise an error when a test calls them.", "",
        "Most of these tests call internals of Megatron-LM's classes. They are no acceptance test; they show",
        "differences that programs may meet. Tests of programs and modules that do not exist here are not run.", "",
        "| tests | result |", "|---|---|", f"| {total['passed']} | pass |",
    ]  # fmt: skip
    lines += [f"| {total[kind]} | {reason} |" for kind, (reason, _) in REASONS.items()]
    lines += [f"| {total['differs']} | Differ on purpose, see below |", ""]
    complete = {file: count["passed"] for file, count in counts.items() if set(count) <= {"passed", "skipped"}}
    lines += ["## Files whose tests all pass", "", "| file | tests |", "|---|---|"]
    lines += [f"| {file} | {number} |" for file, number in sorted(complete.items()) if number]
    lines += ["", "## Files with some passing tests", "", "| file | pass | other results |", "|---|---|---|"]
    for file, count in sorted(counts.items()):
        if count["passed"] and file not in complete:
            results_text = ", ".join(f"{kind} {number}" for kind, number in sorted(count.items()) if kind != "passed")
            lines.append(f"| {file} | {count['passed']} | {results_text} |")
    lines += LARGEST.rstrip().splitlines()
    lines += ["", "## Differences on purpose", "", "| file | tests | reason |", "|---|---|---|"]
    for file, count in sorted(counts.items()):
        if count["differs"]:
            lines.append(f"| {file} | {count['differs']} | {ON_PURPOSE.get(Path(file).name, 'not examined')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if not os.environ.get("MEGATRON_LM"):
        raise SystemExit("set MEGATRON_LM to the folder of a checkout of NVIDIA/Megatron-LM")
    checkout = Path(os.environ["MEGATRON_LM"]).resolve()
    tests = checkout / "tests/unit_tests"
    files = sys.argv[1:] or [str(file.relative_to(checkout)) for name in LISTED for file in sorted(tests.glob(name))]
    results = run(checkout, files)
    print(Counter(classify(*result) for result in results.values()))
    for test, (outcome, message) in results.items():
        if classify(outcome, message) == "differs" or (sys.argv[1:] and outcome == "failed"):
            print(f"{test}: {message[:200]}")
    if not sys.argv[1:]:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout
        PAGE.write_text(page(results, commit or os.environ.get("MEGATRON_LM_COMMIT", "an unknown commit")))


if __name__ == "__main__":
    main()
