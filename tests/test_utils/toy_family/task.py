"""The training task: every label says whether the numbers of the sample have a positive sum."""

from functools import partial

import numpy as np

from megatron.training.data.batch import on_device
from megatron.training.data.batches import Batches
from megatron.training.tasks.language_model import LanguageModelTask
from tests.test_utils.toy_family.family import NumbersConfig
from tests.test_utils.toy_family.model import NumbersModel


class NumbersRows(Batches):
    """Tokens with numbers, which every context-parallel rank needs in full."""

    def local(self, batch):
        return on_device(self.local_tokens(batch))


class NumbersTask(LanguageModelTask):
    """Training on generated samples."""

    def model_provider(self, pre_process=True, post_process=True, vp_stage=None):
        settings = self.model_settings(pre_process, post_process, vp_stage)
        configs = self.cfg.family.transformers(self.cfg)
        return NumbersModel(configs, self.cfg.group(NumbersConfig).numbers_features, settings)

    def make_batches(self):
        return NumbersRows(self.cfg)

    def forward_step(self, data_iterator, model):
        batch = self.get_batch(data_iterator)
        output = model(
            batch["tokens"], batch["position_ids"], batch["numbers"], labels=batch["labels"],
            sample_index=batch["sample_index"],
        )  # fmt: skip
        return output, partial(self.loss_func, batch)

    def random_sample(self, generator):
        length, sizes = self.cfg.data.seq_length, self.cfg.group(NumbersConfig)
        numbers = generator.standard_normal((sizes.numbers_count, sizes.numbers_features)).astype(np.float32)
        return {
            "tokens": generator.integers(0, self.vocab_size, length),
            "labels": np.full(length, int(numbers.sum() > 0)),
            "loss_mask": np.ones(length, dtype=np.float32),
            "position_ids": np.arange(length),
            "numbers": numbers,
        }
