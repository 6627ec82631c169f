"""The text of the tree stays in plain English: each folder stays below its ceiling of private idioms."""

import io
import tokenize
from pathlib import Path

import pytest

from tests.plain_words import PLAIN, ROOTS, Unit, ceilings, found_in, rates, units

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("root", ROOTS)
def test_text_stays_below_the_ceilings_of_its_folder(root):
    limits = ceilings()
    too_many = {
        folder: (actual, limits.get(folder, PLAIN)) for folder, actual in rates(ROOT / root).items()
        if any(rate > limit + 0.05 for rate, limit in zip(actual, limits.get(folder, PLAIN)))
    }  # fmt: skip
    assert not too_many, f"run python tests/plain_words.py FOLDER --list 20 and rewrite: {too_many}"


@pytest.mark.parametrize(
    "kind, text, found",
    [
        ("docstring", "Gradients of those of the experts.", ["those of"]),
        ("comment", "the sum is behind the product", ["behind"]),
        ("docstring", "Return the local shard of ``those of``.", []),
        ("message", "must be divisible by the tensor-parallel size", []),
        ("name", "shards_of", ["_of"]),
        ("name", "whole_sequence", ["whole"]),
        ("name", "local_sequence", []),
    ],
)
def test_idioms_are_found_and_code_is_not(kind, text, found):
    assert found_in(Unit(ROOT, 1, kind, text)) == found


def test_docstrings_that_open_with_a_relative_word_are_found(tmp_path):
    path = tmp_path / "module.py"
    function = 'def parts_of(tensor):\n    """Return views of it."""\n'
    path.write_text(f'"""Which tokens a rank holds, in order."""\n\n\n{function}')
    assert {unit.text: found_in(unit) for unit in units(tmp_path) if found_in(unit)} == {
        "Which tokens a rank holds, in order.": ["opens with Which"], "parts_of": ["_of"]
    }  # fmt: skip


def test_comments_and_their_lines_equal_those_of_the_tokenizer(tmp_path):
    source = r'''
a = "# not a comment 'here' \" # either"  # the first comment's "words"
b = """ '#' one "" quote \""" # inside of it
 # still inside """ + "continues \
# on this line"  # the second comment of them
c, d = r"\\", ''  # the third 'comment' is here
e = f"{a!r:#>4} # no" + b'#'  # four words stand here
'''
    (path := tmp_path / "module.py").write_text(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    expected = [(x.start[0], x.string.lstrip("# ")) for x in tokens if x.type == tokenize.COMMENT]
    assert [(unit.line, unit.text) for unit in units(path) if unit.kind == "comment"] == expected
    assert [line for line, _ in expected] == [2, 5, 6, 7]
