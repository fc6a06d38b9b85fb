"""The shipped H200 tables of MiniMax-M3: complete, as good as the validation says, priced to the whole context."""

from pathlib import Path

import public_tables
import pytest
from shipped_steps import check_step

from profiler.comparison import Ratio
from profiler.core.bundle import Bundle, read_bundle
from profiler.core.kv import kv_layout
from profiler.core.paths import data_root, default_bundle_root
from profiler.core.registry import load_model
from profiler.core.types import Category, Parallel
from profiler.passes import cells_of_passes
from profiler.timing import percentile

M3 = "MiniMaxAI/MiniMax-M3"
CLUSTERS = [data_root() / "configs" / "cluster" / f"h200-8x-minimax-m3-{name}.yaml" for name in ("tp8", "tp4-dp2-ep8")]
DEGREES = (1, 2, 4, 8)
CATEGORIES: tuple[Category, ...] = ("dense", "per_sequence", "attention", "indexer", "sparse_attention", "moe", "skew")
ATTENTION_LIKE: tuple[Category, ...] = ("attention", "indexer", "sparse_attention")
# Of cells of 20 us and more, p90 over repeats at tp 1, 2, 4 and 8, as reached: the aim of 3 % is missed.
SPREAD = {
    "attention": (0.05, 0.038, 0.04, 0.035),
    "indexer": (0.074, 0.052, 0.036, 0.027),
    "sparse_attention": (0.052, 0.046, 0.039, 0.042),
}


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return read_bundle(default_bundle_root() / "H200" / M3 / "bf16")


def test_every_degree_has_every_table(bundle: Bundle) -> None:
    assert set(bundle.tables) == {(tp, category) for tp in DEGREES for category in CATEGORIES}
    assert set(bundle.tables[1, "moe"].columns["ep"]) == {1, 2, 4, 8, 16, 32}
    for tp in DEGREES[1:]:
        assert set(bundle.tables[tp, "moe"].columns["ep"]) == {1}
    assert bundle.meta["kv"]["block_tokens"] == 128
    for tp in DEGREES:
        for category in ATTENTION_LIKE:
            columns = bundle.tables[tp, category].columns
            ends = zip(columns["prefill_chunk_tokens"], columns["prefill_context_tokens"], strict=True)
            assert max(int(chunk) + int(context) for chunk, context in ends) == 1_048_575
            assert max(int(keys) for keys in columns["decode_kv_tokens"]) == 1_048_575


@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize("category", ATTENTION_LIKE)
def test_tables_are_as_good_as_the_validation_says(bundle: Bundle, tp: int, category: Category) -> None:
    quality = bundle.meta["grid"][f"tp{tp}/{category}"]["quality"]
    assert quality["leave_one_out"]["p50"] <= 0.02 and quality["leave_one_out"]["p90"] <= 0.06
    spread = quality["spread_from_20_us"]
    assert spread["p50"] <= 0.018 and spread["p90"] <= SPREAD[category][DEGREES.index(tp)]
    most = 0.013 if category == "indexer" else 0.007
    assert quality["disorder"]["wrong"] <= most * quality["disorder"]["pairs"]
    assert quality["outliers"] == 0


def test_only_short_selections_take_less_time_with_more_keys(bundle: Bundle) -> None:
    """Why 1.0 to 1.3 % of the indexer's neighbours are out of order: launches of a few microseconds."""
    for tp in DEGREES:
        columns = bundle.tables[tp, "indexer"].columns
        rows: dict[tuple[object, ...], list[tuple[int, float]]] = {}
        for name, chunk, context, requests, keys, us in zip(
            *(columns[key] for key in (*list(columns)[:5], "time_us")), strict=True
        ):
            along = (name, chunk, requests) if chunk else (name, 0, requests)
            rows.setdefault(along, []).append((int(context) if chunk else int(keys), float(us)))
        pairs = [
            (low, high)
            for points in rows.values()
            for (_, low), (_, high) in zip(sorted(points), sorted(points)[1:], strict=False)
            if low >= 20.0
        ]
        assert sum(high < 0.92 * low for low, high in pairs) <= 0.01 * len(pairs)


def test_one_index_head_takes_as_long_at_tp_4_as_at_tp_8(bundle: Bundle) -> None:
    columns = [bundle.tables[tp, "indexer"].columns for tp in (4, 8)]
    four, eight = (
        {row[:-1]: float(row[-1]) for row in zip(*(c[key] for key in (*list(c)[:6], "time_us")), strict=True)}
        for c in columns
    )
    ratios = [eight[key] / us for key, us in four.items() if us >= 10 and key in eight]
    assert len(ratios) > 1000
    assert percentile(ratios, 50) == pytest.approx(1.0, abs=0.005)
    assert percentile(ratios, 10) > 0.93 and percentile(ratios, 90) < 1.02


