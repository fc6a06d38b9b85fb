"""Batches of unequal requests: the forms themselves, which one is chosen, and that serving prices what was reported."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from profiler.core.batch_text import batch_text, parse_batch
from profiler.core.bundle import Bundle, Table, make_table, read_bundle, write_bundle
from profiler.core.grid import Grid, Outside, equal_end, equal_total, make_grid
from profiler.core.grid_work import Work
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from profiler.core.unequal import Together, beyond_fixed_us, forms_of, make_skew
from profiler.kernels import skew as skew_shots
from profiler.kernels._axes import Limits
from profiler.kernels._placement import ran_of
from profiler.kernels._unequal import request_steps, together_of
from profiler.skew import Fitted, fit_skew
from serving.core.shape import StepShape
from serving.cost import build_cost
from serving.cost.kernels import Kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import priced

SPEC = load_model(priced.MODEL)
KERNELS = ("index_scores", "index_topk", "sparse_mla")
RAN = ran_of(priced.meta(engine={"name": "vllm"}), SPEC, 1)


def decodes(rows: dict[int, dict[int, float]]) -> Grid:
    points = [(float(n), float(kv), t) for n, row in rows.items() for kv, t in row.items()]
    return make_grid(("decode_requests", "decode_kv_tokens"), points, equal_total, Outside("k", "measure"))


def chunks(rows: dict[int, dict[int, float]]) -> Grid:
    points = [(float(c), float(x), t) for c, row in rows.items() for x, t in row.items()]
    return make_grid(("prefill_chunk_tokens", "prefill_context_tokens"), points, equal_end, Outside("k", "measure"))


def test_a_correction_is_linear_between_its_shapes_and_constant_beyond() -> None:
    skew = make_skew([(0, 8, 0.2), (0, 16, 0.4), (128, 8, 0.1), (256, 8, 0.3)])
    assert skew is not None
    assert [skew.decode(n) for n in (2, 8, 12, 99)] == pytest.approx([0.2, 0.2, 0.3, 0.4])
    assert [skew.mixed(c, 8) for c in (1, 128, 192, 999)] == pytest.approx([0.1, 0.1, 0.2, 0.3])
    assert make_skew([]) is None


def test_the_longest_of_a_batch_is_read_at_all_requests_or_at_the_smallest_batch_of_its_kernel() -> None:
    grid = decodes({1: {100: 2.0, 900: 3.0}, 9: {100: 4.0, 900: 12.0}, 64: {100: 10.0, 900: 90.0}})
    points = [(0, 1, 0.5)]
    every, few = make_skew(points), make_skew(points, (1, 9))
    assert every is not None and few is not None
    assert every.decode_us(grid, 64, 200.0, 900) == pytest.approx(20.0 + 0.5 * (90.0 - 20.0))
    # Nine requests are the first of the kernel that runs 64; eight are still of the one before.
    assert few.decode_us(grid, 64, 100.0, 900) == pytest.approx(10.0 + 0.5 * (12.0 - 10.0))
    assert few.decode_us(grid, 64, 400.0, 900) == grid.at(64, 400.0)  # the batch itself takes longer than the longest
    assert few.decode_us(grid, 8, 100.0, 900) == grid.at(8, 100.0)
    assert few.decode_us(grid, 9, 500.0, 500) == grid.at(9, 500.0)


def test_short_chunks_fill_the_card_together() -> None:
    # 2 us of launch, and 4 us for every 64 queries, whatever their context: four chunks of 16 are one of 64.
    grid = chunks({c: {0: 2.0 + 4.0 * max(1, c // 64), 4096: 2.0 + 4.0 * max(1, c // 64)} for c in (16, 32, 64, 128)})
    together = Together(Work(), (), 0)
    assert beyond_fixed_us(grid, 2.0, None, [(16, 1000)] * 4) == 16.0
    assert beyond_fixed_us(grid, 2.0, together, [(16, 1000)] * 4) == pytest.approx(4.0)
    assert beyond_fixed_us(grid, 2.0, together, [(16, 1000)] * 8) == pytest.approx(8.0)
    assert beyond_fixed_us(grid, 2.0, together, [(64, 1000), (64, 9)]) == 8.0
    # Without a context there is no longer chunk of as many keys for every query.
    assert beyond_fixed_us(grid, 2.0, together, [(16, 0)] * 4) == 16.0
    assert beyond_fixed_us(grid, 2.0, together, [(16, 8)] * 4) == pytest.approx(8.0)
    # A card that takes as long for 16 queries as for 64: four chunks cost as 64 queries around the middle of each.
    keys = chunks({c: {x: 2.0 + 0.001 * 64 * (x + c / 2) for x in (0, 4096)} for c in (16, 64)})
    assert beyond_fixed_us(keys, 2.0, together, [(16, 1000)] * 4) == pytest.approx(0.001 * 64 * 1008)
    # Another kernel runs chunks of more than 32; a chunk of 256 is not in the table.
    assert beyond_fixed_us(grid, 2.0, Together(Work(), (1, 32), 0), [(16, 1000)] * 4) == pytest.approx(8.0)
    assert beyond_fixed_us(grid, 2.0, together, [(16, 1000)] * 16) == 64.0


def test_queries_without_a_selection_do_not_become_selecting_ones() -> None:
    """8 x 256 behind 512 are 2,048 queries; around one middle, half of them would lie beyond the 1,024 kept ones."""
    select = Work(select_beyond=1024, idle_keys=1.0, row_keys=1e6)
    grid = chunks({c: {0: 2.0 + 0.01 * c, 768: 2.0 + 0.01 * c + (1e3 if c > 256 else 0)} for c in (256, 1024, 2048)})
    assert beyond_fixed_us(grid, 2.0, Together(select, (), 1024), [(256, 512)] * 8) == pytest.approx(0.01 * 2048)


def test_what_is_known_of_kernels() -> None:
    assert RAN is not None
    assert request_steps("index_topk", RAN) == (8, 32)
    assert request_steps("index_scores", RAN) == request_steps("index_topk", None) == ()
    assert request_steps("index_topk", replace(RAN, tiles=False)) == ()
    assert together_of("mla_dense_prefill", SPEC, RAN) is None and together_of("index_topk", SPEC, None) is None
    scores, sparse = (
        together_of("index_scores", SPEC, RAN),
        together_of("sparse_mla", SPEC, replace(RAN, whole_below=64)),
    )
    assert scores == Together(Work(), (1,), 0)  # waves and parts belong to a chunk as it runs, not to its share
    assert sparse is not None and sparse.steps == (64,) and sparse.even_behind == 2048


def unequal(priced_by: dict[str, Kernel] | None = None) -> Table:
    """The batches that are measured. Top-k waits for its longest request, and prefills take 0.4 of what they add up to;
    with `priced_by`, batches that judge a form have the times of these kernels."""
    limits = Limits("full", 1, (1,), 65_536, 4_096, 256)
    rows = []
    for shot in skew_shots.shots(SPEC, limits):
        prefills, decodes_ = batch_text(shot.requests)
        use, batch = str(shot.fills[0].key[2]), parse_batch(prefills, decodes_)
        for name in shot.fills[0].components:
            requests, time = len(batch.decode_keys), 0.0
            if requests:
                alike = priced.decode_us(name, requests, sum(batch.decode_keys) / requests)
                alone = priced.decode_us(name, 64 if requests >= 64 else 1, max(batch.decode_keys))
                time += max(alike, alone) if name == "index_topk" else alike
            time += 0.4 * sum(priced.prefill_us(name, c, x) for c, x in batch.prefills)
            if priced_by and (kernel := priced_by.get(name)) and (use == "held_out" or use == "prefills"):
                time = price(kernel, batch.prefills, batch.decode_keys)
            rows.append((name, prefills, decodes_, use, time, 0.0))
    return make_table("skew", rows)


def price(kernel: Kernel, prefills: tuple[tuple[int, int], ...], keys: tuple[int, ...]) -> float:
    capped = sum(min(one, priced.CAP) for one in keys)
    shape = StepShape(prefills, len(keys), sum(keys), max(keys, default=0), capped, len(keys))
    return kernel.us(shape, prefills)


def fitted(skew: Table) -> Fitted:
    return fit_skew(priced.tables(SPEC, ep=1) | {"skew": skew}, SPEC, RAN)


def bundle(root: Path, found: Fitted, forms: bool = True) -> Bundle:
    tables = {(1, category): table for category, table in (priced.tables(SPEC, ep=1) | {"skew": unequal()}).items()}
    report = {name: {use: dict(kinds) for use, kinds in one.items()} for name, one in found.report.items()}
    if not forms:  # as bundles were before a form was chosen
        for uses in report.values():
            for kinds in uses.values():
                kinds.pop("form", None)
                kinds.pop("longest_at", None)
    meta = priced.meta(engine={"name": "vllm"}, grid={"tp1/skew": {"fit": report}})
    return read_bundle(write_bundle(root, meta, tables, skew_fits={1: found.fits}))


def kernels(own: Bundle) -> dict[str, Kernel]:
    cost = build_cost(
        bundle=own, spec=SPEC, parallel=Parallel(), hardware=None, max_num_batched_tokens=4096, allow_extrapolation=True
    )
    return {kernel.name: kernel for kernel in cost.kernels}


def test_serving_prices_a_batch_as_the_report_does(tmp_path: Path) -> None:
    found = fitted(unequal())
    assert found.report["index_topk"]["decode"]["form"] == "longest"
    assert found.report["index_topk"]["decode"]["longest_at"] == [1, 64]
    assert found.report["index_scores"]["decode"]["form"] == "mean_max"
    own = bundle(tmp_path, found)
    assert forms_of(own.meta, 1, "index_topk").longest_at == (1, 64)
    # Every batch that judges a form gets the price that serving has for it: the form that was chosen is then exact.
    again = fitted(unequal(kernels(own)))
    for name in KERNELS:
        decode, prefills = again.report[name]["decode"], found.report[name]["prefills"]
        assert decode["form"] == found.report[name]["decode"]["form"] and decode["batches"] >= 10
        assert decode[decode["form"]]["p99"] == 0.0, name
        assert prefills["form"] == "together"
        assert again.report[name]["prefills"]["together"]["p99"] == 0.0, name
        assert again.report[name]["prefills"]["once"]["p99"] > 0.0, name


def test_bundles_without_a_choice_keep_their_prices(tmp_path: Path) -> None:
    found = fitted(unequal())
    before, after = kernels(bundle(tmp_path / "a", found, forms=False)), kernels(bundle(tmp_path / "b", found))
    keys, prefills = (60_000, *(3_000,) * 127), ((512, 1024),) * 3
    for name, kernel in before.items():
        assert kernel.together is None and kernel.prefill is not None
        at, fixed = kernel.prefill.at, kernel.fixed_us
        once = fixed + sum(at(c, x) - fixed for c, x in prefills)
        assert price(kernel, prefills, ()) == pytest.approx(once)
        assert kernel.decode is None or kernel.skew is None or kernel.skew.longest_at == ()
        if name == "sparse_mla":
            assert kernel.skew is None and kernel.decode is not None
            assert price(kernel, (), keys) == kernel.decode.at(128, 2048)
    assert price(after["index_topk"], (), keys) < price(before["index_topk"], (), keys)
