"""The packages and size limits of docs/developers/architecture.md, checked in the syntax tree of every file."""

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

from tests.sizes import CEILING, Size, sizes, total

ROOT = Path(__file__).resolve().parents[2]

# Packages with everything below them, or loose modules. package -> other packages that it may import.
# A graph without cycles (tested); by it the subject of a file decides where it lives, not what it imports.
CORE = {
    "config": "",
    "safe_files": "",
    "autograd_context": "",
    "groups": "config safe_files",
    "fusions": "config groups host_memory",
    "random": "autograd_context fusions",
    "schedules": "config",
    "timers": "config",
    "enums": "",
    "tokenizers": "config safe_files",
    "datasets": "config data safe_files tokenizers",
    "inference": (
        "attention config datasets extensions fusions host_memory random safe_files tensor_parallel tokenizers "
        "transformer"
    ),
    "evaluation": "attention config extensions inference tokenizers",
    "rl": (
        "attention config distributed groups host_memory optimizer parallel_state pipeline_parallel sharding "
        "tensor_parallel transformer"
    ),
    "extensions": "config fusions",
    "sharding": "config fusions groups random",
    "host_memory": "config",
    "statistics": "groups",
    "parallel_state": "config groups",
    "dist_checkpointing": "config groups safe_files sharding",
    "distributed": "config dist_checkpointing fp8 fusions groups host_memory parallel_state sharding statistics",
    "tensor_parallel": "autograd_context config extensions fusions groups parallel_state random sharding",
    "fp8": "config extensions fusions groups sharding tensor_parallel",
    "optimizer": "config distributed extensions fusions groups host_memory parallel_state sharding",
    "pipeline_parallel": "config groups parallel_state tensor_parallel",
    "description": "config pipeline_parallel",
    "attention": "autograd_context config description enums extensions fusions groups host_memory random sharding",
    "transformer":
        "attention autograd_context config description enums extensions fp8 fusions groups host_memory parallel_state "
        "pipeline_parallel random sharding statistics tensor_parallel",
    # modules with parameters, where its neighbours know kernels alone
    "extensions.transformer_engine": "attention config extensions groups sharding tensor_parallel",
    "models":
        "attention autograd_context config data datasets description enums extensions extensions.transformer_engine "
        "fusions groups host_memory inference parallel_state pipeline_parallel random safe_files sharding "
        "statistics tensor_parallel transformer",
}  # fmt: skip
# nothing in core imports export
EXPORT = "attention config description dist_checkpointing fusions models safe_files sharding tokenizers"
TRAINING = {
    "config": "core",
    "train_state": "core",
    "notices": "core config",
    "stored_settings": "core config",
    "rules": "core config data stored_settings",
    "exits": "core config train_state",
    "observe": "core config train_state",
    "hooks": "core config exits observe train_state",
    "arguments": "core config exits notices rules",
    "initialize": "core config",
    "report": "core arguments config observe rules",
    "data": "core config exits initialize observe",
    "tasks": "core config data hooks initialize observe rules",
    "checkpoint": "core arguments config stored_settings train_state",
    "start": "core checkpoint config data initialize rules tasks",
    "evaluate": "core config data initialize observe tasks",
    "live_weights": "core config stored_settings",
    "trained_model": "core arguments checkpoint config initialize stored_settings tasks",
    "components": "core checkpoint data evaluate hooks start tasks train_state",
    "checks": "core components config exits hooks observe train_state",
    "generation": "core components config exits observe rules",
    "step": "core checks components config exits initialize observe start",
    "trainer": "checkpoint components config evaluate exits generation hooks observe step",
    "watchdog": "components core config exits hooks initialize observe start train_state",
    "run":
        "core arguments checkpoint checks components config data evaluate exits hooks initialize observe report rules "
        "start stored_settings tasks train_state trainer watchdog",
    "entry": "core arguments config report run tasks",
    "verify": "core components config data exits run step tasks",
}


