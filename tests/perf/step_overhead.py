"""Time per step that no kernel table holds, read off a recorded run of one engine: three estimates.

    python tests/perf/step_overhead.py CLUSTER RUN.csv RECORDED_DIR BUNDLE_ROOT

CLUSTER is the cluster file of the run and RUN.csv its replay with `step_overhead_us` 0. Printed are

* tail: the last request decodes alone after the last but one has finished; its recorded time per step less the tables'.
  How many steps that took is taken from the replay, and may be off by one or two.
* last started: the request whose first token is the last of all decodes beside nothing but decodes; its recorded time
  per token less the replay's.
* all: least squares over all requests. While a request decodes, the steps that the tables say would fit into its
  recorded time are compared with its tokens. Unknowns are a time per step, and one per prefill step, apart for fewer
  than 100 running requests and for more.
"""

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

GRID_S = 0.02
MANY = 100


def main(cluster: Path, run: Path, recorded: Path, bundle_root: Path) -> None:
    import csv
    from dataclasses import replace

    from serving.config import load_cluster
    from serving.core.shape import StepShape
    from serving.deployment import deploy
    from serving.recorded import read_recorded

    instance = load_cluster(cluster).instances[0]
    instance = replace(instance, engine=replace(instance.engine, step_overhead_us=0.0))
    cost = deploy(instance, 0, bundle_root, True).cost
    real = read_recorded(recorded).requests
    with run.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    first, last = (np.array([getattr(one, name) / 1e9 for one in real]) for name in ("first_token_ns", "finish_ns"))
    prompt, output = (np.array([getattr(one, name) for one in real]) for name in ("prompt_tokens", "output_tokens"))
    hits = np.array([int(row["prefix_hit_tokens"]) for row in rows])
    sim_first, sim_last = (np.array([int(row[name]) / 1e9 for row in rows]) for name in ("first_token_ns", "finish_ns"))

    times = np.arange(0, last.max(), GRID_S)
    running, keys, longest = (np.zeros(len(times)) for _ in range(3))
    for one in range(len(real)):
        alive = (times >= first[one]) & (times < last[one])
        kv = prompt[one] + output[one] * (times[alive] - first[one]) / (last[one] - first[one])
        running[alive] += 1
        keys[alive] += kv
        longest[alive] = np.maximum(longest[alive], kv)

    def step_s(at: int, prefill: tuple[int, int] | None = None) -> float:
        count, total = int(running[at]), int(keys[at])
        rows = (prefill,) if prefill else ()
        return cost.step_ns([StepShape(rows, count, total, int(longest[at]), total, count + len(rows))]) / 1e9

    step = np.array([step_s(at) if running[at] else np.inf for at in range(len(times))])

    ends = np.argsort(last)
    end, before = ends[-1], ends[-2]
    alone = (times >= last[before]) & (times < last[end])
    tables = step[alone].mean()
    seconds, steps = last[end] - last[before], round((sim_last[end] - sim_last[before]) / tables)
    more = seconds / steps - tables
    print(f"tail: {seconds:.3f} s in {steps} steps, tables {1e3 * tables:.2f} ms: {1e3 * more:.2f} ms")

    late = int(np.argmax(first))
    gap = (last[late] - first[late] - sim_last[late] + sim_first[late]) / (output[late] - 1)
    print(f"last started: {1e3 * gap:.2f} ms")

    position = np.maximum(np.searchsorted(times, first) - 1, 0)
    prefill_s = np.zeros(len(real))
    for one, at in enumerate(position):
        chunk = (int(min(prompt[one] - hits[one], 2048 - running[at])), int(hits[one]))
        prefill_s[one] = step_s(at, chunk) - (step[at] if running[at] else 0.0)
    columns, missing = [], []
    for one in range(len(real)):
        free = np.where((times >= first[one]) & (times < last[one]), GRID_S, 0.0)
        others = np.flatnonzero((first > first[one] + 1e-4) & (first <= last[one] + 1e-6))
        for other in others:
            at, need = position[other], prefill_s[other]
            while need > 0 and at >= 0:
                taken = min(free[at], need)
                free[at] -= taken
                need, at = need - taken, at - 1
        few = running[position[others]] < MANY
        each = 1 / step[position[others]]
        columns.append([(free / step**2).sum(), each[few].sum(), each[~few].sum()])
        missing.append((free / step).sum() - (output[one] - 1))
    found, *_ = np.linalg.lstsq(np.array(columns), np.array(missing), rcond=None)
    print(
        f"all: {1e3 * found[0]:.2f} ms per step; per prefill step {1e3 * found[1]:+.2f} ms below {MANY} requests, "
        f"{1e3 * found[2]:+.2f} ms above"
    )


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
