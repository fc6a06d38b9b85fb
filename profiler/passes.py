"""Cells that a pass fills besides those it was run for.

An engine that runs whole passes multiplies every token of a batch by the same matrices, whichever requests they belong
to, so that a pass of another table (66 decodes, a chunk of 257 tokens) also says what the projections take at its
number of tokens. Block-scaled products step behind 64, 128 and 256 tokens, where decode batches are, and no line
through few points finds that.

The same pass runs all experts of a layer behind the engine's own router. That is what the engine does; an expert shot
calls their kernel alone, with routing drawn by the model's rule.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Final

from profiler.bind import Row, bind
from profiler.core.bundle import Table, Value
from profiler.core.even_load import activated_experts
from profiler.core.shots import Fill, Shot
from profiler.core.types import Category, ModelSpec, MoeDims
from profiler.engines.base import Binding, EngineInfo
from profiler.kernels._components import names_of
from profiler.kernels.dense import BY_REQUESTS, CATEGORY
from profiler.timing import median, spread_rel
from profiler.visits import Latest

EXPERTS: Final[Category] = "moe"

# A row of the table of experts: layer, ep, tokens, activated_experts, local_pairs, time_us, spread_rel.
Cell = tuple[Value, ...]
_ACTIVATED: Final = 3
_FEWEST_ON_LINE: Final = 5


def dense_of_passes(measured: Latest, spec: ModelSpec, info: EngineInfo, binding: Binding) -> list[Row]:
    """Dense rows at the numbers of tokens that no dense shot has, each from one pass; none where dense was not run.

    Of several passes of as many tokens the one with the fewest requests and keys counts. Passes on the dense attention
    path run other projections, and components that go with requests rather than tokens are left out.
    """
    planned = [fill for shot in measured.shots for fill in shot.fills if fill.category == CATEGORY]
    if not planned or not info.whole_forward:
        return []
    names = tuple(name for name in planned[0].components if name not in BY_REQUESTS)
    known = {fill.key for fill in planned}
    chosen: dict[int, int] = {}
    for index, shot in enumerate(measured.shots):
        result = measured.results.get(index)
        if shot.moe is not None or shot.regime == "dense" or result is None or result.failure is not None:
            continue
        tokens = shot.new_tokens
        if (tokens,) not in known and (tokens not in chosen or _size(shot) < _size(measured.shots[chosen[tokens]])):
            chosen[tokens] = index
    return _rows(chosen, names, measured, spec, info, binding)


def _rows(
    chosen: dict[int, int],
    names: Sequence[str],
    measured: Latest,
    spec: ModelSpec,
    info: EngineInfo,
    binding: Binding,
) -> list[Row]:
    shots = list(measured.shots)
    for tokens, index in chosen.items():
        shots[index] = replace(shots[index], fills=(Fill(CATEGORY, (tokens,), tuple(names)),))
    # A pass in which a component did not run gives no rows, and that is no failure: it was run for another table.
    return list(bind([measured.results[index] for index in chosen.values()], shots, spec, info, binding).rows)


def _size(shot: Shot) -> tuple[int, int]:
    return len(shot.requests), shot.kv_tokens


@dataclass(frozen=True, slots=True)
class ExpertPasses:
    """All experts of a rank (ep 1) in whole passes, ascending by tokens.

    rows: microseconds of one call, keyed by (ep, tokens, experts that one token reaches, pairs), which is the least
    that such a pass has read. passes: how many passes stand behind each number of tokens. on_line: numbers of tokens
    whose time is that of as many experts as are expected, by the line through their passes. reached: of the others,
    experts that the passes reached, where all of them were counted.
    """

    rows: tuple[Row, ...] = ()
    passes: Mapping[int, int] = field(default_factory=dict)
    reached: Mapping[int, float] = field(default_factory=dict)
    on_line: frozenset[int] = frozenset()

    def cells(self, moe: MoeDims) -> list[Cell]:
        """Rows of the table. Their activated experts are those expected of independent tokens, to a hundredth (to a
        whole one, two tokens would be 1.6 % off), or where few passes were counted those that were."""
        found: list[Cell] = []
        for row in self.rows:
            ep, tokens, _, pairs = (int(value) for value in row.key)
            reached = round(self.reached.get(tokens, activated_experts(moe, ep, tokens)), 2)
            spread = round(row.spread_rel, 4)
            found.append((row.name, ep, tokens, reached, pairs, float(f"{row.time_us:.6g}"), spread))
        return found


def experts_of_passes(measured: Latest, spec: ModelSpec, info: EngineInfo, binding: Binding) -> ExpertPasses:
    """All experts at every number of tokens that a pass had, one row each; none where no whole pass was run.

    The time is the median over all passes of as many tokens, decodes and prefills alike, each with the median of its
    repeats. One pass is one draw of the routing, since its repeats have the same tokens, and draws of 16 to 48 tokens
    scatter by 3 to 5 % (standard deviation over 8 to 30 passes each, DeepSeek-V3.2 on an H200), so the one with the
    fewest requests would be no better than any other. Passes on either attention path count: the experts see neither,
    and of 257 to 1,024 tokens both take the same within 0.2 %. Passes that ask for the dense path and run another are
    no cells (`profiler.bind.never_dense`). The spread is (p90 - p10) / median over the passes, of a single one that of
    its repeats. Experts reached are the median over the same passes, where all were counted. Passes whose draw is no
    average one are no cells (`_of_kindred_tokens`).

    Where at least five passes were counted and those expected of independent tokens lie among their counts, the time
    is that of as many, by the line through the passes (`_at_expected`): their times follow the counts (MiniMax-M3 on an
    H200: correlation 0.97 and more from 9 to 192 tokens, 24 to 30 us an expert), and up to 8 tokens, where vLLM
    launches a block for every pair whichever expert it has, hardly; the line is nearly flat there by itself. The
    spread is then that of what is left of the passes beside the line.
    """
    moe = spec.moe
    if moe is None or not info.whole_forward:
        return ExpertPasses()
    wanted = [index for index in measured.results if not _of_kindred_tokens(measured.shots[index], moe)]
    rows = expert_rows(measured, wanted, spec, info, binding)
    counted = {index: measured.results[index].reached_experts for index in wanted}
    return _joined(rows, counted, moe)


def expert_rows(
    measured: Latest, wanted: Iterable[int], spec: ModelSpec, info: EngineInfo, binding: Binding
) -> Sequence[Row]:
    """All experts of each whole pass among the shots of these numbers, a row each: keyed as `ExpertPasses.rows`.

    Failed shots and those of experts alone give none. The model has experts.
    """
    moe = spec.moe
    assert moe is not None
    names, shots, ran = names_of(spec, EXPERTS), list(measured.shots), []
    for index in wanted:
        shot, result = shots[index], measured.results[index]
        if shot.moe is None and result.failure is None:
            key = (1, shot.new_tokens, moe.topk, shot.new_tokens * moe.topk)
            shots[index] = replace(shot, fills=(Fill(EXPERTS, key, names),))
            ran.append(result)
    return bind(ran, shots, spec, info, binding).rows


def _of_kindred_tokens(shot: Shot, moe: MoeDims) -> bool:
    """Whether a pass reaches fewer experts than as many independent tokens: one prompt with no context behind it.

    With random weights its few tokens attend to one another alone, come out alike and pick alike: 3 to 10 % fewer
    experts than expected in the mean of 5 to 130 tokens (at most 20), where prompts with a context are within 1 % but
    for 2 at one degree, and decodes within 2 (MiniMax-M3 and GLM-5 on an H200, 128 and 256 experts;
    tests/perf/experts_reached.py). A counted one is no cell either: where other passes have as many tokens it lies on
    their line (0.3 % off in the median, at most 4.6), but most numbers of tokens would have it alone. No longer asked
    where less than one expert is expected to be left out.
    """
    kindred = len(shot.requests) == 1 and shot.requests[0][1] == 0 and shot.new_tokens > 1
    return kindred and activated_experts(moe, 1, shot.new_tokens) < moe.num_experts - 1


def _joined(rows: Iterable[Row], counted: Mapping[int, float | None], moe: MoeDims) -> ExpertPasses:
    """One row of each component and key, from those of single passes. counted: the experts that each shot reached."""
    of_key: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        of_key[int(row.key[1]), row.name].append(row)
    found, passes, reached, on_line = [], {}, {}, set()
    for (tokens, _), own in sorted(of_key.items()):
        times = [row.time_us for row in own]
        counts = [experts for row in own if (experts := counted[row.shot]) is not None]
        passes[tokens] = len(own)
        if len(counts) == len(own):
            even = _at_expected(counts, times, activated_experts(moe, 1, tokens))
            if even is None:
                reached[tokens] = median(counts)
            else:
                times = even
                on_line.add(tokens)
        spread = spread_rel(times) if len(own) > 1 else own[0].spread_rel
        found.append(replace(own[0], time_us=median(times), spread_rel=spread))
    return ExpertPasses(tuple(found), passes, reached, frozenset(on_line))


def _at_expected(counts: Sequence[float], times: Sequence[float], expected: float) -> list[float] | None:
    """What passes would have taken had each reached `expected` experts, by the median slope of all pairs of them
    (Theil and Sen's: one slow pass does not turn it); None with fewer than five, or counts that do not surround it."""
    if len(counts) < _FEWEST_ON_LINE or not min(counts) <= expected <= max(counts):
        return None
    both = list(zip(counts, times, strict=True))
    slopes = [(t - u) / (c - d) for (c, t), (d, u) in combinations(both, 2) if c != d]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    return [time + slope * (expected - count) for count, time in both]


def with_passes(cells: Iterable[Cell], passes: Iterable[Cell]) -> list[Cell]:
    """Cells of a table of experts in which those of passes replace the even load of as many tokens.

    Of a number of tokens that is the cell that reaches most experts, as lookups read it (profiler.core.grid_moe).
    Others, of uneven popularity, stay, and so does every other degree of expert parallelism.
    """
    there, new = list(cells), list(passes)
    reached = {cell[:_ACTIVATED]: float(cell[_ACTIVATED]) for cell in new}
    most: dict[Cell, float] = defaultdict(float)
    for cell in there:
        most[cell[:_ACTIVATED]] = max(most[cell[:_ACTIVATED]], float(cell[_ACTIVATED]))

    def stays(cell: Cell) -> bool:
        own, experts = cell[:_ACTIVATED], float(cell[_ACTIVATED])
        return own not in reached or experts < min(most[own], reached[own])

    return [cell for cell in there if stays(cell)] + new


def cells_of_passes(table: Table, origins: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """The cells of a table of experts that are of whole passes, as `whole_passes` of meta.yaml has their origins."""
    at = {(int(one["ep"]), int(tokens)) for one in origins for tokens in str(one["tokens"]).split()}
    found: dict[Cell, Cell] = {}
    for cell in table.rows():
        own = cell[:_ACTIVATED]
        if own[1:] in at and (own not in found or float(cell[_ACTIVATED]) > float(found[own][_ACTIVATED])):
            found[own] = cell
    return list(found.values())


def origin_of(passes: ExpertPasses, run: str, kv_layout: str) -> dict[str, Any]:
    """What meta.yaml keeps of the cells of passes: which run and cache they had, and how many passes each number of
    tokens."""
    return {
        "ep": 1,
        "tokens": " ".join(map(str, passes.passes)),
        "passes": " ".join(map(str, passes.passes.values())),
        "time_us": _how_timed(passes),
        "activated_experts": _how_counted(passes),
        "kv_layout": kv_layout,
        "run": run,
    }


def _how_timed(passes: ExpertPasses) -> str:
    usual = "measured, median over the passes of as many tokens"
    if not passes.on_line:
        return usual
    share = f"{len(passes.on_line)} of {len(passes.passes)} numbers of tokens"
    return f"{usual}; at {share} at the experts expected, by the line through the passes"


def _how_counted(passes: ExpertPasses) -> str:
    counted = len(passes.reached)
    if not counted:
        return "computed, those expected of independent tokens"
    if counted == len(passes.passes):
        return "counted, median over the passes of as many tokens"
    return f"counted at {counted} of {len(passes.passes)} numbers of tokens, computed at the others"


def remaining_origin(origin: Mapping[str, Any], newer: ExpertPasses) -> dict[str, Any]:
    """An earlier origin without the numbers of tokens that newer passes have; empty when none is left."""
    pairs = zip(str(origin["tokens"]).split(), str(origin["passes"]).split(), strict=True)
    left = {tokens: passes for tokens, passes in pairs if int(tokens) not in newer.passes}
    return {**origin, "tokens": " ".join(left), "passes": " ".join(left.values())} if left else {}
