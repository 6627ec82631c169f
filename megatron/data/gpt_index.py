"""The order of samples of a GPT data set: a pure function of lengths, seed and the number of samples asked for.

Documents are shuffled, concatenated and cut every ``sequence_length`` tokens; the samples are then shuffled. With
several epochs all are shuffled together, except that a last epoch that is needed to less than 80 % follows the others,
so that no document is seen a second time before every document was seen once more. Same bytes as Megatron-LM."""

from dataclasses import dataclass

import numpy as np

from megatron.core.config.errors import UserError
from megatron.data import helpers

SEPARATE_BELOW = 0.80


@dataclass(frozen=True)
class EpochPlan:
    """The number of passes over the documents, and whether the last one is shuffled separately."""

    num_epochs: int
    tokens_per_epoch: int
    samples_before_final_epoch: int | None
    """Samples of all epochs but the last if the last is kept apart, else None."""


@dataclass(frozen=True)
class GPTIndices:
    """The three arrays that define the sample stream."""

    document_index: np.ndarray
    """int32 (int64 beyond 2^31 documents) [epochs * documents], the order of documents."""
    sample_index: np.ndarray
    """[samples + 1, 2], where each sample starts; see ``helpers.build_sample_idx``."""
    shuffle_index: np.ndarray
    """uint32 (int64 beyond 2^32) [samples], the order of samples."""


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, sequence_length: int, extra_token: int) -> EpochPlan:
    """Return the fewest epochs that hold ``num_samples`` samples; one if ``num_samples`` is None. Raises UserError
    without tokens. ``samples_before_final_epoch`` is None unless a last epoch that is used only in small part (below 80
    %) must be shuffled separately.

    Args:
        extra_token: 1 if samples of a run share a token with the next (the last label), else 0."""
    if tokens_per_epoch < 1:
        raise UserError("the documents hold no tokens")
    if num_samples is None:
        return EpochPlan(1, tokens_per_epoch, None)
    num_epochs = max(1, -(-(num_samples * sequence_length + extra_token) // tokens_per_epoch))
    if num_epochs == 1:
        return EpochPlan(1, tokens_per_epoch, None)
    before_final = ((num_epochs - 1) * tokens_per_epoch - extra_token) // sequence_length
    per_epoch = (tokens_per_epoch - extra_token) // sequence_length
    separate = num_samples - before_final < int(SEPARATE_BELOW * per_epoch)
    return EpochPlan(num_epochs, tokens_per_epoch, before_final if separate else None)


def build_document_index(documents: np.ndarray, plan: EpochPlan, random_state: np.random.RandomState) -> np.ndarray:
    """Return the documents of all epochs in shuffled order, a new array, int32 if the numbers fit, else int64. The last
    epoch is shuffled separately if the plan uses it only in part. Advances ``random_state``."""
    dtype = np.int32 if documents.size == 0 or int(documents.max()) <= np.iinfo(np.int32).max else np.int64
    documents = documents.astype(dtype, copy=False)
    order = np.tile(documents, plan.num_epochs)
    together = len(order) if plan.samples_before_final_epoch is None else len(order) - len(documents)
    helpers.shuffle(order[:together], random_state)
    if together < len(order):
        helpers.shuffle(order[together:], random_state)
    return order


def build_shuffle_index(num_first: int, num_samples: int, random_state: np.random.RandomState) -> np.ndarray:
    """Return [0, num_first) shuffled, followed by [num_first, num_samples) shuffled; uint32, int64 from 2^32 - 2
    samples on. Advances ``random_state``."""
    dtype = np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(num_samples, dtype=dtype)
    helpers.shuffle(order[:num_first], random_state)
    if num_first < num_samples:
        helpers.shuffle(order[num_first:], random_state)
    return order


def build_gpt_indices(
    sequence_lengths: np.ndarray,
    documents: np.ndarray,
    plan: EpochPlan,
    sequence_length: int,
    seed: int,
    drop_last_partial_sequence: bool = True,
    extra_token: int = 1,
) -> GPTIndices:
    """Return document, sample and shuffle index. All draws come from one ``RandomState(seed)``: documents first,
    samples last. ``extra_token`` 1: each sample has one token more, for the shifted labels."""
    random_state = np.random.RandomState(seed)
    document_index = build_document_index(documents, plan, random_state)
    sample_index = helpers.build_sample_idx(
        sequence_lengths,
        document_index,
        sequence_length,
        plan.num_epochs,
        plan.tokens_per_epoch,
        drop_last_partial_sequence,
        bool(extra_token),
    )
    num_samples = len(sample_index) - 1
    num_first = num_samples if plan.samples_before_final_epoch is None else plan.samples_before_final_epoch
    return GPTIndices(document_index, sample_index, build_shuffle_index(num_first, num_samples, random_state))
