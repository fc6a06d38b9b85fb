"""Sweep files: which points to run.

name: v32-on-h200
mode: replay                     or screen: memory and placements only, no replay
models: [deepseek-ai/DeepSeek-V3.2-Exp]
hardware: [H200]                 names
gpus: [8]                        of one instance
placements: launchable           or all, or a list of {tp, pp, dp, ep}
kv_dtypes: [auto]
utilizations: [0.9]
limits: [{max_model_len: 81920, max_num_batched_tokens: 8192, max_num_seqs: 256}]
replicas: [1]                    independent copies of the instance behind one router
router: least_loaded
workload: ../workloads/example_trace.jsonl     trace or description, relative to this file
requests: 500
rates_per_s: [1, 2, 4]           over all replicas; or, in their place,
concurrencies: [1, 16, 64]       most requests in flight over all replicas, of clients that wait
seeds: [1, 2, 3]
slo: {ttft_ms: 2000, tpot_ms: 60, percentile: 99}
bundle_root: bundles             relative to this file; default: the shipped one
allow_extrapolation: false
allow_projected: false           take tables that were scaled from another GPU; marked everywhere
pipelines: false                 replay splits with pp > 1, too, which takes longer
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from profiler.core.errors import ConfigError
from profiler.core.load import read_mapping
from profiler.core.paths import default_bundle_root
from profiler.core.types import Parallel
from serving.config import Count, ParallelFile, Positive, Share, Strict, validated
from serving.routers import create_router
from serving.sweeps.slo import Slo, slo_of


class LimitsFile(Strict):
    """Limits of one engine; None is what the engine picks for the card, max_model_len: the model's own."""

    max_model_len: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_num_seqs: Count | None = None


_NotNegative = Annotated[int, Field(ge=0)]


class SweepFile(Strict):
    name: str
    mode: Literal["replay", "screen"] = "replay"
    models: Annotated[list[str], Field(min_length=1)]
    hardware: Annotated[list[str], Field(min_length=1)]
    gpus: Annotated[list[Count], Field(min_length=1)]
    placements: Annotated[
        Annotated[Literal["launchable", "all"], Tag("~word")] | Annotated[list[ParallelFile], Tag("~list")],
        Discriminator(lambda value: "~list" if isinstance(value, list) else "~word"),
    ] = "launchable"
    kv_dtypes: Annotated[list[str], Field(min_length=1, default_factory=lambda: ["auto"])]
    utilizations: Annotated[list[Share], Field(min_length=1, default_factory=lambda: [0.9])]
    limits: Annotated[list[LimitsFile], Field(min_length=1, default_factory=lambda: [LimitsFile()])]
    replicas: Annotated[list[Count], Field(min_length=1, default_factory=lambda: [1])]
    router: str = "least_loaded"
    workload: str | None = None
    requests: Count | None = None
    rates_per_s: Annotated[list[Positive], Field(min_length=1)] | None = None
    concurrencies: Annotated[list[Count], Field(min_length=1)] | None = None
    seeds: Annotated[list[_NotNegative], Field(min_length=1)] | None = None
    slo: dict[str, Any] | None = None
    bundle_root: str | None = None
    allow_extrapolation: bool = False
    allow_projected: bool = False
    pipelines: bool = False


