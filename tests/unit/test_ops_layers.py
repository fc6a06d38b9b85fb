"""Dense helpers against float64 closed forms, and their refusals."""

import math

import pytest
import torch

from profiler.ops.layers import layer_norm, rms_norm, rotary, rotary_table, swiglu, swiglu_clipped


def test_rms_norm_matches_float64() -> None:
    x, weight = torch.randn(7, 96, dtype=torch.float64), torch.randn(96, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x.float(), weight.float()).double(), expected * weight, rtol=1e-5, atol=1e-6)
    gemma = rms_norm(x.float(), weight.float(), unit_offset=True).double()
    torch.testing.assert_close(gemma, expected * (1 + weight), rtol=1e-5, atol=1e-5)


def test_layer_norm_of_a_row_has_zero_mean_and_unit_variance() -> None:
    x = torch.randn(5, 128) * 9 + 4
    normal = layer_norm(x, torch.ones(128), torch.zeros(128)).double()
    assert normal.mean(-1).abs().max() < 1e-5
    assert (normal.square().mean(-1) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_by_the_angle(interleaved: bool) -> None:
    positions = torch.tensor([0, 3, 1000])
    cos, sin = rotary_table(positions, 8, theta=100.0)
    x = torch.randn(3, 2, 12)
    turned = rotary(x, cos, sin, interleaved=interleaved, offset=4)
    assert torch.equal(turned[..., :4], x[..., :4])
    for t, position in enumerate(positions.tolist()):
        for i in range(4):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
            angle = position * 100.0 ** (-2 * i / 8)
            before = torch.complex(x[t, :, 4 + a], x[t, :, 4 + b])
            after = torch.complex(turned[t, :, 4 + a], turned[t, :, 4 + b])
            expected = before * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(at_q: int, at_k: int) -> float:
        turned = [rotary(x, *rotary_table(torch.tensor([at]), 16)).double() for x, at in ((q, at_q), (k, at_k))]
        return float((turned[0] * turned[1]).sum())

    assert score(70, 20) == pytest.approx(score(1050, 1000), abs=1e-4)


def test_gated_activations() -> None:
    gate_up = torch.tensor([[1.0, -2.0, 9.0, 3.0, 0.5, -20.0]])
    gate, up = (1.0, -2.0, 9.0), (3.0, 0.5, -20.0)
    plain = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    torch.testing.assert_close(swiglu(gate_up), torch.tensor([plain]))
    clipped = [
        (max(-7, min(u, 7)) + 1) * min(g, 7) / (1 + math.exp(-1.702 * min(g, 7))) for g, u in zip(gate, up, strict=True)
    ]
    torch.testing.assert_close(swiglu_clipped(gate_up), torch.tensor([clipped]))


def test_refusals_name_the_argument() -> None:
    cos, sin = rotary_table(torch.tensor([1, 2]), 8)
    with pytest.raises(ValueError, match=r"weight: expected shape \(16\), found \(8,\)"):
        rms_norm(torch.randn(2, 16), torch.ones(8))
    with pytest.raises(ValueError, match="rotary_dim"):
        rotary_table(torch.tensor([1]), 7)
    with pytest.raises(ValueError, match="offset"):
        rotary(torch.randn(2, 1, 8), cos, sin, offset=1)
    with pytest.raises(ValueError, match="cos"):
        rotary(torch.randn(3, 1, 8), cos, sin)
    with pytest.raises(ValueError, match="gate_up"):
        swiglu(torch.randn(2, 3))
