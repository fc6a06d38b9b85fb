"""The operators on a CUDA device, at the models' own widths, against float64: python -m pytest tests/gpu -m gpu

Outputs start as NaN and unread cache rows are NaN, so that neither an unwritten result nor a stray read stays hidden.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.ops.dsa import DSAConfig, DSAManager, DSAStep, KVRows, StepContext
from profiler.ops.formats import SparseKVFormat, dequantize_mla_rows, quantize_fp8, quantize_mla_rows
from profiler.ops.gqa import gqa_decode, gqa_prefill
from profiler.ops.indexer import index_scores, index_topk, quantize_queries, select_topk_causal
from profiler.ops.mla import attend_picked, mla_decode, mla_prefill
from profiler.ops.moe import expert_gemm
from profiler.ops.msa import msa_attend, msa_block_scores, msa_select
from profiler.ops.sparse_sdpa import sparse_sdpa
from profiler.ops.triton.launches import HopperLaunch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BF16, PACKED = SparseKVFormat.BF16, SparseKVFormat.FP8_PACKED


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = plain(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)
    torch.manual_seed(3)
    with torch.device("cuda"):
        yield


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN never passes a comparison."""
    difference = got.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def _ascending(picked: torch.Tensor) -> torch.Tensor:
    high = torch.iinfo(torch.int32).max
    ordered = torch.where(picked < 0, high, picked).sort(-1).values
    return torch.where(ordered == high, -1, ordered)


def _picks(queries: int, picks: int, low: int, high: int) -> torch.Tensor:
    """Rows low .. high - 1, tails of every length, the last query without any."""
    indices = torch.stack([torch.randperm(high - low)[:picks] + low for _ in range(queries)]).int()
    kept = torch.randint(1, picks + 1, (queries, 1))
    kept[0], kept[-1] = picks, 0
    return torch.where(torch.arange(picks) < kept, indices, -1)


PROBE = """
import torch
from profiler.ops.formats import SparseKVFormat, quantize_mla_rows
from profiler.ops.triton.launches import HopperLaunch
from profiler.ops.triton.mla import attend_picked_kernel

q, latents = torch.randn(2, 64, 576, device="cuda").bfloat16(), torch.randn(500, 576, device="cuda")
indices = torch.randint(0, 500, (2, 256), device="cuda").int()
for ahead in (True, False):
    for held in (0, 256):
        launch = HopperLaunch("roles", ahead=ahead, held=held)
        attend_picked_kernel(q, latents.bfloat16(), indices, 512, 0.1, SparseKVFormat.BF16, hopper=launch)
    launch = HopperLaunch("roles", ahead=ahead)
    attend_picked_kernel(q, quantize_mla_rows(latents), indices, 512, 0.1, SparseKVFormat.FP8_PACKED, hopper=launch)
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def roles_failure() -> str:
    """What went wrong when warps that wait for one another were tried in a process of their own; empty if nothing.

    Should they wait for ever, that process is ended, and the tests go on without them.
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    try:
        subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, timeout=90, check=True
        )
    except subprocess.TimeoutExpired:
        return "no end after 90 s"
    except subprocess.CalledProcessError as failure:
        return str(failure.stderr)[-2000:]
    return ""


@pytest.fixture(scope="module")
def launches(roles_failure: str) -> list[HopperLaunch]:
    """The launches of the Hopper kernels that come to an end."""
    roles = [] if roles_failure else [HopperLaunch("roles"), HopperLaunch("roles", ahead=False)]
    return [HopperLaunch("turns"), *roles]


def test_roles_come_to_an_end(roles_failure: str) -> None:
    assert roles_failure == ""


