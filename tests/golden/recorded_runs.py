"""Recordings validated with their own hosts' times, once for all tests of a module, and what is asked of all."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

from serving.recording.validate import Validation, validate


def of(path: Path, known: dict[Path, Validation]) -> Validation:
    if path not in known:
        known[path] = validate(path, with_own_host=True)
    return known[path]


def check_errors(found: Validation, bounds: tuple[float, float, float, float]) -> None:
    """bounds in per cent: mean TTFT, mean TPOT, median error of a step's device time, and of all their times summed."""
    off = {(one.metric, one.statistic): abs(one.difference_percent) for one in found.comparison.figures}
    ttft, tpot, median, total = bounds
    assert off["ttft", "mean"] <= ttft and off["tpot", "mean"] <= tpot
    assert found.device["all"].median <= median and abs(found.device["all"].total) <= total
    assert found.extrapolated_lookups == 0


def check_blocks(found: Validation, percent: float) -> None:
    """Exactly on the engine's own KV memory, within `percent` by the memory model."""
    blocks = found.blocks
    assert blocks is not None and blocks.given == blocks.recorded
    assert abs(blocks.predicted_percent) <= percent


def check_preemptions(found: Validation, recorded: int) -> None:
    simulated, there = found.preemptions
    assert there == recorded and abs(simulated - recorded) <= 4


def decode_errors(runs: Iterable[Validation]) -> Iterator[tuple[int, float]]:
    """(requests, error of the device time in per cent) of every decode step."""
    for run in runs:
        for step in run.steps:
            if step.kind in ("decode", "padded decode") and step.device_us:
                yield step.tokens, 100 * (step.device_us[1] / step.device_us[0] - 1)


def check_decode_steps(runs: Iterable[Validation], percent: float) -> None:
    """The median error of the device time, at 2 requests, 3 to 4, 5 to 8 and every eight more that 20 steps had.

    Steps of one request wait for the thread, which is not equally fast.
    """
    errors: dict[int, list[float]] = {}
    for tokens, error in decode_errors(runs):
        if tokens > 1:
            graph = next(size for size in (2, 4, *range(8, 65, 8)) if size >= tokens)
            errors.setdefault(graph, []).append(error)
    met = {graph: median(found) for graph, found in errors.items() if len(found) >= 20}
    assert len(met) >= 9, met
    assert all(abs(error) <= percent for error in met.values()), met
