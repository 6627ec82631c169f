"""The composed configuration: frozen groups, copies with other values, and groups of families."""

from dataclasses import dataclass, field, fields

import pytest

from megatron.core.config.distillation import DistillationConfig
from megatron.core.config.groups import FlagGroup, frozen_group
from megatron.core.config.lora import LoraConfig
from megatron.core.config.optional import PackedSamplesConfig
from megatron.core.config.preferences import PreferenceConfig
from megatron.core.config.quantization import QuantizationConfig
from megatron.core.config.sft import FineTuningConfig
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.registry import families
from megatron.core.models.t5.config import EncoderDecoderConfig
from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.stored_settings import ARCHITECTURE
from tests.unit_tests.training.config.test_resolve import TINY, resolved


def test_every_group_is_frozen():
    cfg = resolved()
    groups = {item.name: getattr(cfg, item.name) for item in fields(cfg)}
    frozen = {name: group for name, group in groups.items() if isinstance(group, FlagGroup)}
    assert {"flat", "model", "optimizer", "training", "data", "checkpoint"} <= frozen.keys()
    for group in (*frozen.values(), *cfg.family_groups.values()):
        name = fields(group)[0].name
        before = getattr(group, name)
        with pytest.raises(AttributeError, match=f"the configuration is frozen: {name} cannot be set"):
            setattr(group, name, 3)
        assert getattr(group, name) is before
    parsed = parse_args(TINY.split())
    with pytest.raises(AttributeError, match="the configuration is frozen: num_layers cannot be set"):
        parsed.flat.num_layers = 3
    with pytest.raises(TypeError, match="there is no setting 'num_layer'"):
        parsed.with_settings(num_layer=3)


def test_copies_have_other_values_in_every_form():
    cfg = resolved()
    other = cfg.with_settings(num_layers=5, seq_length=64)
    assert (other.model.num_layers, other.flat.num_layers, other.data.seq_length) == (5, 5, 64)
    assert (cfg.model.num_layers, cfg.flat.num_layers, cfg.data.seq_length) == (2, 2, 32)


def test_only_groups_without_an_attribute_are_read_by_kind():
    cfg = resolved("--bert-no-binary-head")
    assert {*cfg.family_groups} == {
        BertConfig, EncoderDecoderConfig, FineTuningConfig, LoraConfig, PackedSamplesConfig, PreferenceConfig,
        DistillationConfig, QuantizationConfig,
    }  # fmt: skip
    assert cfg.group(BertConfig).bert_binary_head is False


@dataclass(kw_only=True)
class Toy(FlagGroup):
    width: int = 3
    names: list[str] = field(default_factory=list)


def test_fields_without_a_value_have_their_defaults():
    first, second = frozen_group(Toy, {"width": 4, "other": 5}), frozen_group(Toy, {})
    assert (first.width, second.width, first.names, second.names) == (4, 3, [], [])
    assert first.names is not second.names and not hasattr(first, "other")


@pytest.mark.parametrize("name", families())
def test_checkpoints_keep_all_settings_of_the_weights(name):
    """Loading rejects weights that were trained with other values."""
    flags = f"{TINY} --decoder-seq-length 16" if name == "t5" else TINY
    described = resolve(parse_args(flags.split(), model_family=name), 1).describe(100)
    assert {*described.settings} <= {*ARCHITECTURE}