@pytest.mark.parametrize("heads", [128, 64, 40, 16])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("holes", [False, True])
def test_sparse_mla(heads: int, splits: int, with_sink: bool, holes: bool, launches: list[HopperLaunch]) -> None:
    from profiler.ops.triton.mla import attend_picked_kernel

    q, rows = torch.randn(9, heads, 576).bfloat16(), torch.randn(5000, 576).bfloat16()
    indices = _picks(9, 2048, 100, 4900)
    rows[:100], rows[4900:] = float("nan"), float("nan")
    if holes:
        indices[:-1, 3::7] = -1
    sink = torch.randn(heads) * 4 if with_sink else None
    expected = attend_picked(q.double(), rows.double(), indices, 512, scale=0.1, sink=sink, backend="naive")
    launches = launches + [replace(launch, held=256) for launch in launches if launch.kernel == "roles"]
    # Without a choice of launch the call takes the table's; with a block, Triton's own kernel.
    options: list[dict[str, Any]] = [{}, {"block": 64}, *({"hopper": launch} for launch in launches)]
    for launch in options:
        got = attend_picked_kernel(q, rows, indices, 512, 0.1, BF16, sink, splits=splits, **launch)
        assert got.dtype == torch.bfloat16
        assert _error(got, expected) < 6e-3, launch
        assert not got[-1].any()


@pytest.mark.parametrize("queries", [3, 300])
@pytest.mark.parametrize("heads", [128, 16])
def test_packed_rows(queries: int, heads: int, launches: list[HopperLaunch]) -> None:
    from profiler.ops.triton.mla import attend_picked_kernel

    latents = torch.randn(6000, 576)
    rows = quantize_mla_rows(latents)
    q, indices, sink = torch.randn(queries, heads, 576).bfloat16(), _picks(queries, 2048, 0, 6000), torch.randn(heads)
    wide = dequantize_mla_rows(rows, torch.float64)
    expected = attend_picked(q.double(), wide, indices, 512, scale=0.05, sink=sink, backend="naive")
    # Three queries read the packed rows themselves; three hundred have them widened once.
    options: list[dict[str, Any]] = [{}, {"block": 32}, *({"hopper": launch} for launch in launches)]
    for launch in options:
        for splits in (None, 1, 4):
            got = attend_picked_kernel(q, rows, indices, 512, 0.05, PACKED, sink, splits=splits, **launch)
            assert _error(got, expected) < 8e-3, (launch, splits)
            assert not got[-1].any()


def test_raw_fp8_rows() -> None:
    rows = torch.randn(3000, 576).to(torch.float8_e4m3fn)
    q, indices = torch.randn(5, 128, 576).bfloat16(), _picks(5, 1024, 0, 3000)
    expected = attend_picked(q.double(), rows.double(), indices, 512, scale=0.05, backend="naive")
    got = attend_picked(q, rows, indices, 512, scale=0.05, kv_format=SparseKVFormat.FP8_RAW)
    assert _error(got, expected) < 8e-3


def test_sparse_sdpa_on_a_striped_cache() -> None:
    queries, tokens = 64, 64 * 8 * 16
    q, natural = torch.randn(1, 128, queries, 576).bfloat16(), torch.randn(tokens, 576).bfloat16()
    indices = _picks(queries, 2048, 0, tokens)[None, None]
    order = torch.arange(tokens).view(-1, 8, 64).transpose(0, 1).reshape(-1)
    args: dict[str, Any] = {"kv_format": BF16, "cache_batch_idx": torch.tensor(1)}
    plain = sparse_sdpa(q, torch.stack((natural * 0, natural))[:, None], indices, 512, **args)
    striped = sparse_sdpa(
        q,
        torch.stack((natural * 0, natural[order]))[:, None],
        indices,
        512,
        mesh_shape=(8, 1),
        block_cyclic_sp_axis=0,
        block_cyclic_chunk_local=64,
        **args,
    )
    assert torch.equal(plain, striped)
    fp8 = sparse_sdpa(q.to(torch.float8_e4m3fn), natural[None, None], indices, 512, kv_format=BF16)
    assert fp8.dtype == torch.float8_e4m3fn and _error(fp8[..., :-1, :], plain[..., :-1, :]) < 0.1


