"""Text in which spans are replaced by sentinels, and the spans, with an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.models.t5 import T5Model
from megatron.core.models.t5.t5_spec import get_t5_block_specs
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.data.batch import get_batch_on_this_cp_rank, to_device
from megatron.training.data.datasets import check_tokenizer_of_data, data_source_options
from megatron.training.initialize import training_device
from megatron.training.tasks.base import NumSamples
from megatron.training.tasks.language_model import LanguageModelTask, mock_data

LONGEST_NGRAM = 10


class T5Task(LanguageModelTask):
    """T5 on sentences that ``tools/preprocess_data.py --split-sentences`` wrote, or on documents of one each."""

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        """A :class:`T5Model` of the flags' shape; initial weights depend on the seed and the names alone."""
        cfg = self.cfg
        config = core_transformer_config_from_args(cfg)
        encoder, decoder = get_t5_block_specs(
            config, cfg.decoder_num_layers, relative_positions=cfg.position_embedding_type == "relative",
            use_transformer_engine=cfg.transformer_impl == "transformer_engine",
        )  # fmt: skip
        return T5Model(
            config=config,
            encoder_config=config,
            transformer_encoder_layer_spec=encoder,
            transformer_decoder_layer_spec=decoder,
            vocab_size=self.vocab_size,
            max_sequence_length=cfg.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not cfg.untie_embeddings_and_output_weights,
            position_embedding_type=cfg.position_embedding_type,
            rotary_percent=cfg.rotary_percent,
            rotary_base=cfg.rotary_base,
            seq_len_interpolation_factor=cfg.rotary_seq_len_interpolation_factor,
            relative_attention_num_buckets=cfg.relative_attention_num_buckets,
            relative_attention_max_distance=cfg.relative_attention_max_distance,
            seed=cfg.seed,
            make_vocab_size_divisible_by=cfg.make_vocab_size_divisible_by,
            groups=parallel_state.get_process_groups(),
            branches=self.branches(vp_stage or 0),
            vp_stage=vp_stage,
        )

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[Any, ...]:
        """T5's data sets (blended, split) from the data flags; with --mock-data random tokens."""
        cfg = self.cfg
        if cfg.mock_data:
            return mock_data(self, num_samples)
        config = T5MaskedWordPieceDatasetConfig(
            **data_source_options(cfg, self.tokenizer),
            sequence_length_decoder=cfg.decoder_seq_length,
            masking_probability=cfg.mask_prob,
            short_sequence_probability=cfg.short_seq_prob,
            masking_max_ngram=LONGEST_NGRAM,
            masking_do_full_word=True,
            masking_use_geometric_distribution=True,
        )
        check_tokenizer_of_data(config, self.tokenizer)
        kind = T5MaskedWordPieceDataset
        return tuple(BlendedMegatronDatasetBuilder(kind, list(num_samples), lambda: True, config).build())

    def get_batch(self, data_iterator: Iterator[dict]) -> dict[str, Tensor]:
        """text_enc [b, e], text_dec, labels (0 in the padding), loss_mask [b, s], sample_index [b]; ``lengths`` [b], on
        the host: of the encoder before its padding. Under context parallelism this rank's tokens."""
        names = "text_enc", "text_dec", "labels", "loss_mask", "sample_index"
        batch = next(data_iterator)
        lengths = batch["enc_mask"].sum(1)
        own = get_batch_on_this_cp_rank({name: batch[name] for name in names})
        own["labels"] = own["labels"].clamp(min=0)
        return {**to_device(own, training_device()), "lengths": lengths}

    def loss_func(self, batch: dict[str, Tensor], output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of the losses fp32 [b, s] of the decoder's tokens before the padding."""
        mask = batch["loss_mask"].to(output.dtype)
        loss, num_tokens = (output * mask).sum(), mask.sum()
        return loss, num_tokens, {"lm loss": torch.stack([loss.detach().double(), num_tokens.double()])}

    def forward_step(self, data_iterator: Iterator[dict], model: nn.Module) -> tuple[Any, Callable]:
        """Token losses of the next micro-batch."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["text_enc"],
            batch["text_dec"],
            lm_labels=batch["labels"],
            encoder_lengths=batch["lengths"],
            sample_index=batch["sample_index"],
        )
        return output, partial(self.loss_func, batch)

    def random_sample(self, generator: np.random.Generator) -> dict[str, Any]:
        """Either of its texts may be a short one."""
        encoder, decoder = self.cfg.seq_length, self.cfg.decoder_seq_length
        used, written = (np.arange(length) < self.random_length(generator, length)
                         for length in (encoder, decoder))  # fmt: skip
        text, labels = generator.integers(0, self.vocab_size, (2, decoder))
        return {
            "text_enc": generator.integers(0, self.vocab_size, encoder),
            "text_dec": text,
            "labels": np.where(written, labels, -1),
            "loss_mask": (written & (generator.random(decoder) < 0.7)).astype(np.int64),
            "enc_mask": used.astype(np.int64),
            "dec_mask": written.astype(np.int64),
        }
