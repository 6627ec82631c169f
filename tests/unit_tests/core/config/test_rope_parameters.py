"""The JSON text of --rope-parameters."""

import json

import pytest

from megatron.core.config.rope_parameters import RopeParameters, parse_rope_parameters

DYNAMIC = {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1, 1.5], "long_factor": [2, 4], "attention_factor": 1.5,
            "original_max_position_embeddings": 16}  # fmt: skip


def test_text_round_trip_keeps_all_values():
    assert parse_rope_parameters(json.dumps(DYNAMIC)) == RopeParameters("dynamic", 16, factor=2)
    longrope = parse_rope_parameters(json.dumps(LONGROPE))
    assert longrope == RopeParameters("longrope", 16, 1.0, (1.0, 1.5), (2.0, 4.0), 1.5)
    for table in (DYNAMIC, LONGROPE):
        assert json.loads(parse_rope_parameters(json.dumps(table)).to_text()) == table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "rope_type must be one of dynamic, longrope"),
        ({}, "rope_type must be one of"),
        ({"rope_type": ["dynamic"]}, "rope_type must be one of"),
        ({"rope_type": "yarn"}, "rope_type must be one of"),
        ({"rope_type": "dynamic"}, "dynamic must have the keys factor, original_max_position_embeddings, rope_type"),
        (DYNAMIC | {"beta_fast": 1}, "dynamic must have the keys"),
        (DYNAMIC | {"factor": 0.5}, "factor must be at least 1"),
        (DYNAMIC | {"factor": True}, "factor must be a positive number"),
        (DYNAMIC | {"factor": "2"}, "factor must be a positive number"),
        (DYNAMIC | {"factor": float("nan")}, "factor must be a positive number"),
        (DYNAMIC | {"factor": float("inf")}, "factor must be a positive number"),
        (DYNAMIC | {"original_max_position_embeddings": 16.5}, "must be an integer of at least 2"),
        (DYNAMIC | {"original_max_position_embeddings": 1}, "must be an integer of at least 2"),
        (LONGROPE | {"attention_factor": 0}, "attention_factor must be a positive number"),
        (LONGROPE | {"short_factor": 1}, "short_factor must be a list of positive numbers"),
        (LONGROPE | {"short_factor": []}, "short_factor must be a list of positive numbers"),
        (LONGROPE | {"long_factor": [1, None]}, "long_factor must be a list of positive numbers"),
        (LONGROPE | {"long_factor": [1]}, "short_factor and long_factor must have the same length"),
    ],
)
def test_invalid_values_are_named(table, message):
    with pytest.raises(ValueError, match=message):
        parse_rope_parameters(json.dumps(table))


@pytest.mark.parametrize("text", ["", "dynamic", "{", "{'rope_type': 'dynamic'}"])
def test_text_that_is_not_json_is_rejected(text):
    with pytest.raises(ValueError, match="must be a JSON object"):
        parse_rope_parameters(text)
