"""A recording against the simulator: its trace replayed, its steps priced one by one, its blocks counted."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.hardware import load_hardware
from profiler.core.load import read_mapping, sha256_of
from profiler.core.paths import default_bundle_root
from serving.api import replay
from serving.comparison import STATISTICS, Comparison, Figure, compare_requests, simulated_requests
from serving.config import load_cluster
from serving.core.hosted import HostedGroup
from serving.core.runlog import percentile
from serving.deployment import deploy, instance_model
from serving.recorded import read_recorded
from serving.recording.block_counts import BlockCounts, block_counts
from serving.recording.files import read_steps
from serving.recording.host_table import log_of, own_host
from serving.recording.step_errors import Errors, PricedStep, by_kind, priced_steps, token_gaps_ns
from serving.traces import Trace, read_trace

NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Validation:
    """What became of one recording.

    comparison: per request, with the gaps between tokens of all requests as a further metric "itl". steps: every
    recorded step with its price. device, step: their errors by kind of step, see serving.recording.step_errors.
    blocks: None where the recording was given its blocks. preemptions: simulated and recorded.
    """

    path: Path
    meta: Mapping[str, Any]
    comparison: Comparison
    steps: tuple[PricedStep, ...]
    device: Mapping[str, Errors]
    step: Mapping[str, Errors]
    blocks: BlockCounts | None
    preemptions: tuple[int, int]
    extrapolated_lookups: int

    def mapping(self) -> dict[str, Any]:
        """For JSON: errors in per cent of the recording."""
        figures: dict[str, dict[str, Any]] = {}
        for one in self.comparison.figures:
            figures.setdefault(one.metric, {})[one.statistic] = {
                "simulated_ms": round(one.simulated_ms, 4),
                "recorded_ms": round(one.recorded_ms, 4),
                "difference_percent": round(one.difference_percent, 3),
            }
        blocks = self.blocks
        return {
            "recording": self.path.name,
            "model": self.meta["model"],
            "layers": self.meta["layers"],
            "mode": self.meta["mode"],
            "requests": self.comparison.requests,
            "figures": figures,
            "mean_absolute_error_ms": {name: round(value, 4) for name, value in self.comparison.error_ms.items()},
            "device_time_of_steps": {kind: _rounded(one) for kind, one in self.device.items()},
            "time_of_steps": {kind: _rounded(one) for kind, one in self.step.items()},
            "preemptions": {"simulated": self.preemptions[0], "recorded": self.preemptions[1]},
            "extrapolated_lookups": self.extrapolated_lookups,
            "num_gpu_blocks": None
            if blocks is None
            else {
                "recorded": blocks.recorded,
                "from_the_engines_kv_memory": blocks.given,
                "predicted": blocks.predicted,
                "predicted_percent": round(blocks.predicted_percent, 3),
                "memory_gib": {name: {"recorded": one, "predicted": two} for name, (one, two) in _terms(blocks)},
            },
        }


def validate(
    path: Path,
    traces: Path | None = None,
    bundle_root: Path | None = None,
    *,
    allow_extrapolation: bool = False,
    with_own_host: bool = False,
) -> Validation:
    """The recording in folder `path`, as `python -m serving record` writes it.

    traces: folder of its trace; by default the nearest folder `traces` beside or above the recording that holds it.
    with_own_host: with the host's times of this recording instead of those of the GPU's file, which leaves the errors
    of the device and of the rules.

    Raises ConfigError when a file of the recording or its trace is missing or another than the one that was played,
    CoverageError for shapes outside the tables without allow_extrapolation.
    """
    folder = path / "vllm" if (path / "vllm").is_dir() else path
    meta, engine = read_mapping(folder / "meta.json"), read_mapping(folder / "engine.json")
    cluster = load_cluster(folder.parent / "config.json")
    trace = _trace(path, meta, traces)
    steps = read_steps(folder)
    recorded = read_recorded(path)
    root = bundle_root or default_bundle_root()
    instance = cluster.instances[0]
    if with_own_host:
        own = own_host(log_of(path, meta, engine, steps), load_hardware(instance.hardware).host)
        instance = replace(instance, engine=replace(instance.engine, host=own, host_overhead_us=None))
        cluster = replace(cluster, instances=(instance,))
    spec = instance_model(instance)
    deployed = deploy(instance, 0, root, allow_extrapolation)
    group = deployed.groups[0]
    hosted = group if isinstance(group, HostedGroup) else None
    priced = priced_steps(
        steps,
        deployed.table_cost,
        hosted.host if hosted else None,
        spec.indexer.attended_cap_tokens if spec.indexer else None,
        hosted.behind if hosted else None,
        hosted.inputs_ns if hosted else 0,
    )
    result = replay(cluster, trace, bundle_root=root, allow_extrapolation=allow_extrapolation, keep_itl=True)
    comparison = compare_requests(path.name, simulated_requests(result), recorded)
    gaps = Counter(gap for found in result.itl_ns.values() for gap in found)
    prompts = {row: one.prompt_tokens for row, one in enumerate(trace.requests)}
    itl = _gap_figures(gaps, Counter(token_gaps_ns(steps, prompts)))
    return Validation(
        path=path,
        meta=meta,
        comparison=replace(comparison, figures=(*comparison.figures, *itl)),
        steps=tuple(priced),
        device=by_kind(priced, "device"),
        step=by_kind(priced, "step"),
        blocks=block_counts(spec, load_hardware(instance.hardware), meta, engine),
        preemptions=(sum(one.preemptions for one in result.records), sum(one.preemptions for one in steps)),
        extrapolated_lookups=result.extrapolated_lookups,
    )


def _trace(path: Path, meta: Mapping[str, Any], traces: Path | None) -> Trace:
    name, count = str(meta["dataset_path"]), int(meta["num_requests"])
    folders = [traces] if traces else [one / "traces" for one in path.resolve().parents]
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None:
        raise ConfigError(f"{path}: its trace {name} is not in {traces or 'a folder traces beside or above it'}")
    if sha256_of(found) != meta["dataset_hash"]:
        raise ConfigError(f"{found}: not the trace that was played for {path}; its SHA-256 is another")
    return read_trace(found, limit=count)


def _gap_figures(ours: Counter[int], theirs: Counter[int]) -> list[Figure]:
    if not ours or not theirs:
        return []
    return [
        Figure("itl", statistic, *(_statistic(statistic, gaps) / NS_PER_MS for gaps in (ours, theirs)))
        for statistic in STATISTICS
    ]


def _statistic(name: str, counts: Counter[int]) -> float:
    if name == "mean":
        return sum(value * count for value, count in counts.items()) / counts.total()
    return percentile(counts, float(name[1:]))


def _rounded(errors: Errors) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(errors).items()}


def _terms(blocks: BlockCounts) -> Iterator[tuple[str, tuple[float | None, float | None]]]:
    for name, pair in blocks.terms_gib.items():
        one, two = (None if value is None else round(value, 3) for value in pair)
        yield name, (one, two)