@pytest.mark.parametrize("heads", [64, 32, 20])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "mixed"])
@pytest.mark.parametrize(("rows", "count"), [(1, 3000), (130, 4097)])
def test_index_scores(heads: int, kind: str, rows: int, count: int) -> None:
    q, weights, keys = torch.randn(rows, heads, 128).bfloat16(), torch.randn(rows, heads), torch.randn(count, 128)
    scales = None
    if kind == "fp8":
        q, weights = quantize_queries(q, weights)
    if kind == "bf16":
        keys = keys.bfloat16()
    else:
        keys, wide = quantize_fp8(keys, 128)
        scales = wide[:, 0]
    expected = index_scores(q, weights, keys, key_scales=scales, backend="naive")
    got = index_scores(q, weights, keys, key_scales=scales)
    # FP8 products add up in fewer bits than fp32 on the tensor cores.
    assert _error(got, expected) < (2e-3 if kind == "fp8" else 1e-5)


@pytest.mark.parametrize(("width", "topk"), [(500, 2048), (8192, 2048), (40_000, 2048), (9000, 100), (3000, 512)])
@pytest.mark.parametrize("rows", [40, 700])
def test_selection_equals_a_stable_sort(width: int, topk: int, rows: int) -> None:
    scores = torch.randn(rows, width).relu()
    scores[0], scores[1] = 0.0, -0.0
    scores[2] = torch.randint(0, 5, (width,)).float()
    scores[3, ::3] = float("-inf")
    scores[4] = torch.arange(width)
    scores[5, torch.rand(width) < 0.99] = 0.0
    positions = torch.randint(-1, width, (rows,))
    positions[:6] = width - 1
    expected = _ascending(select_topk_causal(scores, positions, topk, backend="naive"))
    assert torch.equal(select_topk_causal(scores, positions, topk), expected)


def test_long_prefill_selection_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.ops.indexer.SCORE_PIECE_ELEMENTS", 100 * 6000)
    q, weights, keys = torch.randn(777, 64, 128).bfloat16(), torch.randn(777, 64), torch.randn(6000, 128).bfloat16()
    positions = torch.arange(6000 - 777, 6000)
    got = index_topk(q, weights, keys, positions, 2048)
    expected = index_topk(q, weights, keys, positions, 2048, backend="naive")
    # Near ties may fall either way between fp32 sums in different orders.
    differing = sum(len(set(a) ^ set(b)) for a, b in zip(got.tolist(), expected.tolist(), strict=True))
    assert differing < 777 * 2048 * 1e-3


