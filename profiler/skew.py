"""Corrections for batches of unequal requests: fitted per kernel, judged on batches that the fit has not seen.

Decode requests of unequal lengths, four forms; the price of a step takes one of the two in the middle
(profiler.core.unequal), the one whose squared errors over the batches of the fit are smaller:

    mean      t(mean): the time follows the sum of the lengths
    mean_max  t(mean) + alpha (t(max) - t(mean)), alpha by the number of requests
    longest   the same with t(max) of few requests, where that is above t(mean)
    each      the mean over the requests of t(its keys): follows sums of a table that is not straight

where t(x) is the kernel's own table at that number of requests and x keys each. Kernels that read at most a cap of keys
get min(keys, cap). alpha is the least-squares value over the batches of the fit, each relative to its own time, and
between 0 and 1, since a batch takes no less than the mean and no more than all requests at the longest.

A prefill beside decode requests, and several prefills in a step, are compared with their parts:

    sum       all parts added
    once      added, less the fixed part of the launch for all but one (several prefills)
    together  once, but no part costs more than its share of a chunk as long as all of them (several prefills)
    overlap   the longest part, and beta times the rest; beta from every other batch, judged on those between
    beside    decodes, and the prefills by the kernel that runs them there (profiler.kernels._beside)

Several prefills are priced as once or together, a prefill beside decodes as sum or, where it is known, beside,
whichever has the smaller squared errors over the same other batches.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from profiler.core.batch_text import Batch, parse_batch
from profiler.core.bundle import Table
from profiler.core.errors import CoverageError
from profiler.core.grid import Grid, Outside, batch_rows, fixed_us
from profiler.core.launch import JointLaunch, Passes, Tiles
from profiler.core.skew_fit import SkewFit
from profiler.core.types import Category, ModelSpec
from profiler.core.unequal import Beside, Skew, Together, beyond_fixed_us, make_skew
from profiler.kernels._beside import beside_of
from profiler.kernels._components import ATTENTION_LIKE, categories_of
from profiler.kernels._placement import Ran, decode_lookup, prefill_lookup, steps_of
from profiler.kernels._unequal import launch_of, request_steps, tiles_of, together_of
from profiler.timing import percentile

_DIGITS: Final = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of skew.csv: the batch and microseconds of one call."""

    batch: Batch
    use: str
    time_us: float


Form = Callable[[Measured], float]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The tables that a kernel's batches are compared with; None where it has no such cells. cap_tokens 0 is no cap.
    fixed_us: of a launch with prefills (profiler.core.grid.fixed_us). together: None where its work is not known.
    longest_at: the smallest measured batch of each of its ways of working. beside: None where prefills beside decodes
    run as alone. tiles, launch: None where the tiles of several requests are not known."""

    prefill: Grid | None
    decode: Grid | None
    cap_tokens: int
    fixed_us: float = 0.0
    together: Together | None = None
    longest_at: tuple[int, ...] = ()
    beside: Beside | None = None
    tiles: Tiles | Passes | None = None
    launch: JointLaunch | None = None

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
    fixed = fixed_us(prefill, steps_of(spec, name)) if prefill else 0.0
    return Kernel(
        prefill,
        decode,
        cap,
        fixed_us=fixed,
        together=together_of(name, spec, ran),
        longest_at=_smallest(decode.xs, request_steps(name, ran)) if decode else (),
        beside=beside_of(rows, name, spec, ran, outside, together=True) if prefill and decode else None,
        tiles=tiles_of(name, spec, ran),
        launch=launch_of(name, ran, prefill, fixed) if prefill and decode else None,
    )


def _smallest(requests: Sequence[float], steps: Sequence[int]) -> tuple[int, ...]:
    """The smallest measured number of requests up to the first step, between each two, and behind the last."""
    ranges = zip((0, *steps), (*steps, math.inf), strict=True)
    found = (min((n for n in requests if low < n <= high), default=None) for low, high in ranges)
    return tuple(int(n) for n in found if n is not None)


def _fit_kernel(name: str, kernel: Kernel, batches: Sequence[Measured]) -> tuple[list[SkewFit], dict[str, Any]]:
    report: dict[str, Any] = {}
    fits: list[SkewFit] = []
    by_use: dict[str, list[Measured]] = defaultdict(list)
    for one in batches:
        by_use[one.use].append(one)
    if kernel.decode is not None and by_use["fit"]:
        fits, report["decode"] = _decode_report(name, kernel, by_use["fit"], by_use["held_out"])
    for use in ("joint", "prefills"):
        if by_use[use] and kernel.prefill is not None:
            report[use] = _parts_report(kernel, by_use[use])
    return fits, report


def _decode_report(
    name: str, kernel: Kernel, batches: Sequence[Measured], held_out: Sequence[Measured]
) -> tuple[list[SkewFit], dict[str, Any]]:
    """The corrections of the form that suits the kernel better, and how every form does on the batches held out."""
    found, forms = {}, {}
    for form, longest_at in (("mean_max", ()), ("longest", kernel.longest_at)):
        found[form] = _alphas(name, kernel, batches, longest_at)
        forms[form] = _decode_form(kernel, found[form], longest_at)
    chosen = _best(batches, forms, ("mean_max", "longest"))
    judged = _judge(
        held_out, {"mean": lambda one: _mean(kernel, one.batch), **forms, "each": lambda one: _each(kernel, one.batch)}
    )
    report = judged | {"fitted_on": sum(fit.batches for fit in found[chosen]), "form": chosen}
    if chosen == "longest":
        report["longest_at"] = list(kernel.longest_at)
    return found[chosen], report


def _decode_form(kernel: Kernel, fits: Sequence[SkewFit], longest_at: tuple[int, ...]) -> Form:
    skew = make_skew([(0, fit.decode_requests, fit.alpha) for fit in fits], longest_at)
    return lambda one: _decode_us(kernel, skew, one.batch)


def _decode_us(kernel: Kernel, skew: Skew | None, batch: Batch) -> float:
    assert kernel.decode is not None
    requests, keys = len(batch.decode_keys), kernel.keys(batch)
    mean = sum(keys) / requests
    return skew.decode_us(kernel.decode, requests, mean, max(keys)) if skew else kernel.at(requests, mean)


def _best(batches: Sequence[Measured], forms: Mapping[str, Form], names: Sequence[str]) -> str:
    """The form whose squared relative errors are the smallest over the batches that all of them can price; of equal
    ones the first."""
    squares = dict.fromkeys(names, 0.0)
    for one in batches:
        try:
            errors = {form: forms[form](one) / one.time_us - 1 for form in squares}
        except CoverageError:
            continue
        for form, error in errors.items():
            squares[form] += error * error
    return min(names, key=squares.__getitem__)


def _alphas(name: str, kernel: Kernel, batches: Sequence[Measured], longest_at: tuple[int, ...]) -> list[SkewFit]:
    """One alpha per number of requests, from the batches inside the kernel's table."""
    # What alpha multiplies is the price at alpha 1 less that at alpha 0.
    whole = make_skew([(0, 1, 1.0)], longest_at)
    sums: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for one in batches:
        try:
            mean, most = _mean(kernel, one.batch), _decode_us(kernel, whole, one.batch)
        except CoverageError:
            continue
        rise = (most - mean) / one.time_us
        sums[len(one.batch.decode_keys)].append((rise * (one.time_us - mean) / one.time_us, rise * rise))
    fits = []
    for requests, terms in sorted(sums.items()):
        square = sum(b for _, b in terms)
        alpha = min(1.0, max(0.0, sum(a for a, _ in terms) / square)) if square else 0.0
        fits.append(SkewFit(name, 0, requests, round(alpha, _DIGITS), len(terms)))
    return fits


