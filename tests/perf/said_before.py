"""Recordings against what was predicted before they were made.

    python tests/perf/said_before.py tests/recorded/predictions-of-recordings/GLM-5-FP8-6L \
        tests/recorded/H200/GLM-5-FP8-6L

Per recording: recorded mean, and the prediction's error in per cent of it, mean and p99 of TTFT (from when the
scheduler took a request in) and of TPOT; makespan in seconds, from the first queueing, with its error; blocks,
predicted and recorded. Recordings that were not made are named.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("recordings", type=Path)
    options = parser.parse_args()
    for path in sorted(options.predictions.glob("*.json")):
        folder = options.recordings / path.stem
        print(row(path.stem, json.loads(path.read_text()), folder) if folder.is_dir() else f"{path.stem}: not made")
    return 0


def row(name: str, said: dict[str, dict[str, float]], folder: Path) -> str:
    from profiler.timing import percentile
    from serving.recorded import read_recorded

    requests = read_recorded(folder).requests
    ttft = [(one.first_token_ns - one.queued_ns) / 1e6 for one in requests]
    tpot = [
        (one.finish_ns - one.first_token_ns) / 1e6 / (one.output_tokens - 1)
        for one in requests
        if one.output_tokens > 1
    ]
    makespan_s = (max(one.finish_ns for one in requests) - min(one.queued_ns for one in requests)) / 1e9
    cells = [name]
    for key, times in (("queued_to_first_token_ms", ttft), ("tpot_ms", tpot)):
        mean = sum(times) / len(times)
        errors = (said[key]["mean"] / mean - 1, said[key]["p99"] / percentile(times, 99) - 1)
        cells += [f"{mean:,.1f}", " / ".join(f"{100 * error:+.1f}" for error in errors)]
    engine = json.loads((folder / "vllm" / "engine.json").read_text())
    cells += [f"{makespan_s:.1f}", f"{100 * (float(said['makespan_s']) / makespan_s - 1):+.1f}"]  # type: ignore[arg-type]
    return "| " + " | ".join([*cells, f"{said['num_gpu_blocks']:,}", f"{engine['num_gpu_blocks']:,}"]) + " |"


if __name__ == "__main__":
    sys.exit(main())
