"""Corrections for batches of unequal requests: fitted per kernel, judged on batches that the fit has not seen.

Decode requests of unequal lengths, three forms:

    mean      t(mean): the time follows the sum of the lengths
    mean_max  t(mean) + alpha (t(max) - t(mean)), alpha by the number of requests; the form of skew_fit.csv
    each      the mean over the requests of t(its keys): follows sums of a table that is not straight

where t(x) is the kernel's own table at that number of requests and x keys each. Kernels that read at most a cap of keys
get min(keys, cap). alpha is the least-squares value over the batches of the fit, each relative to its own time, and
between 0 and 1, since a batch takes no less than the mean and no more than all requests at the longest.

A prefill beside decode requests, and several prefills in a step, are compared with their parts:

    sum       all parts added
    once      added, less the fixed part of the launch for all but one (several prefills)
    overlap   the longest part, and beta times the rest; beta from every other batch, judged on those between
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from profiler.core.batch_text import Batch, parse_batch
from profiler.core.bundle import Table
from profiler.core.errors import CoverageError
from profiler.core.grid import Grid, Outside, batch_rows, fixed_us
from profiler.core.skew_fit import SkewFit
from profiler.core.types import Category, ModelSpec
from profiler.kernels._components import ATTENTION_LIKE, categories_of
from profiler.kernels._placement import Ran, decode_lookup, prefill_lookup, steps_of
from profiler.timing import percentile

_DIGITS: Final = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of skew.csv: the batch and microseconds of one call."""

    batch: Batch
    use: str
    time_us: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """The tables that a kernel's batches are compared with; None where it has no such cells. cap_tokens 0 is no cap.
    fixed_us: of a launch with prefills (profiler.core.grid.fixed_us)."""

    prefill: Grid | None
    decode: Grid | None
    cap_tokens: int
    fixed_us: float = 0.0

    def keys(self, batch: Batch) -> list[int]:
        return [min(keys, self.cap_tokens) if self.cap_tokens else keys for keys in batch.decode_keys]

    def at(self, requests: int, keys: float) -> float:
        assert self.decode is not None
        return self.decode.at(requests, keys)


@dataclass(frozen=True, slots=True)
class Fitted:
    """fits: the rows of skew_fit.csv. report: per kernel, errors of every form, as meta.yaml keeps them."""

    fits: tuple[SkewFit, ...]
    report: Mapping[str, Any]


def fit_skew(tables: Mapping[Category, Table], spec: ModelSpec, ran: Ran | None = None) -> Fitted:
    """Fits every kernel of the table "skew" against its own table; kernels are never pooled. ran: what ran them.

    Batches outside a kernel's table cannot be compared with it; their number is reported as `outside`.
    """
    by_kernel = _measured(tables["skew"])
    fits: list[SkewFit] = []
    report: dict[str, Any] = {}
    for name, batches in by_kernel.items():
        kernel = _kernel(tables, spec, name, ran)
        if kernel is None:
            continue
        own, found = _fit_kernel(name, kernel, batches)
        fits += own
        report[name] = found
    return Fitted(tuple(fits), report)


def _measured(table: Table) -> dict[str, list[Measured]]:
    columns = table.columns
    found: dict[str, list[Measured]] = defaultdict(list)
    for row, (name, prefills, decodes, use, time) in enumerate(
        zip(*(columns[c] for c in ("kernel", "prefills", "decodes", "use", "time_us")), strict=True), start=1
    ):
        batch = parse_batch(str(prefills), str(decodes), f"skew.csv row {row}")
        found[str(name)].append(Measured(batch, str(use), float(time)))
    return found


def _kernel(tables: Mapping[Category, Table], spec: ModelSpec, name: str, ran: Ran | None) -> Kernel | None:
    category = categories_of(spec).get(name)
    if category not in ATTENTION_LIKE or category not in tables:
        return None
    rows, outside = batch_rows(tables[category], name), Outside(name, "python -m profiler profile")
    cap = spec.indexer.attended_cap_tokens if spec.indexer and category == "sparse_attention" else 0
    prefills, decodes = any(row.chunk for row in rows), any(row.requests for row in rows)
    prefill = prefill_lookup(rows, name, spec, ran, outside) if prefills else None
    decode = decode_lookup(rows, name, ran, outside) if decodes else None
    return Kernel(prefill, decode, cap, fixed_us(prefill, steps_of(spec, name)) if prefill else 0.0)


def _fit_kernel(name: str, kernel: Kernel, batches: Sequence[Measured]) -> tuple[list[SkewFit], dict[str, Any]]:
    report: dict[str, Any] = {}
    fits: list[SkewFit] = []
    by_use: dict[str, list[Measured]] = defaultdict(list)
    for one in batches:
        by_use[one.use].append(one)
    if kernel.decode is not None and by_use["fit"]:
        fits, outside = _alphas(name, kernel, by_use["fit"])
        points = [(fit.decode_requests, fit.alpha) for fit in fits]
        forms: dict[str, Callable[[Measured], float]] = {
            "mean": lambda one: _mean_max(kernel, one.batch, 0.0),
            "mean_max": lambda one: _mean_max(kernel, one.batch, held(points, len(one.batch.decode_keys))),
            "each": lambda one: _each(kernel, one.batch),
        }
        report["decode"] = _judge(by_use["held_out"], forms) | {"fitted_on": len(by_use["fit"]) - outside}
    for use in ("joint", "prefills"):
        if by_use[use] and kernel.prefill is not None:
            report[use] = _parts_report(kernel, by_use[use])
    return fits, report


