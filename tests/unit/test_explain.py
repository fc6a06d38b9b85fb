"""The tree of a step: adds up to the step, bounds follow their closed forms, pages are well formed."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import priced
import pytest

from profiler.core.bundle import read_bundle
from profiler.core.errors import ConfigError
from profiler.core.hardware import load_hardware
from profiler.core.paths import default_bundle_root
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.core.shape import StepShape
from serving.cost import TableCost, build_cost
from serving.cost.bounds import Bounds
from serving.cost_tree import Node, rows
from serving.explain import Explanation, document, explain, page, parse_rank, tree_text
from serving.explained import ranks_of

SPEC, H200 = load_model(priced.MODEL), load_hardware("H200")
GROUP = Parallel(dp=8, ep=8)


def priced_cost(tmp_path: Path, **options: object) -> TableCost:
    return build_cost(
        bundle=priced.bundle(tmp_path),
        spec=SPEC,
        parallel=GROUP,
        hardware=H200,
        max_num_batched_tokens=4096,
        capture_sizes=(1, 2, 4, 8, 16, 32, 48, 64),
        step_us=100.0,
        **options,  # type: ignore[arg-type]
    )


def explained(cost: TableCost, *batches: str, bounded: bool = True) -> Explanation:
    shapes = ranks_of([parse_rank(text, priced.CAP) for text in batches], 8)
    bounds = Bounds(SPEC, GROUP, H200, priced.meta()) if bounded else None
    return explain(cost, shapes, bounds, priced.meta(), SPEC)


def leaves(found: Explanation) -> dict[str, list[Node]]:
    leaves: dict[str, list[Node]] = {}
    for _, node in rows(found.root):
        if not node.children:
            leaves.setdefault(node.name, []).append(node)
    return leaves


@pytest.mark.parametrize("batches", [("33x4096",), ("1x1000@0 4x9000", "idle", "60x100"), ("2x700@100",)])
def test_the_leaves_add_up_to_the_step(tmp_path: Path, batches: tuple[str, ...]) -> None:
    cost = priced_cost(tmp_path)
    found = explained(cost, *batches)
    shapes = ranks_of([parse_rank(text, priced.CAP) for text in batches], 8)
    assert found.root.us == pytest.approx(cost.step_ns(shapes) / 1e3, rel=1e-9)
    assert sum(node.us for nodes in leaves(found).values() for node in nodes) == pytest.approx(found.root.us)


def test_calls_are_split_over_the_layer_kinds(tmp_path: Path) -> None:
    found = leaves(explained(priced_cost(tmp_path), "32x4096"))
    assert sorted(node.calls for node in found["sparse_mla"]) == [3, 58]
    assert [node.calls for node in found["experts"]] == [58]
    assert [node.calls for node in found["all_gather experts"]] == [58]
    assert [node.calls for node in found["lm_head"]] == [1]
    assert found["step overhead"][0].provenance == "stated"
    assert found["all_gather experts"][0].provenance == "computed"
    assert found["experts"][0].provenance == "measured"


def test_bounds_follow_their_closed_forms(tmp_path: Path) -> None:
    found = leaves(explained(priced_cost(tmp_path), "33x4096"))
    hbm, fp8, link = 4800e3, 1979e6, 450e3
    # 48 padded tokens through o_proj: 128 heads of 128 to 7168, fp8 weights, two bytes per activation.
    k, n = 128 * 128, 7168
    o_proj = max(2 * 48 * k * n / fp8, (k * n + 2 * 48 * (k + n)) / hbm)
    assert found["o_proj"][0].bound_us == pytest.approx(58 * o_proj)
    # 384 gathered tokens in fp8 with their scales: seven eighths of them pass each rank.
    gather = 384 * 7168 * (1 + 4 / 128) * 7 / 8 / link
    assert found["all_gather experts"][0].bound_us == pytest.approx(58 * gather)
    # 384 pairs on a rank's 32 experts; nearly all are reached and their weights dominate.
    reached = round(32 * (1 - (1 - 8 / 256) ** 384))
    weights = reached * 3 * 7168 * 2048
    assert found["experts"][0].bound_us == pytest.approx(58 * weights / hbm, rel=0.02)
    # Keys of 33 requests, not of the padding, 132 bytes each.
    scores = (33 * 4096 * 128 + 33 * 64 * 128) * 132 / 128 / hbm
    flops = 2 * 64 * 128 * 33 * 4096 / fp8
    assert found["index_scores"][0].bound_us == pytest.approx(58 * max(scores, flops), rel=1e-6)


def test_cached_elements_count_as_many_bytes_as_the_tables_were_measured_with() -> None:
    """MiniMax-M3 in bf16 at tp 4: keys and values of one head take 512 bytes, an index key 256."""
    spec, parallel = load_model("MiniMaxAI/MiniMax-M3"), Parallel(tp=4, dp=2, ep=8)
    bundle = read_bundle(default_bundle_root() / "H200" / spec.name / "bf16")
    cost = build_cost(bundle=bundle, spec=spec, parallel=parallel, hardware=H200, max_num_batched_tokens=8192)
    shapes = [StepShape((), 32, 32 * 8192, 8192, 32 * 2048, 32)] * 2
    least = Bounds(spec, parallel, H200, bundle.meta).by_component(cost, shapes, 0)
    queries = 16 * 128
    assert least["attention"] == pytest.approx(32 * (8192 * 512 + 2 * 2 * queries) / 4800e3, rel=1e-6)
    assert least["sparse_gqa"] == pytest.approx(32 * ((2048 - 127) * 512 + 2 * 2 * queries) / 4800e3, rel=1e-6)
    assert least["block_scores"] == pytest.approx(32 * (8192 + 1) * 256 / 4800e3, rel=1e-6)


def test_padding_and_waiting(tmp_path: Path) -> None:
    cost = priced_cost(tmp_path)
    found = explained(cost, "33x4096", "60x4096")
    assert found.busiest_rank == 1
    assert found.tokens == (33, 60, *[0] * 6)
    assert set(found.computed_tokens) == {64}
    shapes = ranks_of([parse_rank(text, priced.CAP) for text in ("33x4096", "60x4096")], 8)
    unpadded = replace(cost, capture_sizes=()).step_ns(shapes)
    assert found.padding_us == pytest.approx((cost.step_ns(shapes) - unpadded) / 1e3)
    times = cost.ranks_ns(shapes)
    assert found.waiting_us == pytest.approx((max(times) - sum(times) / 8) / 1e3)
    text = tree_text(found)
    assert "busiest rank: 1 of 8" in text and "computes 64 tokens for 60" in text
    assert explained(cost, "32x4096").padding_us == 0


def test_without_a_hardware_file_there_are_no_bounds(tmp_path: Path) -> None:
    found = explained(priced_cost(tmp_path), "32x4096", bounded=False)
    assert all(node.bound_us is None for _, node in rows(found.root))
    assert "bound_us" not in str(document(found))


SERVED = sorted(p.parent for p in (default_bundle_root() / "H200").rglob("meta.yaml") if "replay" not in p.parent.name)


@pytest.mark.parametrize("path", SERVED, ids=lambda p: p.name)
@pytest.mark.parametrize("parallel", [GROUP, Parallel(), Parallel(tp=8)], ids=["dp8-ep8", "one", "tp8"])
def test_no_measured_kernel_beats_its_roofline(path: Path, parallel: Parallel) -> None:
    """Of the shipped tables, at one shape off their points; 5 % are for boost clocks."""
    bundle = read_bundle(path)
    table = bundle.tables.get((parallel.tp, "moe"))
    if table is None or parallel.ep not in table.columns["ep"] or bundle.meta["model"] != priced.MODEL:
        pytest.skip("no tables of a whole step")
    cost = build_cost(bundle=bundle, spec=SPEC, parallel=parallel, hardware=H200, max_num_batched_tokens=8192)
    shapes = [StepShape((), 48, 48 * 6000, 6000, 48 * 2048, 48)] * parallel.dp
    found = explain(cost, shapes, Bounds(SPEC, parallel, H200, bundle.meta), bundle.meta, SPEC)
    for nodes in leaves(found).values():
        for node in nodes:
            assert node.bound_us is None or node.bound_us <= 1.05 * node.us, node


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.titles += [value or "" for name, value in attrs if name == "title"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_well_formed_file(tmp_path: Path) -> None:
    found = explained(priced_cost(tmp_path), "33x4096")
    text = page(found, "<model> & card")
    parser = _Balanced()
    parser.feed(text)
    assert parser.open == []
    assert len(parser.titles) == sum(1 for _ in rows(found.root))
    assert "&lt;model&gt; &amp; card" in text and "<model>" not in text
    assert "http" not in text and "<script" not in text


def test_batches_as_text() -> None:
    shape = parse_rank("2x512@4096 3x5000 1x100", 2048)
    assert shape == StepShape(((512, 4096), (512, 4096)), 4, 15100, 5000, 3 * 2048 + 100, 6)
    assert parse_rank("idle", 2048) is None
    assert parse_rank("4x100", None) == StepShape((), 4, 400, 100, 400, 4)


def test_bad_batches_are_refused(tmp_path: Path) -> None:
    for text in ("", "  "):
        with pytest.raises(ConfigError, match="an empty batch"):
            parse_rank(text, None)
    with pytest.raises(ConfigError, match="batch '32*4096': '32*4096' is not a batch".replace("*", r"\*")):
        parse_rank("32*4096", None)
    with pytest.raises(ConfigError, match="9 batches for 8 ranks"):
        ranks_of([None] * 9, 8)
    with pytest.raises(ConfigError, match="every rank is idle"):
        explained(priced_cost(tmp_path), "idle")
