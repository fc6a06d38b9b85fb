"""Acquisition: sweep -> engine -> samples -> binding -> tables -> bundle."""

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from profiler.bind import never_dense
from profiler.borrow import TP, Lender, lent_tables, with_origin
from profiler.card import CPU, check_card, choose_engine, hardware_name
from profiler.contract import REPLAY_CATEGORIES, check_execution, execution_of, replay_spec
from profiler.core.bundle import Bundle, Table, read_bundle, table_text, write_bundle
from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.hardware import load_hardware
from profiler.core.kv import KV_DTYPES, kv_layout
from profiler.core.registry import load_model, load_model_config
from profiler.core.shots import Shot
from profiler.core.skew_fit import SkewFit
from profiler.core.types import Category, ModelSpec, Parallel
from profiler.engines.base import Binding, Engine, EngineOptions, ShotResult, create_engine, find_binding, most_repeats
from profiler.kernels._axes import Limits
from profiler.kernels._placement import ran_of
from profiler.kernels.moe import local_experts
from profiler.passes import EXPERTS
from profiler.power import sample_power, with_power
from profiler.recheck import suspects
from profiler.samples import Run, append_power, append_result, plain_info, read_runs, start_run
from profiler.shared import Shared, shared_tables
from profiler.skew import fit_skew
from profiler.sweep import (
    batch_of,
    choose_categories,
    contained,
    merge,
    plan,
    rank_spec,
    shared_categories,
    split_by_memory,
    split_by_prefills,
)
from profiler.tabulate import (
    Acquired,
    bundle_meta,
    config_sha256,
    tabulate,
    variant_of,
    with_earlier_passes,
    with_own_passes,
)
from profiler.visits import one_engine

SM90: Final = "sm90"

Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One `profile` call. None stands for: every category of the model, the engine's own block length, the model's
    own maximum length. See the command for the units of the rest."""

    model: str
    hardware: str
    tps: tuple[int, ...]
    ep_degrees: tuple[int, ...]
    engine: str
    grid: str
    categories: tuple[str, ...] | None
    kv_cache_dtype: str
    block_tokens: int | None
    max_model_len: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    warmup: int
    repeats: int
    command: str
    skip_skew: bool = False
    contract: str = "serving"
    execution: str = "auto"
    power: bool = False
    expert_backend: str = "TritonExperts"
    kv_cache_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A job checked against the model: canonical names, and the shots of each tp before memory is known."""

    spec: ModelSpec
    config: dict[str, Any]
    hardware: str
    limits: dict[int, Limits]
    categories: dict[int, tuple[Category, ...]]
    shots: dict[int, dict[Category, list[Shot]]]


def prepare(job: Job, model_root: Path | None = None) -> Target:
    """Everything that can be refused before a device is touched. `model_root` holds the configurations.

    Raises ConfigError."""
    config = load_model_config(job.model, model_root)
    spec = load_model(job.model, model_root)
    hardware = hardware_name(job.hardware)
    check_execution(spec, job.contract, job.execution)
    _refuse_cache_size(job, "reference" if hardware == CPU else job.engine)
    wanted = job.categories
    if job.contract == "replay":
        spec = replay_spec(spec, job.tps, job.ep_degrees)
        wanted = wanted or REPLAY_CATEGORIES
    if job.warmup < 0 or job.repeats < 1:
        raise ConfigError(f"--warmup {job.warmup} --repeats {job.repeats}: at least 0 and 1 are needed")
    length = job.max_model_len or spec.max_position
    if length > spec.max_position:
        raise ConfigError(f"--max-model-len {length}: {spec.name} ends at {spec.max_position} positions")
    # Block lengths and caches that no kernel takes, and cards that have none for this model, are refused here.
    architecture = SM90 if hardware == CPU else load_hardware(hardware).architecture
    kv_dtype = job.kv_cache_dtype if job.kv_cache_dtype in KV_DTYPES else "auto"
    kv_layout(spec, Parallel(), architecture, kv_dtype, block_tokens=job.block_tokens)
    limits, categories, shots = {}, {}, {}
    shared = shared_categories(spec, job.tps) if wanted is None else ()
    for tp in job.tps:
        rank_spec(spec, tp)
        limits[tp] = Limits(job.grid, tp, job.ep_degrees, length, job.max_num_batched_tokens, job.max_num_seqs)
        categories[tp] = choose_categories(spec, wanted, tp, job.skip_skew)
        if tp != job.tps[0]:
            categories[tp] = tuple(c for c in categories[tp] if c not in shared)
        if "moe" in categories[tp] and spec.moe is not None:
            for ep in job.ep_degrees:
                local_experts(spec.moe, ep)
        shots[tp] = plan(spec, limits[tp], categories[tp])
    return Target(spec, config, hardware, limits, categories, shots)