@pytest.mark.parametrize("store", ["paged_fp8", "paged_bf16"])
def test_a_captured_decode_equals_eager_steps(store: str) -> None:
    """Keys, selection and attention of two full layers and a shared one, replayed while requests grow and leave."""
    page, topk, heads, rows = 64, 512, 64, 4
    lengths = {"a": 3000, "b": 700, "c": 1500}
    tables = {"a": list(range(0, 60)), "b": list(range(60, 80)), "c": list(range(80, 120))}
    config = DSAConfig("mla", (0, 2), (3,), topk=topk, key_store=store, max_request_pages=60)  # type: ignore[arg-type]
    eager = DSAManager(config, page, "cuda", num_pages=130)
    fixed = DSAManager(config, page, "cuda", num_pages=130)
    cache = torch.randn(130, page, 576).bfloat16()
    prompt = [(r, n - 8) for r, n in lengths.items()]
    for manager in (eager, fixed):
        placed = [KVRows(r, 0, tables[r], 5) for r in lengths]
        torch.manual_seed(1)
        manager.plan(DSAStep({"main": prompt}), StepContext({"mla": {"main": placed}}))
        for layer in (0, 2):
            manager.store_keys(layer, torch.randn(sum(n for _, n in prompt), 128).bfloat16())
    inputs = {
        "keys": torch.zeros(rows, 128).bfloat16(),
        "q": torch.zeros(rows, 32, 128).bfloat16(),
        "weights": torch.zeros(rows, 32),
        "query": torch.zeros(rows, heads, 576).bfloat16(),
    }

    def layers(manager: DSAManager, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = {name: tensor[:count] for name, tensor in inputs.items()}
        query = given["query"]
        for layer in (0, 2):
            manager.store_keys(layer, given["keys"] * (layer + 1))
            picked = manager.select(layer, given["q"] * (layer + 1), given["weights"])
            manager.attend(picked, query[..., :512], query[..., 512:], cache, 0.1)
        picked = manager.shared_selection(3)
        return picked, manager.attend(picked, query[..., :512], query[..., 512:], cache, 0.1)

    graph: torch.cuda.CUDAGraph | None = None
    captured: tuple[torch.Tensor, torch.Tensor] | None = None
    for turn, batch in enumerate((["a", "b", "c"], ["a", "b", "c"], ["c", "a"], ["b"])):
        placed = [KVRows(r, lengths[r] - 8 + turn, tables[r], 5) for r in lengths]
        step = [(r, 1) for r in batch]
        context = StepContext({"mla": {"main": placed}})
        for tensor in inputs.values():
            tensor.copy_(torch.randn(tensor.shape))
        eager.plan(DSAStep({"main": step}), context)
        expected = layers(eager, len(batch))
        fixed.plan(DSAStep({"main": step}, {"main": rows}), context)
        if graph is None:
            layers(fixed, rows)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = layers(fixed, rows)
        graph.replay()
        assert captured is not None
        assert torch.equal(_ascending(captured[0][: len(batch)]), _ascending(expected[0]))
        # Another number of rows may split the picks otherwise, which moves the last bit of bf16.
        assert _error(captured[1][: len(batch)], expected[1]) < 5e-3
        assert not captured[1][len(batch) :].any() and (captured[0][len(batch) :] == -1).all()


@pytest.mark.parametrize("store", ["buffer", "paged_fp8", "paged_bf16"])
def test_mixed_steps_agree_with_the_cpu(store: str) -> None:
    page, topk = 64, 256
    config = DSAConfig("mla", (0,), topk=topk, key_store=store)  # type: ignore[arg-type]
    rows = [("a", 900), ("b", 1), ("c", 40)]
    placed = [KVRows("a", 0, range(15)), KVRows("b", 600, range(15, 27), 7), KVRows("c", 500, range(27, 40))]
    before = DSAStep({"main": [("b", 600), ("c", 500)]})
    start = [KVRows("b", 0, range(15, 27), 7), KVRows("c", 0, range(27, 40))]
    keys = {"a": torch.randn(900, 128), "b": torch.randn(601, 128), "c": torch.randn(540, 128)}
    q, weights = torch.randn(941, 64, 128).bfloat16(), torch.randn(941, 64)
    query, cache = torch.randn(941, 16, 576).bfloat16(), torch.randn(40, page, 576).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        manager = DSAManager(config, page, device, num_pages=40)
        manager.plan(before, StepContext({"mla": {"main": start}}))
        manager.store_keys(0, torch.cat((keys["b"][:600], keys["c"][:500])).bfloat16().to(device))
        manager.plan(DSAStep({"main": rows}), StepContext({"mla": {"main": placed}}))
        manager.store_keys(0, torch.cat((keys["a"], keys["b"][600:], keys["c"][500:])).bfloat16().to(device))
        picked = manager.select(0, q.to(device), weights.to(device))
        given = (query[..., :512].to(device), query[..., 512:].to(device), cache.to(device))
        results.append((picked.cpu(), manager.attend(picked, *given, 0.1).cpu()))
    differing = sum(len(set(a) ^ set(b)) for a, b in zip(results[0][0].tolist(), results[1][0].tolist(), strict=True))
    assert differing < 941 * topk * 1e-3
    assert _error(results[1][1], results[0][1]) < 2e-2


@pytest.mark.parametrize("paged", [False, True])
def test_msa_at_the_models_widths(paged: bool) -> None:
    rows, groups, heads, length = 70, 4, 64, 5000
    index_q, index_k = torch.randn(rows, groups, 128).bfloat16(), torch.randn(40 * 128, 128).bfloat16()
    q = torch.randn(rows, heads, 128).bfloat16()
    k, v = torch.randn(40 * 128, groups, 128).bfloat16(), torch.randn(40 * 128, groups, 128).bfloat16()
    positions = torch.randint(0, length, (rows,))
    positions[0], positions[1] = 0, length - 1
    args: dict[str, Any] = (
        {"blocks": 40}
        if not paged
        else {
            "blocks": 40,
            "pages": torch.randperm(40).int(),
            "row_page_offset": torch.zeros(rows, dtype=torch.int32),
        }
    )
    scores = msa_block_scores(index_q, index_k, positions, **args)
    expected = msa_block_scores(index_q, index_k, positions, backend="naive", **args)
    seen = expected > float("-inf")
    assert torch.equal(seen, scores > float("-inf")) and _error(scores[seen], expected[seen]) < 1e-5
    picked = msa_select(expected, positions)
    assert torch.equal(_ascending(picked), _ascending(msa_select(expected, positions, backend="naive")))
    args.pop("blocks")
    out = msa_attend(q, k, v, picked, positions, 0.09, **args)
    wide = msa_attend(q.double(), k.double(), v.double(), picked, positions, 0.09, backend="naive", **args)
    assert _error(out, wide) < 6e-3
    few = msa_attend(q[:2], k, v, picked[:2], positions[:2], 0.09, **_first_rows(args, 2))
    assert _error(few, wide[:2]) < 6e-3


def _first_rows(args: dict[str, Any], rows: int) -> dict[str, Any]:
    return {name: value[:rows] if name == "row_page_offset" else value for name, value in args.items()}


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu()


def test_dense_attention_agrees_with_float64() -> None:
    q_nope, q_pe = torch.randn(300, 16, 128).bfloat16(), torch.randn(300, 16, 64).bfloat16()
    latents, kv_b = torch.randn(700, 576).bfloat16() * 0.3, torch.randn(16, 256, 512).bfloat16() * 0.05
    expected = mla_prefill(_wide(q_nope), _wide(q_pe), _wide(latents), _wide(kv_b), 0.07)
    assert _error(mla_prefill(q_nope, q_pe, latents, kv_b, 0.07).cpu(), expected) < 1e-2
    table, lengths = torch.randperm(30).view(3, 10), torch.tensor([640, 100, 1])
    query, pages = torch.randn(3, 16, 576).bfloat16(), torch.randn(30, 64, 576).bfloat16()
    nope, rope = query[..., :512], query[..., 512:]
    expected = mla_decode(_wide(nope), _wide(rope), _wide(pages), _wide(table), _wide(lengths), 0.07)
    assert _error(mla_decode(nope, rope, pages, table, lengths, 0.07).cpu(), expected) < 1e-2
    q, k, v = (torch.randn(n, h, 128).bfloat16() for n, h in ((200, 32), (500, 8), (500, 8)))
    assert _error(gqa_prefill(q, k, v, 0.09).cpu(), gqa_prefill(_wide(q), _wide(k), _wide(v), 0.09)) < 1e-2
    k_pages, v_pages = torch.randn(30, 64, 8, 128).bfloat16(), torch.randn(30, 64, 8, 128).bfloat16()
    expected = gqa_decode(_wide(q[:3]), _wide(k_pages), _wide(v_pages), _wide(table), _wide(lengths), 0.09)
    assert _error(gqa_decode(q[:3], k_pages, v_pages, table, lengths, 0.09).cpu(), expected) < 1e-2


def test_experts_agree_with_float64() -> None:
    x, ids = torch.randn(100, 512).bfloat16(), torch.stack([torch.randperm(16)[:4] for _ in range(100)])
    weights = torch.rand(100, 4)
    w13, w2 = torch.randn(8, 512, 512).bfloat16() * 0.05, torch.randn(8, 512, 256).bfloat16() * 0.05
    expected = expert_gemm(_wide(x), _wide(ids), _wide(weights), _wide(w13), _wide(w2), first_expert=4)
    assert _error(expert_gemm(x, ids, weights, w13, w2, first_expert=4).cpu(), expected) < 2e-2
