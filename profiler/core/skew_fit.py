"""`tp<N>/skew_fit.csv`: per kernel, how a decode batch of unequal lengths differs from an equal one.

    time = t(mean) + alpha (t(max) - t(mean))

t(x) is the kernel's own table at the batch's number of requests and x keys each, mean and max those of the batch.
alpha 0: the time follows the sum of the lengths; alpha 1: it follows the longest request.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

from profiler.core.errors import ConfigError
from profiler.core.load import read_text

FILE: Final = "skew_fit.csv"


@dataclass(frozen=True, slots=True)
class SkewFit:
    """alpha of one kernel for batches of `decode_requests`, beside a prefill chunk or alone (0 tokens).

    batches: measured batches behind it.
    """

    kernel: str
    prefill_chunk_tokens: int
    decode_requests: int
    alpha: float
    batches: int


COLUMNS: Final = tuple(field.name for field in fields(SkewFit))


def fit_text(fits: Iterable[SkewFit]) -> str:
    """The CSV form, sorted; equal fits give equal bytes."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(sorted(astuple(fit) for fit in fits))
    return stream.getvalue()


def read_fits(path: Path) -> tuple[SkewFit, ...]:
    """Raises ConfigError naming file and line when it is malformed."""
    lines = csv.reader(io.StringIO(read_text(path)))
    header = tuple(next(lines, []))
    if header != COLUMNS:
        raise ConfigError(f"{path}:1: the header is {','.join(header)}; it must be {','.join(COLUMNS)}")
    found: dict[tuple[str, int, int], SkewFit] = {}
    for row in lines:
        at = f"{path}:{lines.line_num}"
        try:
            kernel, chunk, requests, alpha, batches = row
            fit = SkewFit(kernel, int(chunk), int(requests), float(alpha), int(batches))
        except ValueError:
            raise ConfigError(f"{at}: not a fit: {','.join(row)!r}; the columns are {','.join(COLUMNS)}") from None
        if not kernel or fit.prefill_chunk_tokens < 0 or fit.decode_requests < 1 or not math.isfinite(fit.alpha):
            raise ConfigError(f"{at}: a kernel, a chunk of at least 0, a request and a finite alpha are needed")
        key = (fit.kernel, fit.prefill_chunk_tokens, fit.decode_requests)
        if key in found:
            raise ConfigError(f"{at}: {', '.join(map(str, key))} appears twice")
        found[key] = fit
    return tuple(found.values())


def by_kernel(
    fits: Mapping[int, Sequence[SkewFit]],
) -> dict[tuple[int, str], tuple[tuple[int, int, float], ...]]:
    """(tp, kernel) -> (prefill_chunk_tokens, decode_requests, alpha) points, as `Bundle.skew` has them."""
    points: dict[tuple[int, str], list[tuple[int, int, float]]] = {}
    for tp, own in fits.items():
        for fit in own:
            point = (fit.prefill_chunk_tokens, fit.decode_requests, fit.alpha)
            points.setdefault((tp, fit.kernel), []).append(point)
    return {key: tuple(sorted(found)) for key, found in points.items()}
