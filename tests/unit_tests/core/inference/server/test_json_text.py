"""JSON in pieces equals json.dumps."""

import json
import math
import random

import pytest

from megatron.core.inference.server.json_text import json_bytes


def value(rng, depth):
    if depth == 0 or rng.random() < 0.3:
        return rng.choice((None, True, 3, -1.5, 1e300, "", "naïve \"\\\n\u2028中\U0001f600", [], {}))
    count = rng.choice((0, 1, 2, 63, 64, 65, 129)) if depth < 3 else rng.choice((1, 2, 3))
    if rng.random() < 0.5:
        return [value(rng, depth - 1) for _ in range(count)]
    return {rng.choice(("a", "é", '"', "")) + str(n): value(rng, depth - 1) for n in range(count)}


def test_pieces_are_the_json_of_the_value():
    rng = random.Random(0)
    for _ in range(200):
        expected = value(rng, 4)
        assert json.loads(json_bytes(expected)) == expected


def test_text_without_utf8_is_replaced_and_numbers_without_json_are_errors():
    assert json.loads(json_bytes({"\ud800": ["a\udfff"]})) == {"?": ["a?"]}
    for wrong in (math.nan, [0.0] * 100 + [math.inf], {"a": [{"b": -math.inf}]}):
        with pytest.raises(ValueError, match="not JSON compliant"):
            json_bytes(wrong)
