"""How far off experts of a degree are that nobody measured: `python tests/perf/wider_experts.py`.

A measured degree of each shipped table is left out and derived from two smaller ones (profiler/core/wider_experts.py).
Errors are those of an even load at every number of tokens that was measured, in percent of the measured time: median,
p90 and the largest, from 64 tokens on, the least that 64 data-parallel ranks have, and of fewer.
"""

import sys
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from profiler.core.bundle import read_bundle
from profiler.core.even_load import activated_experts, local_pairs
from profiler.core.grid import Outside
from profiler.core.grid_moe import moe_grid
from profiler.core.paths import default_bundle_root
from profiler.core.registry import load_model
from profiler.core.wider_experts import wider_table

TABLES = {
    "deepseek-ai/DeepSeek-V3.2-Exp": "fp8",
    "zai-org/GLM-5-FP8": "fp8",
    "zai-org/GLM-5": "bf16",
    "zai-org/GLM-5.2": "bf16",
    "MiniMaxAI/MiniMax-M3": "bf16",
}
FIRST = 64
# (sources, derived): one step beyond the largest, and two.
STEPS = (((4, 8), 16), ((8, 16), 32), ((2, 4), 16), ((4, 8), 32))


def errors(model: str, sources: tuple[int, int], ep: int) -> dict[int, float]:
    """Derived over measured less one, by tokens of the group."""
    table = read_bundle(default_bundle_root() / "H200" / model / TABLES[model]).table(1, "moe")
    moe = load_model(model).moe
    assert moe is not None
    local, outside = moe.num_experts // ep, Outside("experts", "", allow_extrapolation=True)
    measured = moe_grid(table, "experts", ep, local, outside)
    derived = moe_grid(wider_table(table, "experts", moe, sources, ep), "experts", ep, local, outside)
    tokens = sorted({int(n) for d, n in zip(table.columns["ep"], table.columns["tokens"], strict=True) if d == ep})
    loads = {n: (local_pairs(moe, ep, n), activated_experts(moe, ep, n)) for n in tokens}
    return {n: derived.at(*load) / measured.at(*load) - 1 for n, load in loads.items()}


def figures(found: dict[int, float], *, few: bool = False) -> tuple[float, float, float]:
    """Median, p90 and largest of the errors from FIRST tokens on, or of fewer, in percent."""
    values = [100 * abs(error) for tokens, error in found.items() if (tokens < FIRST) is few]
    return median(values), quantiles(values, n=10, method="inclusive")[-1], max(values)


def main() -> None:
    print(f"model\tfrom\tto\tfrom {FIRST} tokens on: p50\tp90\tmost\tfewer: p50\tp90\tmost")
    for model in TABLES:
        for sources, ep in STEPS:
            found = errors(model, sources, ep)
            cells = [f"{value:.1f}" for few in (False, True) for value in figures(found, few=few)]
            print(model, f"{sources[0]} and {sources[1]}", ep, *cells, sep="\t")


if __name__ == "__main__":
    main()
