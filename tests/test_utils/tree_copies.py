"""Copies of the tree, and processes that see nothing else of it: what ``tests/mutate.py`` runs tests in."""

import compileall
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_tree(target):
    """The files that git knows or would add and the compiled extension, with bytecode."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    extensions = [str(path.relative_to(ROOT)) for path in ROOT.glob("*.so")]
    for name in [*filter(None, listed.split("\0")), *extensions]:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for folder in ("megatron", "tests"):
        compileall.compile_dir(target / folder, quiet=2)
    return target


def fork(tree, folder, work, memory=None):
    """Starts ``work()`` in a new process that imports from ``tree`` and has its temporary files in ``folder``. It and
    each process that it starts may hold ``memory`` bytes of private data; allocations beyond it fail."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 98
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        if memory is not None:
            # of data, not of addresses: torch maps many gigabytes that nothing ever touches
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        os.chdir(tree)
        sys.modules["__main__"] = types.ModuleType("__main__")  # spawned processes would import this file
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, ROOT / "tests")]
        sys.path[:] = [str(tree), *elsewhere]
        sys.dont_write_bytecode = True  # two versions of a file within one second would share their bytecode
        os.environ |= {"PYTHONPATH": str(tree), "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        tempfile.tempdir = None
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def end(pid):
    """Kills a process of :func:`fork` and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run_pytest(arguments, plugin):
    """Run pytest in a forked process. The pool forks its ranks from this process, where imports are already done."""
    import pytest

    from tests.test_utils import gloo_pool

    gloo_pool.START_METHOD = "fork"
    return int(pytest.main(["-q", "--tb=short", "--assert=plain", *arguments], plugins=[plugin]))
