"""Flags that only the masked-word programs (BERT, T5) read: settings of their data sets and models."""

from unittest import mock

import numpy as np

from tests.test_utils.flag_effects.rows import Probe

BERT = "--tokenizer-type BertWordPieceLowerCase --vocab-file {bert}"


def of_samples(name):
    """A function of settings: the setting ``name`` of the data sets that pretrain_bert.py builds."""

    def asks(cfg):
        from megatron.core.tokenizers import build_tokenizer
        from megatron.training.tasks import bert, language_model

        with (
            mock.patch.object(language_model, "BlendedMegatronDatasetBuilder") as builder,
            mock.patch.object(language_model, "check_data_tokenizer"),
        ):
            builder.return_value.build.return_value = []
            task = bert.BertTask(cfg.with_settings(model_family="bert"), build_tokenizer(cfg.tokenizer))
            task.train_valid_test_datasets_provider((1, 1, 1))
        return getattr(builder.call_args.args[-1], name)

    return asks


def names_of_heads(cfg):

    names = [param.name for param in cfg.with_settings(model_family="bert").describe(64).params()]
    return [name for name in names if "binary_head" in name or "tokentype" in name or "pooler" in name]


def decoder_depth(cfg):

    return sum(len(layer) == 3 for layer in cfg.describe(64).layers)


def names_of_output(cfg):
    """Without a bias."""

    return [param.name for param in cfg.describe(64).params() if "output_layer" in param.name]


def answer_length(cfg):
    from megatron.training.tasks.t5 import T5Task
    from megatron.training.verify.layout_trace import with_synthetic_data

    return len(with_synthetic_data(T5Task, 61)(cfg).random_sample(np.random.default_rng(0))["labels"])


def relative_positions(cfg):
    """Buckets, and the longest distance, of the model that is built."""
    from megatron.training.tasks.t5 import T5Task
    from megatron.training.verify.layout_trace import with_synthetic_data

    model = with_synthetic_data(T5Task, 61)(cfg).model_provider()
    return len(model.encoder_relative_pos_emb.table), model.max_distance


def token_types(cfg):
    from megatron.training.tasks.bert import BertTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    return len(with_synthetic_data(BertTask, 61)(cfg).model_provider().embedding.tokentype_embeddings.weight)


def shape_of_rows(cfg):
    """Rows of a micro-batch, and whether they hold padding."""
    from megatron.training.data.loader import KeyedDataset, collate
    from megatron.training.tasks.bert import BertTask
    from megatron.training.verify.layout_trace import with_synthetic_data

    task = with_synthetic_data(BertTask, 61)(cfg)
    samples = KeyedDataset(task.train_valid_test_datasets_provider((4, 0, 0))[0])
    batch = task.get_batch(iter([collate([samples[index, index] for index in range(4)])]))
    return batch["text"].shape[0], batch["text"].numel() < 4 * cfg.data.seq_length


WITHOUT = "--tokenizer-type --vocab-size"
T5 = {
    "base": f"{BERT} --vocab-extra-ids 10 --decoder-seq-length 16 --position-embedding-type relative",
    "family": "t5", "without": WITHOUT,
}  # fmt: skip
ROWS = [
    Probe("--mask-prob 0.3", of_samples("masking_probability"), 0.3, base=BERT, without=WITHOUT),
    Probe("--short-seq-prob 0.5", of_samples("short_sequence_probability"), 0.5, base=BERT, without=WITHOUT),
    Probe("--bert-no-binary-head", names_of_heads, []),
    Probe("--bert-num-tokentypes 3", token_types, 3, base=BERT, without=WITHOUT, family="bert"),
    Probe("--use-packed-sequence", shape_of_rows, (1, True), base=BERT, without=WITHOUT, family="bert"),
    Probe("--decoder-num-layers 5", decoder_depth, 5, **T5),
    Probe("--decoder-seq-length 12", answer_length, 12, **T5),
    Probe("--relative-attention-num-buckets 8", relative_positions, (8, 128), **T5),
    Probe("--scale-decoder-outputs", names_of_output, ["lm_head.output_layer.weight"], **T5),
    Probe("--relative-attention-max-distance 64", relative_positions, (32, 64), **T5),
]
