"""Small dense pieces of a decoder layer: normalisation, rotary embedding, gated activation."""

import torch
import torch.nn.functional as F

from profiler.ops.checks import FLOATS, INTEGERS, check_tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, unit_offset: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32, in the dtype of x.

    x (..., D), weight (D,). unit_offset multiplies by 1 + weight (the Gemma form).
    Raises ValueError when the widths disagree.
    """
    check_tensor("weight", weight, (x.shape[-1],), FLOATS)
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scale = weight.float() + 1.0 if unit_offset else weight.float()
    return (normal * scale).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Layer normalisation over the last dimension in fp32, in the dtype of x. x (..., D), weight and bias (D,)."""
    check_tensor("weight", weight, (x.shape[-1],), FLOATS)
    check_tensor("bias", bias, (x.shape[-1],), FLOATS)
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps).to(x.dtype)


def rotary_table(positions: torch.Tensor, rotary_dim: int, theta: float = 1e4) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions (T,), each (T, rotary_dim / 2) fp32; frequency i is theta^(-2i / rotary_dim)."""
    check_tensor("positions", positions, ("T",), INTEGERS)
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: expected a positive even number, found {rotary_dim}")
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float64) / rotary_dim
    angle = positions.double()[:, None] * theta**-exponent
    return angle.cos().float(), angle.sin().float()


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False, offset: int = 0
) -> torch.Tensor:
    """Rotate rotary_dim features of every head, starting at feature `offset`; the others pass through.

    x (T, H, D); cos and sin (T, rotary_dim / 2) as from `rotary_table`. interleaved pairs features (2i, 2i + 1) (MLA's
    query and key), otherwise (i, i + rotary_dim / 2) (NeoX; the indexer and GQA). Computed in fp32, in the dtype of x.
    """
    check_tensor("x", x, ("T", "H", "D"), FLOATS)
    half = cos.shape[-1]
    check_tensor("cos", cos, (x.shape[0], half), FLOATS)
    check_tensor("sin", sin, (x.shape[0], half), FLOATS)
    if offset < 0 or offset + 2 * half > x.shape[-1]:
        raise ValueError(f"offset: features {offset} .. {offset + 2 * half - 1} lie outside x of {tuple(x.shape)}")
    part = x[..., offset : offset + 2 * half].float()
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    c, s = cos.float()[:, None, :], sin.float()[:, None, :]
    rotated = (first * c - second * s, second * c + first * s)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    result = x.clone()
    result[..., offset : offset + 2 * half] = joined.to(x.dtype)
    return result


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of (..., 2I) with the gate in the first half, in fp32, returned as (..., I) in its dtype."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: expected an even width, found {tuple(gate_up.shape)}")
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def swiglu_clipped(gate_up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0, beta: float = 1.0) -> torch.Tensor:
    """The clipped gate of MiniMax-M3: (min(up, limit) clipped below at -limit, plus beta) * gate * sigmoid(alpha gate).

    gate_up (..., 2I), the gate in the first half and cut at `limit`; fp32 inside, (..., I) in the dtype of gate_up.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: expected an even width, found {tuple(gate_up.shape)}")
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + beta) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)
