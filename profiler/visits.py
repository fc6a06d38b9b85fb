"""Runs of the same measurement on several visits to a card, read as one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from profiler.core.errors import ConfigError
from profiler.core.shard import geometry
from profiler.core.shots import Fill, Key, Shot
from profiler.core.types import Category, ModelSpec, Parallel
from profiler.engines.base import EngineInfo, ShotResult, most_repeats
from profiler.samples import Run
from profiler.sweep import batch_of

_DIVIDED: Final = "gqa_kv"


def one_engine(runs: Sequence[Run]) -> EngineInfo:
    """What the runs have in common. Raises ConfigError when they were not measured alike."""
    first = runs[0]
    for run in runs[1:]:
        for what, a, b in (
            ("engine", first.info.name, run.info.name),
            ("versions", dict(first.info.versions), dict(run.info.versions)),
            ("card", first.info.gpu.get("name"), run.info.gpu.get("name")),
            ("KV layout", kv_facts(first.info), kv_facts(run.info)),
            ("weights", first.info.weights, run.info.weights),
            ("execution", first.info.settings.get("execution"), run.info.settings.get("execution")),
            ("layers", first.info.layer_kinds, run.info.layer_kinds),
            ("protocol", dict(first.protocol), dict(run.protocol)),
            ("model configuration", first.model_config_sha256, run.model_config_sha256),
        ):
            if a != b:
                raise ConfigError(f"samples of tp {first.tp} are of two kinds: {what} {a!r} and {b!r}")
    return runs[-1].info


def kv_facts(info: EngineInfo) -> dict[str, Any]:
    """What serving must agree with: the number of tokens that fitted is a fact of one run only."""
    return {key: value for key, value in info.kv.items() if key != "tokens"}


def kv_of_all_ranks(info: EngineInfo, spec: ModelSpec, tp: int) -> dict[str, Any]:
    """The same of every degree: `tp` ranks divide keys and values of grouped heads, so these are in bytes of all heads.

    What the engine allocated on a rank is multiplied by the share of the heads that it holds.
    """
    facts = kv_facts(info)
    if spec.gqa is None or tp == 1:
        return facts
    heads, own = (geometry(spec, Parallel(tp=degree)).kv_heads for degree in (1, tp))
    size = "bytes_per_token_layer"
    caches = [
        {**cache, size: cache[size] * heads // own} if cache["name"] == _DIVIDED else cache for cache in facts["caches"]
    ]
    return {**facts, "caches": caches}


@dataclass(frozen=True, slots=True)
class Latest:
    """shots: those of the last run, then others' that it does not plan. results: the one that counts, by shot index,
    where there is any. looks: the two newest measurements of a shot that was measured twice, the older one first.
    """

    shots: Sequence[Shot]
    results: Mapping[int, ShotResult]
    looks: Mapping[int, tuple[ShotResult, ShotResult]]


def latest(runs: Sequence[Run]) -> Latest:
    """One measurement from several runs: where a shot was run twice, the later run that did not fail counts.

    Runs of one batch are one shot that fills the cells of all of them, as the last run that plans a cell names it.
    Within a run, repeats beyond the most of one look are a second look; together they are the result.
    """
    cells: dict[Shot, dict[tuple[Category, Key], Fill]] = {}
    measured = {_batch(run, run.shots[own]) for run in runs for own in run.results}
    for run in reversed(runs):
        for shot in run.shots:
            batch = _batch(run, shot)
            if batch in measured or shot not in runs[-1].left_out:
                own_cells = cells.setdefault(batch, {})
                for fill in shot.fills:
                    own_cells.setdefault((fill.category, fill.key), fill)
    index_of = {batch: index for index, batch in enumerate(cells)}
    results: dict[int, ShotResult] = {}
    looks: dict[int, tuple[ShotResult, ShotResult]] = {}
    for run in runs:
        repeats = most_repeats(run.info, int(run.protocol["repeats"]))
        for own, found in run.results.items():
            index = index_of[_batch(run, run.shots[own])]
            result = replace(found, shot_index=index)
            before = results.get(index)
            if result.failure is not None:
                results.setdefault(index, result)
                continue
            results[index] = result
            first, second = _split(result, repeats)
            if second.samples:
                looks[index] = first, second
            elif before is not None and before.failure is None:
                looks[index] = before, result
    shots = [replace(batch, fills=tuple(fills.values())) for batch, fills in cells.items()]
    return Latest(shots, results, looks)


def _split(result: ShotResult, repeats: int) -> tuple[ShotResult, ShotResult]:
    first = tuple(sample for sample in result.samples if sample.repeat < repeats)
    second = tuple(sample for sample in result.samples if sample.repeat >= repeats)
    return replace(result, samples=first), replace(result, samples=second)


def _batch(run: Run, shot: Shot) -> Shot:
    return batch_of(shot, run.info.whole_forward)
