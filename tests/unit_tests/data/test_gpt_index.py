"""The order of samples equals Megatron-LM's rules, written here independently in a slow form."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.gpt_index import build_gpt_indices, plan_epochs


def stream_by_the_rules(lengths, documents, num_samples, sequence_length, seed, extra=1):
    """Every sample as a list of (document, token offset), in training order.

    Count epochs one by one until there are enough tokens; decide on the last epoch; shuffle documents and samples with
    one generator; write out every token of every document in order; cut.
    """
    tokens_per_epoch = sum(lengths[document] for document in documents)
    epochs, tokens = 1, tokens_per_epoch
    while num_samples is not None and tokens < num_samples * sequence_length + extra:
        epochs, tokens = epochs + 1, tokens + tokens_per_epoch
    separate = False
    if epochs > 1:
        samples_before = ((epochs - 1) * tokens_per_epoch - extra) // sequence_length
        samples_of_last = num_samples - samples_before
        samples_per_epoch = (tokens_per_epoch - extra) // sequence_length
        separate = samples_of_last < int(0.80 * samples_per_epoch)
    generator = np.random.RandomState(seed)
    if separate:
        first = np.array(list(documents) * (epochs - 1), dtype=np.int32)
        generator.shuffle(first)
        last = np.array(list(documents), dtype=np.int32)
        generator.shuffle(last)
        order = first.tolist() + last.tolist()
    else:
        together = np.array(list(documents) * epochs, dtype=np.int32)
        generator.shuffle(together)
        order = together.tolist()
    laid_out = [(document, offset) for document in order for offset in range(lengths[document])]
    count = (len(laid_out) - extra) // sequence_length
    samples = [laid_out[i * sequence_length : (i + 1) * sequence_length + extra] for i in range(count)]
    if separate:
        head = np.arange(samples_before, dtype=np.uint32)
        generator.shuffle(head)
        tail = np.arange(samples_before, count, dtype=np.uint32)
        generator.shuffle(tail)
        shuffled = head.tolist() + tail.tolist()
    else:
        numbers = np.arange(count, dtype=np.uint32)
        generator.shuffle(numbers)
        shuffled = numbers.tolist()
    return [samples[number] for number in shuffled]


def stream_of_the_indices(indices, lengths, sequence_length, extra=1):
    samples = []
    for number in indices.shuffle_index.tolist():
        place, offset = indices.sample_index[number].tolist()
        sample = []
        while len(sample) < sequence_length + extra:
            document = int(indices.document_index[place])
            sample += [(document, at) for at in range(offset, lengths[document])]
            place, offset = place + 1, 0
        samples.append(sample[: sequence_length + extra])
    return samples


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=14).filter(lambda lengths: sum(lengths) > 1),
    st.data(),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1]),
)
def test_sample_stream_equals_the_rules(lengths, data, sequence_length, seed, extra):
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    documents = np.arange(first, last, dtype=np.int32)
    num_samples = data.draw(st.none() | st.integers(1, 40))
    tokens = int(sum(lengths[first:last]))
    if tokens <= extra:
        return
    plan = plan_epochs(tokens, num_samples, sequence_length, extra)
    sizes = np.array(lengths, dtype=np.int32)
    indices = build_gpt_indices(sizes, documents, plan, sequence_length, seed, True, extra)
    expected = stream_by_the_rules(lengths, documents.tolist(), num_samples, sequence_length, seed, extra)
    assert stream_of_the_indices(indices, lengths, sequence_length, extra) == expected
    assert num_samples is None or len(expected) >= num_samples
    assert indices.document_index.dtype == np.int32 and indices.shuffle_index.dtype == np.uint32


def test_a_last_epoch_is_kept_apart_below_eighty_percent():
    """100 documents of 10 tokens, samples of 10: 99 samples an epoch, 199 in two."""
    assert plan_epochs(1000, 99, 10, 1).num_epochs == 1
    assert plan_epochs(1000, 100, 10, 1).num_epochs == 2
    assert plan_epochs(1000, 99 + 78, 10, 1).samples_before_final_epoch == 99  # 78 < int(0.8 * 99)
    assert plan_epochs(1000, 99 + 79, 10, 1).samples_before_final_epoch is None
    plan = plan_epochs(1000, 150, 10, 1)
    indices = build_gpt_indices(np.full(100, 10, dtype=np.int32), np.arange(100, dtype=np.int32), plan, 10, 1234)
    assert (
        sorted(indices.document_index[:100].tolist())
        == sorted(indices.document_index[100:].tolist())
        == list(range(100))
    )
    assert sorted(indices.shuffle_index[:99].tolist()) == list(range(99))
    assert sorted(indices.shuffle_index[99:].tolist()) == list(range(99, 199))


def test_a_known_stream():
    """Fixed values: a change of numpy or the builders that changes the data order must fail here."""
    sizes = np.arange(1, 11, dtype=np.int32)
    indices = build_gpt_indices(sizes, np.arange(10, dtype=np.int32), plan_epochs(55, None, 8, 1), 8, 1234)
    assert indices.document_index.tolist() == [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]
    assert indices.sample_index.tolist() == [[0, 0], [1, 0], [2, 5], [5, 0], [5, 8], [7, 2], [8, 4]]
    assert indices.shuffle_index.tolist() == [5, 0, 3, 4, 2, 1]


def test_number_of_epochs_takes_no_loop():
    plan = plan_epochs(3, 10**15, 4096, 1)
    assert plan.num_epochs == -(-(10**15 * 4096 + 1) // 3)


def test_documents_without_tokens_are_rejected():
    with pytest.raises(ValueError, match="no tokens"):
        plan_epochs(0, 10, 4, 1)


def test_numpy_builders_give_the_same_bytes(monkeypatch):
    sizes = np.random.default_rng(0).integers(0, 30, 500).astype(np.int32)
    documents, tokens = np.arange(500, dtype=np.int32), int(sizes.sum())
    for num_samples in (None, 700, 1500):
        plan = plan_epochs(tokens, num_samples, 10, 1)
        fast = build_gpt_indices(sizes, documents, plan, 10, 5)
        with monkeypatch.context() as patched:
            patched.setattr("megatron.data.helpers._cpp", None)
            slow = build_gpt_indices(sizes, documents, plan, 10, 5)
        for name in vars(fast):
            left, right = getattr(fast, name), getattr(slow, name)
            assert left.dtype == right.dtype and left.tobytes() == right.tobytes()
