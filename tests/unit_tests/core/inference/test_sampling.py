"""Sampling keeps to its filters, its context and its seed."""

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.inference.sampling import Draws, Sampling, draw, draw_arrays, filtered, generate, generate_seq2seq
from megatron.core.random.philox import GUMBEL_KEY, gumbel

GREEDY = Sampling(temperature=0)


class NextNumber(torch.nn.Module):
    """Always predicts the last token plus one, out of ten."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(50.0))
        self.seen = []

    def forward(self, tokens, positions):
        self.seen.append(tokens.shape[1])
        return torch.nn.functional.one_hot((tokens + 1) % 10, 10) * self.scale


def test_greedy_generation_follows_the_model_and_stops_at_the_stop_token():
    limits = {"max_new_tokens": 20, "max_sequence_length": 8, "stop_tokens": [9, 7]}
    tokens = list(generate(NextNumber(), [1], **limits, sampling=GREEDY))
    assert tokens == [2, 3, 4, 5, 6]


def test_the_context_never_exceeds_the_sequence_length():
    model = NextNumber()
    assert len(list(generate(model, [0], max_new_tokens=12, max_sequence_length=4))) == 12
    assert max(model.seen) == 4


class NextAnswer(NextNumber):
    """Decoder of :class:`NextNumber`."""

    def forward(self, text, written, output_encoder_hidden_only=False, encoder_hidden_states=None):
        return text if output_encoder_hidden_only else super().forward(written, None)


def test_an_answer_never_exceeds_the_sequence_length():
    model = NextAnswer()
    for most, expected in ((9, [1, 2, 3, 4]), (3, [1, 2, 3])):
        limits = {"max_new_tokens": most, "max_sequence_length": 4}
        assert list(generate_seq2seq(model, [5, 6], start=0, **limits, sampling=GREEDY)) == expected
    assert max(model.seen) == 4


def test_draws_are_those_of_the_seed_and_position():
    """The largest logit plus the Gumbel numbers of the seed and position of its row."""
    logits = torch.randn(5, 40, dtype=torch.float64)
    samplings, positions = [Sampling(seed=number) for number in (3, 3, 9, 4, 0)], [9, 4, 3, 3, 7]
    arrays, form = draw_arrays(samplings, positions)
    draws = Draws(**{name: torch.from_numpy(values) for name, values in arrays.items()})
    result = draw(logits, draws, form).tolist()
    for row, sampling, position, token in zip(logits, samplings, positions, result, strict=True):
        noise = gumbel(torch.tensor([[sampling.seed]]), torch.tensor([[position]]), 40, GUMBEL_KEY)[0]
        assert token == int((row.float() - row.float().max() + noise).argmax())


def test_an_empty_prompt_is_rejected():
    with pytest.raises(ValueError, match="prompt is empty"):
        next(generate(NextNumber(), [], max_new_tokens=1, max_sequence_length=4))


def test_top_p_ends_with_the_token_that_reaches_it():
    """Four equal tokens: two reach 0.5 exactly."""
    arrays, form = draw_arrays([Sampling(top_p=0.5, seed=1)], [0])
    draws = Draws(**{name: torch.from_numpy(values) for name, values in arrays.items()})
    assert filtered(torch.zeros(1, 4), draws, form).isfinite().tolist() == [[True, True, False, False]]


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for sampling, saved in (
        (Sampling(top_k=2), [False, True, False, True]),
        (Sampling(top_p=0.75), [False, True, True, True]),
        (Sampling(top_p=0.4), [False, True, False, False]),
    ):
        arrays, form = draw_arrays([sampling.seeded()], [0])
        draws = Draws(**{name: torch.from_numpy(x) for name, x in arrays.items()})
        assert filtered(logits[None], draws, form).isfinite().tolist() == [saved]


def filtered_row(logits, sampling, largest_k=None):
    arrays, form = draw_arrays([sampling.seeded(), *([Sampling(top_k=largest_k, seed=0)] if largest_k else [])], [0, 0])
    draws = Draws(**{name: torch.from_numpy(x) for name, x in arrays.items()})
    return filtered(logits.expand(len(arrays["top_k"]), -1), draws, form)[0]


def test_filters_of_a_row_do_not_depend_on_other_rows():
    """Rows with no filter, one or both, and a greedy one, in one batch."""
    options = ({"top_p": 0.5}, {}, {"top_k": 3}, {"temperature": 0.5, "top_k": 6, "top_p": 0.8}, {"temperature": 0})
    samplings = [Sampling(seed=0, **values) for values in options]
    logits = torch.randn(len(samplings), 11, generator=torch.Generator().manual_seed(1))
    arrays, form = draw_arrays(samplings, range(len(samplings)))
    result = filtered(logits, Draws(**{name: torch.from_numpy(x) for name, x in arrays.items()}), form)
    for row, sampling, actual in zip(logits, samplings, result, strict=True):
        torch.testing.assert_close(actual, filtered_row(row, sampling), rtol=0, atol=0)
    shifted = logits - logits.amax(-1, keepdim=True)
    torch.testing.assert_close(result[[1, 4]], shifted[[1, 4]], rtol=0, atol=0)


def test_top_p_of_one_keeps_tokens_of_every_probability():
    """Also those that change no sum in fp32."""
    logits = torch.tensor([0.0, -60.0, -30.0])
    assert filtered_row(logits, Sampling(top_p=1.0)).isfinite().all()
    assert filtered_row(logits, Sampling(top_p=0.999)).isfinite().tolist() == [True, False, False]


def test_filters_keep_the_tokens_of_their_definition():
    """For every k, also if another row has a larger one, and every top_p; tokens are sorted by hand."""
    generator = torch.Generator().manual_seed(2)
    for number in range(120):
        logits = torch.randn(11, generator=generator) * 2
        k, top_p = 1 + number % 11, (0.0, 0.3, 0.6, 0.95)[number % 4]
        sampling = Sampling(temperature=0.7, top_k=k, top_p=top_p)
        order = sorted(range(11), key=lambda token: -logits[token])[:k]
        if top_p:
            weights = [float((logits[token] / 0.7).exp()) for token in order]
            order = [token for n, token in enumerate(order) if sum(weights[:n]) < top_p * sum(weights)]
        saved = filtered_row(logits, sampling, (None, 4, 9)[number % 3]).isfinite().nonzero()[:, 0].tolist()
        assert saved == sorted(order), (k, top_p)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 6, 7])
def test_draws_are_the_top_k_tokens_and_all_of_them(top_k):
    logits = torch.arange(12).float() / 6
    choose = Sampling(top_k=top_k, seed=5).chooser()
    assert {choose(logits, position) for position in range(400)} == set(range(12 - top_k, 12))


def test_the_seed_decides_the_draws():
    def draw(seed):
        model, sampling = NextNumber(), Sampling(seed=seed)
        model.scale.data.fill_(0.5)
        return list(generate(model, [0], max_new_tokens=30, max_sequence_length=8, sampling=sampling))

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize("values", [
    {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": 1e-30}, {"top_p": 1.5},
    {"top_p": float("nan")}, {"top_k": -1}, {"seed": -1}, {"seed": 2**64},
])  # fmt: skip
def test_settings_out_of_range_are_rejected(values):
    with pytest.raises(UserError, match=f"{next(iter(values))} .*must be"):
        Sampling(**values)


def test_the_smallest_temperature_draws_the_likeliest_token():
    logits = torch.tensor([1.0, 3.0e4, 2.0e4, -1.0e4])
    for temperature in (1e-6, 1e-3):
        assert Sampling(temperature=temperature, seed=1).chooser()(logits) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_are_one_message(value, temperature):
    logits = torch.tensor([1.0, value, 2.0])
    with pytest.raises(UserError, match="logits are NaN or infinite"):
        Sampling(temperature=temperature).chooser()(logits)
