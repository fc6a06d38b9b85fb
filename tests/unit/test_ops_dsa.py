"""The DSA manager on both key stores: mixed steps, shared layers, fixed shapes, and what it refuses."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from profiler.ops.dsa import (
    DSAConfig,
    DSAManager,
    DSASpec,
    DSAStep,
    EngineResourceInfo,
    IndexKeyStore,
    KVRows,
    PagedIndexKeyStore,
    StepContext,
    index_topk,
)
from profiler.ops.formats import SparseKVFormat, dequantize_mla_rows, quantize_mla_rows

PAGE, TOPK, HEADS, RANK, ROPE = 4, 8, 2, 16, 8
STORES = ("buffer", "paged_bf16", "paged_fp8")


def _manager(store: str, num_pages: int = 64, **more: object) -> DSAManager:
    config = DSAConfig("mla", (0, 2), (3,), topk=TOPK, index_dim=128, key_store=store, **more)  # type: ignore[arg-type]
    return DSAManager.build(DSASpec("dsa", config), EngineResourceInfo(PAGE, "cpu", num_pages))


def _pages(first: int, count: int) -> list[int]:
    """Page ids out of order, disjoint for distinct `first`."""
    return [first + (i * 7) % count for i in range(count)]


class World:
    """Requests with random keys and latents for every position, and their places in the cache."""

    def __init__(self, lengths: dict[str, int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.requests = list(lengths)
        self.keys = {r: torch.randn(n, 128, generator=generator).bfloat16() for r, n in lengths.items()}
        self.queries = {r: torch.randn(n, HEADS, 128, generator=generator) for r, n in lengths.items()}
        self.weights = {r: torch.randn(n, HEADS, generator=generator) for r, n in lengths.items()}
        self.latents = {r: torch.randn(n, RANK + ROPE, generator=generator).bfloat16() for r, n in lengths.items()}
        self.q_latent = {r: torch.randn(n, HEADS, RANK + ROPE, generator=generator) for r, n in lengths.items()}
        self.page_start = {r: i % PAGE for i, r in enumerate(lengths)}
        self.tables = {r: _pages(11 * i + 1, 11) for i, r in enumerate(lengths)}
        self.cache = torch.full((64, PAGE, RANK + ROPE), float("nan"))

    def rows(self, what: dict[str, torch.Tensor], spans: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        return torch.cat([what[r][start : start + count] for r, start, count in spans])

    def write(self, spans: Sequence[tuple[str, int, int]]) -> None:
        for r, start, count in spans:
            for position in range(start, start + count):
                at = position + self.page_start[r]
                self.cache[self.tables[r][at // PAGE], at % PAGE] = self.latents[r][position].float()

    def run(
        self, manager: DSAManager, spans: Sequence[tuple[str, int, int]], padded: int | None = None, layer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = DSAStep({"main": [(r, count) for r, _, count in spans]}, {} if padded is None else {"main": padded})
        placed = [KVRows(r, start, self.tables[r], self.page_start[r]) for r, start, _ in spans]
        plan = manager.plan(step, StepContext({"mla": {"main": placed}}))["main"]
        self.write(spans)

        def pad(x: torch.Tensor) -> torch.Tensor:
            return torch.cat((x, torch.full((plan.rows - len(x), *x.shape[1:]), 0.5, dtype=x.dtype)))

        manager.store_keys(layer, pad(self.rows(self.keys, spans)))
        picked = manager.select(layer, pad(self.rows(self.queries, spans)), pad(self.rows(self.weights, spans)))
        query = pad(self.rows(self.q_latent, spans))
        out = manager.attend(picked, query[..., :RANK], query[..., RANK:], self.cache, 0.25)
        used = sum(count for _, _, count in spans)
        assert not out[used:].any() and (picked[used:] == -1).all()
        return picked[:used], out[:used]

    def expected(self, request: str, position: int, picked: Sequence[int]) -> torch.Tensor:
        rows = self.latents[request][list(picked)].double()
        logits = self.q_latent[request][position].double() @ rows.t() * 0.25
        return logits.softmax(-1) @ rows[:, :RANK]


def _check(world: World, picked: torch.Tensor, out: torch.Tensor, spans: Sequence[tuple[str, int, int]]) -> None:
    row = 0
    for request, start, count in spans:
        for position in range(start, start + count):
            chosen = [p for p in picked[row].tolist() if p >= 0]
            assert len(chosen) == min(TOPK, position + 1) and max(chosen) <= position
            torch.testing.assert_close(
                out[row].double(), world.expected(request, position, chosen), rtol=1e-4, atol=1e-5
            )
            row += 1


@pytest.mark.parametrize("store", STORES)
def test_mixed_steps_select_and_attend_like_the_reference(store: str) -> None:
    world, manager = World({"a": 30, "b": 21, "c": 17}), _manager(store)
    for spans in (
        [("a", 0, 5), ("b", 0, 3)],  # nothing to select
        [("a", 5, 15), ("b", 3, 1)],  # a prefill chunk past topk beside a decode row
        [("b", 4, 15), ("a", 20, 1), ("c", 0, 9)],
        [("c", 9, 1), ("b", 19, 1), ("a", 21, 1)],  # decode only
        [("c", 10, 3), ("b", 20, 1), ("a", 22, 2)],  # speculative rows
    ):
        picked, out = world.run(manager, spans)
        assert manager.needs_selection() == any(start + count > TOPK for _, start, count in spans)
        _check(world, picked, out, spans)
        if store != "paged_fp8":
            row = 0
            for request, start, count in spans:
                direct = index_topk(
                    world.queries[request][start : start + count],
                    world.weights[request][start : start + count],
                    world.keys[request][: start + count],
                    torch.arange(start, start + count),
                    TOPK,
                )
                got = picked[row : row + count].sort(-1).values
                assert torch.equal(got, direct.sort(-1).values)
                row += count


@pytest.mark.parametrize("store", ["paged_bf16", "paged_fp8"])
def test_padded_plans_equal_eager_ones_in_place(store: str) -> None:
    lengths = {"a": 30, "b": 21, "c": 17}
    world = World(lengths)
    eager, fixed = _manager(store), _manager(store, max_request_pages=12)
    addresses = set()
    for spans in ([("a", 0, 25), ("b", 0, 20)], [("a", 25, 1), ("b", 20, 1)], [("a", 26, 2)], [("a", 28, 1)]):
        expected = world.run(eager, spans)
        got = world.run(fixed, spans, padded=None if spans[0][1] == 0 else 4)
        assert torch.equal(got[0].sort(-1).values, expected[0].sort(-1).values)
        torch.testing.assert_close(got[1], expected[1])
        if spans[0][1]:
            plan = fixed.plan(
                DSAStep({"main": [("a", 1)]}, {"main": 4}),
                StepContext({"mla": {"main": [KVRows("a", 3, world.tables["a"])]}}),
            )["main"]
            tensors = (plan.pages, plan.row_page_offset, plan.row_start, plan.positions, plan.slots)
            addresses.add(tuple(tensor.data_ptr() for tensor in tensors if tensor is not None))
            assert plan.positions is not None and plan.positions.tolist() == [3, -1, -1, -1]
    assert len(addresses) == 1


def test_shared_layers_reuse_the_last_pick_of_this_forward() -> None:
    world, manager = World({"a": 30}), _manager("buffer")
    spans = [("a", 0, 20)]
    first, _ = world.run(manager, spans)
    assert torch.equal(manager.shared_selection(3), first)
    manager.store_keys(2, world.rows(world.keys, spans))
    other = manager.select(2, world.rows(world.queries, spans) * -1, world.rows(world.weights, spans))
    assert not torch.equal(other, first)
    assert torch.equal(manager.shared_selection(3), other)
    manager.plan(DSAStep({"main": [("a", 1)]}), StepContext({"mla": {"main": [KVRows("a", 20, world.tables["a"])]}}))
    with pytest.raises(ValueError, match="no full layer has selected for 'main' before shared layer 3"):
        manager.shared_selection(3)
    with pytest.raises(ValueError, match="layer_idx: 2 does not reuse"):
        manager.shared_selection(2)


def test_labels_are_planned_apart() -> None:
    manager = _manager("buffer")
    placed = {"main": [KVRows("a", 0, [1, 2, 3])], "draft": [KVRows("b", 4, [5, 6, 7])]}
    plans = manager.plan(DSAStep({"main": [("a", 9)], "draft": [("b", 1)]}), StepContext({"mla": placed}))
    assert set(plans) == {"main", "draft"} and manager.depends_on() == {"mla"}
    assert manager.needs_selection("main") and not manager.needs_selection("draft")
    manager.store_keys(0, torch.randn(9, 128), label="main")
    with pytest.raises(ValueError, match="start_pos: 4 leaves a gap, request 'b' has 0 keys in layer 0"):
        manager.store_keys(0, torch.randn(1, 128), label="draft")
    with pytest.raises(ValueError, match="label: no rows are planned for 'other'"):
        manager.needs_selection("other")


def test_packed_and_raw_fp8_latents() -> None:
    config = DSAConfig("mla", (0,), topk=4, key_store="paged_fp8")
    manager = DSAManager(config, PAGE, "cpu", num_pages=8)
    latents = torch.randn(10, 576)
    rows = quantize_mla_rows(latents)
    layer = torch.zeros(8, PAGE, 656, dtype=torch.uint8)
    layer[2], layer[5], layer[3, :2] = rows[:4], rows[4:8], rows[8:]
    manager.plan(DSAStep({"main": [("a", 10)]}), StepContext({"mla": {"main": [KVRows("a", 0, [2, 5, 3])]}}))
    manager.store_keys(0, torch.randn(10, 128))
    picked = manager.select(0, torch.randn(10, 3, 128), torch.randn(10, 3))
    query = torch.randn(10, 2, 576)
    out = manager.attend(picked, query[..., :512], query[..., 512:], layer, 0.05, kv_format=SparseKVFormat.FP8_PACKED)
    wide = dequantize_mla_rows(rows, torch.float64)
    for row in range(10):
        chosen = wide[[p for p in picked[row].tolist() if p >= 0]]
        expected = (query[row].double() @ chosen.t() * 0.05).softmax(-1) @ chosen[:, :512]
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-4)


def test_key_store_appends_views_and_evicts() -> None:
    store = IndexKeyStore()
    keys = torch.randn(300, 16)
    store.append("a", 0, keys[:10], 0)
    early = store.history("a", 0, 7)
    assert early.data_ptr() == store.history("a", 0, 10).data_ptr()
    for start in range(10, 300, 29):
        store.append("a", 0, keys[start : start + 29], start)
    assert store.tokens("a", 0) == 300 and store.tokens("a", 1) == 0 and store.tokens("b", 0) == 0
    assert torch.equal(store.history("a", 0, 300), keys) and torch.equal(early, keys[:7])
    store.append("a", 0, -keys[100:103], 100)
    assert store.tokens("a", 0) == 103 and torch.equal(store.history("a", 0, 103)[100:], -keys[100:103])
    with pytest.raises(ValueError, match="length: 104 keys asked of request 'a', layer 0, which has 103"):
        store.history("a", 0, 104)
    with pytest.raises(ValueError, match="gap"):
        store.append("a", 0, keys[:1], 104)
    with pytest.raises(ValueError, match="do not match the stored"):
        store.append("a", 0, keys[:1].double(), 103)
    store.append("b", 4, keys[:1], 0)
    assert store.tracked_requests() == {"a", "b"}
    store.reset("a")
    assert store.tokens("a", 0) == 0 and store.tracked_requests() == {"a", "b"}
    store.evict("a")
    store.evict("a")
    store.reset("a")
    assert store.tracked_requests() == {"b"} and store.tokens("a", 0) == 0
    with pytest.raises(ValueError, match="length"):
        store.history("a", 0, 1)


def test_requests_are_reset_and_removed() -> None:
    world, manager = World({"a": 30}), _manager("buffer")
    world.run(manager, [("a", 0, 12)])
    assert manager.buffer_keys is not None
    manager.reset_request("a")
    assert manager.buffer_keys.tokens("a", 0) == 0 and manager.buffer_keys.tracked_requests() == {"a"}
    world.run(manager, [("a", 0, 12)])
    manager.reset_request("a", free=True)
    assert manager.buffer_keys.tracked_requests() == set()
    manager.remove_request("a")
    paged = _manager("paged_fp8")
    paged.reset_request("a", free=True)
    paged.remove_request("a")


def test_a_failed_store_writes_nothing() -> None:
    manager = _manager("buffer")
    placed = [KVRows("a", 0, [1]), KVRows("b", 3, [2])]
    manager.plan(DSAStep({"main": [("a", 2), ("b", 1)]}), StepContext({"mla": {"main": placed}}))
    with pytest.raises(ValueError, match="gap"):
        manager.store_keys(0, torch.randn(3, 128))
    assert manager.buffer_keys is not None and manager.buffer_keys.tracked_requests() == set()
    with pytest.raises(ValueError, match=r"keys: expected shape \(3, 128\), found \(2, 128\)"):
        manager.store_keys(0, torch.randn(2, 128))


@pytest.mark.parametrize(
    ("rows", "placed", "message"),
    [
        ([("x", 1)], [KVRows("a", 0, [1])], r"request 'x' has no rows in the KV plan, which has \['a'\]"),
        ([("a", 1), ("a", 1)], [KVRows("a", 0, [1])], "listed twice"),
        ([("a", 0)], [KVRows("a", 0, [1])], "0 new tokens"),
        ([("a", 2)], [KVRows("a", 3, [1])], "needs 2 pages of 4 for 5 tokens from offset 0, it has 1"),
        ([("a", 2)], [KVRows("a", 2, [1], 1)], "needs 2 pages of 4 for 4 tokens from offset 1"),
        ([("a", 1)], [KVRows("a", 0, [64])], r"names pages \[64\], the cache has 64"),
        ([("a", 1)], [KVRows("a", 0, [1], 4)], "page_start: 4"),
    ],
)
def test_plans_refuse_rows_that_do_not_fit(rows: list[tuple[str, int]], placed: list[KVRows], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _manager("paged_fp8").plan(DSAStep({"main": rows}), StepContext({"mla": {"main": placed}}))


def test_plans_refuse_caches_labels_and_padding_that_do_not_fit() -> None:
    manager = _manager("paged_fp8", max_request_pages=2)
    ctx = StepContext({"mla": {"main": [KVRows("a", 0, [1, 2, 3])]}})
    with pytest.raises(ValueError, match="no plan of cache 'mla'"):
        manager.plan(DSAStep({}), StepContext({"kv": {}}))
    with pytest.raises(ValueError, match="labels"):
        manager.plan(DSAStep({}, {"main": 2}), ctx)
    with pytest.raises(ValueError, match="max_request_pages is 2"):
        manager.plan(DSAStep({"main": [("a", 1)]}, {"main": 2}), ctx)
    with pytest.raises(ValueError, match="1 rows cannot hold the 2"):
        manager.plan(DSAStep({"main": [("a", 2)]}, {"main": 1}), StepContext({"mla": {"main": [KVRows("a", 0, [1])]}}))
    with pytest.raises(ValueError, match="fixed shapes need a paged key_store"):
        _manager("buffer").plan(DSAStep({"main": [("a", 1)]}, {"main": 2}), ctx)


def test_attend_refuses_futures_and_missing_pages() -> None:
    manager = _manager("buffer")
    manager.plan(DSAStep({"main": [("a", 2)]}), StepContext({"mla": {"main": [KVRows("a", 0, [5])]}}))
    query = torch.randn(2, HEADS, RANK + ROPE)
    cache = torch.randn(6, PAGE, RANK + ROPE)
    picked = torch.tensor([[0, -1], [1, 0]], dtype=torch.int32)
    args = (query[..., :RANK], query[..., RANK:])
    with pytest.raises(ValueError, match="a row picks a position after its own"):
        manager.attend(picked + 1, *args, cache, 1.0)
    with pytest.raises(ValueError, match="latent_layer: page 5 is planned, the view has 5"):
        manager.attend(picked, *args, cache[:5], 1.0)
    with pytest.raises(ValueError, match="latent_layer"):
        manager.attend(picked, *args, cache[:, :3], 1.0)
    with pytest.raises(ValueError, match="q_nope"):
        manager.attend(picked, query[:1, :, :RANK], args[1], cache, 1.0)


def test_configs_refuse_contradictions() -> None:
    with pytest.raises(ValueError, match="also full layers"):
        DSAConfig("mla", (0, 1), (1,))
    with pytest.raises(ValueError, match="no full layer comes before"):
        DSAConfig("mla", (2,), (1,))
    with pytest.raises(ValueError, match="key_store"):
        DSAConfig("mla", (0,), key_store="disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_pages"):
        DSAManager(DSAConfig("mla", (0,), key_store="paged_fp8"), 64, "cpu")


def test_paged_store_refuses_slots_that_do_not_exist_and_drops_padding() -> None:
    store = PagedIndexKeyStore((0,), 2, PAGE, "cpu", kind="fp8")
    assert store.bytes_per_token_layer == 132 and store.layer(0).shape == (3, PAGE * 132)
    with pytest.raises(ValueError, match=r"slots: values 8 .. 8 lie outside -1 .. 7"):
        store.write(0, torch.randn(1, 128), torch.tensor([8]))
    assert not store.layer(0).any()
    store.write(0, torch.randn(2, 128), torch.tensor([-1, 6]))
    codes, scales = store.gather(0, torch.arange(8))
    assert scales is not None and scales.count_nonzero() == 1 and codes[6].float().any()
    with pytest.raises(ValueError, match="layer 1 has no index keys"):
        store.layer(1)
    with pytest.raises(ValueError, match="index_dim"):
        PagedIndexKeyStore((0,), 2, PAGE, "cpu", index_dim=64)


def test_the_example_of_the_reference_runs() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "ops.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    exec(compile(example, "ops.md", "exec"), {})
