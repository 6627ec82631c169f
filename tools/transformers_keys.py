"""Write megatron/export/hf/transformers_keys.json: the keys of ``config.json`` that ``transformers`` reads.

Collected from the source of ``transformers``, per architecture of the families in megatron/export/hf: fields of the
configuration class, its attributes, attributes of ``config`` in the model's code, and names in ``getattr``, ``get``,
``pop`` and ``"name" in``. Code of generation and base classes counts for all architectures. The set is too large rather
than too small: a name in it is rejected by the importer unless a rule reads it, other names have no effect there.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a program from anywhere
    sys.path.insert(0, str(ROOT))

from megatron.export.hf.registry import KEYS_OF_TRANSFORMERS, known_families  # noqa: E402

SHARED = (
    "configuration_utils.py", "modeling_utils.py", "modeling_rope_utils.py", "masking_utils.py", "cache_utils.py",
    "modeling_layers.py", "loss/loss_utils.py", "generation/configuration_utils.py", "generation/utils.py",
)  # fmt: skip
"""Source files of ``transformers`` that read keys of every architecture."""


def derive_keys() -> dict[str, list[str]]:
    """Return the sorted keys by architecture, and under ``shared`` those of all architectures."""
    import transformers

    package = Path(transformers.__file__).parent
    shared = set[str]().union(*(names_in(package / file) for file in SHARED))
    result = {"shared": sorted(shared)}
    for architecture in sorted({family.architecture for family in known_families().values()}):
        keys = set[str]()
        for kind in getattr(transformers, architecture).config_class.__mro__:
            if kind.__module__.startswith("transformers.models."):
                folder = Path(inspect.getfile(kind)).parent
                files = [*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")]
                keys = keys.union(*(names_in(file) for file in files))
        result[architecture] = sorted(keys - shared)
    return result


def names_in(file: Path) -> set[str]:
    """Return the names that the code of ``file`` may read from a configuration."""
    names = (name for node in ast.walk(ast.parse(file.read_text())) for name in _names(node, _is_configuration(file)))
    return {name for name in names if isinstance(name, str) and name.isidentifier()}


def _is_configuration(file: Path) -> bool:
    return file.name.startswith("configuration_")


def _names(node: ast.AST, in_configuration: bool) -> Iterator[object]:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name) if in_configuration:
            yield name
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name) if owner.endswith("config"):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name)) if in_configuration:  # field of a configuration class
            yield name
        case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=name), *_]):
            yield name
        case ast.Call(func=ast.Attribute(attr="get" | "pop" | "setdefault"), args=[ast.Constant(value=name), *_]):
            yield name
        case ast.Compare(left=ast.Constant(value=name), ops=[ast.In() | ast.NotIn()]):
            yield name
        case ast.Assign(targets=[ast.Name(id="attribute_map")], value=ast.Dict(keys=keys)):
            yield from (key.value for key in keys if isinstance(key, ast.Constant))


def main() -> None:
    import transformers

    table = {"transformers": transformers.__version__, **derive_keys()}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items()]
    KEYS_OF_TRANSFORMERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
