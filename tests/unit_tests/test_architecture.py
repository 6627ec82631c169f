"""The layers and the budgets of docs/developers/architecture.md, walked over the syntax trees of every file."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# module prefix -> layer; the longest prefix wins. A module may import strictly lower layers and its own package.
LAYERS = {
    "megatron": 0,  # the namespace package itself
    "megatron.core": 0,
    "megatron.data": 0,
    "megatron.core.errors": -1,  # below megatron.data too
    "megatron.core.cli": 0,
    "megatron.core.collective_names": 0,
    "megatron.core.notices": 0,
    "megatron.core.ranges": 0,
    "megatron.core.utils": 5,  # names for scripts; nothing below needs them
    "megatron.core.rerun_state_machine": 1,
    "megatron.core.enums": 0,
    "megatron.core.placement": 1,
    "megatron.core.flat_pieces": 1,
    "megatron.core.process_groups": 1,
    "megatron.core.rng": 1,
    "megatron.core.model_parallel_config": 1,
    "megatron.core.packed_seq_params": 1,
    "megatron.core.nccl_options": 1,
    "megatron.core.copy_engines": 1,
    "megatron.core.pipeline_balance": 1,
    "megatron.core.pipeline_layout": 1,
    "megatron.core.batch_schedule": 1,
    "megatron.core.buffer_layout": 1,
    "megatron.core.timers": 1,
    "megatron.core.tokenizers": 1,
    "megatron.core.fusions": 1,
    "megatron.core.parallel_state": 2,
    "megatron.core.fp8": 2,
    "megatron.core.dist_checkpointing": 2,
    "megatron.core.datasets": 2,
    "megatron.core.mpu": 3,
    "megatron.core.num_microbatches_calculator": 3,
    "megatron.core.tensor_parallel": 3,
    "megatron.core.context_parallel": 3,
    "megatron.core.transformer": 4,
    "megatron.core.extensions": 2,  # thin adapters of optional packages
    "megatron.core.extensions.transformer_engine": 4,  # modules with parameters
    "megatron.core.pipeline_parallel": 4,
    "megatron.core.distributed": 4,
    "megatron.core.optimizer": 5,
    "megatron.core.optimizer_param_scheduler": 5,
    "megatron.core.models": 5,
    "megatron.core.inference": 6,
    "megatron.core.export": 6,
    "megatron.legacy": 6,
    "megatron.training": 7,
    "megatron.post_training": 8,
    "megatron.inference": 8,
    "pretrain_gpt": 9,
    "pretrain_bert": 9,
    "pretrain_t5": 9,
    "pretrain_moe": 9,
    "tools": 9,
    "examples": 9,
}
FORBIDDEN = {"megatron.core.pipeline_parallel": ["megatron.core.transformer", "megatron.core.models"],
             "megatron.core.distributed": ["megatron.core.transformer", "megatron.core.models"]}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_TRITON_LINES = 150
MAX_CLASS_LINES = 400
MAX_PARAMETERS = 8
MAX_LIBRARY_LINES = 25_000  # of code: a limit on docstrings would only make them shorter
MAX_ENTRY_LINES = 60
OPTIONAL_IMPORT_HOMES = ("megatron/core/extensions/", "megatron/core/fusions/", "megatron/core/tokenizers/",
                         "megatron/training/hooks/")

# path or path::name -> reason; each entry lifts the budget rules for that place
EXCEPTIONS = {
    "megatron/core/models/gpt/gpt_model.py::__init__": "the constructor that existing programs call by name",
    "megatron/core/parallel_state.py::initialize_model_parallel": "the call by which programs name their layout",
    "megatron/data/helpers.py::import": "the one place that picks the C++ index builders or their numpy twin",
}


def python_files():
    tops = [ROOT / "megatron", ROOT / "tools", ROOT / "examples"]
    files = [path for top in tops if top.exists() for path in sorted(top.rglob("*.py"))]
    return files + sorted(ROOT.glob("pretrain_*.py"))


FILES = python_files()
IDS = [str(path.relative_to(ROOT)) for path in FILES]


def module_name(path):
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def prefix_of(module):
    """The longest row of LAYERS that holds ``module``."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        candidate = ".".join(parts[:end])
        if candidate in LAYERS:
            return candidate
    return None


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path, tree):
    """Every project module that ``path`` imports, wherever in the file the import stands."""
    known = {module_name(file) for file in FILES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            base = node.module or ""
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if prefix_of(name) is not None)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_go_strictly_downwards(path):
    module = module_name(path)
    home = prefix_of(module)
    assert home is not None, f"{module} has no layer: add it to LAYERS and to docs/developers/architecture.md"
    is_init = path.name == "__init__.py"
    for imported, line in imported_modules(path, tree_of(path)):
        target = prefix_of(imported)
        own_package = target == home and home not in ("megatron", "megatron.core")
        if own_package and not is_init:
            package = module.rsplit(".", 1)[0]
            assert imported != package or "." not in package, f"{path}:{line} imports its own package's __init__"
        if is_init and imported.startswith(module + "."):
            continue
        both_plain = is_plain_core_module(target) and is_plain_core_module(home)
        if own_package or (both_plain and LAYERS[target] == LAYERS[home]):
            continue
        levels = f"{module} (L{LAYERS[home]}) imports {imported} (L{LAYERS[target]})"
        assert LAYERS[target] < LAYERS[home], f"{path}:{line}: {levels}"
        assert target not in FORBIDDEN.get(home, []), f"{path}:{line}: {home} must not import {target}"


