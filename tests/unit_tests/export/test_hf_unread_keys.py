"""Keys of config.json that ``transformers`` does not read are left out with a note; keys that it reads are rejected."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from megatron.core.config.errors import UserError
from megatron.export.hf.registry import KEYS_OF_TRANSFORMERS, keys_of_transformers, known_families, load_settings
from tests.unit_tests.export.test_hf import CONFIG, load_hf, random_weights, write

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import transformers_keys

UNREAD = {
    "is_llama_config": True, "rope_interleaved": True, "transformers.js_config": {"dtype": "q4"}, "_num_labels": 1,
    "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128, "pooler_type": "first_token_transform", "_model_name_or_path": "x",
    "unsloth_version": "2025.1", "unsloth_fixed": True, "a_new_key": 3,
}  # fmt: skip
"""Keys of published folders that no class of ``transformers`` reads, and an invented one."""


@pytest.mark.parametrize("name", sorted(known_families()))
def test_no_listed_key_is_among_those_that_transformers_reads(name):
    assert not UNREAD.keys() & keys_of_transformers(known_families()[name].architecture)


def test_unread_keys_are_left_out_with_one_note_and_change_no_setting(tmp_path):
    weights = random_weights(CONFIG)
    plain = load_hf(write(tmp_path / "a", weights, CONFIG))
    more = load_hf(write(tmp_path / "b", weights, {**CONFIG, **UNREAD}))
    assert more.settings == plain.settings and plain.notes == []
    assert more.notes == [f"left out keys of config.json without effect on the model: {', '.join(UNREAD)}"]


def test_read_keys_without_a_rule_are_named_in_one_message(tmp_path):
    read = {"logits_mup_width_multiplier": 4, "attention_chunk_size": 8, "use_mtp": 7}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **UNREAD, **read}))
    with pytest.raises(UserError) as caught:
        load_settings(tmp_path)
    assert all(f"{name} is {value!r}" in str(caught.value) for name, value in read.items())
    assert not any(f"{name} is " in str(caught.value) for name in UNREAD)


def test_stored_keys_are_those_of_the_source_of_transformers():
    """Another version than the stored one may have dropped keys; its configuration classes must not have more."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers: the keys are derived from it")
    stored = json.loads(KEYS_OF_TRANSFORMERS.read_text())
    derived = transformers_keys.derive_keys()
    if stored.pop("transformers") == transformers.__version__:
        assert derived == stored, "run python tools/transformers_keys.py"
    for architecture in stored.keys() - {"shared"}:
        kind = getattr(transformers, architecture).config_class
        read = {field.name for field in dataclasses.fields(kind)} | {*kind.attribute_map}
        assert read <= keys_of_transformers(architecture), architecture
        assert read <= {*derived["shared"], *derived[architecture]}, architecture
