"""Data sources and splits as users write them."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.blend import (
    convert_split_vector_to_split_matrix,
    get_blend_and_blend_per_split,
    get_blend_from_list,
    parse_and_normalize_split,
    split_range,
)


def flags(**given_flags):
    names = ["data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path"]
    defaults = dict.fromkeys([*names, "per_split_data_args_path"]) | {"mock_data": False}
    return SimpleNamespace(**(defaults | given_flags))


def test_prefixes_and_weighted_pairs():
    assert get_blend_from_list(None) is None
    assert get_blend_from_list(["a"]) == (["a"], None)
    assert get_blend_from_list(["2024"]) == (["2024"], None)
    assert get_blend_from_list([" a", "b "]) == (["a", "b"], None)
    assert get_blend_from_list(["30", "a", "70", "b"]) == (["a", "b"], [30.0, 70.0])
    assert get_blend_from_list([0.5, "a"]) == (["a"], [0.5])
    assert get_blend_from_list(["a", "b", "c"]) == (["a", "b", "c"], None)


@pytest.mark.parametrize("blend", [["0.5", "a", "b"], ["0.5", "a", "b", "c"], ["a", "0.5"], ["1", "2"], []])
def test_mixtures_of_the_two_forms_are_rejected(blend):
    with pytest.raises(ValueError, match="--data-path"):
        get_blend_from_list(blend)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_weights_are_above_zero(weight):
    with pytest.raises(ValueError, match="--data-path: the weight of a is"):
        get_blend_from_list([weight, "a", "1", "b"])


def test_each_source_of_data(tmp_path):
    listing, per_split = tmp_path / "blend.txt", tmp_path / "per_split.json"
    listing.write_text("0.3 a\n0.7 b\n")
    per_split.write_text(json.dumps({"train": [0.3, "a", 0.7, "b"], "valid": ["c"]}))
    weighted = (["a", "b"], [0.3, 0.7])
    assert get_blend_and_blend_per_split(flags()) == (None, None)
    assert get_blend_and_blend_per_split(flags(mock_data=True)) == (None, None)
    assert get_blend_and_blend_per_split(flags(data_path=["a"])) == ((["a"], None), None)
    assert get_blend_and_blend_per_split(flags(data_args_path=str(listing))) == (weighted, None)
    expected = (None, [(["a"], None), None, (["b"], None)])
    assert get_blend_and_blend_per_split(flags(train_data_path=["a"], test_data_path=["b"])) == expected
    expected = (None, [weighted, (["c"], None), None])
    assert get_blend_and_blend_per_split(flags(per_split_data_args_path=str(per_split))) == expected


def test_two_sources_are_rejected_by_name():
    with pytest.raises(ValueError, match="--data-path and --mock-data"):
        get_blend_and_blend_per_split(flags(data_path=["a"], mock_data=True))
    with pytest.raises(ValueError, match="--data-args-path and --train-data-path"):
        get_blend_and_blend_per_split(flags(data_args_path="x", valid_data_path=["a"]))


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"val": ["a"]}', '{"train": "a"}', '{"train": [["a"]]}', '{"train": []}']
)
def test_a_wrong_per_split_file_is_rejected(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="--per-split-data-args-path"):
        get_blend_and_blend_per_split(flags(per_split_data_args_path=str(path)))
    with pytest.raises(ValueError, match="cannot be read"):
        get_blend_and_blend_per_split(flags(data_args_path=str(tmp_path / "missing")))


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_random_files_are_parsed_or_rejected(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("blend") / "x"
    path.write_bytes(content)
    for name in ("data_args_path", "per_split_data_args_path"):
        try:
            get_blend_and_blend_per_split(flags(**{name: str(path)}))
        except ValueError as error:
            assert "args-path" in str(error)


@pytest.mark.parametrize(
    "split", ["969, 30, 1", "'969,30,1'", '"969 30 1"', "96.9%,3.0%,.1%", "969/30/1", "[969, 30, 1]"]
)
def test_spellings_of_a_split(split):
    assert parse_and_normalize_split(split) == pytest.approx([0.969, 0.03, 0.001], abs=1e-15)


@pytest.mark.parametrize("split", ["", "0,0,0", "1,1,1,1", "-1,1", "a,b", "1..2", "nan"])
def test_wrong_splits_are_rejected(split):
    with pytest.raises(ValueError, match="--split"):
        parse_and_normalize_split(split)


def test_split_bounds_over_documents():
    assert convert_split_vector_to_split_matrix([0.99, 0.01, 0.0]) == [(0, 0.99), (0.99, 1.0), None]
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split("98,1,1"))
    assert [split_range(pair, 50) for pair in bounds] == [(0, 49), (49, 50), (50, 50)]  # 49.5 rounds to even
    assert split_range((0.0, 0.5), 5) == (0, 2) and split_range((0.5, 1.0), 7) == (4, 7)


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=3), st.integers(0, 10**12))
def test_splits_cover_every_document_once(parts, documents):
    fractions = parse_and_normalize_split(",".join(f"{part:.6f}" for part in parts))
    edges = [split_range(pair, documents) for pair in convert_split_vector_to_split_matrix(fractions) if pair]
    assert edges[0][0] == 0 and edges[-1][1] == documents
    assert all(left[1] == right[0] for left, right in zip(edges[:-1], edges[1:]))
