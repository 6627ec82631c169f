"""Rows of requirements: terms against values, and every row of both tables against settings that break or meet it."""

from types import SimpleNamespace

import pytest

from megatron.core.config.cli import flags_of
from megatron.core.config.requirements import Condition, Row, Term, read_table, unmet
from megatron.training.arguments import parse_args
from megatron.training.config.flat import FlatConfig
from megatron.training.config.resolve import resolve

FLAGS = {spec.field: spec for spec in flags_of(FlatConfig)}
ROWS = [row for package in ("megatron.core.config", "megatron.training.rules") for row in read_table(package)]
CASES = [pytest.param(row, terms, id=f"{i}-{terms[0].field}") for i, row in enumerate(ROWS) for terms in row.setting]


@pytest.mark.parametrize("text, values, explicit, holds", [
    ("a", {"a": 0}, (), True), ("a", {"a": False}, (), False), ("a", {"a": None}, (), False),
    ("a", {"a": []}, (), False), ("not a", {"a": ""}, (), True), ("not a", {"a": 0.0}, (), False),
    ("@a", {"a": None}, ("a",), True), ("@a", {"a": 1}, (), False),
    ("a=x,y", {"a": "y"}, (), True), ("a!=x,y", {"a": "y"}, (), False), ("a=1", {"a": 1}, (), True),
    ("a=x", {"a": None}, (), False), ("a!=x", {"a": None}, (), True),
    ("a>1", {"a": 2}, (), True), ("a>1", {"a": 1}, (), False), ("a>1", {"a": None}, (), False),
    ("a:x,y", {"a": ["z", "y"]}, (), True), ("a:x", {"a": None}, (), False),
    ("a & b", {"a": 1, "b": None}, (), False), ("a & b | c", {"a": None, "b": 1, "c": True}, (), True),
    ("a.b", {"a": SimpleNamespace(b=True)}, (), True),
])  # fmt: skip
def test_conditions_hold_for_the_values_that_they_name(text, values, explicit, holds):
    assert bool([*Condition.parse(text).holding(SimpleNamespace(**values), explicit)]) == holds


def test_text_that_is_no_condition_is_rejected():
    with pytest.raises(ValueError, match="'a <= 2' is no term"):
        Condition.parse("a & a <= 2")


def reasons(setting, relation, condition, reason="", **values):
    row = Row(Condition.parse(setting), relation, Condition.parse(condition), reason, "")
    return [(item.field, item.reason) for item in unmet([row], SimpleNamespace(**values), (), FLAGS)]


def test_reasons_name_flags_and_values():
    assert reasons("fp16", "excludes", "bf16", fp16=True, bf16=True) == [("fp16", "contradicts --bf16")]
    assert reasons("qk_clip", "excludes", "norm_placement!=pre", qk_clip=True, norm_placement="post") == [
        ("qk_clip", "contradicts --norm-placement post")
    ]
    assert reasons("muon_use_syrk", "requires", "optimizer=muon,adam | bf16 & window_size", muon_use_syrk=True,
                   optimizer="sgd", bf16=True, window_size=None) == [
        ("muon_use_syrk", "requires --optimizer muon or adam or --bf16 and --window-size")
    ]  # fmt: skip
    assert reasons("optimizer=sgd", "needs", "lr", optimizer="sgd", lr=None) == [
        ("lr", "is required by --optimizer sgd")
    ]
    assert reasons("fp16 | bf16", "excludes", "lr>0", "at {lr:g}", fp16=True, bf16=True, lr=0.5) == [
        ("fp16", "at 0.5"), ("bf16", "at 0.5"),
    ]  # fmt: skip


def test_fields_of_rows_exist():
    registered = {*FLAGS, "needs_data", "data_parallel_size", "fp64", "gated_linear_unit", "family.is_causal"}
    used = {term.field for row in ROWS for side in (row.setting, row.condition) for terms in side for term in terms}
    assert used <= registered and len(ROWS) > 150


def fulfil(settings, explicit, term: Term, holds: bool) -> None:
    """Change ``settings`` so that ``term`` holds, or does not."""
    spec = FLAGS.get(term.field)
    remaining = [value for value in (spec.choices if spec else ()) if str(value) not in term.values] or ["another"]
    if term.prefix == "@":
        (explicit.add if holds else explicit.discard)(term.field)
        return
    if term.operator == ">":
        value = int(term.values[0]) + holds
    elif term.operator == ":":
        value = list(term.values[:1]) if holds else []
    elif term.operator:
        value = term.values[0] if holds == (term.operator == "=") else remaining[0]
    else:
        value = True if holds != bool(term.prefix) else None
    target, _, name = term.field.rpartition(".")
    setattr(getattr(settings, target) if target else settings, name, value)


@pytest.mark.parametrize("row, terms", CASES)
def test_rows_report_exactly_the_settings_that_break_them(row, terms):
    parsed = parse_args(["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"])
    flat = resolve(parsed, 1).flat
    settings = SimpleNamespace(**flat.values(), family=SimpleNamespace(is_causal=True, programs=flat.family.programs))
    settings.attention_dropout = 0.5  # printed as a number
    settings.gated_linear_unit, explicit = None, set()
    breaks = row.relation == "excludes"
    for term in terms:
        fulfil(settings, explicit, term, True)
    fixed = {term.field for term in terms}
    for condition in row.condition:
        for term in condition:
            if term.field not in fixed or term.prefix == "@":
                fulfil(settings, explicit, term, breaks)
    item, *_ = unmet([row], settings, explicit, FLAGS)
    assert item.field == (row.condition[0][0].field if row.relation == "needs" else terms[0].field)
    assert item.reason and "{" not in item.reason
    for condition in row.condition:
        for term in condition:
            if term.field not in fixed or term.prefix == "@":
                fulfil(settings, explicit, term, not breaks)
    if not fixed & {term.field for condition in row.condition for term in condition if term.prefix != "@"}:
        assert item.field not in [item.field for item in unmet([row], settings, explicit, FLAGS)]
