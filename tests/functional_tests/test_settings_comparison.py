"""``convert.py`` checks settings with a small random model, for real models of every size."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install transformers: it is what is compared with")

from megatron.core.config.errors import UserError  # noqa: E402
from megatron.export.hf.attention_settings import Rope, Window  # noqa: E402
from megatron.export.hf.family import complete  # noqa: E402
from megatron.export.hf.registry import find_family, known_families  # noqa: E402
from megatron.export.hf.settings import Same  # noqa: E402
from megatron.tools.checkpoint import compare_logits, convert  # noqa: E402
from megatron.tools.checkpoint.small_model import shrink, tokens_needed  # noqa: E402
from tests.functional_tests.test_hf_families import CONVERTED, EVERY  # noqa: E402
from tests.test_utils.foreign_models import build  # noqa: E402
from tests.unit_tests.export.test_hf_published import GEMMA_2_2B, GEMMA_3_1B  # noqa: E402

FIRST = {EVERY[name].architecture: name for name in reversed(CONVERTED)}


@pytest.fixture(autouse=True)
def too_large(monkeypatch):
    """Every model counts as too large to be built."""
    monkeypatch.setattr(compare_logits, "LARGEST", 0)


def converted(folder, target, capsys):
    code = convert.main(["--saver", "native", "--load-dir", str(folder), "--save-dir", str(target)])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("name", [*FIRST.values(), "deepseek-v3-few-choices"])
def test_settings_of_a_model_that_is_too_large_are_equal(name, tmp_path, capsys):
    build(EVERY[name]).save_pretrained(tmp_path / "theirs")
    code, said = converted(tmp_path / "theirs", tmp_path / "ours", capsys)
    assert code == 0 and "settings against transformers (small random model)" in said and ": equal; " in said, said
    assert "logits not compared: " in said


WRONG = {
    "a window of 40 taken for none": (
        {"sliding_window": 40}, Window, lambda self, config: {"window_size": None, "window_attn_skip_freq": None}),
    "a base of 500000 taken for 10000": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope,
        lambda self, config, load=Rope.load: {**load(self, config), "rotary_base": 10000}),
    "another epsilon": (
        {"rms_norm_eps": 0.1}, Same,
        lambda self, config, load=Same.load: {
            name: 1e-6 if name == "norm_epsilon" else value for name, value in load(self, config).items()}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_in_a_table_is_found_without_the_weights(mistake, tmp_path, capsys, monkeypatch):
    settings, rule, load = WRONG[mistake]
    build(EVERY["mistral"]).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": None, **settings}))
    assert converted(tmp_path / "theirs", tmp_path / "right", capsys)[0] == 0
    monkeypatch.setattr(rule, "load", load)
    code, messages = converted(tmp_path / "theirs", tmp_path / "wrong", capsys)
    assert code == 1 and ": DIFFERENT; " in messages, messages


def test_a_short_window_is_exceeded_in_the_comparison_of_the_weights_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare_logits, "LARGEST", 10**9)
    monkeypatch.setattr(compare_logits, "compare_settings", lambda *_: 0)
    build(EVERY["mistral"]).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": 40}))
    assert "98 tokens in fp32: equal" in converted(tmp_path / "theirs", tmp_path / "right", capsys)[1]
    monkeypatch.setattr(Window, "load", WRONG["a window of 40 taken for none"][2])
    code, messages = converted(tmp_path / "theirs", tmp_path / "wrong", capsys)
    assert code == 1 and ": DIFFERENT; " in messages, messages


def test_without_transformers_a_conversion_says_that_nothing_was_compared(tmp_path, capsys, monkeypatch):
    build(EVERY["mistral"]).save_pretrained(tmp_path / "theirs")
    find_spec = compare_logits.importlib.util.find_spec
    monkeypatch.setattr(
        compare_logits.importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name)
    )
    code, said = converted(tmp_path / "theirs", tmp_path / "ours", capsys)
    assert code == 0 and "logits not compared: transformers is not installed; pip install transformers" in said, said


THRESHOLDS = {
    "shortest": ({}, {}, 32),
    "window": ({"window_size": (100, 0)}, {}, 109),
    "window of the folder alone": ({}, {"sliding_window": 100}, 109),
    "nested in the folder": ({}, {"text": {"local_attention": 60}}, 69),
    "rope scaling": ({"use_rope_scaling": True}, {}, 2057),
    "yarn": ({"yarn_original_max_position_embeddings": 1000}, {}, 1009),
    "rotary of the folder": ({}, {"rope_scaling": {"original_max_position_embeddings": 500}}, 509),
    "largest": ({"window_size": (100, 0), "use_rope_scaling": True}, {"sliding_window": 3000}, 3009),
    "too large": ({"window_size": (5000, 0)}, {"sliding_window": 4200}, 32),
    "no number": ({}, {"sliding_window": None, "use_sliding_window": True}, 32),
    "relative": ({"position_embedding_type": "relative", "relative_attention_max_distance": 128}, {}, 137),
    "distance without relative positions": ({"relative_attention_max_distance": 128}, {}, 32),
    "table of positions": (
        {"position_embedding_type": "learned_absolute", "window_size": (100, 0), "max_position_embeddings": 48}, {}, 48
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", THRESHOLDS)
def test_sequences_exceed_every_threshold_by_nine_tokens(case):
    settings, config, expected = THRESHOLDS[case]
    defaults = {
        "window_size": None, "yarn_original_max_position_embeddings": None, "use_rope_scaling": False,
        "position_embedding_type": "rope", "relative_attention_max_distance": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    assert tokens_needed({**defaults, **settings}, config) == expected


def test_shrink_keeps_patterns_head_sizes_and_windows_of_published_models():
    """The pattern of layers, the size of heads, windows; texts are longer than these."""
    two, three = (complete(find_family(config).load_settings(config)) for config in (GEMMA_2_2B, GEMMA_3_1B))
    small = shrink(two)
    assert (small["num_layers"], small["kv_channels"], small["window_size"]) == (2, 256, (4095, 0))
    assert tokens_needed(small, GEMMA_2_2B) == 4105 and shrink(three)["num_layers"] == 6
    assert small["num_attention_heads"] // small["num_query_groups"] == 2
    assert known_families()["gemma2"].save_settings(small)["query_pre_attn_scalar"] == 256


def other_values(value):
    if isinstance(value, bool):
        return [not value]
    return [value + 1] if isinstance(value, int) else [value * 1.5 + 0.1] if isinstance(value, float) else []


@pytest.mark.parametrize("name", FIRST.values())
def test_a_key_that_changes_the_logits_changes_settings_or_is_rejected(name):
    """Every key of the configuration class, with another value, one at a time."""
    foreign, tokens = build(EVERY[name]).eval(), torch.arange(3, 35)[None] % 50
    config = {**foreign.config.to_dict(), "architectures": [type(foreign).__name__]}
    family, passed = find_family(config), 0
    settings, expected = family.load_settings(config), foreign(input_ids=tokens).logits
    changes = [(key, other) for key, value in config.items() for other in other_values(value)]
    for key, other in changes:
        if key in ("return_dict", "time_step_min"):  # the form of the answer; a limit that Nemotron-H's training lacks
            continue
        try:
            if family.load_settings({**config, key: other}) != settings:
                continue
        except (UserError, ArithmeticError):
            continue
        try:
            model = type(foreign)(type(foreign.config).from_dict({**config, key: other})).eval()
        except Exception:  # transformers rejects it
            continue
        unfit = model.load_state_dict(foreign.state_dict(), strict=False)
        assert not unfit.missing_keys and not unfit.unexpected_keys, key
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, msg=lambda text, key=key: f"{key}: {text}")
        passed += 1
    assert passed  # token ids and the like
