"""How much longer a batch of unequal lengths takes than one of equal lengths with the same keys."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Skew:
    """alpha of time = t(mean) + alpha (t(max) - t(mean)), for decode batches alone and beside a prefill chunk.

    Linear between the measured shapes and constant beyond them: it is a correction of a few per cent, and the shapes
    themselves are bounded by the kernel's table.
    """

    requests: tuple[float, ...]
    alphas: tuple[float, ...]
    chunks: tuple[float, ...]
    rows: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]

    def decode(self, requests: float) -> float:
        return _held(self.requests, self.alphas, requests)

    def mixed(self, chunk: float, requests: float) -> float:
        return _held(self.chunks, [_held(*row, requests) for row in self.rows], chunk)


def _held(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    i = bisect_left(xs, x)
    if i == 0:
        return ys[0] if ys else 0.0
    if i == len(xs):
        return ys[-1]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


def make_skew(points: Iterable[tuple[int, int, float]]) -> Skew | None:
    """From (prefill_chunk_tokens, decode_requests, alpha) points; None without points."""
    rows: dict[int, list[tuple[int, float]]] = {}
    for chunk, requests, alpha in sorted(points):
        rows.setdefault(chunk, []).append((requests, alpha))
    if not rows:
        return None
    alone = rows.pop(0, [])
    return Skew(
        requests=tuple(n for n, _ in alone),
        alphas=tuple(alpha for _, alpha in alone),
        chunks=tuple(rows),
        rows=tuple((tuple(n for n, _ in row), tuple(alpha for _, alpha in row)) for row in rows.values()),
    )