def _mean(kernel: Kernel, batch: Batch) -> float:
    return _decode_us(kernel, None, batch)


def _each(kernel: Kernel, batch: Batch) -> float:
    keys = kernel.keys(batch)
    return sum(kernel.at(len(keys), one) for one in keys) / len(keys)


def _judge(batches: Sequence[Measured], forms: Mapping[str, Form]) -> dict[str, Any]:
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
        yield _mean(kernel, batch)


def _beside_us(kernel: Kernel, batch: Batch) -> float:
    assert kernel.beside is not None
    return _mean(kernel, batch) + kernel.beside.us(batch.prefills)


def _launch_us(kernel: Kernel, batch: Batch) -> float:
    assert kernel.launch is not None
    keys, decodes = kernel.keys(batch), _mean(kernel, batch)
    tiles = kernel.launch.us(decodes, len(keys), sum(keys) / len(keys), max(keys), batch.prefills)
    prefills = sum(_parts(kernel, batch)) - decodes
    return max(kernel.launch.added_us(decodes, prefills), tiles)


def _prefills_us(kernel: Kernel, batch: Batch, together: Together | Tiles | Passes | None) -> float:
    assert kernel.prefill is not None
    return kernel.fixed_us + beyond_fixed_us(kernel.prefill, kernel.fixed_us, together, batch.prefills)


def _overlap(kernel: Kernel, batch: Batch, beta: float) -> float:
    parts = list(_parts(kernel, batch))
    return max(parts) + beta * (sum(parts) - max(parts))


def _parts_report(kernel: Kernel, batches: Sequence[Measured]) -> dict[str, Any]:
    seen, unseen = batches[::2], batches[1::2]
    beta = _beta(kernel, seen)
    forms: dict[str, Form] = {
        "sum": lambda one: sum(_parts(kernel, one.batch)),
        "overlap": lambda one: _overlap(kernel, one.batch, beta),
    }
    if batches[0].use == "prefills":
        forms["once"] = lambda one: _prefills_us(kernel, one.batch, None)
        if kernel.together is not None:
            forms["together"] = lambda one: _prefills_us(kernel, one.batch, kernel.together)
        if kernel.tiles is not None:
            forms["tiles"] = lambda one: _prefills_us(kernel, one.batch, kernel.tiles)
        priced = [form for form in forms if form not in ("sum", "overlap")]
    else:
        if kernel.beside is not None:
            forms["beside"] = lambda one: _beside_us(kernel, one.batch)
        if kernel.launch is not None:
            forms["launch"] = lambda one: _launch_us(kernel, one.batch)
        priced = [form for form in forms if form != "overlap"]
    # Bundles name no form of prefills beside decodes that is the only one.
    chosen = {"form": _best(seen, forms, priced)} if len(priced) > 1 or "once" in forms else {}
    return _judge(unseen, forms) | {"beta": round(beta, _DIGITS), "fitted_on": len(seen)} | chosen


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
