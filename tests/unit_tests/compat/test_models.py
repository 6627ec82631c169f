"""Constructors of language models take settings one by one, in Megatron-LM's order."""

import inspect

import pytest

from megatron.compat import group_collection
from megatron.compat.group_collection import ProcessGroupCollection
from megatron.compat.models import BertModel, GPTModel, T5Model, takes_fields
from megatron.core.config.cli import ConfigError

COMMON = ["vocab_size", "max_sequence_length", "pre_process", "post_process"]
ENDS = {
    GPTModel: (["config", "transformer_layer_spec"], ["seq_len_interpolation_factor", "mtp_block_spec"]),
    BertModel: (["config", "num_tokentypes", "transformer_layer_spec"], ["add_binary_head", "vp_stage"]),
    T5Model: (
        ["config", "encoder_config", "transformer_encoder_layer_spec", "transformer_decoder_layer_spec"],
        ["relative_attention_num_buckets", "relative_attention_max_distance", "vp_stage"],
    ),
}


class Model:
    @takes_fields("size vocab_size max_sequence_length rotary_base extra")
    def __init__(self, size, settings, extra=3, *, more=None):
        self.given = size, settings, extra, more


def test_fields_and_constructor_arguments_may_be_mixed():
    size, settings, extra, more = Model(1, 50, 16, 500.0, 4, seed=7, more="x").given
    assert (size, extra, more) == (1, 4, "x")
    assert (settings.vocab_size, settings.rotary_base, settings.seed, settings.pre_process) == (50, 500.0, 7, True)
    assert Model(size=1, vocab_size=50, max_sequence_length=16).given[2:] == (3, None)


@pytest.mark.parametrize(
    "args, kwargs, message",
    [
        ((1, 50), {}, "missing a required argument: 'max_sequence_length'"),
        ((1, 50, 16), {"colour": 3}, "unexpected keyword argument 'colour'"),
        ((1, 50, 16, 5.0, 4, 7), {}, "too many positional arguments"),
        ((1, 50, 16), {"vocab_size": 3}, "multiple values for argument 'vocab_size'"),
    ],
)
def test_wrong_arguments_raise(args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        Model(*args, **kwargs)


@pytest.mark.parametrize("kind", ENDS)
def test_positions_are_those_of_megatron_lm(kind):
    parameters = inspect.signature(kind).parameters.values()
    positional = [
        parameter.name for parameter in parameters if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    first, last = ENDS[kind]
    assert positional[: len(first) + 4] == first + COMMON and positional[-len(last) :] == last


@pytest.mark.parametrize(
    "argument, message",
    [
        ({"scatter_embedding_sequence_parallel": False}, "scatter_embedding_sequence_parallel False: embeddings of"),
        ({"pg_collection": ProcessGroupCollection(tp=object())}, "pg_collection: the groups tp are not those"),
    ],
    ids=["embeddings", "groups"],
)
def test_arguments_of_megatron_lm_that_change_the_layout_are_rejected(argument, message, monkeypatch):
    monkeypatch.setitem(group_collection._GETTERS, "tp", object)
    with pytest.raises(ConfigError, match=message):
        GPTModel(None, None, 8, 8, **argument)
