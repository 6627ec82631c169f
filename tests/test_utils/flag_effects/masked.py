"""Flags that the programs with masked words alone read: what their data sets and models are made with."""

import dataclasses
from unittest import mock

from tests.test_utils.flag_effects.rows import Probe

BERT = "--tokenizer-type BertWordPieceLowerCase --vocab-file {bert}"


def of_samples(name):
    """A function of settings: the setting ``name`` of the data sets that pretrain_bert.py builds."""

    def asks(cfg):
        from megatron.core.tokenizers import build_tokenizer
        from megatron.training.tasks import bert

        with (
            mock.patch.object(bert, "BlendedMegatronDatasetBuilder") as builder,
            mock.patch.object(bert, "check_tokenizer_of_data"),
        ):
            builder.return_value.build.return_value = []
            bert.BertTask(cfg, build_tokenizer(cfg)).train_valid_test_datasets_provider((1, 1, 1))
        return getattr(builder.call_args.args[-1], name)

    return asks


def names_of_heads(cfg):
    from megatron.training.model_description import describe_run

    names = [param.name for param in describe_run(dataclasses.replace(cfg, model_family="bert"), 64).params()]
    return [name for name in names if "binary_head" in name or "tokentype" in name or "pooler" in name]


WITHOUT = "--tokenizer-type --vocab-size"
ROWS = [
    Probe("--mask-prob 0.3", of_samples("masking_probability"), 0.3, base=BERT, without=WITHOUT),
    Probe("--short-seq-prob 0.5", of_samples("short_sequence_probability"), 0.5, base=BERT, without=WITHOUT),
    Probe("--bert-no-binary-head", names_of_heads, []),
]