def with_shots(target: Target, shots: dict[int, dict[Category, list[Shot]]]) -> Target:
    """The same target with other shots than those of a sweep, by tp."""
    return replace(target, shots=shots)


def without_category(target: Target, category: str) -> Target:
    """The same target with no shots of a category, whose table comes from elsewhere."""
    shots = {tp: {c: own for c, own in found.items() if c != category} for tp, found in target.shots.items()}
    return with_shots(target, shots)


def protocol(job: Job, whole_forward: bool) -> dict[str, Any]:
    """How a cell is measured, as meta.yaml records it."""
    cache = "as the rest of the forward pass leaves it" if whole_forward else "flushed before every timed call"
    return {
        "warmup": job.warmup,
        "repeats": job.repeats,
        "statistic": "median over repeats of the device time of one call",
        "spread": "(p90 - p10) / median over repeats",
        "l2": cache,
    }


def measure(
    job: Job,
    target: Target,
    tp: int,
    report: Report,
    *,
    save_to: Path | None = None,
    earlier: Sequence[Run] = (),
    new_in: Path | None = None,
) -> Run:
    """Starts the engine and runs the shots of one tp, without those that `earlier` runs have already.

    Results go to `save_to` as they come. new_in: a root of bundles that must not have the tables yet, None to skip
    that check. Raises AcquisitionError when the engine cannot start or the card is another, ConfigError when the
    tables exist or the earlier runs were measured otherwise.
    """
    check_card(target.hardware)
    name = choose_engine(job.engine, target.hardware)
    _refuse_cache_size(job, name)
    length = target.limits[tp].max_model_len
    options = EngineOptions(
        model=target.spec.name,
        config=target.config,
        spec=target.spec,
        hardware=target.hardware,
        tp=tp,
        ep_degrees=job.ep_degrees,
        kv_cache_dtype=job.kv_cache_dtype,
        block_tokens=job.block_tokens,
        max_model_len=length,
        max_num_batched_tokens=job.max_num_batched_tokens,
        max_num_seqs=job.max_num_seqs,
        execution="native" if job.contract == "replay" else job.execution,
        layer_kinds=earlier[-1].info.layer_kinds if earlier else None,
        expert_backend=job.expert_backend,
        kv_cache_gib=job.kv_cache_gib,
    )
    engine = create_engine(name, options)
    try:
        run = _planned(job, target, tp, engine)
        if options.execution == "native" and execution_of(run.info) != "native":
            raise AcquisitionError(f"engine {run.info.name} does not run the native module of {target.spec.name}")
        if new_in is not None:
            _refuse_existing(run, new_in, job.contract)
        one_engine([*earlier, run])
        _fill(run, job, target, engine, report, save_to, earlier)
        return run
    finally:
        engine.close()


def _refuse_cache_size(job: Job, engine: str) -> None:
    if job.kv_cache_gib is not None and engine == "reference":
        raise ConfigError("--kv-cache-gib sizes the cache of engine vllm; the reference engine allocates none ahead")


def _planned(job: Job, target: Target, tp: int, engine: Engine) -> Run:
    """A run without results yet: what the engine is, and the shots that fit into its memory."""
    info = plain_info(engine.info())
    planned = [shot for shots in target.shots[tp].values() for shot in shots if not never_dense(shot, info)]
    if info.whole_forward:
        planned = merge(planned, contained(target.spec, target.limits[tp], target.categories[tp]))
    shots, left_out = split_by_memory(planned, info.kv.get("tokens"), int(info.kv["block_tokens"]))
    shots, too_many = split_by_prefills(shots, info.settings.get("max_prefills_per_step"))
    left_out += too_many
    return Run(
        model=target.spec.name,
        model_config_sha256=config_sha256(target.config),
        hardware=target.hardware,
        tp=tp,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        command=job.command,
        protocol=protocol(job, info.whole_forward),
        limits=json.loads(json.dumps(asdict(target.limits[tp]))),
        info=info,
        shots=tuple(shots),
        left_out=tuple(left_out),
    )


def _refuse_existing(run: Run, root: Path, contract: str) -> None:
    folder = bundle_folder(root, run, contract)
    if not (folder / "meta.yaml").exists():
        return
    wanted = {(run.tp, fill.category) for shot in run.shots for fill in shot.fills}
    there = sorted(f"tp{tp}/{category}.csv" for tp, category in wanted & read_bundle(folder).tables.keys())
    if there:
        raise ConfigError(f"{folder}: has {', '.join(there)} already. --force replaces them.")


