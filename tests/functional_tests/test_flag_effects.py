"""Every flag reaches what it sets: the program runs with it and without it, and what it claims to change has changed.

The table is complete: a flag that works has a row, or a place among the few that only name a path or a log.
"""

import shlex

import pytest

from megatron.training.arguments import all_flag_specs, parse_args, validate_args
from tests.test_utils.flag_effects import files, table
from tests.test_utils.flag_effects.observe import MODEL, observe
from tests.test_utils.flag_effects.rows import Probe, same


class Runs:
    """Observed runs; each command line runs once per session."""

    def __init__(self, pool, folder):
        self.pool, self.folder = pool, folder
        self.places = files.write(folder)
        self.seen, self.num_runs = {}, 0

    def argv(self, row, changed=False):
        """Return the command line of the base run or the changed run."""
        flags = shlex.split(MODEL)
        for dropped in f"{row.without} {row.drop if changed else ''}".split():
            at = flags.index(dropped)
            del flags[at : at + 2]
        return flags + shlex.split(f"{row.base} {row.changed if changed else ''}")

    def placed(self, argv, out):
        return [part.format(out=out, **self.places) for part in argv]

    def of(self, row, argv):
        """Return the observations of every rank."""
        key = (tuple(argv), row.ranks, row.count, row.pretend)
        if key not in self.seen:
            self.num_runs += 1
            out = self.folder / str(self.num_runs)
            out.mkdir()
            if {"{checkpoint}", "{used}"} & set(argv) and "used" not in self.places:
                self.places |= files.write_checkpoints(self)
            arguments = self.placed(argv, out), str(out), row.count, row.pretend
            self.seen[key] = self.pool.run(observe, row.ranks, *arguments)
        return self.seen[key]


@pytest.fixture(scope="session")
def runs(gloo_pool, tmp_path_factory):
    return Runs(gloo_pool, tmp_path_factory.mktemp("flags"))


def check(row, base, changed):
    for expectation in row.expect:
        expectation(base, changed)


ROWS = [each for each in table.TABLE if not isinstance(each, Probe)]
PROBES = [each for each in table.TABLE if isinstance(each, Probe)]


@pytest.mark.parametrize("row", ROWS, ids=[each.changed for each in ROWS])
def test_flag_has_its_stated_effect(runs, row):
    base = runs.of(row, runs.argv(row))
    changed = runs.of(row, runs.argv(row, changed=True))
    pairs = list(zip(base, changed))
    if row.ranks == 1:
        pairs = [(base[0], changed[0])]
    for before, after in pairs:
        check(row, before, after)
    with pytest.raises(AssertionError):  # what a flag that reaches nothing would give must not pass
        for before in base:
            check(row, before, before)


@pytest.mark.parametrize("probe", PROBES, ids=[each.changed for each in PROBES])
def test_flag_decides(runs, probe, tmp_path):
    answers = []
    for argv in (runs.argv(probe), runs.argv(probe, changed=True)):
        cfg = validate_args(parse_args(runs.placed(argv, tmp_path), model_family=probe.family), probe.ranks)
        answers.append(probe.ask(cfg))
    assert same(answers[1], probe.expect), answers
    assert not same(answers[0], answers[1])


def test_every_flag_has_a_row():
    """A flag that is in neither table is a flag that may do nothing."""
    registered = {each.flag for each in table.TABLE} | set(table.EXEMPT)
    missing, stale = [], set(registered)
    for spec in all_flag_specs():
        has = registered & set(spec.names)
        stale -= has
        if not has:
            missing.append(spec.names[0])
    assert not missing, f"without a row in tests/test_utils/flag_effects: {' '.join(missing)}"
    assert not stale, f"rows of flags that do not exist: {' '.join(sorted(stale))}"


def test_no_flag_is_exempt_that_has_a_row():
    assert not {each.flag for each in table.TABLE} & set(table.EXEMPT)