def all_experts(bundle: Bundle, tp: int) -> dict[int, tuple[float, float]]:
    """tokens -> (experts reached, microseconds) of the even load of all experts (ep 1) in passes."""
    (origin,) = bundle.meta["grid"][f"tp{tp}/moe"]["whole_passes"]
    return {
        int(cell[2]): (float(cell[3]), float(cell[5])) for cell in cells_of_passes(bundle.tables[tp, "moe"], [origin])
    }


@pytest.mark.parametrize("tp", DEGREES)
def test_all_experts_are_of_many_passes_with_even_loads(bundle: Bundle, tp: int) -> None:
    (origin,) = bundle.meta["grid"][f"tp{tp}/moe"]["whole_passes"]
    passes = dict(zip(map(int, origin["tokens"].split()), map(int, origin["passes"].split()), strict=True))
    assert all(passes[tokens] >= 13 for tokens in (9, 16, 24, 32, 33, 48, 64, 96, 128, 192, 256))
    assert "by the line through the passes" in origin["time_us"] and "counted" in origin["activated_experts"]
    loads = bundle.meta["grid"][origin["run"]]["settings"]["expert_loads"]
    assert loads["spread_after"] < 0.083 < 0.55 < loads["spread_before"]


@pytest.mark.parametrize("tp", DEGREES)
def test_experts_take_longer_with_more_tokens_in_tiles_too(bundle: Bundle, tp: int) -> None:
    """A batch that loads were evened on fills the tiles as no other does, and 8,192 tokens would be too fast."""
    found = all_experts(bundle, tp)
    seven, eight, nine = (found[tokens][1] for tokens in (7168, 8192, 9216))
    assert 1.09 * seven < eight < 0.9 * nine


def test_an_expert_of_a_pass_takes_as_long_whichever_batch_of_few_tokens(bundle: Bundle) -> None:
    found = all_experts(bundle, 1)
    each = [us / reached for tokens, (reached, us) in found.items() if 9 <= tokens <= 64]
    assert len(each) == 8 and min(each) > 25.1 and max(each) < 25.8


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "batch",
    ["32x4096", "256x4096", "1x1000000", "1x8192@0", "1x8000@1000000", "1x1@500", "64x8192 1x2048@4096 1x900@0"],
)
def test_steps_up_to_the_whole_context_are_priced_and_none_beats_its_bound(path: Path, batch: str) -> None:
    check_step(path, batch, {"experts", "block_scores", "block_topk", "sparse_gqa", "attention"})


def test_a_token_takes_as_much_of_a_rank_at_tp_8_as_at_tp_4() -> None:
    sizes = [kv_layout(load_model(M3), Parallel(tp=tp), "sm90").bytes_per_token for tp in DEGREES]
    assert sizes == [137_472, 76_032, 45_312, 45_312]


@pytest.fixture(scope="module")
def modules(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> list[Ratio]:
    return public_tables.modules(tmp_path_factory.mktemp("aic"), bundle, "msa_module")


def test_decode_modules_agree_with_the_public_ones(modules: list[Ratio]) -> None:
    for tp, low, high in ((1, 0.92, 1.03), (2, 0.92, 1.02), (4, 0.97, 1.02), (8, 0.90, 1.06)):
        own = [one for one in modules if one.tp == tp and one.phase == "decode"]
        large = [one.ratio for one in own if one.key[2] >= 8 and one.key[3] >= 4096]
        assert len(large) >= 35 and low < min(large) and max(large) < high
        assert 0.98 < percentile(large, 50) < 1.01
    (named,) = [one for one in modules if one.tp == 8 and one.key[:4] == (0, 0, 128, 131_072)]
    assert named.first_us == pytest.approx(1063, abs=0.5) and named.second_us == pytest.approx(1043.5, abs=2)


def test_prefill_modules_agree_with_the_public_ones(modules: list[Ratio]) -> None:
    """Those of 4,096 tokens and more at tp 1 ran at a clock that the power limit had lowered: 10 to 25 % longer."""
    for tp, middle, most in ((1, 1.11, 1.25), (2, 1.06, 1.14), (4, 1.03, 1.08), (8, 1.02, 1.04)):
        whole = [
            one.ratio
            for one in modules
            if one.tp == tp and one.phase == "prefill" and one.key[1] == 0 and one.key[0] >= 256
        ]
        assert len(whole) >= 12 and min(whole) > 0.96 and max(whole) < most
        assert 1.0 < percentile(whole, 50) < middle
