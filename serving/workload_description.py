"""Workload descriptions: what a trace looks like, without its rows. Fitted from a trace, or written by hand.

    kind: workload
    version: 1
    arrivals: {process: gamma, rate_per_s: 2.5, burstiness: 0.6, diurnal: {period_s: 86400, weights: [1, 2, ...]}}
    lengths: {form: empirical, bins: [{share, prompt_tokens: [low, ...], output_tokens: [low, ...]}, ...]}
             {form: lognormal, prompt_tokens: {mean, sigma, min, max}, output_tokens: {...}, correlation: 0.2}
    prefixes: {count: 8, tokens: 1024, share: 0.7}             optional
    sessions: {calls: [...], added_tokens: [...], think_ms: [...]}   optional; lists are quantiles from 0 to 100 %

A bin holds an equal share of the prompts, in order of length, at least 50 of them where it is fitted; its lists are
quantiles from 0 to 100 %, rounded to two significant digits. No row, identifier or content of the trace is kept.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from profiler.core.errors import ConfigError
from profiler.core.load import read_mapping
from profiler.core.units import NS_PER_MS, NS_PER_S
from serving.config import Positive, Strict, validated
from serving.trace_tools.generate import Plan, Prefixes, Sessions, generated
from serving.traces import TraceRequest
from serving.traces._arrivals import Arrivals

LONGEST_TOKENS: Final = 1 << 24
_PROMPT_BINS: Final = 20
_POINTS: Final = 11
_BIN_ROWS: Final = 50
_PREFIX_BLOCK_TOKENS: Final = 64
_MOST_DRAWS: Final = 10_000

_Tokens = Annotated[int, Field(ge=1, le=LONGEST_TOKENS)]
_Millis = Annotated[int, Field(ge=0, le=10**10)]
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Quantiles = Annotated[list[_Tokens], Field(min_length=2)]


class DiurnalFile(Strict):
    """weights: relative rates of the equal parts of one period; their mean is the mean rate."""

    period_s: Positive
    weights: Annotated[list[_Weight], Field(min_length=2)]


class ArrivalsFile(Strict):
    process: Literal["poisson", "gamma", "constant"]
    rate_per_s: Positive
    burstiness: Positive | None = None
    diurnal: DiurnalFile | None = None


class BinFile(Strict):
    share: Annotated[float, Field(gt=0, le=1)]
    prompt_tokens: _Quantiles
    output_tokens: _Quantiles


class LognormalFile(Strict):
    """mean of the distribution itself, sigma of its logarithm; drawn again until within min and max."""

    mean: Positive
    sigma: Annotated[float, Field(gt=0, le=10)]
    min: _Tokens = 1
    max: _Tokens = LONGEST_TOKENS


class LengthsFile(Strict):
    form: Literal["empirical", "lognormal"]
    bins: Annotated[list[BinFile], Field(min_length=1)] | None = None
    prompt_tokens: LognormalFile | None = None
    output_tokens: LognormalFile | None = None
    correlation: Annotated[float, Field(gt=-1, lt=1)] = 0.0


class PrefixesFile(Strict):
    count: Annotated[int, Field(ge=1)]
    tokens: _Tokens
    share: Annotated[float, Field(gt=0, le=1)]


class SessionsFile(Strict):
    calls: _Quantiles
    added_tokens: _Quantiles
    think_ms: Annotated[list[_Millis], Field(min_length=2)]
    max_prompt_tokens: _Tokens | None = None


class DescriptionFile(Strict):
    kind: Literal["workload"]
    version: Literal[1]
    arrivals: ArrivalsFile
    lengths: LengthsFile
    prefixes: PrefixesFile | None = None
    sessions: SessionsFile | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Description:
    """A checked description; `file` is its content."""

    file: DescriptionFile

    @property
    def rate_per_s(self) -> float:
        return self.file.arrivals.rate_per_s


def is_description(path: Path) -> bool:
    """Whether a file is meant as a description: YAML, or JSON whose name says so."""
    return path.suffix in (".yaml", ".yml")


def read_description(path: Path) -> Description:
    """Raises ConfigError naming file and key for anything missing, unknown, out of range or contradicting."""
    file = validated(DescriptionFile, read_mapping(path), path)
    _check(file, str(path))
    return Description(file)


def _check(file: DescriptionFile, where: str) -> None:
    arrivals, lengths = file.arrivals, file.lengths
    if (arrivals.process == "gamma") != (arrivals.burstiness is not None):
        raise ConfigError(f"{where}: arrivals.burstiness goes with process gamma and with no other")
    if arrivals.diurnal and not sum(arrivals.diurnal.weights) > 0:
        raise ConfigError(f"{where}: arrivals.diurnal.weights are all 0")
    if lengths.form == "empirical" and (lengths.bins is None or lengths.prompt_tokens or lengths.output_tokens):
        raise ConfigError(f"{where}: lengths of the form empirical have bins, and no prompt_tokens or output_tokens")
    if lengths.form == "lognormal" and (lengths.bins or not lengths.prompt_tokens or not lengths.output_tokens):
        raise ConfigError(f"{where}: lengths of the form lognormal have prompt_tokens and output_tokens, and no bins")
    for number, one in enumerate(lengths.bins or ()):
        for name in ("prompt_tokens", "output_tokens"):
            if (values := getattr(one, name)) != sorted(values):
                raise ConfigError(f"{where}: lengths.bins[{number}].{name} must be in ascending order")
    if lengths.bins and not math.isclose(sum(one.share for one in lengths.bins), 1.0, abs_tol=1e-3):
        raise ConfigError(f"{where}: the shares of lengths.bins must sum to 1")
    for name, spread in (("prompt_tokens", lengths.prompt_tokens), ("output_tokens", lengths.output_tokens)):
        if spread and spread.min > spread.max:
            raise ConfigError(f"{where}: lengths.{name}: min {spread.min} is above max {spread.max}")
    if file.prefixes and file.prefixes.tokens % _PREFIX_BLOCK_TOKENS:
        raise ConfigError(f"{where}: prefixes.tokens must be a multiple of {_PREFIX_BLOCK_TOKENS}")


def requests_of(
    description: Description, rows: int, seed: int, rate_per_s: float | None = None
) -> Iterator[TraceRequest]:
    """Seeded requests of a description: `rows` of them, or `rows` sessions. Equal arguments give equal requests.

    rate_per_s replaces the description's mean rate. Raises ConfigError for a lognormal that misses its bounds.
    """
    file = description.file
    arrivals = Arrivals(
        file.arrivals.process, rate_per_s or file.arrivals.rate_per_s, seed, file.arrivals.burstiness or 1.0
    )
    lengths = list(islice(_lengths(file.lengths, random.Random(f"lengths {seed}")), rows))
    sessions = None
    if file.sessions:
        sessions = Sessions(
            lambda draw: _drawn(file.sessions.calls, draw),  # type: ignore[union-attr]
            lambda draw: _drawn(file.sessions.added_tokens, draw),  # type: ignore[union-attr]
            lambda draw: _drawn(file.sessions.think_ms, draw),  # type: ignore[union-attr]
            file.sessions.max_prompt_tokens,
        )
    prefixes = Prefixes(file.prefixes.count, file.prefixes.tokens, file.prefixes.share) if file.prefixes else None
    plan = Plan(
        rows, arrivals, lengths=lengths, in_order=True, prefixes=prefixes, sessions=sessions,
        block_tokens=_PREFIX_BLOCK_TOKENS, seed=seed,
    )  # fmt: skip
    if file.arrivals.diurnal is None:
        yield from generated(plan)
        return
    warp = _warp(file.arrivals.diurnal)
    for request in generated(plan):
        yield replace(request, arrival_ns=round(warp(request.arrival_ns / NS_PER_S) * NS_PER_S))


def _lengths(lengths: LengthsFile, draw: random.Random) -> Iterator[tuple[int, int]]:
    if lengths.bins is not None:
        shares = [one.share for one in lengths.bins]
        while True:
            (one,) = draw.choices(lengths.bins, shares)
            yield _drawn(one.prompt_tokens, draw), _drawn(one.output_tokens, draw)
    assert lengths.prompt_tokens is not None and lengths.output_tokens is not None
    rho = lengths.correlation
    while True:
        for _ in range(_MOST_DRAWS):
            first = draw.gauss(0.0, 1.0)
            second = rho * first + math.sqrt(1 - rho * rho) * draw.gauss(0.0, 1.0)
            pair = _lognormal(lengths.prompt_tokens, first), _lognormal(lengths.output_tokens, second)
            if _within(lengths.prompt_tokens, pair[0]) and _within(lengths.output_tokens, pair[1]):
                break
        else:
            raise ConfigError("the lognormal lengths do not reach the range of min and max")
        yield pair


def _lognormal(spread: LognormalFile, normal: float) -> int:
    return round(math.exp(math.log(spread.mean) - spread.sigma**2 / 2 + spread.sigma * normal))


def _within(spread: LognormalFile, value: int) -> bool:
    return spread.min <= value <= spread.max


def _drawn(quantiles: Sequence[int], draw: random.Random) -> int:
    """A draw from the distribution that is linear between equally spaced quantiles."""
    at = draw.random() * (len(quantiles) - 1)
    below = int(at)
    return round(quantiles[below] + (quantiles[below + 1] - quantiles[below]) * (at - below))


def _warp(diurnal: DiurnalFile) -> Any:
    """Time at a constant rate -> time at the varying rate: the inverse of the cumulated relative rate."""
    parts = len(diurnal.weights)
    width_s, mean = diurnal.period_s / parts, sum(diurnal.weights) / parts
    edges = [0.0]
    for weight in diurnal.weights:
        edges.append(edges[-1] + weight / mean * width_s)

    def warped(even_s: float) -> float:
        periods, rest = divmod(even_s, diurnal.period_s)
        part = max(index for index in range(parts) if edges[index] <= rest and diurnal.weights[index] > 0)
        inside = (rest - edges[part]) / (edges[part + 1] - edges[part])
        return float(periods * diurnal.period_s + (part + min(inside, 1.0)) * width_s)

    return warped


def fit(
    requests: Iterable[TraceRequest], *, form: Literal["empirical", "lognormal"] = "empirical", parts: int = 0
) -> dict[str, Any]:
    """The description of a trace, ready to be written as YAML.

    form: of the lengths. parts: of a diurnal profile over the trace's span, 0 for none. Arrivals: gamma whose shape
    is 1 / (squared coefficient of variation of the gaps), or Poisson where that lies within 0.95 to 1.05. Raises
    ConfigError for fewer than 20 requests or sessions, or where all arrive at once.
    """
    rows = list(requests)
    calls: dict[str, list[TraceRequest]] = defaultdict(list)
    for row in rows:
        if row.call_index is not None and row.session_id is not None:
            calls[row.session_id].append(row)
    first = [row for row in rows if not row.call_index]
    if len(first) < 20:
        raise ConfigError(f"a description needs at least 20 requests or sessions to be fitted from, found {len(first)}")
    prefixes, own = ({}, [row.prompt_tokens for row in first]) if calls else _fit_prefixes(first)
    pairs = [(tokens, row.output_tokens) for tokens, row in zip(own, first, strict=True)]
    described: dict[str, Any] = {"kind": "workload", "version": 1, "arrivals": _fit_arrivals(first, parts)}
    described["lengths"] = _fit_empirical(pairs) if form == "empirical" else _fit_lognormal(pairs)
    if prefixes:
        described["prefixes"] = prefixes
    if calls:
        described["sessions"] = _fit_sessions(list(calls.values()))
    return described


def _fit_arrivals(rows: Sequence[TraceRequest], parts: int) -> dict[str, Any]:
    times_s = [row.arrival_ns / NS_PER_S for row in rows]
    span_s = times_s[-1] - times_s[0]
    if span_s <= 0:
        raise ConfigError("all requests arrive at one time: there is no rate to fit")
    rate = (len(rows) - 1) / span_s
    diurnal: dict[str, Any] = {}
    if parts:
        if not 2 <= parts <= len(rows) // 10:
            raise ConfigError(f"a profile of {parts} parts needs at least 10 requests a part: 2 to {len(rows) // 10}")
        filled = Counter(min(int((at - times_s[0]) / span_s * parts), parts - 1) for at in times_s)
        weights = [filled[part] * parts / len(rows) for part in range(parts)]
        diurnal = {"diurnal": {"period_s": _digits(span_s, 3), "weights": [_digits(one, 2) for one in weights]}}
        times_s = _even(times_s, span_s, weights)
    gaps = [after - before for before, after in pairwise(times_s)]
    mean = sum(gaps) / len(gaps)
    variation = sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
    found: dict[str, Any] = {"process": "constant", "rate_per_s": _digits(rate, 4)}
    if 0.95 <= variation <= 1.05:
        found["process"] = "poisson"
    elif variation > 1e-4:
        found |= {"process": "gamma", "burstiness": _digits(min(max(1 / variation, 1e-3), 1e6), 3)}
    return found | diurnal


def _even(times_s: Sequence[float], span_s: float, weights: Sequence[float]) -> list[float]:
    """Arrivals with the profile taken out, so that its swing does not count as burstiness."""
    width_s = span_s / len(weights)
    even = []
    for at in times_s:
        part = min(int((at - times_s[0]) / width_s), len(weights) - 1)
        even.append(width_s * (sum(weights[:part]) + weights[part] * ((at - times_s[0]) / width_s - part)))
    return even


def _fit_prefixes(rows: Sequence[TraceRequest]) -> tuple[dict[str, Any], list[int]]:
    """Shared prefixes, told by hash blocks, and what each prompt has beyond the shared part.

    Requests are grouped by their first block; a group shares what all its members begin with. The description has
    one length for all: the mean over the members, to whole blocks of 64 tokens.
    """
    own = [row.prompt_tokens for row in rows]
    groups: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        if row.prefix and row.prefix.ids:
            groups[row.prefix.ids[0]].append(place)
    shared_tokens: dict[int, int] = {}
    for places in groups.values():
        if len(places) > 1:
            found = [rows[place].prefix for place in places]
            ids = [one.ids for one in found if one]
            same = next(
                (i for i, several in enumerate(zip(*ids, strict=False)) if len(set(several)) > 1), min(map(len, ids))
            )
            block = next(one.block_tokens for one in found if one)
            shared_tokens |= {place: min(same * block, own[place] - 1) for place in places}
    several = sum(len(places) > 1 for places in groups.values())
    mean = sum(shared_tokens.values()) / len(shared_tokens) if shared_tokens else 0.0
    tokens = round(mean / _PREFIX_BLOCK_TOKENS) * _PREFIX_BLOCK_TOKENS
    if not tokens:
        return {}, own
    described = {"count": several, "tokens": tokens, "share": _digits(len(shared_tokens) / len(rows), 3)}
    return described, [max(1, value - shared_tokens.get(place, 0)) for place, value in enumerate(own)]


def _fit_empirical(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    ordered = sorted(pairs)
    bins = min(_PROMPT_BINS, max(1, len(ordered) // _BIN_ROWS))
    edges = [len(ordered) * number // bins for number in range(bins + 1)]
    found = []
    for low, high in pairwise(edges):
        part = ordered[low:high]
        prompts = [prompt for prompt, _ in part]
        found.append(
            {
                "share": _digits(len(part) / len(ordered), 6),
                "prompt_tokens": _quantiles(prompts, _POINTS),
                "output_tokens": _quantiles([output for _, output in part], _POINTS),
            }
        )
    return {"form": "empirical", "bins": found}


def _fit_lognormal(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Mean and variance of the logarithms, and the correlation between them."""
    logs = [[math.log(value) for value in column] for column in zip(*pairs, strict=True)]
    means = [sum(one) / len(one) for one in logs]
    sigmas = [math.sqrt(sum((x - m) ** 2 for x in one) / len(one)) for one, m in zip(logs, means, strict=True)]
    spread: dict[str, Any] = {"form": "lognormal"}
    for name, column, mean, sigma in zip(
        ("prompt_tokens", "output_tokens"), zip(*pairs, strict=True), means, sigmas, strict=True
    ):
        if sigma < 1e-6:
            raise ConfigError(f"{name}: all are {column[0]}; a lognormal does not describe one value, use empirical")
        spread[name] = {
            "mean": _digits(math.exp(mean + sigma**2 / 2), 4),
            "sigma": _digits(sigma, 4),
            "min": _down(min(column)),
            "max": _up(max(column)),
        }
    product = sum((x - means[0]) * (y - means[1]) for x, y in zip(*logs, strict=True)) / len(pairs)
    spread["correlation"] = round(max(-0.99, min(0.99, product / (sigmas[0] * sigmas[1]))), 3)
    return spread


def _fit_sessions(sessions: Sequence[Sequence[TraceRequest]]) -> dict[str, Any]:
    added, think_ms = [], []
    for calls in sessions:
        for before, after in pairwise(calls):
            added.append(max(1, after.prompt_tokens - before.prompt_tokens - before.output_tokens))
            think_ms.append(after.tool_duration_ns // NS_PER_MS)
    if not added:
        raise ConfigError("every session has one call: give one line per request instead")
    return {
        "calls": _quantiles([len(calls) for calls in sessions], _POINTS),
        "added_tokens": _quantiles(added, _POINTS),
        "think_ms": _quantiles(think_ms, _POINTS),
    }


def _quantiles(values: Sequence[int], points: int) -> list[int]:
    ascending = sorted(values)
    places = [round((len(ascending) - 1) * point / (points - 1)) for point in range(points)]
    return [round(_digits(ascending[place], 2)) for place in places]


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _down(value: int) -> int:
    size = int(10 ** max(0, len(str(value)) - 2))
    return max(1, value // size * size)


def _up(value: int) -> int:
    size = int(10 ** max(0, len(str(value)) - 2))
    return -(-value // size) * size
