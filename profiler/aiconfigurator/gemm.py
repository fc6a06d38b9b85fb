"""Matrix products: AIConfigurator's table over (m, n, k), read at the shapes of a model."""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from profiler.core.errors import CoverageError

if TYPE_CHECKING:
    import pandas as pd

COLUMNS: Final = ("gemm_dtype", "m", "n", "k", "latency")


class Products:
    """Microseconds of (m, k) x (k, n) for one weight format: bilinear in n and k between measured shapes.

    Tables are in milliseconds. Products run in tiles of their output, so columns beyond the table count as equal parts
    one after another; so do inner dimensions beyond it. Rows outside of a shape's own are not answered.
    """

    def __init__(self, frame: "pd.DataFrame", path: Path) -> None:
        self.path = path
        shapes: dict[tuple[int, int], dict[int, list[float]]] = {}
        columns = (frame[name].tolist() for name in ("m", "n", "k", "latency"))
        for m, n, k, latency in zip(*columns, strict=True):
            if latency > 0:
                shapes.setdefault((int(n), int(k)), {}).setdefault(int(m), []).append(float(latency) * 1e3)
        self.shapes = {
            shape: {m: sorted(times)[(len(times) - 1) // 2] for m, times in sorted(rows.items())}
            for shape, rows in shapes.items()
        }
        self.ns = sorted({n for n, _ in self.shapes})
        self.ks = sorted({k for _, k in self.shapes})

    def curve(self, n: int, k: int) -> dict[int, float]:
        """Microseconds by rows, for the rows that every measured shape around (n, k) has.

        Raises CoverageError for a shape smaller than the table's.
        """
        if n > self.ns[-1] or k > self.ks[-1]:
            parts_n, parts_k = -(-n // self.ns[-1]), -(-k // self.ks[-1])
            part = self.curve(-(-n // parts_n), -(-k // parts_k))
            return {m: us * parts_n * parts_k for m, us in part.items()}
        corners_n, corners_k = _around(self.ns, n), _around(self.ks, k)
        if not corners_n or not corners_k:
            raise CoverageError(
                f"{self.path}: no product with n {n} and k {k}; the table begins at n {self.ns[0]} and k {self.ks[0]}"
            )
        if missing := [(a, b) for a in corners_n for b in corners_k if (a, b) not in self.shapes]:
            raise CoverageError(f"{self.path}: no product with n {missing[0][0]} and k {missing[0][1]}")
        common = sorted(set.intersection(*(set(self.shapes[a, b]) for a in corners_n for b in corners_k)))
        return {m: self._at(m, n, k, corners_n, corners_k) for m in common}

    def _at(self, m: int, n: int, k: int, corners_n: Sequence[int], corners_k: Sequence[int]) -> float:
        by_n = [_line(corners_k, [self.shapes[a, b][m] for b in corners_k], k) for a in corners_n]
        return _line(corners_n, by_n, n)


def _around(values: Sequence[int], x: int) -> tuple[int, ...]:
    if not values[0] <= x <= values[-1]:
        return ()
    i = bisect_left(values, x)
    return (x,) if values[i] == x else (values[i - 1], values[i])


def _line(xs: Sequence[int], ts: Sequence[float], x: int) -> float:
    return ts[0] if len(xs) == 1 else ts[0] + (ts[1] - ts[0]) * (x - xs[0]) / (xs[1] - xs[0])
