"""How many GPUs a load needs: the highest rate of each layout within an SLO, and the fewest instances for a rate."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from profiler import __version__
from profiler.core.errors import ConfigError, SparsightError
from profiler.core.load import atomic_write, sha256_of
from serving.pricing import Prices, cost_columns
from serving.report.figures import label, pareto
from serving.sweeps.executor import run_local
from serving.sweeps.intervals import mean_and_halfwidth
from serving.sweeps.measure import measured
from serving.sweeps.points import Candidate, Job, Refused, jobs, layouts, memory_columns
from serving.sweeps.refusal import nothing_ran
from serving.sweeps.results import ANSWER, Journal, disk_error, write_table
from serving.sweeps.run import asked_of, bundle_digests, default_workers, projections, refused_row
from serving.sweeps.search import Search, searched
from serving.sweeps.spec import Sweep
from serving.sweeps.split import split_ratio
from serving.sweeps.traffic import open_traffic

MOST_CHECKED_REQUESTS: Final = 5000


@dataclass(frozen=True, slots=True)
class Limit:
    """The highest rate of a layout over the seeds: mean and half the width of the 95 % interval (None: one seed).

    planned_per_s: what sizing counts on, the lower end of the interval but no less than half the rate of the lowest
    seed, or the mean of one seed. row: of the first
    seed, label: of the layout. saturated: some seed reached the rate above which queues grow without end.
    """

    candidate: Candidate
    mean_per_s: float
    halfwidth_per_s: float | None
    planned_per_s: float
    row: Mapping[str, Any]
    saturated: bool
    label: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """Instances of a layout for a rate, from the limits; load: share of the planned rate that each carries."""

    limit: Limit
    instances: int
    gpus: int
    load: float


@dataclass(frozen=True, slots=True)
class Sized:
    """verdict: sentences, the answer first. met: some layout keeps the SLO. rows: of results.csv."""

    verdict: tuple[str, ...]
    met: bool
    rows: tuple[Mapping[str, Any], ...]


def size(
    sweep: Sweep,
    folder: Path,
    *,
    rate_per_s: float | None = None,
    tolerance: float = 0.03,
    workers: int | None = None,
    prices: Prices | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Sized:
    """Search every layout and seed of `sweep` (its rates are unused), then size `rate_per_s` where it is given.

    Results go to `folder` as those of a sweep, with size.json beside them; an interrupted search goes on. Raises
    ConfigError for bad input, the error of the refusals when no layout may run, SparsightError when the disk is full.
    """
    if sweep.slo is None or sweep.workload is None:
        raise ConfigError("a size needs a workload and an SLO")
    if sweep.concurrencies:
        raise ConfigError("a size searches rates; concurrencies are for a sweep")
    if rate_per_s is not None and not (rate_per_s > 0 and math.isfinite(rate_per_s)):
        raise ConfigError(f"rate is {rate_per_s}; it must be above 0")
    if not 0.001 <= tolerance <= 0.5:
        raise ConfigError(f"tolerance is {tolerance}; it must be between 0.001 and 0.5")
    open_traffic(sweep.workload).at(None, sweep.seeds[0], sweep.requests)
    judged = list(layouts(sweep))
    candidates = {one.layout: one for one in judged if isinstance(one, Candidate)}
    if not candidates:
        error = nothing_ran([refused_row(one) for one in judged if isinstance(one, Refused)])
        assert error is not None
        raise error
    with Journal(folder, _header(sweep, rate_per_s, tolerance)) as journal:
        refused = {f"layout {n}": one for n, one in enumerate(judged) if isinstance(one, Refused)}
        journal.add_all(
            {key: {"row": refused_row(one), "detail": {}} for key, one in refused.items() if key not in journal.done}
        )
        found = _search_all(
            sweep, list(candidates.values()), tolerance, journal, workers or default_workers(), progress
        )
        limits, nearest = _limits(candidates, found)
        checked = _checked_need(sweep, limits, rate_per_s, journal)
        rows = tuple(point["row"] for point in journal.done.values())
    if prices is not None:
        rows = tuple(row | cost_columns(row, prices) for row in rows)
    answer = _answer(sweep, limits, nearest, checked, rate_per_s, rows)
    try:
        with atomic_write(folder / ANSWER) as stream:
            json.dump(answer, stream, indent=2, allow_nan=False)
            stream.write("\n")
    except OSError as error:
        raise disk_error(folder, error, len(rows)) from None
    write_table(folder, rows, "csv")
    return Sized(tuple(answer["verdict"]), bool(limits), rows)


def _header(sweep: Sweep, rate_per_s: float | None, tolerance: float) -> dict[str, Any]:
    assert sweep.workload is not None
    asked = asked_of(sweep) | {"rates_per_s": [] if rate_per_s is None else [rate_per_s]}
    return {
        "made_by": f"sparsight {__version__}",
        "command": "size",
        "sweep": asked | {"tolerance": tolerance},
        "workload_sha256": sha256_of(sweep.workload),
        "bundles": bundle_digests(sweep.bundle_root, sweep.hardware, sweep.models),
        "projections": projections(sweep.bundle_root, sweep.hardware, sweep.models),
    }


def _search_all(
    sweep: Sweep,
    candidates: list[Candidate],
    tolerance: float,
    journal: Journal,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> list[Mapping[str, Any]]:
    """Rows of the searches: the first seed of every layout, then the others near what it found."""
    found: list[Mapping[str, Any]] = []
    memory = {one.layout: memory_columns(one.placement) for one in candidates}
    around: dict[Any, float] = {}
    total, done = len(candidates) * len(sweep.seeds), 0
    for seeds in (sweep.seeds[:1], sweep.seeds[1:]):
        templates = jobs(replace(sweep, rates_per_s=(0.0,), seeds=seeds, replicas=(1,)), candidates)
        searches = [
            Search(job, tolerance, around.get(job.layout)) for job in templates if not _seeds_failed(job, found)
        ]
        total -= len(templates) - len(searches)
        ended = [journal.done[one.key]["row"] for one in searches if one.key in journal.done]
        for result in _run(searches, journal, workers):
            row, points = _kept(result.job, result, memory)
            journal.add_all(points | {result.job.key: {"row": row, "detail": {}}})
            ended.append(row)
            done += 1
            if progress:
                progress(done, total)
        found += ended
        named = {job.layout.name: job.layout for job in templates}
        for row in ended:
            if row.get("highest_rate_per_s") and not row["saturated"]:
                around[named[row["layout"]]] = row["highest_rate_per_s"]
    return found


def _seeds_failed(job: Job, found: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the layout's first seed was refused or keeps the SLO at no rate, so that other seeds need no search."""
    return any(row["layout"] == job.layout.name and not row.get("highest_rate_per_s") for row in found)


