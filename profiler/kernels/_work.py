"""Arithmetic and traffic of one call, for the roofline check of a measured cell."""

from dataclasses import dataclass
from typing import Final

# Bytes per parameter of each weight format, block scales left out.
WEIGHT_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "nvfp4": 0.5}


@dataclass(frozen=True, slots=True)
class Work:
    """Least work of a cell: a multiply-add counts as two operations; every byte is read or written once.

    flops counts matrix products only (elementwise operations are bounded by their bytes).
    weight_bytes are parameters; activation_bytes everything else that must move, caches included.
    """

    flops: float
    weight_bytes: float
    activation_bytes: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes


def gemm(rows: int, k: int, n: int, weight_element_bytes: float, batch: int = 1) -> Work:
    """`batch` products of (rows, k) with (k, n); activations take two bytes per element."""
    return Work(2.0 * batch * rows * k * n, batch * k * n * weight_element_bytes, 2.0 * batch * rows * (k + n))


def elementwise(elements: float) -> Work:
    """Elements read plus elements written, two bytes each."""
    return Work(0.0, 0.0, 2.0 * elements)


def query_key_pairs(key: tuple[int, ...], cap_tokens: int | None = None) -> float:
    """(query, key) pairs of an attention-like cell under the causal mask.

    key: (prefill_chunk_tokens, prefill_context_tokens, decode_requests, decode_kv_tokens, decode_query_tokens). Query i
    (0-based) of a chunk sees context + i + 1 keys; query j of q decode tokens sees kv - (q - 1 - j). With a cap each
    query counts min(seen, cap).
    """
    chunk, context, requests, kv, query = key
    pairs = _ramp(context + 1, context + chunk, cap_tokens) if chunk else 0.0
    if requests:
        pairs += requests * _ramp(kv - query + 1, kv, cap_tokens)
    return pairs


def _ramp(first: int, last: int, cap: int | None) -> float:
    """Sum of min(x, cap) for x from first to last, both included."""
    if cap is None or last <= cap:
        return (first + last) * (last - first + 1) / 2.0
    if first >= cap:
        return float(cap) * (last - first + 1)
    return (first + cap) * (cap - first + 1) / 2.0 + float(cap) * (last - cap)


def key_rows(key: tuple[int, ...]) -> int:
    """Cached rows that the requests of a cell hold: context and chunk of a prefill, kv of each decode request."""
    chunk, context, requests, kv, _ = key
    return (context + chunk if chunk else 0) + requests * kv


def queries(key: tuple[int, ...]) -> int:
    """Query tokens of an attention-like cell."""
    return key[0] + key[2] * key[4]
