"""Corrections for unequal batches, on kernels whose law is known: sums, the longest request, caps, shared launches."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from test_bundle import meta

from profiler.core.batch_text import Batch, batch_text, parse_batch
from profiler.core.bundle import Table, make_table, read_bundle, write_bundle
from profiler.core.errors import ConfigError, ContractError
from profiler.core.registry import load_model
from profiler.core.skew_fit import SkewFit, read_fits
from profiler.core.types import Category
from profiler.kernels import skew as skew_shots
from profiler.kernels._axes import GRIDS, Limits
from profiler.skew import fit_skew

V32 = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
FULL = Limits("full", 1, (1,), 163_840, 16_384, 256)
Law = Callable[[Batch], float]


def tables(name: str, category: Category, law: Law, noise: float = 0.0) -> dict[Category, Table]:
    """The table of one kernel that follows `law` exactly, and its unequal batches with relative noise."""
    axes = GRIDS["full"]
    cells = [
        (name, 0, 0, n, kv, 1, law(Batch((), (kv,) * n)), 0.0)
        for n in axes.decode_requests
        for kv in (*axes.decode_kv_tokens, 163_839)
        if n <= 256 and kv <= 163_839
    ]
    cells += [
        (name, chunk, context, 0, 0, 0, law(Batch(((chunk, context),), ())), 0.0)
        for chunk in axes.chunk_tokens
        for context in axes.context_tokens
        if context <= 131_072
    ]
    rng = random.Random(0)
    rows = []
    for shot in skew_shots.shots(V32, FULL):
        if name in shot.fills[0].components:
            prefills, decodes = batch_text(shot.requests)
            time = law(parse_batch(prefills, decodes)) * (1 + noise * (2 * rng.random() - 1))
            rows.append((name, prefills, decodes, shot.fills[0].key[2], time, 0.01))
    return {category: make_table(category, cells), "skew": make_table("skew", rows)}


def linear_sum(batch: Batch) -> float:
    prefills = sum(chunk * (2 * context + chunk) for chunk, context in batch.prefills)
    return 3.0 + 1e-4 * sum(batch.decode_keys) + 1e-6 * prefills


def longest(batch: Batch) -> float:
    return 3.0 + 1e-3 * max(batch.decode_keys, default=0) + 1e-3 * sum(chunk for chunk, _ in batch.prefills)


@pytest.mark.parametrize(("law", "alpha"), [(linear_sum, 0.0), (longest, 1.0)])
def test_the_law_is_found_in_alpha_and_predicts_other_batches(law: Law, alpha: float) -> None:
    fitted = fit_skew(tables("index_scores", "indexer", law, noise=0.01), V32)
    assert {fit.kernel for fit in fitted.fits} == {"index_scores"}
    assert [fit.decode_requests for fit in fitted.fits] == list(GRIDS["full"].skew.requests)
    assert all(fit.alpha == pytest.approx(alpha, abs=0.03) for fit in fitted.fits)
    decode = fitted.report["index_scores"]["decode"]
    assert decode["batches"] > 15 and decode["outside"] == 0
    assert decode["mean_max"]["p50"] < 0.01 and decode["mean_max"]["p90"] < 0.02
    if alpha:
        assert decode["mean"]["p50"] > 0.2


def test_sums_of_a_bent_table_are_met_by_its_mean_over_the_requests() -> None:
    """Work that begins beyond 2,048 keys: neither the mean length nor the longest knows how many are beyond."""

    def bent(batch: Batch) -> float:
        return 2.0 + sum(1e-3 * max(0, keys - 2_048) for keys in batch.decode_keys) + len(batch.prefills)

    decode = fit_skew(tables("index_topk", "indexer", bent), V32).report["index_topk"]["decode"]
    assert decode["each"]["p90"] < 0.01 < decode["mean_max"]["p90"]


def test_a_capped_kernel_is_compared_at_capped_lengths() -> None:
    def capped(batch: Batch) -> float:
        return 5.0 + 1e-3 * sum(min(keys, 2_048) for keys in batch.decode_keys) + 1e-3 * len(batch.prefills)

    decode = fit_skew(tables("sparse_mla", "sparse_attention", capped), V32).report["sparse_mla"]["decode"]
    # The table has no point at 2,049, so that its first cell beyond the cap is read along a short slope.
    assert decode["mean"]["p90"] < 0.01


def test_parts_of_a_step_are_added_or_overlap() -> None:
    report = fit_skew(tables("index_scores", "indexer", linear_sum), V32).report["index_scores"]
    # Every launch costs 3 us here: the parts' sum counts it once per part, `once` does not.
    assert report["prefills"]["once"]["p90"] < 0.05 < report["prefills"]["sum"]["p99"]
    assert report["joint"]["sum"]["p50"] < 0.05 and report["joint"]["beta"] > 0.8

    def hidden(batch: Batch) -> float:
        parts = [linear_sum(Batch((one,), ())) for one in batch.prefills]
        parts += [linear_sum(Batch((), batch.decode_keys))] if batch.decode_keys else []
        return max(parts)

    report = fit_skew(tables("index_scores", "indexer", hidden), V32).report["index_scores"]
    assert report["joint"]["beta"] < 0.1 and report["joint"]["overlap"]["p90"] < 0.05


def test_batches_outside_the_table_are_counted_not_guessed() -> None:
    own = tables("index_scores", "indexer", linear_sum)
    short = own["indexer"]
    kept = [row for row in short.rows() if int(row[4]) <= 8_192]
    report = fit_skew({"indexer": make_table("indexer", kept), "skew": own["skew"]}, V32).report["index_scores"]
    assert report["decode"]["outside"] > 0


def bundle(tmp_path: Path, fits: dict[int, list[SkewFit]]) -> Path:
    rows = [("k", "none", "1x8 1x2", "fit", 1.5, 0.01)]
    return write_bundle(tmp_path, meta(), {(1, "skew"): make_table("skew", rows)}, skew_fits=fits)


def test_fits_are_written_beside_the_table_and_read_as_points(tmp_path: Path) -> None:
    path = bundle(tmp_path, {1: [SkewFit("k", 0, 16, 0.5, 3), SkewFit("k", 0, 4, 0.25, 2)]})
    read = read_bundle(path)
    assert read.skew[1, "k"] == ((0, 4, 0.25), (0, 16, 0.5))
    assert read.table(1, "skew").columns["decodes"] == ("1x8 1x2",)
    # Another table of another degree leaves them alone; the same table anew brings its own.
    other = make_table("dense", [("o_proj", 1, 1.0, 0.0)])
    write_bundle(tmp_path, meta(), {(2, "dense"): other})
    assert read_bundle(path).skew[1, "k"] == ((0, 4, 0.25), (0, 16, 0.5))
    assert read_bundle(path, tps=[2]).skew == {}


def test_edited_and_malformed_fits_are_refused(tmp_path: Path) -> None:
    path = bundle(tmp_path, {1: [SkewFit("k", 0, 4, 0.25, 2)]}) / "tp1/skew_fit.csv"
    text = path.read_text()
    path.write_text(text.replace("0.25", "0.26"))
    with pytest.raises(ContractError, match=r"skew_fit\.csv: its contents differ"):
        read_bundle(path.parents[1])
    for bad, message in (
        (text.replace("0.25", "a lot"), r":2: not a fit"),
        (text.replace("alpha", "beta"), r":1: the header is"),
        (text + "k,0,4,0.3,1\n", r":3: k, 0, 4 appears twice"),
        (text.replace("0.25", "nan"), r":2: .* finite alpha"),
        (text[:-9], r":2: not a fit"),
    ):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=message):
            read_fits(path)