def _packages():
    """package -> allowed packages, by full names. ``core`` in a row of TRAINING: every package of the library."""
    library = [f"megatron.core.{package}" for package in CORE] + ["megatron.export"]
    table = {
        "megatron.data": {"megatron.core.config", "megatron.core.safe_files"},
        "megatron.export": {f"megatron.core.{name}" for name in EXPORT.split()},
        "megatron.compat": {"*"},
        "megatron.tools": {"*"},
        "megatron.post_training": {*library, *(f"megatron.training.{name}" for name in TRAINING)},
        "megatron.console": {
            "megatron.core.config",
            "megatron.core.dist_checkpointing",
            "megatron.core.models",
            "megatron.training.entry",
        },
        "megatron.__main__": {"megatron.console"},
        "megatron.version": set(),
    }
    for package, allowed in CORE.items():
        table[f"megatron.core.{package}"] = {
            f"megatron.{name}" if name == "data" else f"megatron.core.{name}" for name in allowed.split()
        }
    for package, allowed in TRAINING.items():
        names = allowed.split()
        table[f"megatron.training.{package}"] = {f"megatron.training.{name}" for name in names if name in TRAINING}
        if "core" in names:
            table[f"megatron.training.{package}"] |= {*library, "megatron.data"}
    return table


PACKAGES = _packages()
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_TRITON_LINES = 150
MAX_CLASS_LINES = 400
MAX_PARAMETERS = 8
MAX_ENTRY_LINES = 60
OPTIONAL_IMPORT_HOMES = ("megatron/core/attention/kernels/", "megatron/core/datasets/image_files.py",
                         "megatron/core/extensions/", "megatron/core/fusions/",
                         "megatron/core/tokenizers/", "megatron/tools/", "megatron/training/hooks/")

# path or path::name -> reason; each entry lifts the budget rules for that place
EXCEPTIONS = {
    "megatron/core/models/t5/model.py::forward": "the call that existing programs make by position",
    "megatron/core/parallel_state.py::initialize_model_parallel": "the call by which programs name their layout",
    "megatron/compat/dataset_helpers.py::build_mapping": "a signature of Megatron-LM's",
    "megatron/compat/dataset_helpers.py::build_blocks_mapping": "a signature of Megatron-LM's",
    "megatron/data/helpers.py::import": "the one place that picks the C++ index builders or their numpy twin",
}


def python_files():
    tops = [ROOT / "megatron", ROOT / "tools", ROOT / "examples"]
    files = [path for top in tops if top.exists() for path in sorted(top.rglob("*.py"))]
    return files + sorted(ROOT.glob("pretrain_*.py"))


FILES = python_files()


def module_name(path):
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def package_containing(module):
    """The longest package that holds ``module``."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        candidate = ".".join(parts[:end])
        if candidate in PACKAGES:
            return candidate
    return None


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path, nodes):
    """Yield every project module that the statements among ``nodes`` of ``path`` import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            base = node.module or ""
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.partition(".")[0] == "megatron" or name in MODULES)


def is_shim(path):
    """Whether a file only names, for existing programs, what lives elsewhere: a docstring and one ``import *``."""
    if " import *" not in path.read_text(encoding="utf-8"):
        return False
    _, *statements = tree_of(path).body or [None]
    match statements:
        case [ast.ImportFrom(names=[ast.alias(name="*")])]:
            return True
    return False


SHIMS = {module_name(path): path for path in FILES if is_shim(path)}
NAMESPACES = ("megatron", "megatron.core", "megatron.training", "megatron.legacy")


RULES = []


@functools.lru_cache
def problems():
    """The violations of each rule, from one pass over all files."""
    violations = {rule: [] for rule in RULES}
    for path in FILES:
        nodes = list(ast.walk(tree_of(path)))
        for rule in RULES:
            violations[rule] += [f"{path.relative_to(ROOT)}:{place}: {text}" for place, text in rule(path, nodes)]
    return violations


