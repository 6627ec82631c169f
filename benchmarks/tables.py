"""Writes the tables of measured figures from benchmarks/results/*.json: ``python benchmarks/tables.py [--check]``.

All tables are in benchmarks/results/README.md, the short ones in docs/guides/performance.md, what recipes need and
cost in examples/. A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; the text around it is
written by hand, except for the figures that benchmarks/harness/page_figures.py lists. ``--check`` compares, and exits
with 1 where a page is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import page_figures, roofline  # noqa: E402
from benchmarks.harness import recipes as recipe_costs  # noqa: E402
from benchmarks.harness.kernel_classes import COMMUNICATION  # noqa: E402
from benchmarks.harness.rows import ROWS, Row, base_row, row_flags  # noqa: E402
from megatron.training.arguments import parse_args  # noqa: E402
from megatron.training.config.resolve import resolve  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = ("gpt3", "llama", "nemotron4", "mixtral", "qwen3_moe", "qwen3_vl", "qwen35", "nemotron3", "deepseek_v3",
            "bert", "t5")  # fmt: skip
GUIDES = ("performance.md", "layouts.md", "evidence.md", "fp8.md", "generation.md", "images.md", "kernels.md",
          "lora.md", "memory.md", "moe.md", "optimizers.md")  # fmt: skip
PAGES = (
    RESULTS / "README.md",
    *(ROOT / "docs" / "guides" / name for name in GUIDES),
    *(ROOT / name for name in ("README.md", "docs/compared_with.md", "docs/STATUS.md")),
    ROOT / "examples" / "README.md",
    *(ROOT / "examples" / folder / "README.md" for folder in EXAMPLES),
)  # fmt: skip
TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
NOTHING = "Not measured yet.\n"
VERSIONS = ("torch", "cuda", "cudnn", "triton", "nccl", "transformer_engine", "python", "commit")


def stored(name: str) -> dict[str, Any]:
    """Return the content of a result file; empty if it does not exist."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown, numbers to the right."""
    body = [[cell_text(value) for value in row] for row in rows]
    if not body:
        return NOTHING
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "".join("| " + " | ".join(line) + " |\n" for line in (header, rule, *body))


