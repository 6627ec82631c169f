"""Loading of trained models: tools by family, programs of users."""

import pytest

from megatron.core.config.errors import UserError
from megatron.training.trained_model import _checked_family

GPT = {"model_family": "gpt"}


def test_tools_take_the_families_that_they_serve_and_programs_of_users_all():
    assert _checked_family(GPT, "run", "tools/generate.py").name == "gpt"
    for program in ("mine.py", "research/score.py", ""):
        assert _checked_family(GPT, "run", program).name == "gpt"
    with pytest.raises(UserError, match="--load run contains a 'gpt' model; use tools/generate.py"):
        _checked_family(GPT, "run", "tools/fill_mask.py")