@dataclass(frozen=True, slots=True)
class LimitSet:
    """Limits as asked; None leaves the choice to the engine."""

    max_model_len: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked sweep. placements: the splits to run, or which of the plan's. workload is None for a screen, which has
    neither rates nor concurrencies; a replay has one of the two."""

    name: str
    mode: Literal["replay", "screen"]
    models: tuple[str, ...]
    hardware: tuple[str, ...]
    gpus: tuple[int, ...]
    placements: tuple[Parallel, ...] | Literal["launchable", "all"]
    kv_dtypes: tuple[str, ...]
    utilizations: tuple[float, ...]
    limits: tuple[LimitSet, ...]
    replicas: tuple[int, ...]
    router: str
    workload: Path | None
    requests: int
    rates_per_s: tuple[float, ...]
    seeds: tuple[int, ...]
    slo: Slo | None
    bundle_root: Path
    allow_extrapolation: bool
    allow_projected: bool = False
    pipelines: bool = False
    concurrencies: tuple[int, ...] = ()


_REPLAY_ONLY = ("workload", "requests", "rates_per_s", "concurrencies", "seeds", "slo")
_LOADS = ("rates_per_s", "concurrencies")


def read_sweep(path: Path) -> Sweep:
    """Raises ConfigError naming the file and the key of the first fault: unknown keys, repeated values, keys of a
    replay in a screen, a replay without traffic or with rates and concurrencies, splits that use none of the GPU
    numbers."""
    content = read_mapping(path)
    file = validated(SweepFile, content, path)
    for key in (
        "models",
        "hardware",
        "gpus",
        "kv_dtypes",
        "utilizations",
        "limits",
        "replicas",
        *_LOADS,
        "seeds",
    ):
        _no_repeats(path, key, getattr(file, key) or ())
    given = [key for key in _REPLAY_ONLY if getattr(file, key) is not None]
    if file.mode == "screen":
        if given:
            raise ConfigError(f"{path}: mode screen replays nothing: remove {', '.join(given)}, or use mode replay")
        if file.replicas != [1]:
            raise ConfigError(f"{path}: mode screen looks at one instance: remove replicas, or use mode replay")
    elif lacking := _lacking(given):
        raise ConfigError(f"{path}: mode replay needs {', '.join(lacking)}; mode screen needs none of them")
    elif all(key in given for key in _LOADS):
        raise ConfigError(
            f"{path}: rates_per_s and concurrencies are both given; remove one: requests come at a rate, or when a "
            "client has its answer"
        )
    _created(path, file.router)
    root = path.parent
    return Sweep(
        name=file.name,
        mode=file.mode,
        models=tuple(file.models),
        hardware=tuple(file.hardware),
        gpus=tuple(file.gpus),
        placements=_placements(path, file),
        kv_dtypes=tuple(file.kv_dtypes),
        utilizations=tuple(file.utilizations),
        limits=tuple(LimitSet(one.max_model_len, one.max_num_batched_tokens, one.max_num_seqs) for one in file.limits),
        replicas=tuple(file.replicas),
        router=file.router,
        workload=root / file.workload if file.workload else None,
        requests=file.requests or 0,
        rates_per_s=tuple(file.rates_per_s or ()),
        seeds=tuple(file.seeds or ()),
        slo=slo_of(file.slo, f"{path}: slo") if file.slo is not None else None,
        bundle_root=root / file.bundle_root if file.bundle_root else default_bundle_root(),
        allow_extrapolation=file.allow_extrapolation,
        allow_projected=file.allow_projected,
        pipelines=file.pipelines,
        concurrencies=tuple(file.concurrencies or ()),
    )


def _lacking(given: Sequence[str]) -> list[str]:
    needed = ("workload",), ("requests",), _LOADS, ("seeds",)
    return [" or ".join(keys) for keys in needed if not set(keys) & set(given)]


def _no_repeats(path: Path, key: str, values: Sequence[Any]) -> None:
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ConfigError(f"{path}: {key}[{place}]: {_shown(value)} is listed twice")


def _shown(value: Any) -> str:
    return str(value.model_dump() if isinstance(value, Strict) else value)


def _created(path: Path, router: str) -> None:
    try:
        create_router(router)
    except ConfigError as error:
        raise ConfigError(f"{path}: router: {error}") from None


def _placements(path: Path, file: SweepFile) -> tuple[Parallel, ...] | Literal["launchable", "all"]:
    if isinstance(file.placements, str):
        return file.placements
    if not file.placements:
        raise ConfigError(f"{path}: placements: an empty list leaves nothing to run; use launchable or all")
    _no_repeats(path, "placements", file.placements)
    splits = tuple(Parallel(one.tp, one.pp, one.dp, one.ep) for one in file.placements)
    for place, split in enumerate(splits):
        if split.gpus not in file.gpus:
            raise ConfigError(
                f"{path}: placements[{place}] takes tp x pp x dp = {split.gpus} GPUs, gpus lists "
                f"{', '.join(map(str, file.gpus))}"
            )
    return splits