def _run(searches: Sequence[Search], journal: Journal, workers: int) -> Any:
    left = [one for one in searches if one.key not in journal.done]
    return run_local(searched, left, workers) if left else ()


def _kept(search: Search, result: Any, memory: Mapping[Any, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of a search that ended, and its replays by key."""
    own = memory[search.job.layout]
    if result.value is None:
        named = {"status": "failed", "kind": "worker", "reason": result.failure}
        row = {**search.job.layout.columns(), "key": search.job.key, "seed": search.job.seed, **named, **own}
        return row | {"layout": search.job.layout.name}, {}
    points = {
        point["row"]["key"]: {"row": point["row"] | own, "detail": point["detail"]} for point in result.value["points"]
    }
    row = dict(result.value["row"]) | own | {"layout": search.job.layout.name}
    if row["status"] == "done":
        row["status"] = "limit"
    return row, points


def _limits(
    candidates: Mapping[Any, Candidate], found: Sequence[Mapping[str, Any]]
) -> tuple[list[Limit], Mapping[str, Any] | None]:
    """The limits, most requests per GPU first, and of the layouts without one the row nearest to the SLO."""
    limits, failed = [], []
    for layout, candidate in candidates.items():
        rows = [row for row in found if row["layout"] == layout.name and row["status"] == "limit"]
        rates = [row["highest_rate_per_s"] for row in rows]
        if not rows or any(rate is None for rate in rates):
            failed += rows
            continue
        mean, half = mean_and_halfwidth(rates)
        planned = mean if half is None else max(mean - half, min(rates) / 2)
        saturated = any(row["saturated"] for row in rows)
        limits.append(Limit(candidate, mean, half, planned, rows[0], saturated))
    limits.sort(key=lambda one: (-one.planned_per_s / one.candidate.layout.gpus, one.candidate.layout.name))
    rows = [one.row for one in limits]
    limits = [replace(one, label=label(one.row, rows)) for one in limits]
    failed.sort(key=lambda row: (row["slo_worst_ratio"] is None, row["slo_worst_ratio"] or 0.0))
    return limits, failed[0] if failed else None


def needs(limits: Sequence[Limit], rate_per_s: float) -> list[Need]:
    """Instances of each layout for a rate, fewest GPUs first, then the lightest load."""
    found = []
    for limit in limits:
        instances = math.ceil(rate_per_s / limit.planned_per_s - 1e-9)
        load = rate_per_s / (instances * limit.planned_per_s)
        found.append(Need(limit, instances, instances * limit.candidate.layout.gpus, load))
    return sorted(found, key=lambda need: (need.gpus, need.load))


def _checked_need(
    sweep: Sweep, limits: Sequence[Limit], rate_per_s: float | None, journal: Journal
) -> tuple[Need, Mapping[str, Any]] | None:
    """The need with the fewest GPUs, replayed as a whole behind the router; one more instance where that fails."""
    if rate_per_s is None or not limits:
        return None
    need = needs(limits, rate_per_s)[0]
    row: Mapping[str, Any] = {}
    for extra in range(3):
        instances = need.instances + extra
        requests = max(sweep.requests, min(sweep.requests * instances, MOST_CHECKED_REQUESTS))
        seed = next((seed for seed in sweep.seeds if seed), 1) if requests > sweep.requests else sweep.seeds[0]
        template = jobs(replace(sweep, rates_per_s=(0.0,), seeds=(seed,), replicas=(1,)), [need.limit.candidate])[0]
        job = replace(template, replicas=instances, requests=requests, rate_per_s=rate_per_s)
        if job.key not in journal.done:
            point = measured(job)
            memory = memory_columns(need.limit.candidate.placement)
            journal.add(job.key, {"row": point["row"] | memory, "detail": point["detail"]})
        row = journal.done[job.key]["row"]
        if row.get("slo_met"):
            planned = need.limit.planned_per_s
            gpus = instances * need.limit.candidate.layout.gpus
            return Need(need.limit, instances, gpus, rate_per_s / (instances * planned)), row
    return need, row


def _answer(
    sweep: Sweep,
    limits: Sequence[Limit],
    nearest: Mapping[str, Any] | None,
    checked: tuple[Need, Mapping[str, Any]] | None,
    rate_per_s: float | None,
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    assert sweep.slo is not None
    text = [f"SLO: {sweep.slo.describe()}."]
    if not limits:
        return {"verdict": [_unmet(sweep, nearest, rows)], "text": text, "tables": []}
    best = limits[0]
    name, hardware = best.label, best.candidate.layout.hardware
    mark = ", projected, not measured" if best.row.get("provenance") == "projected" else ""
    if checked is None:
        verdict = [f"Highest rate per GPU: {name} on {best.candidate.layout.gpus} {hardware}, {_rate(best)}{mark}."]
    else:
        verdict = _need_sentences(checked, rate_per_s or 0.0, mark)
    if best.halfwidth_per_s is None:
        verdict.append("One seed was run, so there is no confidence interval.")
    if best.saturated:
        verdict.append(
            "The SLO is kept up to the rate at which all requests at once are worked off; throughput limits."
        )
    tables = [_limits_table(limits)]
    if rate_per_s is not None:
        tables.append(_needs_table(needs(limits, rate_per_s), rate_per_s))
    points = [row for row in rows if row["status"] == "done" and row.get("rate_per_s")]
    text += _split_text(sweep, best)
    return {"verdict": verdict, "text": text, "tables": tables, "front": _front_table(points)}


def _unmet(sweep: Sweep, nearest: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> str:
    if nearest is None:
        reasons = [row["reason"] for row in rows if row["status"] in ("refused", "failed") and row["kind"] != "illegal"]
        return f"No layout could be replayed: {reasons[-1] if reasons else 'none is legal'}"
    assert sweep.slo is not None
    name = str(nearest["slo_limiting"])
    ratio = nearest["slo_worst_ratio"]
    how_far = f", {ratio:.2f} times what is allowed" if ratio else ""
    bound = sweep.slo.bounds.get(name)
    return (
        f"No layout keeps the SLO. Nearest: {nearest['layout']}, at {nearest['rate_per_s']:.3g} requests/s limited by "
        f"{name}{f' (bound {bound:g})' if bound else ''}{how_far}."
    )


def _need_sentences(checked: tuple[Need, Mapping[str, Any]], rate_per_s: float, mark: str) -> list[str]:
    need, row = checked
    layout = need.limit.candidate.layout
    sentences = [
        f"{rate_per_s:g} requests/s need {need.gpus} {layout.hardware}: {need.instances} x ({need.limit.label}), each "
        f"{_rate(need.limit)} within the SLO{mark}."
    ]
    if row.get("slo_met"):
        sentences.append(
            f"Replayed as a whole the SLO is kept; limiting is {row['slo_limiting']} at {row['slo_worst_ratio']:.0%}."
        )
    else:
        sentences.append("Replayed as a whole behind the router the SLO is NOT kept, not even with two more instances.")
    planned = need.limit.planned_per_s
    if need.limit.halfwidth_per_s is not None:
        by_mean = math.ceil(rate_per_s / need.limit.mean_per_s - 1e-9)
        if by_mean < need.instances:
            wide = planned > need.limit.mean_per_s - need.limit.halfwidth_per_s
            end = "half the rate of the lowest seed, since the 95 % interval ends below that"
            sentences.append(
                f"Sized for {end if wide else 'the lower end of the 95 % interval'}; by the mean {by_mean} x would do "
                f"({by_mean * layout.gpus} GPUs). More seeds or requests narrow the interval."
            )
    sentences.append(
        f"Each instance carries {need.load:.0%} of its limit. With one more ({need.gpus + layout.gpus} GPUs) it is "
        f"{rate_per_s / ((need.instances + 1) * planned):.0%}, and the load is still carried when one fails."
    )
    return sentences


def _rate(limit: Limit) -> str:
    half = "" if limit.halfwidth_per_s is None else f" ± {limit.halfwidth_per_s:.2g}"
    return f"{limit.mean_per_s:.3g}{half} requests/s"


def _limits_table(limits: Sequence[Limit]) -> dict[str, Any]:
    columns = [
        "layout",
        "GPUs",
        "highest rate /s",
        "95 % interval",
        "per GPU",
        "limited by",
        "out tok/s per GPU",
        "tok/s of a user",
    ]
    rows = [
        [
            one.label, str(one.candidate.layout.gpus), f"{one.mean_per_s:.3g}",
            "-" if one.halfwidth_per_s is None else f"± {one.halfwidth_per_s:.2g}",
            f"{one.mean_per_s / one.candidate.layout.gpus:.3g}", str(one.row["slo_limiting"]),
            f"{one.row['output_tokens_per_s_per_gpu']:.1f}", f"{one.row['user_tokens_per_s'] or 0.0:.1f}",
        ]
        for one in limits
    ]  # fmt: skip
    return {"columns": columns, "rows": rows, "numeric": [1, 2, 3, 4, 6, 7]}


def _needs_table(found: Sequence[Need], rate_per_s: float) -> dict[str, Any]:
    columns = [
        "layout",
        "instances",
        "GPUs",
        "load of each",
        "GPUs with one spare",
        "load with one spare",
        "GPUs by the mean",
    ]
    rows = []
    for need in found:
        layout = need.limit.candidate.layout
        spare = need.load * need.instances / (need.instances + 1)
        by_mean = math.ceil(rate_per_s / need.limit.mean_per_s - 1e-9) * layout.gpus
        rows.append(
            [
                need.limit.label, str(need.instances), str(need.gpus), f"{need.load:.0%}", str(need.gpus + layout.gpus),
                f"{spare:.0%}", str(by_mean),
            ]
        )  # fmt: skip
    return {"columns": columns, "rows": rows, "numeric": [1, 2, 3, 4, 5, 6]}


def _front_table(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns = ["on the Pareto front", "requests/s", "out tok/s per GPU", "tok/s of a user", "keeps the SLO"]
    rows = [
        [
            label(row, points), f"{row['rate_per_s']:.3g}", f"{row['output_tokens_per_s_per_gpu']:.1f}",
            f"{row['user_tokens_per_s']:.1f}", "yes" if row.get("slo_met") else "no",
        ]
        for row in pareto(points)
    ]  # fmt: skip
    return {"columns": columns, "rows": rows, "numeric": [1, 2, 3]}


def _split_text(sweep: Sweep, best: Limit) -> list[str]:
    assert sweep.workload is not None
    job = jobs(replace(sweep, rates_per_s=(0.0,), seeds=sweep.seeds[:1], replicas=(1,)), [best.candidate])[0]
    try:
        found = split_ratio(job, open_traffic(sweep.workload), sweep.bundle_root)
    except SparsightError as error:
        return [f"Prefill and decode apart: no estimate, {error}"]
    if found is None:
        return []
    return [
        "Prefill and decode apart, estimated from the tables at mean lengths and without the transfer of KV: an "
        f"instance of {best.label} prefills {found.prefill_per_s:.3g} or decodes {found.decode_per_s:.3g} "
        f"requests/s (batch {found.decode_batch} per rank), so {found.prefill_per_decode:.2f} prefill instances per "
        "decode instance."
    ]
