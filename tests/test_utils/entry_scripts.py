"""Entry scripts run inside ranks of the pool, as ``__main__`` with a separate command line."""

import runpy
import sys
from pathlib import Path

from tests.test_utils.gpt_runs import MODEL_FLAGS

SCRIPTS = Path(__file__).resolve().parents[1] / "functional_tests" / "scripts"


def run_script(rank: int, world_size: int, name: str, argv: list[str], flags: tuple[str, ...] = ()) -> int:
    """Run ``scripts/<name>.py`` with a tiny model's flags (or ``flags``) and ``argv``; return the exit code."""
    path = str(SCRIPTS / f"{name}.py")
    before, sys.argv = sys.argv, [path, *(flags or MODEL_FLAGS), *argv]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        sys.argv = before
    return 0