def cell_text(value: object) -> str:
    """A cell."""
    if value is None or value == "":
        return "–"
    if isinstance(value, list):  # forward and backward, say
        return " / ".join(map(cell_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def versions(record: dict[str, Any]) -> str:
    """Device and versions in one line."""
    return ", ".join([record.get("device", "?"), *(f"{name} {record[name]}" for name in VERSIONS if record.get(name))])


def what(row: Row, name: str) -> str:
    """``name``: the row with its additions, possibly another depth."""
    gpus = "1 GPU" if row.gpus == 1 else f"{row.gpus} GPUs"
    other = re.search(r"--num-layers (\d+)", name)
    return f"{gpus}, {other[1] if other else row.layers} layers, s {row.length}, batch {row.batch}"


def training(file: str) -> str:
    """A speed table: valid rows only, the others below it with the reason."""
    rows, spoiled, records = [], [], {}
    results = stored(file).get("rows", {})
    one_gpu = results.get("one", {}).get("tflops_per_gpu")
    for name, result in results.items():
        reason = result.get("error") or result.get("invalid")
        if reason or result.get("tflops_per_gpu") is None:
            spoiled.append(f"* `{name}`: {cell_text(reason).strip()[-200:]}")
            continue
        record = json.dumps({**result["environment"], "date": None, "uncommitted_changes": None}, sort_keys=True)
        number = records.setdefault(record, len(records) + 1)
        profile = result.get("profile") or {}
        rows.append((
            f"`{name}`", what(ROWS[base_row(name)], name), f"{result['tflops_per_gpu']:.1f}",
            f"{result['tflops_per_gpu'] / one_gpu:.0%}" if one_gpu else None,
            result["tokens_per_second_per_gpu"], result["seconds_per_iteration"], result["peak_memory_gb"],
            profile.get("exposed_communication_ms"), profile.get("idle_ms"), result["repeats"], f"[{number}]",
        ))  # fmt: skip
    header = ("row", "run", "TFLOP/s per GPU", "of `one`", "tokens/s per GPU", "s per step", "peak GB", "exposed ms",
              "idle ms", "jobs", "where")  # fmt: skip
    notes = []
    for text, number in records.items():
        record = json.loads(text)
        notes.append(f"[{number}] {versions(record)}" + (f"; {record['note']}" if record.get("note") else ""))
    return "\n".join([table(header, rows), *notes, *(["", "Not valid:", *spoiled] if spoiled else []), ""])


SHORT = (
    "one", "one+fp8-tensorwise", "one-8b", "gpt-345m+cuda-graph", "dp2", "tp2-sp-overlap+four-sequences",
    "pp2-zero-bubble", "cp2-s32768", "dp4", "pp4-zero-bubble-h2", "cp4-s32768+a2a", "mixtral", "qwen3-moe",
    "qwen3-moe-ep2+gather-tokens", "bert-large", "t5-3b",
)  # fmt: skip
"""Rows of the short speed table."""


def speed() -> str:
    """The speed table in short: the valid rows of ``SHORT``."""
    rows = [
        (f"`{name}`", what(ROWS[base_row(name)], name), f"{row['tflops_per_gpu']:.0f}",
         row["tokens_per_second_per_gpu"], row["seconds_per_iteration"],
         row["peak_memory_gb"] and f"{row['peak_memory_gb']:.0f}")
        for name, row in stored("training").get("rows", {}).items()
        if name in SHORT and row.get("tflops_per_gpu") and not row.get("invalid") and "error" not in row
    ]  # fmt: skip
    return table(("row", "run", "TFLOP/s per GPU", "tokens/s per GPU", "s per step", "peak GB"), rows)


def side_by_side() -> str:
    """Megatron-LM and this project on the same GPUs."""
    content = stored("side_by_side")
    rows = []
    for name, row in content.get("rows", {}).items():
        ratio = row["ours"] / row["theirs"]
        memory = " / ".join(f"{row[side]} GB" for side in ("theirs_gb", "ours_gb") if side in row)
        rows.append((name, row["shape"], f"{row['theirs']:.0f}", f"**{row['ours']:.0f}**", f"{ratio - 1:+.0%}", memory))
    header = ("bf16, TFLOP/s per GPU", "shape", "Megatron-LM", "this project", "faster", "peak memory")
    record = content.get("environment", {})
    return table(header, rows) + (f"\n{versions(record)}. {record['note']}.\n" if rows else "")


def pairs() -> str:
    """Runs compared on one machine, minutes apart."""
    rows = []
    for pair in stored("pairs").get("pairs", []):
        first, second = (pair[side] for side in ("first", "second"))
        names = dict.fromkeys(f"`{each['row']}`" for each in (first, second))
        commits = dict.fromkeys(each["environment"]["commit"][:7] for each in (first, second))
        change = second["tflops_per_gpu"] / first["tflops_per_gpu"] - 1
        speeds = first["tflops_per_gpu"], second["tflops_per_gpu"], f"{change:+.1%}"
        rows.append((pair["what"], ", ".join(names), *speeds, ", ".join(commits)))
    return table(("pair", "row", "first TFLOP/s per GPU", "second", "change", "commits"), rows)


def profiles() -> str:
    """Return the gap to the limits of every profiled row, by class."""
    parts = []
    for name, result in stored("training").get("rows", {}).items():
        report = result.get("roofline")
        if not report or result.get("invalid") or "error" in result:
            continue
        profile = result["profile"]
        rows = [
            (row["class"], row["limit_ms"], row["measured_ms"], row["gap_ms"], row["tflops"], row["tb_per_second"])
            for row in report["rows"] if row["measured_ms"] >= 0.0005 * (report["step_ms"] or 0) or row["limit_ms"]
        ]  # fmt: skip
        waits = sum(each["count"] for each in profile["synchronizations"])
        at = f", at commit {result['profiled_at']}" if result.get("profiled_at") else ""
        parts.append(
            f"`{name}`, one step of rank 0{at}: limit {report['limit_ms']:.0f} ms, {report['step_ms']:.0f} ms under "
            f"the profiler; {profile['launches']} launches, {waits} waits of the host, "
            f"{profile['device_to_host_copies']} copies to it.\n\n"
            + table(("class", "limit ms", "measured ms", "gap ms", "TFLOP/s", "TB/s"), rows)
        )
    return "\n".join(parts) or NOTHING


def limits() -> str:
    """Return the limits of every row, computed from the ceilings, without measurements of runs."""
    ceilings, rows = roofline.load_ceilings(), []
    for name, row in ROWS.items():
        flags = parse_args([*row_flags(name), "--train-iters", "1"], model_family=row.family)
        cfg = resolve(flags, row.gpus, gpus=True)
        work = roofline.limits(cfg, cfg.tokenizer.vocab_size, ceilings)
        total = sum(each.ms for each in work.values())
        flops = cfg.describe(cfg.tokenizer.vocab_size).flops_per_sample * row.batch / row.gpus
        share = {
            part: sum(each.ms for kind, each in work.items() if kind.startswith(part))
            for part in ("GEMM", "attention", COMMUNICATION)
        }
        rest = total - sum(share.values())
        hidden = sum(roofline.communication_ms(cfg, cfg.tokenizer.vocab_size, ceilings).values())
        rows.append((f"`{name}`", round(flops / total / 1e9), round(total), *map(round, share.values()), round(rest),
                     round(hidden)))  # fmt: skip
    header = ("row", "TFLOP/s per GPU at most", "ms per step at least", "GEMM", "attention", "bubble", "the rest",
              "collectives to hide")  # fmt: skip
    return table(header, rows) + f"\nCeilings: {ceilings['source']}.\n"


def loss_curves() -> str:
    """Comparisons of loss curves."""
    content = stored("loss_curves")
    rows = []
    for row in content.get("comparisons", []):
        values = row.get("deviations")
        cells = [f"{values[name]:.3%} of {row['band'][name]:.1%}" for name in values] if values else ["every bit"] * 3
        verdict = "same" if row["passed"] else "**differs**"
        rows.append((f"`{row['other']}` against `{row['reference']}`", *cells, verdict))
    drawn = {name: curve for name, curve in content.get("curves", {}).items() if "losses" in curve}
    notes = [
        f"`{name}`: {curve['losses'][0]:.4f} to {curve['losses'][-1]:.4f}; {versions(curve['environment'])}"
        for name, curve in drawn.items()
    ]
    header = ("curves", "first ten steps", "any ten steps", "last twenty", "verdict")
    return table(header, rows) + "".join(f"\n* {note}" for note in notes) + ("\n" if notes else "")


def real_text(name: str) -> str:
    """Return the comparisons of loss curves on real text."""
    content = stored(name)
    rows = []
    for row in content.get("comparisons", []):
        other = "noise" if row["curve"].startswith("bf16") else "–"
        verdict = {True: "same", False: "**differs**"}.get(row.get("passed"), other)
        values = (f"{row[key]:.4f}" for key in ("rms", "largest", "last"))
        error = f" ± {row['error_relative']:.2%}" if "error_relative" in row else ""
        rows.append((row["curve"], row["steps"], *values, f"{row['last_relative']:.2%}{error}", verdict))
    notes = [
        f"{name}: {curve['losses'][0]:.4f} to {curve['losses'][-1]:.4f} in {curve['seconds']} s; "
        f"{versions(curve['environment'])}"
        for name, curve in content.get("curves", {}).items() if curve.get("losses")
    ]  # fmt: skip
    header = ("curve against bf16", "steps", "rms difference", "largest", "last", "last, relative", "verdict")
    return table(header, rows) + "".join(f"\n* {note}" for note in notes) + ("\n" if notes else "")


def killed_rank() -> str:
    """Return the three runs of benchmarks/killed_rank.py and the differences of their losses."""
    if not (content := stored("killed_rank/result")):
        return NOTHING
    killed, resumed, steps = content["killed"], content["resumed_from"], content["steps"]
    losses, differences = content["uninterrupted"], content["differences"]
    (many, few), (first, second) = content["ranks"], content["layouts"]
    end = f"SIGKILL to rank {killed['rank']}; ended after {killed['seconds_to_end']} s, exit code {killed['exit_code']}"
    rows = [
        ("uninterrupted", many, f"`{first}`", f"1 to {steps}", f"loss {losses[0]:.4f} to {losses[-1]:.4f}"),
        ("killed", many, f"`{first}`", f"1 to {killed['iteration']}", end),
        ("continued", few, f"`{second}`", f"{resumed + 1} to {steps}", f"from the checkpoint of iteration {resumed}"),
    ]
    after = differences["after"]
    notes = [
        f"largest difference of losses up to the signal: {differences['before']:g}",
        f"after it: root mean square {after['rms']:.1e}, largest {after['largest']:.1e}, mean of the last steps "
        f"{after['last']:.1e} ({abs(differences['last_relative']):.5%})",
        f"shape `{content['shape']}`; {versions(content['environment'])}",
    ]
    header = ("run", "ranks", "layout", "iterations", "outcome")
    return table(header, rows) + "".join(f"\n* {note}" for note in notes) + "\n"


def finetuning() -> str:
    """Return the speed of fine-tuning; adapters are compared with full training on the same rows."""
    content = stored("finetuning")
    speeds = {name: row["tokens_per_second_per_gpu"] for name, row in content.get("rows", {}).items()}
    full = {"lora": "pretrain", "sft": "pretrain", "sft and lora": "sft"}
    rows = []
    for name, row in content.get("rows", {}).items():
        other = full.get(name)
        ratio = f"{speeds[name] / speeds[other]:.3f} of {other}" if other else None
        cells = f"{speeds[name]:,.0f}", f"{row['tflops_per_gpu']:.0f}", f"{row['peak_memory_gb']:.1f}"
        rows.append((name, *cells, row["filled_percent"], ratio))
    header = ("training", "tokens/s", "TFLOP/s", "peak GB", "rows filled, %", "speed")
    return table(header, rows) + (f"\n{versions(content['environment'])}\n" if rows else "")


def cards() -> str:
    """Return one line per card and check group: verdicts, figures of logits, losses."""
    rows = []
    for path in sorted((RESULTS / "cards").glob("*.json")):
        card = json.loads(path.read_text(encoding="utf-8"))
        checks = card["checks"]
        logits = re.search(r"logits against.*?difference (\S+ of \S+),", checks["import, logits"]["details"])
        verdicts = {name.split()[1]: check["verdict"] for name, check in checks.items() if name.startswith("layout")}

        def detail(name: str, checks: dict[str, Any] = checks) -> str:
            check = checks.get(name, {"verdict": "not run", "details": ""})
            return check["details"] if check["verdict"] == "passed" else check["verdict"]

        resumed = checks.get("resumed bytes", {"verdict": "not run"})["verdict"]
        rows.append((
            card["model"], f"{card['model_type']}, {card['parameters'] / 1e6:.1f} M", logits and logits[1],
            detail("exported bytes").replace("exported tensors have the bytes of the folder", "tensors"),
            f"{detail('4 training steps')}; resumed bytes: {resumed}",
            ", ".join(f"{name}: {verdict}" for name, verdict in verdicts.items()), detail("greedy text"),
        ))  # fmt: skip
    header = ("model", "architecture", "largest difference of logits", "exported bytes", "training", "layouts", "text")
    return table(header, rows)


def context_parallel() -> str:
    """Forms of context parallelism, one layer's attention."""
    content = stored("context_parallel")
    rows = [
        (f"`{name}`", row["ms"], row["tflops_per_gpu"], row["exposed_ms"], row["peak_gib"])
        for name, row in content.get("rows", {}).items()
    ]
    header = ("form", "ms", "TFLOP/s per GPU", "exposed ms", "peak GiB")
    if not rows:
        return NOTHING
    settings = ", ".join(f"{name} {value}" for name, value in content["settings"].items())
    return table(header, rows) + f"\n{content['machine']['gpu']}, torch {content['machine']['torch']}, {settings}\n"


def recipes(folder: str) -> str:
    """Return memory and cost of the recipes in one folder of examples/, or in all folders."""
    rows = recipe_costs.rows(folder, stored("training").get("rows", {}))
    return table(recipe_costs.HEADER, rows)


def gradient_sums() -> str:
    """Return the error of sums over ranks by precision and order."""
    content = stored("gradient_sums")
    if not (rows := content.get("rows", {})):
        return NOTHING
    columns = [(name, order) for name in next(iter(rows.values()), {}) for order in ("ring", "tree")]
    header = ["ranks", *(f"{name}, {order}" for name, order in columns)]
    lines = ([ranks, *(f"{row[name][order]:.1e}" for name, order in columns)] for ranks, row in rows.items())
    return table(header, lines) + f"\n{versions(content)}, {content.get('elements', 0):,} elements\n"


def plain(name: str) -> Callable[[], str]:
    """The table of a benchmark whose file has ``rows`` or ``operations``: a list of records, or records by name."""

    def render() -> str:
        content = stored(name)
        entries = content.get("rows") or content.get("operations") or []
        records = [{"name": key, **row} for key, row in entries.items()] if isinstance(entries, dict) else entries
        columns = list(dict.fromkeys(key for record in records for key in record if not isinstance(record[key], dict)))
        text = table(columns, ([record.get(column) for column in columns] for record in records))
        record = content.get("environment") or content.get("machine") or content
        return text + (f"\n{versions(record)}\n" if records else "")

    return render


TABLES: dict[str, Callable[[], str]] = {
    "side-by-side": side_by_side, "speed": speed, "training": partial(training, "training"),
    "training-before-kernels": partial(training, "training_before_kernels"),
    "pairs": pairs,
    "profiles": profiles, "limits": limits, "loss-curves": loss_curves, "context-parallel": context_parallel,
    "gradient-sums": gradient_sums, "real-text": partial(real_text, "real_text"),
    "real-text-1000": partial(real_text, "real_text_1000"),
    "real-text-experts": partial(real_text, "real_text_experts"), "killed-rank": killed_rank, "cards": cards,
    "finetuning": finetuning,
    "fusions": plain("fusions"), "cross-entropy": plain("cross_entropy"), "optimizer": plain("optimizer"),
    "copy-engines": plain("copy_engines"), "gemms": plain("gemms"),
    "recipes": partial(recipes, ""), **{f"recipes-{folder}": partial(recipes, folder) for folder in EXAMPLES},
}  # fmt: skip


def page(text: str, path: Path | None = None) -> str:
    """A page with every table, and the figures of the page at ``path``, as the results say; ``ValueError`` names a
    table that does not exist, or a figure's pattern that does not match."""

    def fill(match: re.Match[str]) -> str:
        if match["name"] not in TABLES:
            raise ValueError(f"no table {match['name']!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[match['name']]()}\n{match[3]}"

    text = TABLE.sub(fill, text)
    return text if path is None else page_figures.filled(path.relative_to(ROOT).as_posix(), text, stored)


def main(argv: list[str]) -> int:
    """Write the pages, or compare them."""
    outdated = 0
    for path in PAGES:
        current = path.read_text(encoding="utf-8")
        text, name = page(current, path), path.relative_to(ROOT)
        if "--check" not in argv:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
        elif current != text:
            print(f"{name} is out of date: run python benchmarks/tables.py")
            outdated = 1
    return outdated


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
