"""Rotary frequencies against the published formulas."""

import math

import pytest
import torch

from megatron.core.attention.rotary import LengthScaling, Llama3Scaling, RotaryEmbedding, YarnScaling, yarn_scaling
from megatron.core.config.rope_parameters import RopeParameters
from megatron.core.config.transformer_config import TransformerConfig


def test_plain_frequencies_and_tables():
    rotary = RotaryEmbedding(16, 0.5, rotary_base=500000, dtype=torch.float64)
    expected = [500000 ** (-2 * i / 8) for i in range(4)]
    torch.testing.assert_close(rotary.frequencies(), torch.tensor(expected, dtype=torch.float64))
    cos, sin = rotary(100)
    assert cos.shape == (100, 1, 1, 4)
    assert cos[77, 0, 0, 1].item() == pytest.approx(math.cos(77 * expected[1]), abs=1e-12)
    assert sin[99, 0, 0, 3].item() == pytest.approx(math.sin(99 * expected[3]), abs=1e-12)
    assert torch.equal(rotary(10).cos, cos[:10])


def test_interpolation_divides_positions():
    plain, stretched = RotaryEmbedding(8, dtype=torch.float64), RotaryEmbedding(8, interpolation=4, dtype=torch.float64)
    torch.testing.assert_close(stretched(9).sin[8], plain(3).sin[2])


def test_dynamic_frequencies_follow_the_length_of_every_call():
    """transformers' ``_compute_dynamic_ntk_parameters``: tables of a longer row do not fit a shorter one."""
    parameters = RopeParameters("dynamic", original_max_position_embeddings=10, factor=3.0)
    rotary = RotaryEmbedding(8, rotary_base=100, scaling=LengthScaling(parameters), dtype=torch.float64)
    for length in (40, 30, 7, 10, 30):
        base = 100 * (3.0 * max(length, 10) / 10 - 2.0) ** (8 / 6)
        angles = torch.outer(torch.arange(length).double(), base ** (-torch.arange(0, 8, 2).double() / 8))
        torch.testing.assert_close(rotary(length).sin[:, 0, 0], angles.sin(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_factor_takes_effect(factor):
    scaled = RotaryEmbedding(128, rotary_base=500000, scaling=Llama3Scaling(factor)).frequencies().tolist()
    for frequency, original in zip(scaled, RotaryEmbedding(128, rotary_base=500000).frequencies().tolist()):
        wavelength = 2 * math.pi / original
        if wavelength < 8192 / 4:
            expected = original
        elif wavelength > 8192:
            expected = original / factor
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * original / factor + smooth * original
        assert frequency == pytest.approx(expected, rel=1e-12)
    assert scaled[-1] == pytest.approx(500000 ** (-126 / 128) / factor)


def test_yarn_blends_between_kept_and_interpolated_pairs():
    scaling = YarnScaling(factor=40.0, original_max_position_embeddings=4096)
    original = RotaryEmbedding(64).frequencies()
    scaled = RotaryEmbedding(64, scaling=scaling).frequencies()

    def pair(turns):
        return 64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000))

    low, high = math.floor(pair(32)), math.ceil(pair(1))
    for i in range(32):
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert scaled[i].item() == pytest.approx(original[i].item() * (ramp / 40 + 1 - ramp), rel=1e-12)
    assert 0 < low < high < 32 and scaling.concentration == pytest.approx(0.1 * math.log(40) + 1)
    assert RotaryEmbedding(64, scaling=scaling)(1).cos[0, 0, 0, 0].item() == pytest.approx(scaling.concentration)
    both = YarnScaling(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
    assert both.concentration == 1.0


@pytest.mark.parametrize("base", [10.0, 100.0])
def test_yarn_borders_beyond_the_last_pair_are_those_of_transformers(base):
    """Of 8 pairs: the border of slow pairs is 12 at base 100; at base 10 both borders are beyond the last pair."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers: it is what is compared with")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 16384}
    parameters = {"rope_type": "yarn", "rope_theta": base, "factor": 4.0, "original_max_position_embeddings": 4096}
    config = transformers.LlamaConfig(**sizes, rope_parameters=parameters)
    expected, concentration = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=4096)
    actual = RotaryEmbedding(16, rotary_base=base, scaling=scaling).frequencies()
    torch.testing.assert_close(actual, expected.double(), rtol=1e-6, atol=0)
    assert scaling.concentration == pytest.approx(concentration)


def test_yarn_without_stretching_is_plain_and_needs_the_original_length_otherwise():
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    scaling = yarn_scaling(TransformerConfig(**sizes), 2048)
    plain = RotaryEmbedding(64).frequencies()
    torch.testing.assert_close(RotaryEmbedding(64, scaling=scaling).frequencies(), plain)
    with pytest.raises(ValueError, match="yarn_original_max_position_embeddings"):
        yarn_scaling(TransformerConfig(**sizes, rotary_scaling_factor=4.0), 2048)


@pytest.mark.parametrize("channels, percent", [(10, 0.5), (8, 0.1)])
def test_odd_rotated_widths_are_rejected(channels, percent):
    with pytest.raises(ValueError, match="even number"):
        RotaryEmbedding(channels, percent)
