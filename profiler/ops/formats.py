"""Byte layouts of the caches, and FP8 quantisation.

MLA row, 656 bytes: 512 E4M3 codes | 4 fp32 scales (one per 128 codes) | 64 bf16 rotary features.
Index row, 132 bytes: 128 E4M3 codes | 1 fp32 scale.
Index page of P tokens, 132 P bytes: P x 128 E4M3 codes, then P fp32 scales; the engine keeps its index cache so, which
leaves every key aligned to 16 bytes. A value is code x scale.
"""

from enum import Enum

import torch

from profiler.ops.checks import FLOATS, FP8, check_positive, check_tensor

FP8_MAX = 448.0
LATENT_DIM = 512
ROPE_DIM = 64
MLA_DIM = LATENT_DIM + ROPE_DIM
SCALE_GROUP = 128
MLA_ROW_BYTES = LATENT_DIM + 4 * (LATENT_DIM // SCALE_GROUP) + 2 * ROPE_DIM
INDEX_DIM = 128
INDEX_ROW_BYTES = INDEX_DIM + 4


class SparseKVFormat(Enum):
    """How the rows of a latent cache are stored. Always stated by the caller, never inferred from the width."""

    BF16 = "bf16"
    FP8_RAW = "fp8"
    FP8_PACKED = "fp8_packed"


def quantize_fp8(
    x: torch.Tensor, group: int = SCALE_GROUP, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and fp32 scales of x (..., D), one scale per `group` consecutive features.

    scale = largest magnitude / 448, rounded up to a power of two on request (the UE8M0 scales of DeepSeek-V3.2); 1 for
    a group of zeros. Returns codes (..., D) and scales (..., D / group). Raises ValueError when `group` does not
    divide D.
    """
    check_positive("group", group)
    if x.shape[-1] % group:
        raise ValueError(f"x: width {x.shape[-1]} of {tuple(x.shape)} is no multiple of the scale group {group}")
    grouped = x.float().unflatten(-1, (-1, group))
    # By a tensor: a product with the rounded inverse of a number, as CUDA divides by one, is off by an ulp at times.
    largest = grouped.abs().amax(-1)
    scale = largest / torch.full_like(largest, FP8_MAX)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        # frexp gives scale = mantissa * 2^exponent with mantissa in [0.5, 1): exactly a half is a power already.
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        scale = torch.where(mantissa == 0, torch.zeros_like(scale), scale)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (grouped / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes.flatten(-2), scale


def dequantize_fp8(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16, group: int = SCALE_GROUP
) -> torch.Tensor:
    """code x scale of codes (..., D) and scales (..., D / group), in `dtype`."""
    check_tensor("scales", scales, (*codes.shape[:-1], codes.shape[-1] // group), (torch.float32,))
    return (codes.float().unflatten(-1, (-1, group)) * scales[..., None]).flatten(-2).to(dtype)


def pack_mla_rows(codes: torch.Tensor, scales: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """656-byte rows, uint8 (..., 656), from codes (..., 512) E4M3, scales (..., 4) fp32 and rope (..., 64) bf16."""
    lead = codes.shape[:-1]
    check_tensor("codes", codes, (*lead, LATENT_DIM), (FP8,))
    check_tensor("scales", scales, (*lead, LATENT_DIM // SCALE_GROUP), (torch.float32,))
    check_tensor("rope", rope, (*lead, ROPE_DIM), (torch.bfloat16,))
    parts = (codes.contiguous(), scales.contiguous(), rope.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def unpack_mla_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (..., 512), scales (..., 4) and rope (..., 64) of 656-byte uint8 rows; inverts `pack_mla_rows` exactly."""
    check_tensor("rows", rows, (*rows.shape[:-1], MLA_ROW_BYTES), (torch.uint8,))
    codes, scales, rope = rows.contiguous().split((LATENT_DIM, 16, 2 * ROPE_DIM), dim=-1)
    return codes.view(FP8), scales.view(torch.float32), rope.view(torch.bfloat16)


def quantize_mla_rows(latents: torch.Tensor, *, power_of_two: bool = False) -> torch.Tensor:
    """Packed rows, uint8 (..., 656), of latents (..., 576): the first 512 features to FP8, the rotary ones to bf16."""
    check_tensor("latents", latents, (*latents.shape[:-1], MLA_DIM), FLOATS)
    codes, scales = quantize_fp8(latents[..., :LATENT_DIM], power_of_two=power_of_two)
    return pack_mla_rows(codes, scales, latents[..., LATENT_DIM:].to(torch.bfloat16))


def dequantize_mla_rows(rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Latents (..., 576) in `dtype` of packed 656-byte rows."""
    codes, scales, rope = unpack_mla_rows(rows)
    return torch.cat((dequantize_fp8(codes, scales, dtype), rope.to(dtype)), dim=-1)


def pack_index_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """132-byte rows, uint8 (..., 132), from codes (..., 128) E4M3 and scales (..., 1) fp32."""
    lead = codes.shape[:-1]
    check_tensor("codes", codes, (*lead, INDEX_DIM), (FP8,))
    check_tensor("scales", scales, (*lead, 1), (torch.float32,))
    return torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scales)], dim=-1)


def unpack_index_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., 128) and scales (..., 1) of 132-byte uint8 rows; inverts `pack_index_rows` exactly."""
    check_tensor("rows", rows, (*rows.shape[:-1], INDEX_ROW_BYTES), (torch.uint8,))
    codes, scales = rows.contiguous().split((INDEX_DIM, 4), dim=-1)
    return codes.view(FP8), scales.view(torch.float32)


def quantize_index_rows(keys: torch.Tensor, *, power_of_two: bool = False) -> torch.Tensor:
    """Packed rows, uint8 (..., 132), of index keys (..., 128)."""
    check_tensor("keys", keys, (*keys.shape[:-1], INDEX_DIM), FLOATS)
    return pack_index_rows(*quantize_fp8(keys, INDEX_DIM, power_of_two=power_of_two))


def dequantize_index_rows(rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Index keys (..., 128) in `dtype` of packed 132-byte rows."""
    return dequantize_fp8(*unpack_index_rows(rows), dtype, INDEX_DIM)


def split_index_pages(pages: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of index pages, uint8 (N, page_tokens x 132): codes (N, page_tokens, 128) and scales (N, page_tokens).

    Writing to the views writes to the pages.
    """
    check_tensor("pages", pages, ("N", page_tokens * INDEX_ROW_BYTES), (torch.uint8,))
    if not pages.is_contiguous():
        raise ValueError(f"pages: expected contiguous memory, found strides {pages.stride()}")
    edge = page_tokens * INDEX_DIM
    return pages[:, :edge].view(FP8).unflatten(1, (page_tokens, INDEX_DIM)), pages[:, edge:].view(torch.float32)
