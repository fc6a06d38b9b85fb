"""All experts together (ep 1) as whole passes have them, beside the slices that were called alone."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from profiling import SMALL, FakeEngine, each_component, small_root

from profiler import acquire
from profiler.commands.profile import command as profile_command
from profiler.commands.slice import command as slice_command
from profiler.core.bundle import Bundle, Table, make_table, read_bundle, table_text
from profiler.core.even_load import activated_experts
from profiler.core.registry import load_model
from profiler.core.shots import MoeBatch, Shot
from profiler.engines.base import EngineInfo, EngineOptions, KernelSample, ShotResult, find_binding
from profiler.kernels._axes import GRIDS
from profiler.passes import (
    ExpertPasses,
    cells_of_passes,
    experts_of_passes,
    origin_of,
    remaining_origin,
    with_passes,
)
from profiler.timing import spread_rel
from profiler.visits import Latest

LAYOUTS = {
    name: {
        "layout": name,
        "block_tokens": 64,
        "caches": [{"name": "mla_latent", "bytes_per_token_layer": size}],
        "tokens": None,
    }
    for name, size in (("bf16", 1152), ("fp8_ds_mla", 656))
}
OTHER_THAN_EXPERTS = "dense,attention,indexer,sparse_attention,per_sequence"
TOPK, EXPERTS = 4, 16  # of SMALL

Time = Callable[[Shot], float]


def alone_us(shot: Shot) -> float:
    """What an expert shot takes: as slow as no pass is."""
    assert shot.moe is not None
    return 9_000.0 + shot.moe.tokens + 100.0 * shot.moe.ep + 10.0 * shot.moe.skew


def pass_us(shot: Shot) -> float:
    return 1_000.0 + shot.new_tokens


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `profile` or `slice` on an engine without a device whose passes run experts; `in_pass` tells how long, None
    for never."""
    models = small_root(tmp_path / "models")

    def run(*arguments: str, one_table: bool = False, in_pass: Time | None = pass_us, **facts: Any) -> Result:
        def make(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
            if shot.moe:
                return [KernelSample(index, repeat, "moe", "experts", alone_us(shot), 1)]
            own = each_component(index, shot, repeat)
            return own + ([KernelSample(index, repeat, "moe", "experts", in_pass(shot), 1)] if in_pass else [])

        def create(name: str, options: EngineOptions) -> FakeEngine:
            return FakeEngine(options, make, **facts)

        monkeypatch.setattr(acquire, "create_engine", create)
        fixed = ["--hardware", "CPU", "--repeats", "3", "--warmup", "0"]
        fixed += ["--model-config-root", str(models), "--out-root", str(tmp_path / "out")]
        chosen = slice_command if one_table else profile_command
        if not one_table:
            fixed += ["--skip-skew", "--grid", "tiny"] if "--grid" not in arguments else ["--skip-skew"]
        return CliRunner().invoke(chosen, [SMALL, *fixed, *arguments], catch_exceptions=True)

    return run


def bundle(tmp_path: Path, variant: str = "bf16") -> Bundle:
    return read_bundle(tmp_path / "out" / "CPU" / SMALL / variant)


def rows(table: Table, ep: int) -> dict[tuple[int, float], tuple[float, float]]:
    """(tokens, activated experts) -> (pairs, time) of one degree."""
    names = ("ep", "tokens", "activated_experts", "local_pairs", "time_us")
    return {
        (int(tokens), float(experts)): (float(pairs), float(time))
        for degree, tokens, experts, pairs, time in zip(*(table.columns[name] for name in names), strict=True)
        if degree == ep
    }


def expected(tokens: int) -> float:
    return round(EXPERTS * (1 - (1 - TOPK / EXPERTS) ** tokens), 2)


def test_every_pass_gives_all_experts_at_its_tokens_and_slices_stay(call: Any, tmp_path: Path) -> None:
    assert call("--ep", "1,2").exit_code == 0
    table = bundle(tmp_path).tables[1, "moe"]
    found = rows(table, 1)
    assert {1, 4, 16, 64, 128} <= {tokens for tokens, _ in found}, "4 decodes have no expert shot"
    for (tokens, experts), (pairs, time) in found.items():
        assert (experts, pairs, time) == (expected(tokens), TOPK * tokens, 1_000.0 + tokens), tokens
    assert {tokens for tokens, _ in rows(table, 2)} == {1, 16, 64, 128}
    assert all(time == 9_200.0 + tokens for (tokens, _), (_, time) in rows(table, 2).items())
    (origin,) = bundle(tmp_path).meta["grid"]["tp1/moe"]["whole_passes"]
    assert origin["tokens"].split() == [str(tokens) for tokens, _ in sorted(found)]
    assert len(origin["passes"].split()) == len(found) and min(map(int, origin["passes"].split())) >= 1
    assert origin["activated_experts"].startswith("computed") and origin["run"] in bundle(tmp_path).meta["grid"]


@pytest.mark.parametrize(("in_pass", "whole_forward"), [(None, True), (pass_us, False)])
def test_without_passes_the_slices_are_the_table(
    call: Any, tmp_path: Path, in_pass: Time | None, whole_forward: bool
) -> None:
    assert call("--ep", "1,2", in_pass=in_pass, whole_forward=whole_forward).exit_code == 0
    found = rows(bundle(tmp_path).tables[1, "moe"], 1)
    assert {tokens for tokens, _ in found} == {1, 16, 64, 128}
    assert all(time == 9_100.0 + tokens for (tokens, _), (_, time) in found.items())
    assert "whole_passes" not in bundle(tmp_path).meta["grid"]["tp1/moe"]


def test_a_draw_of_uneven_popularity_stays_where_a_pass_replaces_the_even_one(call: Any, tmp_path: Path) -> None:
    limits = ("--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--max-model-len", "256")
    assert call("--grid", "coarse", "--ep", "1,2", *limits).exit_code == 0
    at_16 = {experts: time for (n, experts), (_, time) in rows(bundle(tmp_path).tables[1, "moe"], 1).items() if n == 16}
    even = expected(16)
    (uneven,) = at_16.keys() - {even}
    assert uneven < even and at_16[even] == 1_016.0
    assert at_16[uneven] == 9_131.0, "that of the skewed shot"


def test_a_cell_is_the_median_over_the_passes_of_as_many_tokens(call: Any, tmp_path: Path) -> None:
    def by_keys(shot: Shot) -> float:
        return 1_000.0 + shot.kv_tokens

    assert call(in_pass=by_keys).exit_code == 0
    found = rows(bundle(tmp_path).tables[1, "moe"], 1)[16, expected(16)][1]
    most = max(GRIDS["tiny"].context_tokens)
    assert 1_016.0 < found < 1_016.0 + most, "neither the pass of fewest keys nor that of most"


def passes_of(
    tmp: Path,
    shots: dict[Shot, float],
    settings: Mapping[str, Any] | None = None,
    reached: Sequence[float | None] = (),
) -> ExpertPasses:
    """`experts_of_passes` of single passes with the time of their experts, and how many of these they reached."""
    spec = load_model(SMALL, small_root(tmp))
    kinds = tuple(kind.name for kind in spec.layers[:4])
    info = EngineInfo("reference", {}, {}, LAYOUTS["bf16"], "bf16", kinds, True, settings or {})
    results = {
        index: ShotResult(index, (KernelSample(index, 0, "moe", "experts", us, 1),), None if us else "out of memory")
        for index, us in enumerate(shots.values())
    }
    for index, experts in enumerate(reached):
        results[index] = replace(results[index], reached_experts=experts)
    return experts_of_passes(Latest(list(shots), results, {}), spec, info, find_binding(info, "serving"))


def test_which_passes_count(tmp_path: Path) -> None:
    chunk = ((32, 0),)
    shots = {
        Shot((), chunk, "sparse"): 100.0,
        Shot((), chunk, "dense"): 200.0,
        Shot((), ((1, 500),) * 32): 600.0,
        Shot((), ((30, 0), (1, 9), (1, 9))): 0.0,  # failed
        Shot((), moe=MoeBatch(1, 32)): 50.0,
    }
    found = passes_of(tmp_path, shots)
    assert [(row.key, row.time_us) for row in found.rows] == [((1, 32, TOPK, 32 * TOPK), 200.0)]
    assert found.passes == {32: 3}
    # A chunk that this engine runs as a decode was not run dense, as its shot asks.
    for asked in ({"mla_decode_threshold_tokens": 32}, {"dense_prefill": "never"}):
        found = passes_of(tmp_path, shots, asked)
        assert [(row.time_us, found.passes[32]) for row in found.rows] == [(350.0, 2)]


def test_a_lent_table_gets_the_passes_of_its_own_engine(call: Any, tmp_path: Path) -> None:
    limits = ("--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--max-model-len", "256")
    coarse = ("--grid", "coarse", *limits)
    assert call("--ep", "1,2", *coarse, in_pass=None).exit_code == 0
    lender = tmp_path / "out" / "CPU" / SMALL / "bf16"
    result = call(*coarse, "--categories", OTHER_THAN_EXPERTS, "--shared-from", str(lender), kv=LAYOUTS["fp8_ds_mla"])
    assert result.exit_code == 0, result.output
    first, second = bundle(tmp_path), bundle(tmp_path, "bf16-kvfp8_ds_mla")
    before, after = first.tables[1, "moe"], second.tables[1, "moe"]
    assert rows(after, 2) == rows(before, 2)
    even = {key for key in rows(before, 1) if key[1] == max(e for n, e in rows(before, 1) if n == key[0])}
    kept = {key: row for key, row in rows(before, 1).items() if key not in even}
    assert kept and kept.items() <= rows(after, 1).items()
    assert all(rows(after, 1)[tokens, expected(tokens)][1] == 1_000.0 + tokens for tokens in (1, 4, 16, 64))
    entry = second.meta["grid"]["tp1/moe"]
    assert entry["from"] == {"kv_layout": "bf16", "measured_at": first.meta["measured_at"]}
    assert [one["kv_layout"] for one in entry["whole_passes"]] == ["fp8_ds_mla"]
    assert {entry["run"], entry["whole_passes"][0]["run"]} <= second.meta["grid"].keys()
    assert "4" in entry["axes"]["tokens"].split()


def test_experts_of_another_layouts_bundle_replace_those_of_one(call: Any, tmp_path: Path) -> None:
    assert call("--ep", "1,2", in_pass=None).exit_code == 0
    lender = tmp_path / "out" / "CPU" / SMALL / "bf16"
    packed = lender.with_name("bf16-kvfp8_ds_mla")
    facts = {"kv": LAYOUTS["fp8_ds_mla"]}
    result = call("--categories", OTHER_THAN_EXPERTS, "--shared-from", str(lender), **facts)
    assert result.exit_code == 0, result.output
    before, source = bundle(tmp_path), read_bundle(packed)
    moe = ("--variant", "bf16", "--tp", "1", "--category", "moe")
    assert call(*moe, "--moe-from", str(packed), "--dry-run", one_table=True).exit_code == 0
    assert bundle(tmp_path).meta == before.meta
    result = call(*moe, "--moe-from", str(packed), one_table=True)
    assert result.exit_code == 0, (result.output, result.exception)
    after = bundle(tmp_path)
    assert (
        table_text(after.tables[1, "moe"]) == table_text(source.tables[1, "moe"]) != table_text(before.tables[1, "moe"])
    )
    assert {k: table_text(t) for k, t in after.tables.items() if k != (1, "moe")} == {
        k: table_text(t) for k, t in before.tables.items() if k != (1, "moe")
    }
    entry = after.meta["grid"]["tp1/moe"]
    stamp = source.meta["files"]["tp1/moe.csv"]
    assert entry["from"] == {
        "kv_layout": "fp8_ds_mla",
        "measured_at": stamp["measured_at"],
        "from": {"kv_layout": "bf16", "measured_at": before.meta["measured_at"]},
    }
    assert entry["whole_passes"][0]["run"] in after.meta["grid"]
    assert after.meta["files"]["tp1/moe.csv"] == stamp
    assert {k: v for k, v in after.meta.items() if k not in ("grid", "files")} == {
        k: v for k, v in before.meta.items() if k not in ("grid", "files")
    }


def test_only_experts_of_another_layout_measured_alike_are_taken(call: Any, tmp_path: Path) -> None:
    assert call().exit_code == 0
    own = tmp_path / "out" / "CPU" / SMALL / "bf16"
    moe = ("--tp", "1", "--category", "moe")
    result = call(*moe, "--moe-from", str(own), one_table=True)
    assert "another KV layout" in str(result.exception)
    result = call("--tp", "1", "--category", "dense", "--moe-from", str(own), one_table=True)
    assert "goes with --category moe" in str(result.exception)
    assert call(kv=LAYOUTS["fp8_ds_mla"], versions={"torch": "1"}).exit_code == 0
    packed = own.with_name("bf16-kvfp8_ds_mla")
    text = (own / "meta.yaml").read_text()
    result = call("--variant", "bf16", *moe, "--moe-from", str(packed), one_table=True)
    assert "versions: " in str(result.exception)
    assert (own / "meta.yaml").read_text() == text


def test_experts_measured_anew_alone_keep_the_cells_of_passes(call: Any, tmp_path: Path) -> None:
    assert call("--ep", "1,2").exit_code == 0
    before = bundle(tmp_path)
    result = call("--tp", "1", "--category", "moe", one_table=True)
    assert result.exit_code == 0, (result.output, result.exception)
    after = bundle(tmp_path)
    assert table_text(after.tables[1, "moe"]) == table_text(before.tables[1, "moe"])
    key = "whole_passes"
    assert after.meta["grid"]["tp1/moe"][key] == before.meta["grid"]["tp1/moe"][key]
    assert after.meta["grid"]["tp1/moe"]["axes"] == before.meta["grid"]["tp1/moe"]["axes"]


def test_cells_of_passes_and_what_remains_of_earlier_ones() -> None:
    cells = [("experts", 1, 16, 22.0, 128, 285.0, 0.0), ("experts", 1, 16, 104.0, 128, 1197.0, 0.0)]
    other = ("experts", 2, 16, 47.0, 64, 507.0, 0.0)
    new = ("experts", 1, 16, 101.96, 128, 998.0, 0.02)
    merged = with_passes([*cells, other], [new])
    assert merged == [cells[0], other, new]
    origin = {"ep": 1, "tokens": "8 16", "passes": "3 30"}
    assert cells_of_passes(make_table("moe", merged), [origin]) == [new]
    assert remaining_origin(origin, ExpertPasses((), {16: 9})) == {"ep": 1, "tokens": "8", "passes": "3"}
    assert remaining_origin(origin, ExpertPasses((), {8: 1, 16: 9})) == {}


def test_activated_experts_are_told_to_a_hundredth(tmp_path: Path) -> None:
    spec = load_model(SMALL, small_root(tmp_path))
    assert spec.moe is not None
    found = passes_of(tmp_path, {Shot((), ((1, 64),) * 3): 33.0})
    (cell,) = found.cells(spec.moe)
    assert cell[:-1] == ("experts", 1, 3, 9.25, 12, 33.0)
    assert cell[3] == activated_experts(spec.moe, 1, 3)


def test_both_sides_of_every_change_of_tiles_are_passes_of_the_full_grid() -> None:
    axes = GRIDS["full"]
    assert {tokens for tokens in axes.moe_tokens if tokens <= 16_384} <= set(axes.tokens)
    assert {8, 9, 16, 17, 64, 65, 96, 97, 128, 129, 512, 513} <= set(axes.tokens)


def test_divided_experts_come_with_the_passes_of_a_higher_degree(call: Any, tmp_path: Path) -> None:
    """Above tp 1 the stack has experts of a rank's width, no shots of them, and one table of ep 1 from its passes."""
    assert call("--tp", "1,2", "--ep", "1,2").exit_code == 0
    own = bundle(tmp_path)
    table = own.tables[2, "moe"]
    assert set(table.columns["ep"]) == {1}
    found = rows(table, 1)
    assert {1, 4, 16, 64, 128} <= {tokens for tokens, _ in found}
    for (tokens, experts), (pairs, time) in found.items():
        assert (experts, pairs, time) == (expected(tokens), TOPK * tokens, 1_000.0 + tokens), tokens
    entry = own.meta["grid"]["tp2/moe"]
    assert entry["run"] in own.meta["grid"] and entry["whole_passes"][0]["ep"] == 1


def test_a_degree_without_dense_passes_has_no_divided_experts(call: Any, tmp_path: Path) -> None:
    assert call("--tp", "1,2", "--categories", "attention,indexer,sparse_attention").exit_code == 0
    assert {tp for tp, category in bundle(tmp_path).tables if category == "moe"} == set()


def test_divided_experts_of_another_layouts_bundle_are_added(call: Any, tmp_path: Path) -> None:
    assert call("--tp", "1,2", in_pass=None).exit_code == 0
    before = bundle(tmp_path)
    assert (2, "moe") not in before.tables
    packed = before.path.with_name("bf16-kvfp8_ds_mla")
    assert call("--tp", "1,2", kv=LAYOUTS["fp8_ds_mla"]).exit_code == 0
    slice_of = ("--variant", "bf16", "--category", "moe", "--moe-from", str(packed))
    result = call("--tp", "2", *slice_of, one_table=True)
    assert result.exit_code == 0, (result.output, result.exception)
    after, source = bundle(tmp_path), read_bundle(packed)
    assert table_text(after.tables[2, "moe"]) == table_text(source.tables[2, "moe"])
    assert after.tables.keys() == before.tables.keys() | {(2, "moe")}
    assert after.meta["grid"]["tp2/moe"]["from"]["kv_layout"] == "fp8_ds_mla"
    result = call("--tp", "4", *slice_of, one_table=True)
    assert "has no table tp4/moe" in str(result.exception)


def test_experts_that_passes_reached_stand_in_the_table_where_all_were_counted(tmp_path: Path) -> None:
    spec = load_model(SMALL, small_root(tmp_path))
    assert spec.moe is not None
    shots = {
        Shot((), ((3, 4),)): 30.0,
        Shot((), ((3, 8),)): 36.0,
        Shot((), ((2, 0), (1, 5))): 99.0,
        Shot((), ((1, 5),) * 4): 40.0,
        Shot((), ((4, 4),)): 44.0,
    }
    found = passes_of(tmp_path, shots, reached=(8.0, 9.5, 9.0, 11.0, None))
    assert found.reached == {3: 9.0}
    assert [cell[3] for cell in found.cells(spec.moe)] == [9.0, round(activated_experts(spec.moe, 1, 4), 2)]
    how = "counted at 1 of 2 numbers of tokens, computed at the others"
    assert origin_of(found, "run", "bf16")["activated_experts"] == how
    all_counted = passes_of(tmp_path, shots, reached=(8.0, 9.5, 9.0, 11.0, 12.0))
    assert all_counted.reached == {3: 9.0, 4: 11.5}
    assert origin_of(all_counted, "run", "bf16")["activated_experts"].startswith("counted, median")
    # The dense path was not run, so neither its time nor its count says anything.
    odd = {Shot((), ((3, 4),)): 30.0, Shot((), ((3, 0),), "dense"): 60.0}
    assert passes_of(tmp_path, odd, {"dense_prefill": "never"}, (8.0, 2.0)).reached == {3: 8.0}


@pytest.mark.parametrize("regime", ["sparse", "dense"])
def test_a_prompt_with_nothing_behind_it_is_a_cell_only_of_one_token_or_where_all_experts_are_reached(
    tmp_path: Path, regime: str
) -> None:
    assert 16 - expected(9) > 1 > 16 - expected(10)
    alone = {Shot((), ((n, 0),), regime): 100.0 + n for n in (1, 2, 4, 9, 10, 64)}
    assert passes_of(tmp_path, alone).passes == {1: 1, 10: 1, 64: 1}
    # A count does not make one a cell.
    assert passes_of(tmp_path, alone, reached=(4.0, 6.5, 10.0, 14.0, 14.5, 16.0)).passes.keys() == {1, 10, 64}
    beside = {
        Shot((), ((4, 1),), regime): 50.0,
        Shot((), ((2, 0), (2, 0)), regime): 60.0,
        Shot((), ((1, 9),) * 4): 70.0,
    }
    found = passes_of(tmp_path, {**alone, **beside})
    assert found.passes == {1: 1, 4: 3, 10: 1, 64: 1}
    assert [row.time_us for row in found.rows if row.key[1] == 4] == [60.0]


def of_four(passes: Sequence[tuple[float, float]]) -> dict[Shot, float]:
    """Passes of four decodes that take as long; passes: (experts reached, microseconds)."""
    return {Shot((), ((1, 8 + index),) * 4): us for index, (_, us) in enumerate(passes)}


def cell_of_four(tmp: Path, passes: Sequence[tuple[float, float]]) -> tuple[float, float, float, bool]:
    """(experts, microseconds, spread) of their cell, and whether it is on a line."""
    found = passes_of(tmp, of_four(passes), reached=[count for count, _ in passes])
    moe = load_model(SMALL, small_root(tmp)).moe
    assert moe is not None
    ((_, _, tokens, experts, _, us, spread),) = found.cells(moe)
    assert tokens == 4 and found.on_line <= {4}
    return float(experts), float(us), float(spread), 4 in found.on_line


PASS = st.tuples(st.integers(40, 64).map(lambda quarters: quarters / 4), st.floats(1_000.0, 1_500.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(PASS, min_size=1, max_size=9))
def test_counted_passes_give_the_time_of_the_experts_expected(
    tmp_path_factory: pytest.TempPathFactory, passes: list[tuple[float, float]]
) -> None:
    """By the median slope of all pairs of passes that reached different numbers of experts, never a negative one."""
    aim = EXPERTS * (1 - (1 - TOPK / EXPERTS) ** 4)
    counts = [count for count, _ in passes]
    us = [time for _, time in passes]
    inside = len(passes) >= 5 and min(counts) <= aim <= max(counts)
    if inside:
        slopes = []
        for count, time in passes:
            for other_count, other_time in passes:
                if count != other_count:
                    slopes.append((time - other_time) / (count - other_count))
        slope = max(0.0, statistics.median(slopes))
        us = [time - slope * (count - aim) for count, time in passes]
    experts, found, spread, on_line = cell_of_four(tmp_path_factory.mktemp("small"), passes)
    assert on_line is inside
    assert experts == pytest.approx(aim if inside else statistics.median(counts), abs=0.006)
    assert found == pytest.approx(statistics.median(us), rel=1e-4, abs=0.1)
    if len(passes) > 1 and statistics.median(us) > 1.0:
        assert spread == pytest.approx(spread_rel(us), rel=1e-3, abs=1e-3)


def test_passes_whose_times_follow_their_experts_are_read_at_those_expected(tmp_path: Path) -> None:
    counts = (8.5, 9.0, 9.5, 10.0, 13.0)
    line = [(count, 100.0 + 25.0 * count) for count in counts]
    aim = EXPERTS * (1 - (1 - TOPK / EXPERTS) ** 4)
    assert cell_of_four(tmp_path, line) == (expected(4), pytest.approx(100.0 + 25.0 * aim, abs=0.01), 0.0, True)
    # What is left of them beside the line is the spread; one that was slow by far does not turn the line.
    slow = [*line[:2], (9.5, 900.0), *line[3:]]
    experts, us, spread, _ = cell_of_four(tmp_path, slow)
    assert (experts, us) == (expected(4), pytest.approx(100.0 + 25.0 * aim, abs=0.01))
    left = [*(100.0 + 25.0 * aim for _ in range(4)), 900.0 + 25.0 * (aim - 9.5)]
    assert spread == pytest.approx(spread_rel(left), abs=1e-3)


@pytest.mark.parametrize("us", [(500.0, 500.0, 500.0, 500.0, 500.0), (540.0, 520.0, 500.0, 480.0, 460.0)])
def test_passes_whose_times_do_not_follow_their_experts_keep_them(tmp_path: Path, us: Sequence[float]) -> None:
    """As up to 8 tokens, where vLLM launches a block for every pair; fewer experts that take longer are chance."""
    passes = list(zip((8.5, 9.0, 9.5, 10.0, 13.0), us, strict=True))
    assert cell_of_four(tmp_path, passes) == (expected(4), 500.0, pytest.approx(spread_rel(us), abs=1e-4), True)
    same = [(EXPERTS * (1 - (1 - TOPK / EXPERTS) ** 4), time) for time in us]
    assert cell_of_four(tmp_path, same)[1:] == (500.0, pytest.approx(spread_rel(us), abs=1e-4), True)


@pytest.mark.parametrize(
    "counts", [(9.0, 10.0, 11.0, 12.0), (8.0, 9.0, 9.5, 10.0, 10.5), (11.0, 11.5, 12.0, 13.0, 14.0)]
)
def test_few_passes_or_ones_on_one_side_of_the_experts_expected_are_their_medians(
    tmp_path: Path, counts: Sequence[float]
) -> None:
    us = [25.0 * count for count in counts]
    found = cell_of_four(tmp_path, list(zip(counts, us, strict=True)))
    middle = statistics.median(counts)
    assert found == (middle, 25.0 * middle, pytest.approx(spread_rel(us), abs=1e-4), False)


def test_a_bundle_says_which_cells_are_read_on_a_line(tmp_path: Path) -> None:
    line = [(count, 25.0 * count) for count in (8.5, 9.0, 9.5, 12.0, 13.0)]
    reached = [count for count, _ in line]
    usual = "measured, median over the passes of as many tokens"

    def texts(more: dict[Shot, float], counts: Sequence[float | None]) -> tuple[str, str]:
        origin = origin_of(passes_of(tmp_path, of_four(line) | more, reached=[*reached, *counts]), "run", "bf16")
        return origin["time_us"], origin["activated_experts"]

    three, five = {Shot((), ((3, 4),)): 30.0}, {Shot((), ((5, 4),)): 50.0}
    at = "{} of {} numbers of tokens at the experts expected, by the line through the passes"
    computed = "computed, those expected of independent tokens"
    assert texts({}, ()) == (f"{usual}; at {at.format(1, 1)}", computed)
    assert texts(three, (None,)) == (f"{usual}; at {at.format(1, 2)}", computed)
    some = "counted at 1 of {} numbers of tokens, computed at the others"
    assert texts(three, (9.0,)) == (f"{usual}; at {at.format(1, 2)}", some.format(2))
    assert texts(three | five, (9.0, None)) == (f"{usual}; at {at.format(1, 3)}", some.format(3))
    alone = origin_of(passes_of(tmp_path, three, reached=(9.0,)), "run", "bf16")
    assert (alone["time_us"], alone["activated_experts"]) == (
        usual,
        "counted, median over the passes of as many tokens",
    )


def test_a_draw_that_reached_more_than_the_passes_did_does_not_stand_beside_them() -> None:
    cells = [("experts", 1, 16, n, 128, 10.0 * n, 0.0) for n in (22.0, 97.0, 104.0)]
    new = ("experts", 1, 16, 95.5, 128, 998.0, 0.02)
    merged = with_passes(cells, [new])
    assert merged == [cells[0], new]
    assert cells_of_passes(make_table("moe", merged), [{"ep": 1, "tokens": "16", "passes": "1"}]) == [new]