def in_every_file(rule):
    """Return the test that no file violates ``rule``, which yields (line or name, problem) for a path and its nodes."""
    RULES.append(rule)

    def test():
        assert not problems()[rule], "\n".join(problems()[rule])

    test.__doc__ = rule.__doc__
    return test


@in_every_file
def test_packages_import_only_allowed_packages(path, nodes):
    module = module_name(path)
    if module in SHIMS or module in NAMESPACES or not path.is_relative_to(ROOT / "megatron"):
        return
    home = package_containing(module)
    if home is None:
        yield 1, "is in no listed package: move it, or add its package to the table above"
        return
    for imported, line in imported_modules(path, nodes):
        target = package_containing(imported)
        if imported in SHIMS:
            yield line, f"{imported} is a name for existing programs"
        elif imported in (*NAMESPACES, "megatron.version"):
            continue
        elif target is None:
            yield line, f"{imported} is in no listed package"
        elif target == home:
            package = module.rpartition(".")[0]
            if path.name != "__init__.py" and imported == package != home.rpartition(".")[0]:
                yield line, "imports its own package's __init__"
        elif target not in PACKAGES[home] and PACKAGES[home] != {"*"}:
            yield line, f"{home} must not import {target}"


def test_packages_have_no_import_cycle():
    above = {package: allowed & set(PACKAGES) for package, allowed in PACKAGES.items()}
    TopologicalSorter(above).prepare()
    unknown = {name for allowed in PACKAGES.values() for name in allowed} - set(PACKAGES) - {"*"}
    assert not unknown, f"the table allows packages that do not exist: {sorted(unknown)}"


def test_every_listed_package_exists():
    for package in PACKAGES:
        place = ROOT / package.replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").is_file(), f"{package}: no such package"


def test_few_modules_are_outside_packages():
    loose = [path for top in ("core", "training") for path in (ROOT / "megatron" / top).glob("*.py")
             if path.name != "__init__.py"]
    local = [path for path in loose if module_name(path) not in SHIMS]
    assert len(local) <= 20, sorted(map(str, local))


