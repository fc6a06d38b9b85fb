"""Steps of recordings: decode steps in CUDA graphs by tokens, the second stream, and launches behind the device.

    python tests/perf/recorded_steps.py tests/recorded/H200/MiniMax-M3-8L [--padded] [--tables FOLDER]

First the recordings whose names begin with `graphs`, with their own hosts' times: median device time by number of
tokens, median of the price's errors in per cent, steps. Then what the second stream for shared experts adds to decode
steps of 3 to 8 tokens: `graphs-mixed` less `single-stream-mixed`, medians, microseconds of all layers with experts.
Then of every asynchronous recording the steps with prefills that were scheduled 8 ms or more before the device had
ended the step before: milliseconds from that end to the first launch, percentiles 10, 50 and 90; below zero they were
launched ahead. --padded: only the first part, of steps in full graphs, by the tokens that the graph computes.
--tables: bundles other than those that ship.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from profiler.timing import percentile  # noqa: E402
from serving.recording.files import read_steps  # noqa: E402
from serving.recording.host_table import read_log  # noqa: E402
from serving.recording.validate import validate  # noqa: E402

AHEAD_US = 8_000.0

Pairs = Mapping[int, Sequence[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--tables", type=Path)
    options = parser.parse_args()
    if options.padded:
        _print(padded_us(options.folder, options.tables))
    else:
        _everything(options.folder, options.tables)


def padded_us(folder: Path, tables: Path | None = None) -> dict[int, list[tuple[float, float]]]:
    """Device time of decode steps in full graphs, (recorded, priced), by the tokens that the graph computed."""
    found: dict[int, list[tuple[float, float]]] = {}
    for path in sorted(folder.glob("graphs-*")):
        priced = validate(path, bundle_root=tables, with_own_host=True).steps
        for step, one in zip(read_steps(path), priced, strict=True):
            if step.graph == "FULL" and not step.prefill_requests and step.padded_tokens and one.device_us is not None:
                found.setdefault(step.padded_tokens, []).append(one.device_us)
    return found


def _print(found: Pairs) -> None:
    for tokens, pairs in sorted(found.items()):
        errors = [100 * (priced / recorded - 1) for recorded, priced in pairs]
        middle = median(one for one, _ in pairs) / 1e3
        print(f"{tokens:4} tokens {middle:7.3f} ms {median(errors):+6.1f} % {len(pairs):6}")


def _everything(folder: Path, tables: Path | None) -> None:
    found: dict[int, list[tuple[float, float]]] = {}
    for path in sorted(folder.glob("graphs-*")):
        for step in validate(path, bundle_root=tables, with_own_host=True).steps:
            if step.kind in ("decode", "padded decode") and step.device_us is not None:
                found.setdefault(step.tokens, []).append(step.device_us)
    _print(found)

    pairs = [pair for some in found.values() for pair in some]
    total = 100 * (sum(priced for _, priced in pairs) / sum(recorded for recorded, _ in pairs) - 1)
    print(f"{len(pairs):,} decode steps, {total:+.1f} % in all")
    with_stream, without = (decodes_us(folder / name) for name in ("graphs-mixed", "single-stream-mixed"))
    added = {tokens: median(with_stream[tokens]) - median(without[tokens]) for tokens in range(3, 9)}
    print("second stream, us:", ", ".join(f"{tokens} tokens {us:+.0f}" for tokens, us in added.items()))
    late = {path.name: list(launched_ms(path)) for path in sorted(folder.iterdir()) if read_log(path).asynchronous}
    for name, values in [*late.items(), ("all", [one for some in late.values() for one in some])]:
        if values:
            shown = " ".join(f"{percentile(values, share):7.2f}" for share in (10, 50, 90))
            print(f"{name:20} {len(values):4} steps with prefills, launched after the device's end: {shown} ms")


def decodes_us(path: Path) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for step in read_steps(path):
        if step.decode_requests and not step.prefill_requests and step.gpu_us:
            found.setdefault(step.tokens, []).append(step.gpu_us)
    return found


def launched_ms(path: Path) -> Iterator[float]:
    for before, step in pairwise(read_steps(path)):
        if not step.prefill_requests or before.gpu_start_s is None or not before.gpu_us or step.launch_us is None:
            continue
        ended_us = before.gpu_start_s * 1e6 + before.gpu_us
        begun_us = step.start_s * 1e6 + (step.add_us or 0.0) + (step.schedule_us or 0.0)
        if ended_us - begun_us > AHEAD_US:
            yield (begun_us + step.launch_us - (step.forward_launch_us or 0.0) - ended_us) / 1e3


if __name__ == "__main__":
    main()