def test_there_are_no_import_cycles():
    """Module-level imports only: an import inside a function cannot deadlock a start."""
    graph = {}
    for path in FILES:
        statements = [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        top = ast.Module(body=statements, type_ignores=[])
        graph[module_name(path)] = {name for name, _ in imported_modules(path, top)}
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


def is_plain_core_module(name):
    """Plain files under megatron/core belong to one package, megatron.core."""
    return (ROOT / (name.replace(".", "/") + ".py")).exists() and name.count(".") == 2


def is_triton(function):
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_file_function_and_class_sizes(path):
    relative = str(path.relative_to(ROOT))
    lines = len(path.read_text(encoding="utf-8").splitlines())
    limit = MAX_ENTRY_LINES if relative.startswith("pretrain_") else MAX_FILE_LINES
    assert lines <= limit or relative in EXCEPTIONS, f"{relative}: {lines} lines, at most {limit}"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            check_function(relative, node)
        elif isinstance(node, ast.ClassDef) and f"{relative}::{node.name}" not in EXCEPTIONS:
            assert node.end_lineno - node.lineno + 1 <= MAX_CLASS_LINES, f"{relative}::{node.name} is too long"


def check_function(relative, node):
    where = f"{relative}::{node.name}"
    if where in EXCEPTIONS:
        return
    limit = MAX_TRITON_LINES if is_triton(node) else MAX_FUNCTION_LINES
    length = node.end_lineno - node.lineno + 1
    assert length <= limit, f"{where}: {length} lines, at most {limit}"
    if is_triton(node) or node.name in ("forward", "backward") and "ctx" in [a.arg for a in node.args.args]:
        return
    arguments = [a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
    count = len([name for name in arguments if name not in ("self", "cls")])
    assert count <= MAX_PARAMETERS, f"{where}: {count} parameters, at most {MAX_PARAMETERS}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_house_rules(path):
    """``global`` only in parallel_state, optional imports only in their homes, nothing printed by the library."""
    relative = str(path.relative_to(ROOT))
    library = relative.startswith("megatron/")
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Global):
            assert relative == "megatron/core/parallel_state.py", f"{relative}:{node.lineno}: global"
        if isinstance(node, ast.Try) and library and f"{relative}::import" not in EXCEPTIONS:
            imports = [child for statement in node.body for child in ast.walk(statement)
                       if isinstance(child, ast.Import | ast.ImportFrom)]
            assert not imports or relative.startswith(OPTIONAL_IMPORT_HOMES), f"{relative}:{node.lineno}: try: import"


def test_the_library_stays_small():
    library = (path.read_text(encoding="utf-8") for path in FILES if path.is_relative_to(ROOT / "megatron"))
    total = sum(map(lines_of_code, library))
    assert total <= MAX_LIBRARY_LINES, f"{total} lines of code"


def lines_of_code(source):
    """Lines that are not blank and hold more than a comment or a docstring."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in layout]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) and _is_text(node.value)]
    return len(lines - {line for node in texts for line in range(node.lineno, node.end_lineno + 1)})


def _is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_what_counts_as_code():
    assert lines_of_code('"""What it is."""\n\n# why\nx = [\n    1,  # one\n]\n') == 3


def test_parallel_state_pulls_in_few_modules():
    import subprocess
    import sys

    program = ("import sys, megatron.core.parallel_state;"
               "print(sum(name.startswith('megatron') for name in sys.modules))")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(result.stdout) <= 13, "at most 11 modules beside the packages megatron and megatron.core"


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