def _fill(
    run: Run,
    job: Job,
    target: Target,
    engine: Engine,
    report: Report,
    save_to: Path | None,
    earlier: Sequence[Run],
) -> None:
    """Runs every shot of `run` that is not done, keeping and saving each result as it comes.

    Forward passes come first, those of the contained grid before the others; after each part, passes with a cell
    unlike its neighbours are run a second time (not on a processor, which other work disturbs at any time). Expert
    shots come last, since an engine may give them the caches' memory.
    """
    whole, done = run.info.whole_forward, finished(earlier)
    todo = [index for index, shot in enumerate(run.shots) if batch_of(shot, whole) not in done]
    if save_to is not None:
        start_run(save_to, run)
    total = len(run.shots)
    count = total - len(todo)
    report(count, total, "")

    def take(indices: Sequence[int], again: bool) -> None:
        nonlocal count, total
        total += len(indices) if again else 0
        for result in engine.run([run.shots[index] for index in indices], job.warmup, job.repeats):
            index = indices[result.shot_index]
            before = run.results.get(index) if again else None
            own = _renumbered(result, index, most_repeats(run.info, job.repeats) if before else 0)
            run.results[index] = _joined(before, own)
            if save_to is not None:
                append_result(save_to, own)
            count += 1
            report(count, total, run.shots[index].label)

    before_others = contained(target.spec, target.limits[run.tp], target.categories[run.tp])
    forward = [index for index in todo if run.shots[index].moe is None]
    coarse = [index for index in forward if batch_of(run.shots[index], whole) in before_others]
    for part in (coarse, [index for index in forward if index not in set(coarse)]):
        take(part, again=False)
        if part and run.hardware != CPU:
            take(suspects([*earlier, run], target.spec, find_binding(run.info, job.contract)), again=True)
    if job.power:
        binding = find_binding(run.info, job.contract)
        run.power = sample_power(engine, [*earlier, run], target.spec, binding)
        if run.power and save_to is not None:
            append_power(save_to, run.power)
    take([index for index in todo if run.shots[index].moe is not None], again=False)


def _renumbered(result: ShotResult, index: int, first_repeat: int) -> ShotResult:
    samples = tuple(replace(s, shot_index=index, repeat=s.repeat + first_repeat) for s in result.samples)
    return replace(result, shot_index=index, samples=samples)


def _joined(before: ShotResult | None, own: ShotResult) -> ShotResult:
    """Both measurements of a shot together; a failure of the second is one of the shot."""
    return own if before is None else replace(own, samples=before.samples + own.samples)


def finished(runs: Sequence[Run]) -> set[Shot]:
    """Batches that these runs measured without a failure (profiler.sweep.batch_of)."""
    return {
        batch_of(run.shots[i], run.info.whole_forward)
        for run in runs
        for i, result in run.results.items()
        if result.failure is None
    }


def load_samples(paths: Sequence[Path], target: Target) -> dict[int, list[Run]]:
    """Runs of sample files by tp. Raises ConfigError when they are of another model, configuration or card."""
    by_tp: dict[int, list[Run]] = {}
    sha256 = config_sha256(target.config)
    for run in read_runs(paths):
        for what, there, here in (
            ("model", run.model, target.spec.name),
            ("card", run.hardware, target.hardware),
            ("model configuration (sha256)", run.model_config_sha256, sha256),
        ):
            if there != here:
                raise ConfigError(f"{', '.join(map(str, paths))}: {what} is {there}, {here} is asked for")
        by_tp.setdefault(run.tp, []).append(run)
    return by_tp


def bundle_folder(root: Path, run: Run, contract: str = "serving") -> Path:
    """Where the tables of a run belong."""
    return root / run.hardware / run.model / variant_of(run.info, contract)