def _alphas(name: str, kernel: Kernel, batches: Sequence[Measured]) -> tuple[list[SkewFit], int]:
    """One alpha per number of requests, and how many batches lay outside the kernel's table."""
    sums: dict[int, list[tuple[float, float]]] = defaultdict(list)
    outside = 0
    for one in batches:
        requests, keys = len(one.batch.decode_keys), kernel.keys(one.batch)
        try:
            mean, most = kernel.at(requests, sum(keys) / requests), kernel.at(requests, max(keys))
        except CoverageError:
            outside += 1
            continue
        rise = (most - mean) / one.time_us
        sums[requests].append((rise * (one.time_us - mean) / one.time_us, rise * rise))
    fits = []
    for requests, terms in sorted(sums.items()):
        square = sum(b for _, b in terms)
        alpha = min(1.0, max(0.0, sum(a for a, _ in terms) / square)) if square else 0.0
        fits.append(SkewFit(name, 0, requests, round(alpha, _DIGITS), len(terms)))
    return fits, outside


def _mean_max(kernel: Kernel, batch: Batch, alpha: float) -> float:
    requests, keys = len(batch.decode_keys), kernel.keys(batch)
    mean = kernel.at(requests, sum(keys) / requests)
    return mean + alpha * (kernel.at(requests, max(keys)) - mean) if alpha else mean


def _each(kernel: Kernel, batch: Batch) -> float:
    keys = kernel.keys(batch)
    return sum(kernel.at(len(keys), one) for one in keys) / len(keys)


def held(points: Sequence[tuple[int, float]], x: float) -> float:
    """Linear between the points, constant beyond the first and the last; 0 without points."""
    if not points:
        return 0.0
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 if x <= x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[0][1] if x <= points[0][0] else points[-1][1]


def _judge(batches: Sequence[Measured], forms: Mapping[str, Callable[[Measured], float]]) -> dict[str, Any]:
    """p50, p90 and p99 of each form's relative error over the batches inside the table."""
    errors: dict[str, list[float]] = {form: [] for form in forms}
    outside = 0
    for one in batches:
        try:
            predicted = {form: price(one) for form, price in forms.items()}
        except CoverageError:
            outside += 1
            continue
        for form, value in predicted.items():
            errors[form].append(abs(value - one.time_us) / one.time_us)
    return {"batches": len(batches) - outside, "outside": outside} | {
        form: {f"p{q}": round(percentile(found, q), _DIGITS) for q in (50, 90, 99)}
        for form, found in errors.items()
        if found
    }


def _parts(kernel: Kernel, batch: Batch) -> Iterator[float]:
    assert kernel.prefill is not None
    for chunk, context in batch.prefills:
        yield kernel.prefill.at(chunk, context)
    # A kernel without decode cells leaves decode rows to another.
    if batch.decode_keys and kernel.decode is not None:
        keys = kernel.keys(batch)
        yield kernel.at(len(keys), sum(keys) / len(keys))


def _once(kernel: Kernel, batch: Batch) -> float:
    fixed = kernel.fixed_us
    return fixed + sum(max(0.0, part - fixed) for part in _parts(kernel, batch))


def _overlap(kernel: Kernel, batch: Batch, beta: float) -> float:
    parts = list(_parts(kernel, batch))
    return max(parts) + beta * (sum(parts) - max(parts))


def _parts_report(kernel: Kernel, batches: Sequence[Measured]) -> dict[str, Any]:
    beta = _beta(kernel, batches[::2])
    forms: dict[str, Callable[[Measured], float]] = {
        "sum": lambda one: sum(_parts(kernel, one.batch)),
        "overlap": lambda one: _overlap(kernel, one.batch, beta),
    }
    if batches[0].use == "prefills":
        forms["once"] = lambda one: _once(kernel, one.batch)
    judged = _judge(batches[1::2], forms)
    return judged | {"beta": round(beta, _DIGITS), "fitted_on": len(batches[::2])}


def _beta(kernel: Kernel, batches: Sequence[Measured]) -> float:
    """Least squares of time = longest part + beta x rest, each batch relative to its own time, 0 to 1."""
    above = square = 0.0
    for one in batches:
        try:
            parts = list(_parts(kernel, one.batch))
        except CoverageError:
            continue
        rest = (sum(parts) - max(parts)) / one.time_us
        above += rest * (one.time_us - max(parts)) / one.time_us
        square += rest * rest
    return min(1.0, max(0.0, above / square)) if square else 1.0
