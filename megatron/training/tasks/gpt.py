"""Next-token prediction with a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.data.batch import get_batch_on_this_cp_rank, to_device
from megatron.training.data.datasets import check_tokenizer_of_data, data_source_options
from megatron.training.initialize import training_device
from megatron.training.model_description import layers_of_spec
from megatron.training.tasks.base import NumSamples
from megatron.training.tasks.language_model import LanguageModelTask


class GPTTask(LanguageModelTask):
    """GPT and LLaMA-like models on ``.bin/.idx`` text, or on mock data."""

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        """A :class:`GPTModel` of the flags' shape; initial weights depend on the seed and the names alone."""
        cfg = self.cfg
        config, own = core_transformer_config_from_args(cfg), layers_of_spec(cfg)
        engine = cfg.transformer_impl == "transformer_engine"
        spec = own or get_gpt_decoder_block_spec(config, engine)
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=self.vocab_size,
            max_sequence_length=cfg.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not cfg.untie_embeddings_and_output_weights,
            position_embedding_type=cfg.position_embedding_type,  # type: ignore[arg-type]  # the rules refuse the others
            rotary_percent=cfg.rotary_percent,
            rotary_base=cfg.rotary_base,
            rope_scaling=cfg.use_rope_scaling,
            rope_scaling_factor=cfg.rope_scaling_factor,
            seq_len_interpolation_factor=cfg.rotary_seq_len_interpolation_factor,
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, engine),
            seed=cfg.seed,
            make_vocab_size_divisible_by=cfg.make_vocab_size_divisible_by,
            groups=parallel_state.get_process_groups(),
            branches=self.branches(vp_stage or 0),
            vp_stage=vp_stage,
        )

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[Any, Any, Any]:
        """GPT data sets (blended, split) from the data flags."""
        cfg = self.cfg
        kind = MockGPTDataset if cfg.mock_data else GPTDataset
        config = GPTDatasetConfig(
            **data_source_options(cfg, self.tokenizer),
            reset_position_ids=cfg.reset_position_ids,
            reset_attention_mask=cfg.reset_attention_mask,
            eod_mask_loss=cfg.eod_mask_loss,
            vocab_size=self.tokenizer.vocab_size,
        )
        check_tokenizer_of_data(config, self.tokenizer)
        return tuple(BlendedMegatronDatasetBuilder(kind, list(num_samples), lambda: True, config).build())

    def get_batch(self, data_iterator: Iterator[dict]) -> dict[str, Tensor]:
        """tokens, labels, loss_mask, position_ids [b, s], sample_index [b]; cu_seqlens where documents stay apart.

        Of sequences that context-parallel ranks share, this rank's tokens; positions and boundaries stay global.
        """
        device = training_device()
        on_host = get_batch_on_this_cp_rank(next(data_iterator))
        batch = to_device(on_host, device)
        if "cu_seqlens" in on_host:
            batch["document_bounds"] = on_host["cu_seqlens"]
        return batch

    def loss_func(self, batch: dict[str, Tensor], output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Masked sum of the token losses ``output`` fp32 [b, s]."""
        mask = batch["loss_mask"].to(output.dtype)
        loss = (output * mask).sum()
        num_tokens = mask.sum()
        return loss, num_tokens, {"lm loss": torch.stack([loss.detach().double(), num_tokens.double()])}

    def forward_step(self, data_iterator: Iterator[dict], model: nn.Module) -> tuple[Tensor, Callable]:
        """Token losses of the next micro-batch."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["tokens"],
            batch["position_ids"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=packed_documents(batch),
            sample_index=batch["sample_index"],
        )
        return output, partial(self.loss_func, batch)

    def random_sample(self, generator: np.random.Generator) -> dict[str, Any]:
        """Documents in it have random lengths and do not see each other with --reset-attention-mask."""
        length = self.cfg.seq_length
        tokens = generator.integers(0, self.vocab_size, length + 1)
        mask = (generator.random(length) < 0.7).astype(np.float32)
        sample = {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": np.arange(length)}
        if self.cfg.reset_attention_mask:
            cuts = np.sort(generator.choice(np.arange(1, length), size=3, replace=False))
            sample["cu_seqlens"] = np.array([0, *cuts, length])
            sample["position_ids"] = np.concatenate([np.arange(part) for part in np.diff([0, *cuts, length])])
        return sample


def packed_documents(batch: dict[str, Tensor]) -> PackedSeqParams | None:
    """The document boundaries of a micro-batch under --reset-attention-mask, in the flattened [b * s] order."""
    if "cu_seqlens" not in batch:
        return None
    cu_seqlens = batch["cu_seqlens"]
    bounds = tuple(batch["document_bounds"].tolist()) if "document_bounds" in batch else None
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, bounds=bounds)