def publish(
    runs: Sequence[Run], target: Target, job: Job, out_root: Path, force: bool = False, lender: Lender | None = None
) -> tuple[Path | None, Acquired]:
    """Binds the runs of one tp and writes what is complete. Returns (bundle or None, what was acquired).

    Tables that the bundle has already, equal to the last digit, are left as they are, and what meta.yaml says of them,
    unless `force` is given. lender: gives its tables to the bundle where any was acquired; all experts together are
    those of the runs' own passes. Errors as `tabulate`, `lent_tables`, `with_own_passes` and `write_bundle`.
    """
    tp = runs[-1].tp
    binding = find_binding(runs[-1].info, job.contract)
    acquired = tabulate(runs, target.spec, binding, job.categories)
    acquired = replace(acquired, grid=with_origin(acquired.grid, runs))
    folder = bundle_folder(out_root, runs[-1], job.contract)
    bundle = read_bundle(folder) if (folder / "meta.yaml").exists() else None
    there = bundle.tables if bundle else {}
    acquired = _with_earlier_passes(acquired, bundle, target.spec)
    tables = {
        (tp, category): table
        for category, table in acquired.tables.items()
        if force or (tp, category) not in there or table_text(there[tp, category]) != table_text(table)
    }
    shared = shared_tables(bundle, acquired, target.spec, force)
    if lender and acquired.tables:
        lent = lent_tables(lender, bundle_meta(runs, target.spec, acquired, binding))
        own_too = [category for _, category in lent.tables if category in acquired.tables]
        if own_too and not force:
            raise ConfigError(f"{folder}: has tp{tp}/{own_too[0]}.csv already. --force replaces it.")
        lent = _with_own_passes(lent, runs, target.spec, binding)
        shared = Shared({**shared.tables, **lent.tables}, {**shared.grid, **lent.grid})
    tables |= shared.tables
    if tables:
        own = {(tp, category): table for category, table in acquired.tables.items()}
        grid = {**(bundle.meta["grid"] if bundle else {}), **acquired.grid, **shared.grid}
        meta = with_power(bundle_meta(runs, target.spec, acquired, binding), runs, bundle.meta if bundle else {})
        degrees = {tp, *(at for at, _ in shared.tables)}
        fits, reports = _fitted({**there, **own, **shared.tables}, target.spec, degrees, meta | {"grid": grid})
        acquired = replace(acquired, grid={**acquired.grid, **shared.grid, **reports})
        write_bundle(out_root, meta | {"grid": dict(acquired.grid)}, tables, force, fits)
    return (folder if acquired.tables else None), acquired


def _with_earlier_passes(acquired: Acquired, bundle: Bundle | None, spec: ModelSpec) -> Acquired:
    """Experts measured without any pass, as one table anew is, keep the cells of passes that the bundle has: those are
    of the passes of other tables, which stay too."""
    name = f"tp{TP}/{EXPERTS}"
    if bundle is None or acquired.tp != TP or EXPERTS not in acquired.tables:
        return acquired
    origins = (bundle.meta["grid"].get(name) or {}).get("whole_passes")
    if not origins or "whole_passes" in acquired.grid[name]:
        return acquired
    own, earlier = acquired.tables[EXPERTS], bundle.tables[TP, EXPERTS]
    table, entry = with_earlier_passes(own, acquired.grid[name], earlier, origins, spec)
    return replace(acquired, tables={**acquired.tables, EXPERTS: table}, grid={**acquired.grid, name: entry})


def _with_own_passes(lent: Shared, runs: Sequence[Run], spec: ModelSpec, binding: Binding) -> Shared:
    """Lent tables, that of experts with the whole passes of these runs in it."""
    at: tuple[int, Category] = (TP, EXPERTS)
    name = f"tp{TP}/{EXPERTS}"
    if at not in lent.tables:
        return lent
    table, entry = with_own_passes(lent.tables[at], lent.grid[name], runs, spec, binding)
    return Shared({**lent.tables, at: table}, {**lent.grid, name: entry})


def _fitted(
    tables: Mapping[tuple[int, Category], Table], spec: ModelSpec, tps: Iterable[int], meta: Mapping[str, Any]
) -> tuple[dict[int, Sequence[SkewFit]], dict[str, Any]]:
    """Corrections for unequal batches by tp where there is a table of them, and their entries in meta.yaml's grid."""
    fits: dict[int, Sequence[SkewFit]] = {}
    entries: dict[str, Any] = {}
    for tp in sorted(tps):
        own = {category: table for (at, category), table in tables.items() if at == tp}
        if "skew" in own:
            fitted = fit_skew(own, spec, ran_of(meta, spec, tp))
            name = f"tp{tp}/skew"
            fits[tp] = fitted.fits
            entries[name] = {**(meta["grid"].get(name) or {}), "fit": fitted.report}
    return fits, entries


def refuse_incomplete(acquired: Sequence[Acquired]) -> None:
    """AcquisitionError that lists every table left out and why; nothing when all are complete."""
    lines = [
        f"  tp{one.tp}/{category}: {len(reasons)} of its cells failed, first: {reasons[0]}"
        for one in acquired
        for category, reasons in one.refused.items()
    ]
    if lines:
        raise AcquisitionError("not published as complete:\n" + "\n".join(lines))
