"""Names under which programs written for Megatron-LM import this library: the table of names, and how it is served."""

import importlib.util
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import megatron.core
from megatron.compat import names
from megatron.core import mpu, parallel_state
from megatron.core.config.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
TABLE = [(module, name, source) for module, known in names.table().items() for name, source in known.items()]
FOUND = [row for row in TABLE if not row[2].module.startswith(names.ABSENT) and row[1] != names.ALL]
ABSENT = [row for row in TABLE if row[2].module.startswith(names.ABSENT)]


def is_file(module):
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_every_name_of_the_table_is_served_from_its_source():
    for module, name, source in FOUND:
        expected = getattr(import_module(source.module), source.name)
        assert getattr(import_module(module), name) is expected, f"{module}.{name}"


def test_the_table_names_nothing_that_a_module_has_itself():
    """A row that the module's own name hides would be forgotten when either changes."""
    for module, name, _ in TABLE:
        assert not is_file(module) or name not in vars(import_module(module)), f"{module}.{name}"


@pytest.mark.parametrize("row", ABSENT, ids=lambda row: f"{row[0]}.{row[1]}")
def test_names_of_absent_capabilities_can_be_imported_and_say_so_when_used(row):
    module, name, source = row
    result = getattr(import_module(module), name)
    assert result is getattr(import_module(module), name)
    with pytest.raises(UserError) as error:
        result(None, size=1)
    assert str(error.value).startswith(f"{name}: not available here; ") and source.module[8:] in str(error.value)
    if isinstance(result, type):  # programs annotate with it, derive from it and ask for instances
        assert not isinstance(torch_free_object, result)
        with pytest.raises(UserError, match=name):
            type("Derived", (result,), {})()


torch_free_object = object()


def test_modules_of_the_table_are_imported_in_every_form():
    import megatron.core.models.common.embeddings.language_model_embedding as module
    from megatron.core import mpu as second
    from megatron.core.models.common.embeddings import language_model_embedding as third
    from megatron.core.models.common.language_module.language_module import LanguageModule

    assert second is sys.modules["megatron.core.mpu"] is mpu and third is module
    assert LanguageModule.__module__ == "megatron.core.models.common.language_module"
    space = {}
    exec("from megatron.core.models.common.embeddings.language_model_embedding import *", space)
    assert "LanguageModelEmbedding" in space
    exec("from megatron.core.mpu import *", space)
    assert space["get_tensor_model_parallel_rank"] is parallel_state.get_tensor_model_parallel_rank


def test_classes_are_pickled_by_their_module():
    assert pickle.loads(pickle.dumps(megatron.core.ModelParallelConfig)) is megatron.core.ModelParallelConfig


@pytest.mark.parametrize("statement", [
    "import megatron.core.no_such_module", "from megatron.core.models.common.embeddings import nothing",
    "from megatron.core.transformer import Transformer", "import megatron.nothing",
    "from megatron.core.mpu import none",
])  # fmt: skip
def test_unknown_names_are_import_errors(statement):
    with pytest.raises(ImportError):
        exec(statement, {})
    assert importlib.util.find_spec("megatron.core.no_such_module") is None
    assert not hasattr(megatron.core, "no_such_name")


def test_nothing_is_imported_before_a_name_is_used():
    program = (
        "import sys, megatron.core.transformer.torch_norm, megatron.core.models.mamba\n"
        "assert 'torch' not in sys.modules\n"
        "from megatron.core.transformer.torch_norm import L2Norm\n"
        "assert L2Norm.__module__ == 'megatron.core.transformer.norm'"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def imported_names():
    """(module, names) that published programs import: verl, slime, AReaL, NeMo-RL, mbridge, ms-swift and others."""
    lines = (ROOT / "tests/test_utils/imported_names.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def test_names_that_published_programs_import_are_there():
    rows = imported_names()
    missing = []
    for module, listed in rows:
        result = import_module(module)
        missing += [f"{module}.{name}" for name in listed.split()
                    if not hasattr(result, name) and importlib.util.find_spec(f"{module}.{name}") is None]  # fmt: skip
    assert not missing and sum(len(listed.split()) for _, listed in rows) >= 315
