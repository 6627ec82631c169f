"""Every flag with odd values: first --dry-run, then two iterations of each accepted value.

A case is one flag. Its values (-1, 0, 2**63, nan, inf, nothing, a word, 1e30, other alphabets, a very long text, none)
are the only change to a command that works. Each is rejected (exit code not zero, the message names the flag) or
trained. A traceback, a message that does not name the flag, a process that does not end, one that dies of a signal, or
a dry run that writes a file is a failure.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.torture import common
from tests.torture.common import Cases, Failure

ODD = ["-1", "0", str(2**63), "nan", "inf", "", "x", "1e30", "αβγ-中-🙂", "long", "1,2,,x", "../../.."]
LIMIT_DRY, LIMIT_RUN = 10, 60  # seconds
MEMORY = 6 << 30
NOT_TRAINED = {
    "--dry-run", "--help", "--local-rank", "--distributed-backend", "--watchdog-timeout-seconds", "--data-path",
}  # fmt: skip
"""They end the program at once, or are part of the command that works."""


def flags():
    """``(spelling, values)`` of every flag, by name."""
    from megatron.training.arguments import flag_specs

    result = {}
    for spec in flag_specs():
        values = [["x" * 5000] if value == "long" else [value] for value in ODD]
        if isinstance(spec.nargs, int):
            values = [value * spec.nargs for value in values]
        elif spec.nargs in ("+", "*"):
            values += [["1", "-1"], ["0"] * 50]
        if spec.is_bool:
            values = [[], ["x"]]
        result[spec.names[0]] = [*values, []] if not spec.is_bool else values
    return sorted(result.items())


def command(work, folder):
    return [
        *common.MODEL_FLAGS, *common.data_flags(work), "--data-cache-path", str(work / "cache"), "--train-iters", "2",
        "--eval-interval", "2", "--lr-decay-iters", "8", "--save-interval", "2",
        "--save", str(folder / "save"), "--load", str(folder / "save"),
    ]  # fmt: skip


def show(flag, value):
    return " ".join([flag, *(text if len(text) < 40 else f"{text[:10]}… ({len(text)} characters)" for text in value)])


def judge(flag, value, code, output, limit):
    """Return the outcome of a start; raise if it is forbidden."""
    what = show(flag, value)
    if code is None:
        raise Failure(f"{what}: no end within {limit:g} s:\n{output[-1500:]}")
    if "Traceback" in output or "Fatal Python error" in output:
        raise Failure(f"{what}: a traceback:\n{output[-2500:]}")
    if code not in (0, 1, 2, 75):
        raise Failure(f"{what}: exit code {code}:\n{output[-1500:]}")
    if not code:
        return "accepted"
    errors = [line for line in output.splitlines() if line.startswith(("error", "  --", "pretrain_"))]
    names = {flag, flag.replace("--no-", "--"), "--" + flag[2:].removeprefix("no-")}
    if "not finite" in output or " is nan" in output:
        return "trained until a loss was not finite"
    names |= {flag.strip("-").replace("-", " ")}
    if not any(name in line for line in errors for name in names):
        raise Failure(f"{what}: no message names the flag:\n" + ("\n".join(errors)[-1000:] or output[-1500:]))
    return "refused"


def start(flag, value, folder, work):
    """Return the command line with this value."""
    argv = command(work, folder)
    if flag in argv:
        at = argv.index(flag)
        end = next((at + i for i, text in enumerate(argv[at:]) if i and text.startswith("--")), len(argv))
        argv = argv[:at] + argv[end:]
    return [*argv, flag, *value]


def dry_runs(argvs, results):
    """All of them in one process, each with a time limit; writes ``[exit code, output]`` of each."""

    def too_long(number, frame):
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    for argv in argvs:
        output, code = io.StringIO(), 0
        signal.alarm(LIMIT_DRY)
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                code = common.program([*argv, "--dry-run"])
        except TimeoutError:
            code = None
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            code = 1
            output.write(traceback.format_exc())
        signal.alarm(0)
        with open(results, "a") as file:
            file.write(json.dumps([code, output.getvalue()[-20000:]]) + "\n")
    return 0


def limit_memory():
    """Limit the address space, so that an excessive size ends in an error instead of exhausting the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def case(number, random, folder, tally):
    """One flag."""
    flag, values = flags()[number]
    argvs = [start(flag, value, folder, folder.parent) for value in values]

    place = folder / "three" / "folders" / "deep"  # what a value makes of a relative path stays in the case's folder

    def enter_place(rank=0):
        limit_memory()
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        os.chdir(place)

    def all_dry_runs():
        enter_place()
        return dry_runs(argvs, folder / "dry")

    pid = common.fork(all_dry_runs, folder / "dry-output")
    os.waitpid(pid, 0)
    expected = {folder / "dry", folder / "dry-output", place, *place.parents}
    written = sorted(str(path) for path in folder.rglob("*") if path not in expected)
    if written:
        tally.fail(f"{flag}: a dry run wrote {written}")
    verdicts = [json.loads(line) for line in (folder / "dry").read_text().splitlines()]
    if len(verdicts) < len(values):
        tally.fail(f"{show(flag, values[len(verdicts)])} --dry-run: the process died")
    for value, argv, (code, output) in zip(values, argvs, verdicts):
        try:
            outcome = judge(flag, value, code, output, LIMIT_DRY)
            tally.add("--dry-run", outcome)
            if outcome == "accepted" and flag not in NOT_TRAINED:
                shutil.rmtree(folder / "save", ignore_errors=True)
                shutil.rmtree(folder / "run", ignore_errors=True)
                code, output = common.train(argv, 1, folder / "run", limit=LIMIT_RUN, before=enter_place)
                tally.add("two iterations", judge(flag, value, code, output, LIMIT_RUN))
        except Failure as failure:
            tally.add("odd value", "FAILED")
            tally.fail(str(failure))


def main():
    flag = {"nargs": "+", "metavar": "NAME", "help": "only these, named without dashes"}
    cases = Cases(__doc__, count=10**9, kind=common.KIND, flag=flag)
    common.import_everything()
    common.write_data(cases.folder)
    known = [name for name, _ in flags()]
    numbers = [known.index(f"--{name}") for name in cases.options.flag] if cases.options.flag else range(len(known))
    return cases.run(case, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
