"""Loss and batches of preference pairs (--dpo).

Legend: b rows, s sequence (local), n completions of a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.config.preferences import REFERENCE, PreferenceConfig
from megatron.core.pipeline_parallel.loss_weights import LossPairs
from megatron.core.pipeline_parallel.paired_stage import PairedOutput
from megatron.core.rl.preference_losses import Completions, pair_losses, sum_completions
from megatron.core.tensor_parallel.operators import reduce_from_region
from megatron.training.data.batch import Batch
from megatron.training.data.packed_rows import PackedRows

LOSS = "dpo loss"


class PreferenceRows(PackedRows):
    """Rows of :class:`PreferenceDataset`: both completions of a pair are in one row. Losses count pairs."""

    def counts(self, batch: dict[str, Tensor]) -> Sequence[Tensor | int]:
        """Return the number of pairs, which the loss counts, and the number of tokens."""
        return [num_pairs(batch).sum(), batch["loss_mask"].sum()]

    def num_tokens(self, counts: Tensor) -> Tensor:
        return counts[1]

    def local(self, batch: Batch) -> Batch:
        """Return the tensors of the base class with ``valid_tokens``, the weight of a row, as its number of pairs, and
        ``num_completions``, the size of n."""
        pairs_b = num_pairs(batch)
        local = super().local({**batch, "completions": _valid(batch)})
        local["valid_tokens"] = pairs_b.to(local["loss_mask"].device, torch.float32, non_blocking=True)
        local["num_completions"] = 2 * int(pairs_b.max())  # on the host, before the device needs it
        return local


def num_pairs(batch: dict[str, Tensor]) -> Tensor:
    """Return the number of pairs of each full row, int64 [b]."""
    return (_valid(batch).amax(1) + 2) // 2


def _valid(batch: dict[str, Tensor]) -> Tensor:
    return torch.where(batch["loss_mask"] > 0, batch["completions"], -1)


def preference_losses(settings: PreferenceConfig, batch: Batch, output: PairedOutput | Tensor) -> LossPairs:
    """Return the summed loss of the pairs of a micro-batch and TRL's figures, with the number of pairs. All-reduces
    sums of log-probabilities over context-parallel ranks.

    Args:
        settings: loss, beta and label smoothing.
        batch: this rank's part of a batch of :class:`PreferenceRows`.
        output: token losses [b, s] of both models; of the trained one if ``batch`` has the reference's."""
    both = (output, batch[REFERENCE]) if isinstance(output, Tensor) else (output.trained, output.frozen[REFERENCE])
    policy, reference = (_sums(batch, losses) for losses in both)
    pairs = pair_losses(
        policy, reference.log_probs_bn, settings.dpo_loss, settings.dpo_beta, settings.dpo_label_smoothing
    )
    # context-parallel ranks have equal pairs: all need the gradient of their tokens, one reports the values
    is_first = parallel_state.get_process_groups().cp.is_first
    loss, count = pairs.losses.sum(), pairs.present.sum() * is_first
    chosen, rejected = pairs.chosen_rewards, pairs.rejected_rewards
    figures = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": chosen > rejected,
        "rewards/margins": chosen - rejected,
    }
    sums = {name: ((values * pairs.present).sum() * is_first, count) for name, values in figures.items()}
    return {LOSS: (loss if is_first else loss - loss.detach(), count), **sums}


def _sums(batch: Batch, losses: Tensor) -> Completions:
    cp = parallel_state.get_process_groups().cp
    sums = sum_completions(-losses, batch["completions"], batch["num_completions"])
    return Completions(*(reduce_from_region(values, cp) for values in sums))
