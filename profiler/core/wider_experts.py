"""Experts of an expert-parallel degree that nobody measured, from the two largest degrees that somebody did.

At a fixed number of tokens of the group, a rank of twice the degree computes half of the pairs for half of the experts,
and so reads half of the weights. What does not halve is what the kernel does for every token of the group, wherever its
experts are: it quantises all tokens, sorts all pairs and sums all outputs. So with an even load

    t(tokens, ep) = own(tokens) + shared(tokens) / ep

and two measured degrees give both. On DeepSeek-V3.2 (H200, 131,072 tokens) degrees 8, 16 and 32 take 40,422, 33,004 and
29,254 us: each doubling saves half of what the one before did, within 2 %. Reading the larger degree at the same pairs
instead, as if a rank saw no tokens but its own, is half of that. How far off the rule is: docs/validation.md.
"""

from collections.abc import Sequence

from profiler.core.bundle import Table
from profiler.core.even_load import activated_experts, local_pairs
from profiler.core.grid import Grid, Outside
from profiler.core.grid_moe import moe_grid
from profiler.core.types import MoeDims

# Largest degree that is derived, times the largest measured one: what leaving out measured degrees has checked.
MOST_DOUBLED = 2


def degrees_of(table: Table, name: str) -> tuple[int, ...]:
    """The expert-parallel degrees that a table has rows of, ascending."""
    columns = table.columns
    return tuple(sorted({int(ep) for layer, ep in zip(columns["layer"], columns["ep"], strict=True) if layer == name}))


def wider_from(degrees: tuple[int, ...], ep: int) -> tuple[int, int] | None:
    """The two measured degrees that `ep` follows from, None where it was measured or does not follow.

    Both must be slices (degree 1 is another kernel where an engine picks one by the experts that it has).
    """
    slices = [degree for degree in degrees if degree > 1]
    if ep in degrees or len(slices) < 2 or not slices[-1] < ep <= MOST_DOUBLED * slices[-1]:
        return None
    return slices[-2], slices[-1]


def wider_table(table: Table, name: str, moe: MoeDims, sources: tuple[int, int], ep: int) -> Table:
    """The rows of `name` at `ep`, from those of the larger of two `sources`: as many tokens, a share of its pairs and
    experts, and of the time beyond what so many tokens take at any degree.

    The other columns are those of the row that it comes from. Rows of more tokens than the smaller source has are left
    out.
    """
    share = sources[1] / ep
    own_us = _own_us(table, name, moe, sources)
    rows = []
    for row in table.rows():
        found = dict(zip(table.columns, row, strict=True))
        if found["layer"] != name or found["ep"] != sources[1] or (tokens := int(found["tokens"])) not in own_us:
            continue
        time_us = float(found["time_us"])
        own = min(own_us[tokens], time_us)
        found |= {axis: float(found[axis]) * share for axis in ("activated_experts", "local_pairs")}
        found |= {"ep": ep, "time_us": own + (time_us - own) * share}
        rows.append(tuple(found.values()))
    return Table("moe", dict(zip(table.columns, zip(*rows, strict=True), strict=True)))


def _own_us(table: Table, name: str, moe: MoeDims, sources: tuple[int, int]) -> dict[int, float]:
    """Microseconds of an even load that do not depend on the degree, by tokens of the group.

    More tokens take no less of it; single draws of the routing and tiles that one degree alone has scatter it, and the
    closest ascending numbers take that out.
    """
    low, high = sources
    grids = {degree: _grid(table, name, moe, degree) for degree in sources}
    columns = table.columns
    found: dict[int, tuple[float, float]] = {}
    for tokens in sorted({int(n) for ep, n in zip(columns["ep"], columns["tokens"], strict=True) if ep == high}):
        loads = {ep: (local_pairs(moe, ep, tokens), activated_experts(moe, ep, tokens)) for ep in sources}
        if grids[low].covers(*loads[low]):
            few, many = (grids[ep].at(*loads[ep]) for ep in sources)
            found[tokens] = (high * many - low * few) / (high - low), many
    ascending = closest_ascending([own for own, _ in found.values()])
    return {n: max(0.0, min(own, even)) for own, (n, (_, even)) in zip(ascending, found.items(), strict=True)}


def closest_ascending(values: Sequence[float]) -> list[float]:
    """The numbers that never fall with the smallest squared distance from `values`: neighbours that fall are averaged
    until none do."""
    runs: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while runs and runs[-1][0] > mean:
            before, many = runs.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        runs.append((mean, count))
    return [mean for mean, count in runs for _ in range(count)]


def _grid(table: Table, name: str, moe: MoeDims, ep: int) -> Grid:
    return moe_grid(table, name, ep, moe.num_experts // ep, Outside(name, "", allow_extrapolation=True))
