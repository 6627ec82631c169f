"""Links, files and flags that the pages name exist. Their commands: tests/functional_tests/test_docs_commands.py."""

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megatron.console import TOOLS
from megatron.core.config import absent
from megatron.core.config.cli import group_flags, normalize
from megatron.core.datasets.preprocessing.settings import PreprocessConfig
from megatron.core.models.registry import programs
from megatron.training.arguments import flag_specs
from tests.test_utils.layout_table import MODELS, TABLE

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {".git", ".venv", "build", "quickstart_run", ".pytest_cache"}
PAGES = sorted(page for page in ROOT.rglob("*.md") if not ELSEWHERE & set(page.relative_to(ROOT).parts))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)\s]+)\)")
OF_OTHERS = {"--nproc-per-node", "--standalone", "--max-restarts", "--rdzv-conf", "--help", "--no-build-isolation",
             "--inplace", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--nodes", "--ntasks-per-node",
             "--gpus-per-node", "--gpus-per-task", "--exclusive", "--mem", "--signal", "--requeue", "--open-mode",
             "--time", "--cpu-bind", "--dependency", "--gpus", "--ipc", "--ulimit", "--device", "--network", "--model",
             "--model-args",
}  # fmt: skip
"""Flags of torchrun, pip, setup.py, Slurm, Docker and lm_eval."""
OF_THE_USER = {"task.py", "my_task.py"}


def on_pages(find, left_out=()):
    """Return what ``find`` returns for the text of each page, by page, where it is not empty."""
    results = {name: find(page.read_text(encoding="utf-8")) for name, page in zip(NAMES, PAGES, strict=True)}
    return {name: result for name, result in results.items() if result and name.rpartition("/")[2] not in left_out}


