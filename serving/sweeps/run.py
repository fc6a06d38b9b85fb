"""A sweep from its file to a folder of results."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from profiler import __version__
from profiler.core.bundle import variants
from profiler.core.errors import ConfigError
from profiler.core.hardware import load_hardware
from profiler.core.load import read_mapping, read_text, sha256_of
from profiler.core.registry import load_model
from profiler.core.siblings import tables_model
from serving.pricing import Prices, cost_columns
from serving.sweeps.executor import Done, run_local, run_ray
from serving.sweeps.measure import measured, point_columns
from serving.sweeps.points import Candidate, Job, Refused, jobs, layouts, memory_columns
from serving.sweeps.results import Journal, require_parquet, write_table
from serving.sweeps.spec import Sweep
from serving.sweeps.traffic import open_traffic

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """rows: every point and refused layout, in the order of the sweep. ran: points run now, resumed: found finished."""

    table: Path
    rows: tuple[Mapping[str, Any], ...]
    ran: int
    resumed: int


def default_workers() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    workers: int | None = None,
    executor: Literal["process", "ray"] = "process",
    ray_address: str | None = None,
    style: str = "csv",
    prices: Prices | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run what `folder` does not hold yet and write the table.

    prices: adds cost columns. progress(points done, points) is called at the start and after every point. Raises
    ConfigError for input that no point can run with, before the first; a point that its tables, memory or input forbid
    becomes a row with the reason. Raises SparsightError when the disk is full; finished points are kept.
    """
    if style == "parquet":
        require_parquet()
    judged = list(layouts(sweep))
    candidates = [one for one in judged if isinstance(one, Candidate)]
    todo: list[Job] = []
    if sweep.mode == "replay":
        _check_traffic(sweep)
        todo = jobs(sweep, candidates)
    with Journal(folder, _header(sweep)) as journal:
        seen = {f"layout {number}": _layout_row(one, sweep) for number, one in enumerate(judged)}
        journal.add_all(
            {
                key: {"row": row, "detail": {}}
                for key, row in seen.items()
                if row is not None and key not in journal.done
            }
        )
        resumed = [job for job in todo if job.key in journal.done]
        left = [job for job in todo if job.key not in journal.done]
        memory = {candidate.layout: memory_columns(candidate.placement) for candidate in candidates}
        if progress:
            progress(len(resumed), len(todo))
        for done, ended in enumerate(_run(left, workers or default_workers(), executor, ray_address), 1):
            journal.add(ended.job.key, _finished(ended, memory[ended.job.layout]))
            if progress:
                progress(len(resumed) + done, len(todo))
        order = [f"layout {number}" for number in range(len(judged))] + [job.key for job in todo]
        rows = tuple(journal.done[key]["row"] for key in order if key in journal.done)
    if prices is not None:
        rows = tuple(row | cost_columns(row, prices) for row in rows)
    return Outcome(write_table(folder, rows, style), rows, len(left), len(resumed))


def _run(left: Sequence[Job], workers: int, executor: str, ray_address: str | None) -> Iterator[Done[Job]]:
    if not left:
        return iter(())
    if executor == "ray":
        return run_ray(measured, left, workers, ray_address)
    return run_local(measured, left, workers)


def _finished(ended: Done[Job], memory: dict[str, Any]) -> dict[str, Any]:
    if ended.value is not None:
        return {"row": ended.value["row"] | memory, "detail": ended.value["detail"]}
    row = point_columns(ended.job) | {"status": "failed", "kind": "worker", "reason": ended.failure} | memory
    return {"row": row, "detail": {}}


def refused_row(one: Refused) -> dict[str, Any]:
    """The row of a layout that does not run."""
    reason = f"{one.reason}; try {one.suggestion}" if one.suggestion else one.reason
    named = {"key": None, "status": "refused", "kind": one.kind, "reason": reason}
    return named | one.layout.columns() | memory_columns(one.placement)


def _layout_row(one: Candidate | Refused, sweep: Sweep) -> dict[str, Any] | None:
    """The row of a layout that has no replays: a refused one, and any in a screen."""
    if isinstance(one, Refused):
        return refused_row(one)
    if sweep.mode == "replay":
        return None
    named = {"key": None, "status": "fits", "kind": None, "reason": one.placement.reason}
    return named | one.layout.columns() | memory_columns(one.placement)


def _check_traffic(sweep: Sweep) -> None:
    assert sweep.workload is not None
    traffic = open_traffic(sweep.workload)
    if traffic.requests is not None and 0 in sweep.seeds and sweep.requests > traffic.requests:
        raise ConfigError(
            f"{sweep.workload}: has {traffic.requests} requests, {sweep.requests} are asked for with seed 0, which is "
            "the trace itself; lower requests, or use other seeds, which draw from the trace"
        )
    if traffic.sessions and any(sweep.seeds):
        raise ConfigError(f"seeds {', '.join(map(str, sweep.seeds))}: {traffic.refuses_drawing}")


def _header(sweep: Sweep) -> dict[str, Any]:
    """What the results depend on: a folder is resumed only with an equal one."""
    return {
        "made_by": f"sparsight {__version__}",
        "command": "sweep",
        "sweep": asked_of(sweep),
        "workload_sha256": sha256_of(sweep.workload) if sweep.workload else None,
        "bundles": bundle_digests(sweep.bundle_root, sweep.hardware, sweep.models),
        "projections": projections(sweep.bundle_root, sweep.hardware, sweep.models),
    }


def asked_of(sweep: Sweep) -> dict[str, Any]:
    """A sweep as sweep.json has it: the workload by its name, and of rates and concurrencies what is given."""
    asked = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(sweep).items()}
    asked.pop("bundle_root")
    asked.pop("rates_per_s" if sweep.concurrencies else "concurrencies")
    asked["workload"] = sweep.workload.name if sweep.workload else None
    return asked


def bundle_digests(root: Path, hardware: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """sha256 of the meta.yaml of each bundle that may be used; it lists those of the tables."""
    return {name: sha256_of(meta) for name, meta in _metas(root, hardware, models)}


def projections(root: Path, hardware: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Of each projected bundle that may be used: from where, and how far such a projection was off where it could be
    checked (p10 to p90 of projected over measured times)."""
    found = {}
    for name, meta in _metas(root, hardware, models):
        if "projected" not in read_text(meta):
            continue
        content = read_mapping(meta)
        if content.get("provenance") != "projected":
            continue
        note = content.get("projection") or {}
        bands = []
        for one in note.get("error_band") or []:
            low, _, high = one["projected_over_measured"]["all all"]
            bands.append(
                f"for {one['model']} such a projection gave {low:g} to {high:g} times the measured times (p10 to p90)"
            )
        source = (note.get("from") or {}).get("hardware", "another GPU")
        found[name] = f"projected from {source}; {'; '.join(bands) or 'how far that is off is not known'}"
    return found


def _metas(root: Path, hardware: Sequence[str], models: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for card in hardware:
        for model in models:
            gpu = load_hardware(card).name
            names = gpu, tables_model(root, gpu, load_model(model))
            for variant in variants(root, *names):
                meta = root.joinpath(*names, variant, "meta.yaml")
                if meta.is_file():
                    yield "/".join((*names, variant)), meta