def test_there_are_no_import_cycles():
    """Module-level imports only: an import inside a function cannot deadlock a start."""
    graph = {}
    for path in FILES:
        statements = [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        graph[module_name(path)] = {name for name, _ in imported_modules(path, statements)}
    state: dict[str, int] = {}

    def visit(name, trail):
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, "import cycle: " + " -> ".join([*trail, name])
        state[name] = 1
        for child in graph.get(name, ()):
            if child != name:
                visit(child, [*trail, name])
        state[name] = 2

    for name in graph:
        visit(name, [])


def is_triton(function):
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


@in_every_file
def test_file_function_and_class_sizes(path, nodes):
    relative = str(path.relative_to(ROOT))
    lines = len(path.read_text(encoding="utf-8").splitlines())
    limit = MAX_ENTRY_LINES if relative.startswith("pretrain_") else MAX_FILE_LINES
    if lines > limit and relative not in EXCEPTIONS:
        yield lines, f"at most {limit} lines"
    for node in nodes:
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if not isinstance(node, kinds) or f"{relative}::{node.name}" in EXCEPTIONS:
            continue
        length, is_class = node.end_lineno - node.lineno + 1, isinstance(node, ast.ClassDef)
        triton = not is_class and is_triton(node)
        limit = MAX_CLASS_LINES if is_class else MAX_TRITON_LINES if triton else MAX_FUNCTION_LINES
        if length > limit:
            yield node.name, f"{length} lines, at most {limit}"
        if not (is_class or triton) and (count := count_parameters(node)) > MAX_PARAMETERS:
            yield node.name, f"{count} parameters, at most {MAX_PARAMETERS}"


def count_parameters(node):
    """Return the number of parameters; 0 for an autograd function, which torch calls by position."""
    names = [argument.arg for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
    is_autograd = node.name in ("forward", "backward") and "ctx" in names
    return 0 if is_autograd else len([name for name in names if name not in ("self", "cls")])


@in_every_file
def test_house_rules(path, nodes):
    """``global`` only in parallel_state, optional imports only in their homes, nothing printed by the library. A
    backward pass reads saved tensors once; recomputation requires this."""
    relative = str(path.relative_to(ROOT))
    reads = [node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr == "saved_tensors"]
    may_try = relative.startswith(OPTIONAL_IMPORT_HOMES) or f"{relative}::import" in EXCEPTIONS
    for node in nodes:
        if isinstance(node, ast.Global) and relative != "megatron/core/parallel_state.py":
            yield node.lineno, "global"
        if isinstance(node, ast.FunctionDef) and sum(node.lineno <= line <= node.end_lineno for line in reads) > 1:
            yield node.name, "reads saved_tensors twice"
        if isinstance(node, ast.Try) and relative.startswith("megatron/") and not may_try:
            children = (child for statement in node.body for child in ast.walk(statement))
            if any(isinstance(child, ast.Import | ast.ImportFrom) for child in children):
                yield node.lineno, "try: import"


def test_the_library_stays_below_its_ceiling():
    """Lines, ``Any`` and ``fmt: skip`` (``tests/sizes.py``)."""
    assert not total().exceeds(CEILING), f"{total()} is larger than CEILING of tests/sizes.py allows: {CEILING}"


def test_sizes_above_one_ceiling_are_found(tmp_path):
    (tmp_path / "lib" / "part").mkdir(parents=True)
    source = "from typing import Any\n\nx: Any = (\n    1,\n)  # fmt: skip\n"
    (tmp_path / "lib" / "part" / "module.py").write_text(source)
    result = sizes(tmp_path / "lib")
    assert result == {"lib/part": Size(5, 2, 1)} and total(tmp_path / "lib") == Size(5, 2, 1)
    assert not result["lib/part"].exceeds(Size(5, 2, 1))
    assert all(result["lib/part"].exceeds(limit) for limit in (Size(4, 2, 1), Size(5, 1, 1), Size(5, 2, 0)))


FAMILIES = sorted(path.parent.name for path in (ROOT / "megatron" / "core" / "models").glob("*/family.py"))
NAME_FAMILIES = (
    *(f"megatron/core/models/{name}/" for name in FAMILIES), "megatron/training/tasks/", "megatron/export/",
    *(f"pretrain_{name}.py" for name in FAMILIES),
)  # fmt: skip
"""Files that may name a model family. ``export`` reads formats that are different for each of them."""


@in_every_file
def test_only_a_family_names_itself(path, nodes):
    """A new family is a new folder: other files ask its ``ModelFamily`` and compare no names."""
    if str(path.relative_to(ROOT)).startswith(NAME_FAMILIES):
        return
    for node in nodes:
        if isinstance(node, ast.Constant) and node.value in FAMILIES:
            yield node.lineno, f"names the family {node.value!r}"
        if isinstance(node, ast.Compare):
            names = {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
            if "model_family" in names:
                yield node.lineno, "compares model families"


def test_families_are_found_by_their_folders():
    from megatron.core.models.registry import families

    assert sorted(families()) == FAMILIES and [item.name for item in families().values() if item.is_default] == ["gpt"]


def test_parallel_state_pulls_in_few_modules():
    import subprocess
    import sys

    program = ("import sys, megatron.core.parallel_state;"
               "print(sum(name.startswith('megatron') and not hasattr(module, '__path__') "
               "for name, module in sys.modules.items()))")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(result.stdout) <= 12, "at most 12 modules beside packages"


FORBIDDEN_WORDS = ["/work/", "nexus", "issue #"]


def test_the_project_does_not_speak_of_its_making():
    """No paths of a development machine in any text we ship."""
    for path in ROOT.rglob("*"):
        elsewhere = {".venv", "quickstart_run", "build", ".git"} & set(path.parts)
        if elsewhere or path.suffix not in (".py", ".md", ".toml", ".sh", ".txt", ".cpp") or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for word in FORBIDDEN_WORDS:
            assert word not in text, f"{path} holds {word!r}"