def anchors_of(text):
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page):
    """Targets in ``page`` that are no file of the repository, or no heading of it."""
    dead = []
    for match in LINK.finditer(CODE.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = match["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text(encoding="utf-8"))):
            dead.append(match["target"])
    return dead


def test_links_lead_somewhere():
    assert {page: dead_links(page) for page in PAGES if dead_links(page)} == {}


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# A title, `code`\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md) [b](other.md#a-title-code) [c](no.md) [d](other.md#no) `[e](f.md)` [g](https://h.i)")
    assert dead_links(page) == ["no.md", "other.md#no"]


def test_every_page_is_reached_from_the_readme():
    observed, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        observed.add(page)
        text = page.read_text(encoding="utf-8")
        targets = {(page.parent / match["target"].partition("#")[0]).resolve() for match in LINK.finditer(text)}
        new |= {target for target in targets if target.suffix == ".md" and target.is_file()} - observed
    assert [name for name, page in zip(NAMES, PAGES, strict=True) if page not in observed] == []


def test_pages_describe_the_program_only():
    """No numbers of issues, no home folders of a developer's machine."""
    assert on_pages(re.compile(r"(?i)\bissues? #?\d+|/(?:root|home)/\S*").findall) == {}


@pytest.fixture(scope="module")
def known_flags():
    folders = ("tools", "megatron/tools", "benchmarks", "examples", "tests")
    programs = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    specs = (*flag_specs(), *group_flags(PreprocessConfig))
    known = {normalize(name) for spec in specs for name in (*spec.names, spec.on or "")}
    known |= {*absent.by_name(), *OF_OTHERS}
    return known | {normalize(flag) for file in programs for flag in re.findall(r"--[a-z][\w-]+", file.read_text())}


def test_flags_exist(known_flags):
    """``flags.md``, which is generated, also lists what does not exist."""
    flag = re.compile(r"(?<![\w-])--[a-z][\w-]*\w(?![\w*{…-])")
    assert on_pages(lambda text: {*map(normalize, flag.findall(text))} - known_flags, ["flags.md"]) == {}


@pytest.fixture(scope="module")
def files():
    """Every file that a page may name, from the top of the repository."""
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*.*"))
    return {str(path) for path in paths if path.suffix in (".py", ".md") and not ELSEWHERE & set(path.parts)}


def missing(text, files):
    """Files in code spans, such as `core/cli.py` or `fusions/{adam,rope}.py`, that no path ends in."""
    for name in re.findall(r"`([\w./{},*-]+\.(?:py|md))`", text) + re.findall(r"\b(?:tools|tests)/[\w/]+\.py\b", text):
        head, _, rest = name.partition("{")
        inside, _, tail = rest.partition("}")
        for word in inside.split(","):
            if not any(fnmatch(f"/{file}", f"*/{head}{word}{tail}") for file in files):
                yield name


def test_files_exist(files):
    """``CHANGELOG.md`` also names deleted files."""
    assert on_pages(lambda text: set(missing(text, files)) - OF_THE_USER, ["CHANGELOG.md"]) == {}


def test_a_missing_file_is_found(files):
    text = "`config/cli.py` `cli.py` `fusions/{adam,nothing}.py` `tests/no.py` `fusions/rms_*.py`"
    assert set(missing(text, files)) == {"fusions/{adam,nothing}.py", "tests/no.py"}


def test_every_term_of_the_glossary_is_used_elsewhere():
    glossary = ROOT / "docs" / "glossary.md"
    terms = re.findall(r"^\| (?!term|---)(.+?)(?: \((\w+)\))? \|", glossary.read_text(encoding="utf-8"), re.MULTILINE)
    names = [term for term, _ in terms]
    assert len(names) > 40 and names == sorted(names, key=str.lower)
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page != glossary).lower()
    used = [any(re.search(rf"\b{re.escape(name.lower())}", text) for name in pair if name) for pair in terms]
    assert [name for name, actual in zip(names, used, strict=True) if not actual] == []


def missing_checks(text):
    """Tests, injected faults and rows of the matrix in code spans that do not exist."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`([\w*-]+)`", text):
        if re.fullmatch(r"test_\w+|[a-z0-9]+(?:_[a-z0-9]+){2,}", name):
            result = f"def {name}(" in sources
        elif re.fullmatch(r"[a-z0-9*]+(?:-[a-z0-9*]+)*", name):
            result = any(fnmatch(row, name) for row in (*TABLE, *MODELS))
        else:
            continue
        if not result:
            yield name


def test_checks_named_by_the_page_on_silent_errors_exist():
    text = (ROOT / "docs" / "guides" / "silent_errors.md").read_text(encoding="utf-8")
    assert list(missing_checks(text)) == []
    tables = text[text.index("## Losses") :]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| error")]
    retained = re.compile(r"`[\w*-]+`|test_\w+\.py|cannot happen|not excluded")
    assert len(rows) > 35 and [row for row in rows if not retained.search(row.rpartition(" | ")[2])] == []


def test_a_missing_check_is_found():
    text = "`full-*` `nothing-*` `test_nothing` `loss_is_a_mean_of_means` `a_fault_of_nothing` `vocab_size` `--flag`"
    assert list(missing_checks(text)) == ["nothing-*", "test_nothing", "a_fault_of_nothing"]


def test_commands_are_shell():
    """Also those that need GPUs, which run nowhere else in the tests."""

    def errors(text):
        scripts = re.findall(r"^```(?:bash|sh)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        return [error for script in scripts if (error := syntax_errors(script))]

    assert on_pages(errors) == {} and syntax_errors("if true; then\n")


def syntax_errors(script):
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False).stderr


def test_pages_that_the_code_names_exist():
    for path in ROOT.rglob("*.*"):
        if path.suffix not in (".py", ".sh", ".toml", ".md") or ELSEWHERE & set(path.relative_to(ROOT).parts):
            continue
        named = re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8"))
        assert [page for page in named if not (ROOT / page).is_file()] == [], path


def test_every_command_is_documented_with_its_script():
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    for name, (module, description) in TOOLS.items():
        script = f"tools/{module.replace('.', '/')}.py"
        assert f"| `megatron {name}` | `python {script}` | {description} |" in text and (ROOT / script).is_file()
    assert all(f"| `megatron pretrain {name}` | `pretrain_{name}.py` |" in text for name in programs())
