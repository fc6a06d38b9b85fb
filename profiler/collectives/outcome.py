"""From what the ranks measured to rows of the table: the slowest rank of every batch, medians over batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from profiler.collectives.cases import DTYPE, Case
from profiler.collectives.launch import Found
from profiler.core.collective_table import CollectiveRow
from profiler.timing import median, spread_rel


@dataclass(frozen=True, slots=True)
class Outcome:
    """rows and single_us (of the row with the same place): what was measured. skipped: case and why it is not possible.

    lost: cases without a result, or with a wrong one, and why.
    """

    rows: tuple[CollectiveRow, ...]
    single_us: tuple[float, ...]
    skipped: tuple[tuple[Case, str], ...]
    lost: tuple[tuple[Case, str], ...]


def outcome(cases: Sequence[Case], ranks: Sequence[Found]) -> Outcome:
    rows, singles, skipped, lost = [], [], [], []
    for index, case in enumerate(cases):
        lines = [found.cases[index] for found in ranks if index in found.cases]
        if len(lines) < len(ranks):
            lost.append((case, "not measured by every rank"))
            continue
        if why := [str(line["skipped"]) for line in lines if "skipped" in line]:
            skipped.append((case, why[0]))
            continue
        if wrong := [float(line["wrong"]) for line in lines if "wrong" in line]:
            lost.append((case, f"its result is wrong: relative error {wrong[0]:.3g}"))
            continue
        times = per_call_us(case, [line["long_us"] for line in lines], [line["short_us"] for line in lines])
        if median(times) <= 0:
            lost.append((case, "a longer batch did not take longer: too noisy to time"))
            continue
        rows.append(_row(case, len(ranks), times))
        singles.append(median(_slowest([line["single_us"] for line in lines])))
    return Outcome(tuple(rows), tuple(singles), tuple(skipped), tuple(lost))


def per_call_us(case: Case, long_us: Sequence[Sequence[float]], short_us: Sequence[Sequence[float]]) -> list[float]:
    """Of every batch: the slowest rank's time per call, less what a batch costs once where shorter ones were timed."""
    slowest = _slowest(long_us)
    if not any(short_us):
        return [us / case.calls for us in slowest]
    once = median(_slowest(short_us))
    return [(us - once) / (case.calls - case.short_calls) for us in slowest]


def _slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [max(batch) for batch in zip(*by_rank, strict=True)]


def _row(case: Case, gpus: int, times: Sequence[float]) -> CollectiveRow:
    return CollectiveRow(
        case.operation,
        case.backend,
        gpus,
        DTYPE,
        case.bytes,
        case.mode,
        float(f"{median(times):.5g}"),
        float(f"{spread_rel(times):.3g}"),
    )
