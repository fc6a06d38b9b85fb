"""Row layouts byte by byte, and round trips that the format allows to be exact."""

import struct

import pytest
import torch

from profiler.ops import formats


def _codes(*shape: int) -> torch.Tensor:
    """Random finite E4M3 codes."""
    raw = torch.randint(0, 256, shape, dtype=torch.uint8)
    raw[(raw & 0x7F) == 0x7F] = 0x7E
    return raw.view(torch.float8_e4m3fn)


def test_mla_row_bytes() -> None:
    codes, scales = _codes(3, 512), torch.rand(3, 4) + 0.5
    rope = torch.randn(3, 64, dtype=torch.bfloat16)
    rows = formats.pack_mla_rows(codes, scales, rope)
    assert rows.shape == (3, 656) and rows.dtype == torch.uint8
    raw = bytes(rows[1].tolist())
    assert raw[:512] == bytes(codes[1].view(torch.uint8).tolist())
    assert struct.unpack("<4f", raw[512:528]) == tuple(scales[1].tolist())
    halves = struct.unpack("<64H", raw[528:])
    assert list(halves) == [v & 0xFFFF for v in rope[1].view(torch.int16).tolist()]
    back = formats.unpack_mla_rows(rows)
    assert torch.equal(back[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(back[1], scales) and torch.equal(back[2], rope)


def test_index_row_bytes() -> None:
    codes, scales = _codes(5, 128), torch.rand(5, 1)
    rows = formats.pack_index_rows(codes, scales)
    assert rows.shape == (5, 132)
    raw = bytes(rows[4].tolist())
    assert raw[:128] == bytes(codes[4].view(torch.uint8).tolist())
    assert struct.unpack("<f", raw[128:]) == tuple(scales[4].tolist())
    back = formats.unpack_index_rows(rows)
    assert torch.equal(back[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(back[1], scales)


def test_index_page_holds_keys_then_scales() -> None:
    pages = torch.zeros(2, 4 * 132, dtype=torch.uint8)
    codes, scales = formats.split_index_pages(pages, 4)
    codes[1, 2] = torch.full((128,), 1.5).to(torch.float8_e4m3fn)
    scales[1, 2] = 0.25
    assert pages[1, 2 * 128 : 3 * 128].unique().tolist() == [0x3C]
    offset = 4 * 128 + 2 * 4
    assert struct.unpack("<f", bytes(pages[1, offset : offset + 4].tolist())) == (0.25,)
    assert int(pages.count_nonzero()) == 128 + 2  # 0.25 is 0x3E800000


@pytest.mark.parametrize("power_of_two", [False, True])
def test_quantisation_error_is_that_of_three_mantissa_bits(power_of_two: bool) -> None:
    x = torch.randn(64, 512, dtype=torch.float64) * torch.logspace(-3, 3, 64, dtype=torch.float64)[:, None]
    codes, scales = formats.quantize_fp8(x, power_of_two=power_of_two)
    back = formats.dequantize_fp8(codes, scales, torch.float64)
    largest = x.unflatten(-1, (-1, 128)).abs().amax(-1, keepdim=True)
    # Half a unit in the last of 1 + 3 mantissa bits, or half the smallest subnormal step (2^-9) of the scaled range.
    subnormal = (scales[..., None].double() * 2.0**-10).expand(-1, -1, 128).flatten(-2)
    assert ((back - x).abs() <= torch.maximum(x.abs() * 2.0**-4, subnormal) * 1.0001).all()
    ratio = largest[..., 0] / scales
    assert (ratio <= 448 * 1.00001).all() and (ratio > (224 if power_of_two else 447.9)).all()
    if power_of_two:
        assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))


def test_exact_round_trips() -> None:
    codes = _codes(16, 512)
    codes.view(torch.uint8)[:, ::128] = 0x7E  # 448, so that every group's scale is found again
    scales = torch.ldexp(torch.ones(16, 4), torch.randint(-12, 6, (16, 4)))
    values = formats.dequantize_fp8(codes, scales, torch.float32)
    for power_of_two in (False, True):
        again = formats.quantize_fp8(values, power_of_two=power_of_two)
        assert torch.equal(again[1], scales)
        assert torch.equal(formats.dequantize_fp8(*again, torch.float32), values)
    rope = torch.randn(16, 64, dtype=torch.bfloat16)
    latents = torch.cat((values, rope.float()), dim=-1)
    rows = formats.quantize_mla_rows(latents)
    assert torch.equal(formats.dequantize_mla_rows(rows, torch.float32), latents)
    keys = values.unflatten(-1, (4, 128))[:, 0]
    index_rows = formats.quantize_index_rows(keys)
    assert torch.equal(formats.dequantize_index_rows(index_rows, torch.float32), keys)


def test_zeros_quantise_to_zeros() -> None:
    codes, scales = formats.quantize_fp8(torch.zeros(2, 256), power_of_two=True)
    assert torch.equal(scales, torch.ones(2, 2)) and not codes.view(torch.uint8).any()


def test_refusals_name_the_argument() -> None:
    with pytest.raises(ValueError, match="scale group 128"):
        formats.quantize_fp8(torch.randn(2, 100))
    with pytest.raises(ValueError, match=r"rows: expected shape \(2, 656\), found \(2, 576\)"):
        formats.unpack_mla_rows(torch.zeros(2, 576, dtype=torch.uint8))
    with pytest.raises(ValueError, match="codes: expected dtype float8_e4m3fn"):
        formats.pack_mla_rows(torch.zeros(2, 512), torch.zeros(2, 4), torch.zeros(2, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="latents"):
        formats.quantize_mla_rows(torch.zeros(2, 512))
    with pytest.raises(ValueError, match="contiguous"):
        formats.split_index_pages(torch.zeros(132 * 4, 2, dtype=torch.uint8).t(), 4)
