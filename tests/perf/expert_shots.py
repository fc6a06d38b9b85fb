"""Shots of experts alone, kernel by kernel, from their samples; no GPU needed.

    python tests/perf/expert_shots.py [SAMPLES.csv.gz] [--table MOE.csv ...] [--kernels | --leave-one-out]

One line per shot: the slice (ep), tokens, deviation of the experts' popularity, experts and pairs of its draw,
microseconds of all kernels and of the products alone, and of these per expert reached; medians of the repeats. Of every
--table, a `tp1/moe.csv` of another day: its time of the same draw over that of the shot. `in passes`: the even load of
as many tokens in the shipped table, which has all experts together from whole passes, over the shot. --kernels adds
every kernel's microseconds. --leave-one-out prints instead what lookups make of every inner number of tokens of the
shipped table and of each --table without it (errors of its most even draw), and what each --table makes of those that
only the shipped one has.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from profiler.core.bundle import make_table, read_bundle  # noqa: E402
from profiler.core.grid import Grid, Outside  # noqa: E402
from profiler.core.grid_moe import moe_grid, row_places  # noqa: E402
from profiler.core.registry import load_model  # noqa: E402
from profiler.core.shots import Shot  # noqa: E402
from profiler.engines.base import ShotResult  # noqa: E402
from profiler.samples import read_runs  # noqa: E402
from profiler.timing import percentile  # noqa: E402

SAMPLES = ROOT / "tests" / "recorded" / "H200" / "DeepSeek-V3.2-Exp-experts" / "samples.csv.gz"
BUNDLE = ROOT / "profiler" / "perf-native" / "H200" / "deepseek-ai" / "DeepSeek-V3.2-Exp" / "fp8"
SHIPPED = BUNDLE / "tp1" / "moe.csv"
PRODUCTS = "fused_moe_kernel"

Key = tuple[int, int, float, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", nargs="?", type=Path, default=SAMPLES)
    parser.add_argument("--table", type=Path, action="append", default=[])
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--leave-one-out", action="store_true")
    options = parser.parse_args()
    if options.leave_one_out:
        _leave_one_out(options.table)
        return
    tables, shipped = [_times(path) for path in options.table], _times(SHIPPED)
    of_passes = read_bundle(BUNDLE).meta["grid"]["tp1/moe"]["whole_passes"]
    known = {int(tokens) for one in of_passes for tokens in one["tokens"].split()}
    passes = {tokens: us for (ep, tokens, _, _), us in sorted(shipped.items()) if ep == 1 and tokens in known}
    print("ep\ttokens\tskew\texperts\tpairs\tus\tproducts\tper expert\tin passes", *options.table, sep="\t")
    for run in read_runs([options.samples]):
        for index, result in sorted(run.results.items()):
            shot = run.shots[index]
            if shot.moe is None or result.failure:
                continue
            kernels = _kernels(result)
            total, products = kernels["all"], kernels[PRODUCTS]
            key = _key(shot)
            ratios = [f"{table[key] / total:.3f}" if key in table else "" for table in tables]
            together = key[0] == 1 and not shot.moe.skew and key[1] in passes
            whole = f"{passes[key[1]] / total:.3f}" if together else ""
            own = [f"{total:.1f}", f"{products:.1f}", f"{products / key[2]:.2f}", whole]
            print(*key[:2], shot.moe.skew, int(key[2]), key[3], *own, *ratios, sep="\t")
            if options.kernels:
                print(*(f"\t{us:10.2f}  {name}" for name, us in kernels.items()), sep="\n")


def _leave_one_out(others: Sequence[Path]) -> None:
    shipped = _times(SHIPPED)
    for path in (SHIPPED, *others):
        table, together, new = _times(path), [], []
        for ep in sorted({key[0] for key in table}):
            rows, known = _even(table, ep), _grid(table, ep)
            inner = sorted(rows)[1:-1]
            own = [_error(_grid(table, ep, without=n), rows[n], table) for n in inner]
            together += own if ep > 1 else []
            print(f"{path}: ep {ep}, {len(own)} numbers of tokens: {_two(own)}")
            only = [key for tokens, key in _even(shipped, ep).items() if tokens not in rows and ep > 1]
            new += [_error(known, key, shipped) for key in only]
        print(f"{path}: slices, {len(together)}: {_two(together)}")
        if new:
            print(f"{path}: {len(new)} of the shipped table that are not in it: {_two(new)}")


def _even(table: Mapping[Key, float], ep: int) -> dict[int, Key]:
    """The most even draw of every number of tokens."""
    found: dict[int, Key] = {}
    for key in sorted(table):
        if key[0] == ep and key[2] >= found.get(key[1], key)[2]:
            found[key[1]] = key
    return found


def _grid(table: Mapping[Key, float], ep: int, without: int | None = None) -> Grid:
    rows = [("experts", *key, us, 0.0) for key, us in table.items() if key[:2] != (ep, without)]
    local = load_model("deepseek-ai/DeepSeek-V3.2-Exp").moe.num_experts // ep  # type: ignore[union-attr]
    return moe_grid(make_table("moe", rows), "experts", ep, local, Outside("experts", "-", allow_extrapolation=True))


def _error(grid: Grid, key: Key, table: Mapping[Key, float]) -> float:
    """Of a lookup at the draw's experts and at the pairs at which its row stands."""
    rows: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for (ep, tokens, experts, pairs), us in table.items():
        if ep == key[0]:
            rows[tokens].append((experts, float(pairs), us))
    return abs(grid.at(row_places(rows, key[0])[key[1]], key[2]) - table[key]) / table[key]


def _two(errors: Sequence[float]) -> str:
    return f"p50 {percentile(errors, 50):.1%}, p90 {percentile(errors, 90):.1%}"


def _key(shot: Shot) -> Key:
    ep, tokens, experts, pairs = shot.fills[0].key
    return int(ep), int(tokens), float(experts), int(pairs)


def _kernels(result: ShotResult) -> Mapping[str, float]:
    """Microseconds of every kernel of one call and of all together, medians of the repeats."""
    repeats: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for sample in result.samples:
        repeats[sample.repeat][sample.kernel] += sample.duration_us
        repeats[sample.repeat]["all"] += sample.duration_us
    names = list(next(iter(repeats.values())))
    return {name: median(one[name] for one in repeats.values()) for name in names}


def _times(path: Path) -> dict[Key, float]:
    with path.open(newline="") as file:
        return {
            (int(row["ep"]), int(row["tokens"]), float(row["activated_experts"]), int(row["local_pairs"])): float(
                row["time_us"]
            )
            for row in csv.DictReader(file)
        }


if __name__ == "__main__":
    main()
