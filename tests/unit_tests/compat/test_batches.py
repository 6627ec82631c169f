"""Batches of entry scripts as dictionaries, and versions that they print."""

from types import SimpleNamespace

import pytest
import torch

from megatron.compat.argument_utils import gpt_config_from_args
from megatron.compat.batches import (
    NAMES,
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.compat.versions import get_te_version, get_torch_version, is_te_min_version, is_torch_min_version
from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank


def batch():
    tokens = torch.arange(16).view(2, 8)
    return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(2, 8), "position_ids": tokens % 8,
            "cu_seqlens": torch.tensor([[0, 3, 8, 8], [0, 2, 5, 8]], dtype=torch.int32),
            "max_seqlen": torch.tensor([5, 3]), "dataset_id": torch.zeros(2)}  # fmt: skip


def _share(rank, world_size):
    parallel_state.initialize_model_parallel(2, context_parallel_size=1)
    inputs = batch() if rank == 0 else {}
    packed = get_batch_on_this_tp_rank(inputs, has_cu_seqlens=True, tp_rank=rank)
    inputs = {**batch(), "cu_seqlens": torch.tensor([0, 3, 8, 16], dtype=torch.int32)} if rank == 0 else {}
    return packed, get_batch_on_this_tp_rank(inputs, is_sft=False, is_hybrid_cp=False, micro_batch_size=2)


def test_first_rank_of_the_group_gives_every_key_of_a_batch(gloo_pool):
    for packed, masked in gloo_pool.run(_share, 2):
        assert set(NAMES) < set(packed) and packed["labels"].dtype == torch.int64
        for name, value in batch().items():
            torch.testing.assert_close(packed[name], value, rtol=0, atol=0)
        assert packed["attention_mask"] is None and masked["cu_seqlens"] is None
        visible = ~masked["attention_mask"][:, 0]
        assert visible.sum(dim=(1, 2)).tolist() == [3 * 4 // 2 + 5 * 6 // 2, 8 * 9 // 2]


def test_hybrid_context_parallelism_is_rejected():
    for function in (get_batch_on_this_tp_rank, get_batch_on_this_cp_rank):
        with pytest.raises(UserError, match="hybrid-context-parallel"):
            function(batch(), is_hybrid_cp=True)


def test_packed_rows_are_laid_end_to_end():
    flat = flatten_batch_for_packed_sequences(batch())
    assert flat["cu_seqlens"].tolist() == [[0, 3, 8, 10, 13, 16]] and flat["cu_seqlens"].dtype == torch.int32
    assert flat["tokens"].tolist() == [list(range(16))] and flat["max_seqlen"].tolist() == [5]
    plain = {"tokens": torch.zeros(2, 8), "cu_seqlens": None}
    assert flatten_batch_for_packed_sequences(plain) is plain


def _parts(rank, world_size):
    parallel_state.initialize_model_parallel(1, context_parallel_size=2)
    named = get_batch_on_this_cp_rank(
        {**batch(), "attention_mask": None}, is_hybrid_cp=False, cp_group=None, use_per_sequence_balancing=True
    )  # fmt: skip
    return named, get_batch_on_this_cp_rank(batch())


def test_context_parallel_ranks_split_tokens_and_share_boundaries(gloo_pool):
    for rank, (part, by_default) in enumerate(gloo_pool.run(_parts, 2)):
        assert torch.equal(part["tokens"], by_default["tokens"])
        assert part["position_ids"][1].tolist() == ([0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5])
        assert part["cu_seqlens"].shape == (2, 4) and part["max_seqlen"].tolist() == [5, 3]


def _predicting(rank, world_size):
    parallel_state.initialize_model_parallel(1, 2)
    on, off = SimpleNamespace(mtp_num_layers=2), SimpleNamespace(mtp_num_layers=None)
    of_fields = mtp_on_this_rank(layout=None, mtp_num_layers=2, ignore_virtual=False, vp_stage=0)
    requested = [mtp_on_this_rank(on), of_fields, mtp_on_this_rank(off, ignore_virtual=False)]
    return [*requested, get_mtp_ranks([4, 6], on), get_mtp_ranks([4, 6], off)]


def test_last_stage_predicts_further_tokens(gloo_pool):
    first, last = gloo_pool.run(_predicting, 2)
    assert first == [False, False, False, [6], []] and last == [True, True, False, [6], []]


def test_versions_compare_with_strings_and_packages():
    from packaging.version import Version

    assert is_torch_min_version("2.11") and not is_torch_min_version("2.100") and get_torch_version() >= Version("2.11")
    assert not is_torch_min_version(str(torch.__version__), check_equality=False)
    assert is_te_min_version("0.1") == (get_te_version() is not None)


def test_model_settings_that_would_be_ignored_are_rejected():
    gpt_config_from_args(None)
    with pytest.raises(UserError, match="model_provider"):
        gpt_config_from_args(None, model_config_cls=dict)
