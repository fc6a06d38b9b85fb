"""The Triton kernels against their naive twins: in Triton's interpreter on the CPU, compiled where there is a GPU.

Interpreted kernels run in NumPy, so the shapes are tiny.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    # Read when a kernel module is first imported; nothing else in the tests imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"
_triton = pytest.importorskip("triton", reason="Triton is not installed")
if not CUDA and not _triton.__version__.startswith("3.6."):
    pytest.skip(f"written for the interpreter of Triton 3.6, found {_triton.__version__}", allow_module_level=True)
DEVICE = "cuda" if CUDA else "cpu"

from profiler.ops.dsa import PagedIndexKeyStore  # noqa: E402
from profiler.ops.formats import SparseKVFormat, dequantize_mla_rows, quantize_fp8, quantize_mla_rows, split_index_pages  # noqa: E402
from profiler.ops.indexer import index_scores, index_topk, quantize_queries, select_topk_causal  # noqa: E402
from profiler.ops.mla import attend_picked  # noqa: E402
from profiler.ops.msa import msa_attend, msa_block_scores, msa_select  # noqa: E402
from profiler.ops.paging import position_slots  # noqa: E402
from profiler.ops.sparse_sdpa import sparse_sdpa  # noqa: E402
from profiler.ops.triton.indexer import index_scores_dense, index_scores_paged  # noqa: E402
from profiler.ops.triton.launches import SelectLaunch  # noqa: E402
from profiler.ops.triton.mla import attend_picked_kernel, widen_rows_kernel  # noqa: E402
from profiler.ops.triton.msa import attend_blocks, block_scores  # noqa: E402
from profiler.ops.triton.select import select_topk  # noqa: E402
from profiler.ops.triton.select_wide import select_wide  # noqa: E402

BF16 = SparseKVFormat.BF16

if not CUDA:
    import triton.language
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        # The interpreter hands one-element arrays to range(), which NumPy 2.4 no longer takes for an integer.
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_with_index
    _dot = interpreter.interpreter_builder.create_dot

    def _dot_of_bf16(a: Any, b: Any, *rest: Any) -> Any:
        # The interpreter holds bf16 as 16-bit integers and multiplies those; widen them first.
        wide = [
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)
            if x.dtype == triton.language.bfloat16
            else x
            for x in (a, b)
        ]
        return _dot(*wide, *rest)

    interpreter.interpreter_builder.create_dot = _dot_of_bf16


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs start as NaN (or the largest integer), so that an element left unwritten shows."""
    plain = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = plain(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)
    torch.manual_seed(11)
    with torch.device(DEVICE):
        yield


def _ascending(picked: torch.Tensor) -> torch.Tensor:
    """Picks in ascending order, -1 last."""
    high = torch.iinfo(torch.int32).max
    ordered = torch.where(picked < 0, high, picked).sort(-1).values
    return torch.where(ordered == high, -1, ordered)


@pytest.mark.parametrize(("width", "topk", "block"), [(50, 8, None), (300, 16, 64), (320, 16, 32), (20, 64, None)])
def test_selection_equals_the_naive_one_with_ties(width: int, topk: int, block: int | None) -> None:
    scores = torch.randn(8, width).relu()  # half the scores are tied at zero
    scores[3], scores[4] = 0.0, -0.0
    scores[4, ::3] = 0.0
    scores[5] = torch.randint(0, 3, (width,)).float() - 1
    scores[6, ::5] = float("-inf")
    positions = torch.tensor([width - 1, width - 2, width // 2, width - 1, width - 1, width - 3, width - 1, -1])
    picked = select_topk(scores, positions, topk, block=block)
    assert torch.equal(picked, _ascending(select_topk_causal(scores, positions, topk, backend="naive")))


# The first pivot as planned, one that too few reach, one that too many reach.
@pytest.mark.parametrize(("sample", "target"), [(64, None), (16, 5), (64, 160)])
def test_wide_selection_equals_the_naive_one(sample: int, target: int | None) -> None:
    width, topk = 500, 20
    scores = torch.randn(12, width)
    scores[1] = torch.randint(0, 3, (width,)).float()
    scores[2], scores[3] = 0.0, 1.5
    scores[2, ::3], scores[3, 250:] = -0.0, 2.5
    scores[4], scores[5] = torch.arange(width).float(), -torch.arange(width).float()
    scores[6] *= torch.rand(width) < 0.02
    scores[7] = float("-inf")
    scores[8, ::2] = float("-inf")
    scores[9], scores[9, 40:48] = -1e30, 3.0
    positions = torch.full((12,), width - 1)
    positions[8], positions[10], positions[11] = 60, -1, topk + 5
    # Five programs walk over the rows; a pass takes 64 columns of 500.
    launch = SelectLaunch(warps=4, block=64, stages=2, programs=5, sample=sample)
    picked = select_wide(scores, positions, topk, launch, target=target)
    assert torch.equal(picked, _ascending(select_topk_causal(scores, positions, topk, backend="naive")))


def test_selection_refuses_more_picks_than_a_scan_counts() -> None:
    with pytest.raises(ValueError, match="topk: 4097 exceeds the 4096"):
        select_topk_causal(torch.randn(1, 9), torch.tensor([8]), 4097, backend="triton")


def test_selection_of_scores_that_differ_in_the_last_bit() -> None:
    bits = torch.tensor(1.5).view(torch.int32) + torch.randperm(40, device="cpu").to(DEVICE).int()
    scores = torch.stack((bits.view(torch.float32), -bits.view(torch.float32)))
    positions = torch.tensor([39, 39])
    picked = select_topk_causal(scores, positions, 7, backend="triton")
    assert torch.equal(picked, _ascending(select_topk_causal(scores, positions, 7, backend="naive")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "dim", "count"), [(5, 3, 40, 70), (1, 8, 128, 33)])
def test_dense_scores(dtype: torch.dtype, rows: int, heads: int, dim: int, count: int) -> None:
    q, weights = torch.randn(rows, heads, dim).to(dtype), torch.randn(rows, heads)
    keys, factors = torch.randn(count, dim).to(dtype), torch.rand(count)
    expected = index_scores(q, weights, keys, key_scales=factors, backend="naive")
    got = index_scores(q, weights, keys, key_scales=factors, backend="triton")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    positions = torch.arange(count - rows, count)
    causal = index_scores_dense(q, weights, keys, None, positions, block=32, pairs=16)
    seen = torch.arange(count) <= positions[:, None]
    expected = index_scores(q, weights, keys, backend="naive")
    torch.testing.assert_close(causal[seen], expected[seen], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("keys_only", [False, True])
def test_fp8_scores(keys_only: bool) -> None:
    q, weights = torch.randn(3, 4, 128).bfloat16(), torch.randn(3, 4)
    if not keys_only:
        q, weights = quantize_queries(q, weights)
    codes, scales = quantize_fp8(torch.randn(40, 128), 128)
    expected = index_scores(q, weights, codes, key_scales=scales[:, 0], backend="naive")
    got = index_scores(q, weights, codes, key_scales=scales[:, 0], backend="triton")
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_pages_are_written_and_scored(power_of_two: bool) -> None:
    stores = [PagedIndexKeyStore((0,), 6, 16, DEVICE, power_of_two=power_of_two) for _ in range(2)]
    keys, slots = torch.randn(9, 128) * 5, torch.tensor([3, 90, 17, -1, 18, 19, 50, 51, 0])
    keys[2] = 0.0
    stores[0].write(0, keys, slots, backend="naive")
    stores[1].write(0, keys, slots, backend="triton")
    (naive, naive_scales), (codes, scales) = (split_index_pages(store.layer(0)[:6], 16) for store in stores)
    assert torch.equal(scales, naive_scales)
    # The interpreter cuts to E4M3 where the card rounds, and loses a carry into the exponent.
    differing = (codes.float() - naive.float()).abs() > (0 if CUDA else 2.0**-3) * naive.float().abs() + 2.0**-9
    assert differing.float().mean() < (1e-9 if CUDA else 0.005)
    q, weights = torch.randn(2, 3, 128).bfloat16(), torch.randn(2, 3)
    args = (torch.tensor([0, 1, 3]).int(), torch.tensor([0, 1]).int(), torch.tensor([2, 0]).int())
    positions = torch.tensor([20, 25], dtype=torch.int32)
    expected = stores[0].scores(0, q, weights, *args, positions, 32, backend="naive")
    got = index_scores_paged(q, weights, stores[0].layer(0), 16, *args, positions, 32, block=32)
    seen = torch.arange(32) <= positions[:, None]
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-3, atol=1e-2)


def test_index_topk_end_to_end() -> None:
    q, weights, keys = torch.randn(6, 4, 32), torch.randn(6, 4), torch.randn(90, 32)
    positions = torch.tensor([0, 5, 40, 60, 89, -1])
    got = index_topk(q, weights, keys, positions, 12, backend="triton")
    assert torch.equal(got, _ascending(index_topk(q, weights, keys, positions, 12, backend="naive")))


def test_paged_scores() -> None:
    store = PagedIndexKeyStore((0,), 12, 16, DEVICE, kind="bf16", index_dim=32)
    store.layer(0).copy_(torch.randn(13, 16, 32))
    q, weights = torch.randn(4, 3, 32).bfloat16(), torch.randn(4, 3)
    pages = torch.tensor([3, 7, 1, 9, 0, 2, 4], dtype=torch.int32)
    offsets = torch.tensor([0, 0, 4, 4], dtype=torch.int32)
    starts = torch.tensor([5, 5, 0, 0], dtype=torch.int32)
    positions = torch.tensor([57, 58, 40, -1], dtype=torch.int32)
    args = (pages, offsets, starts, positions, 64)
    expected = store.scores(0, q, weights, *args, backend="naive")
    got = index_scores_paged(q, weights, store.layer(0), 16, *args, block=16)
    seen = torch.arange(64) <= positions[:, None]
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-4, atol=1e-3)
    assert got[~seen].isnan().all()


def test_position_slots() -> None:
    selection = torch.tensor([[0, 5, -1, 30], [31, -1, 7, 2]], dtype=torch.int32)
    pages = torch.tensor([4, 9, 6, 3, 8], dtype=torch.int32)
    args = (selection, pages, torch.tensor([0, 2]).int(), torch.tensor([3, 0]).int(), 16)
    assert torch.equal(position_slots(*args, backend="triton"), position_slots(*args, backend="naive"))


def _picks(rows: int, picks: int, cache: int) -> torch.Tensor:
    indices = torch.stack([torch.randperm(cache)[:picks] for _ in range(rows)]).int()
    kept = torch.randint(0, picks + 1, (rows, 1))
    kept[0] = picks
    kept[-1] = 0
    return torch.where(torch.arange(picks) < kept, indices, -1)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "k_dim", "v_dim"), [(3, 48, 32), (20, 32, 32), (5, 24, 10)])
def test_attention_over_picked_rows(splits: int, heads: int, k_dim: int, v_dim: int) -> None:
    q, rows, indices = torch.randn(4, heads, k_dim), torch.randn(90, k_dim), _picks(4, 64, 90)
    sink = torch.randn(heads)
    for used in (None, sink):
        expected = attend_picked(q, rows, indices, v_dim, scale=0.3, sink=used, backend="naive")
        got = attend_picked_kernel(
            q, rows, indices, v_dim, 0.3, BF16, used, splits=splits, block=16, heads_per_program=16
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert not got[-1].any()


def test_attention_takes_bf16_masks_anywhere_and_poisoned_rows() -> None:
    q, rows, indices = torch.randn(3, 16, 48).bfloat16(), torch.randn(60, 48).bfloat16(), _picks(3, 32, 50)
    rows[50:] = float("nan")
    indices[0, ::3] = -1
    expected = attend_picked(q, rows, indices, 32, scale=0.2, backend="naive")
    got = attend_picked(q, rows, indices, 32, scale=0.2, backend="triton")
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("splits", [1, 2])
def test_packed_rows(splits: int) -> None:
    q, rows = torch.randn(2, 16, 576).bfloat16(), quantize_mla_rows(torch.randn(40, 576))
    indices, sink = _picks(2, 32, 40), torch.randn(16)
    packed = SparseKVFormat.FP8_PACKED
    expected = attend_picked(q, rows, indices, 512, scale=0.05, kv_format=packed, sink=sink, backend="naive")
    got = attend_picked_kernel(q, rows, indices, 512, 0.05, packed, sink, splits=splits, block=16)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_packed_rows_that_are_reused_are_widened_once() -> None:
    rows = quantize_mla_rows(torch.randn(7, 576))
    torch.testing.assert_close(widen_rows_kernel(rows), dequantize_mla_rows(rows), rtol=0 if CUDA else 2**-7, atol=0)
    q, indices = torch.randn(4, 3, 576).bfloat16(), torch.arange(28).view(4, 7).int() % 7
    packed = SparseKVFormat.FP8_PACKED
    expected = attend_picked(q, rows, indices, 512, scale=0.05, kv_format=packed, backend="naive")
    got = attend_picked(q, rows, indices, 512, scale=0.05, kv_format=packed, backend="triton")
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_raw_fp8_rows_and_queries() -> None:
    q, rows = torch.randn(2, 3, 48).to(torch.float8_e4m3fn), torch.randn(40, 48).to(torch.float8_e4m3fn)
    indices, raw = _picks(2, 32, 40), SparseKVFormat.FP8_RAW
    expected = attend_picked(q, rows, indices, 32, scale=0.1, kv_format=raw, backend="naive")
    got = attend_picked(q, rows, indices, 32, scale=0.1, kv_format=raw, backend="triton")
    torch.testing.assert_close(got.float(), expected.float(), rtol=0.13, atol=0.07)


def test_sparse_sdpa_runs_the_kernel() -> None:
    q, kv = torch.randn(1, 5, 3, 48), torch.randn(2, 1, 70, 48)
    indices, sink = _picks(3, 32, 70)[None, None], torch.randn(1, 1, 1, 5)
    args: dict[str, Any] = {"kv_format": BF16, "attention_sink": sink, "k_chunk_size": 32, "cache_batch_idx": 1}
    got = sparse_sdpa(q, kv, indices, 32, backend="triton", **args)
    torch.testing.assert_close(got, sparse_sdpa(q, kv, indices, 32, backend="naive", **args), rtol=1e-4, atol=1e-5)


def test_block_scores_and_selection() -> None:
    index_q, index_k = torch.randn(6, 3, 24), torch.randn(150, 24)
    positions = torch.tensor([0, 15, 16, 100, 149, 120])
    got = block_scores(index_q, index_k, positions, 16, 10, None, None, pairs=16)
    expected = msa_block_scores(index_q, index_k, positions, block_tokens=16, backend="naive")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for init, local in ((0, 1), (1, 2), (0, 0)):
        forced: dict[str, Any] = {"block_tokens": 16, "init_blocks": init, "local_blocks": local}
        picked = msa_select(expected, positions, 4, backend="triton", **forced)
        assert torch.equal(picked, _ascending(msa_select(expected, positions, 4, backend="naive", **forced)))


def test_paged_block_scores() -> None:
    index_q, index_k = torch.randn(3, 2, 24), torch.randn(8 * 16, 24)
    pages, offsets = torch.tensor([5, 2, 7, 0, 3, 6]).int(), torch.tensor([0, 3, 3]).int()
    positions = torch.tensor([47, 20, -1])
    args: dict[str, Any] = {"block_tokens": 16, "blocks": 3, "pages": pages, "row_page_offset": offsets}
    got = msa_block_scores(index_q, index_k, positions, backend="triton", **args)
    expected = msa_block_scores(index_q, index_k, positions, backend="naive", **args)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("paged", [False, True])
def test_attention_over_picked_blocks(splits: int, paged: bool) -> None:
    rows, groups, heads = 4, 2, 6
    q, k, v = torch.randn(rows, heads, 24), torch.randn(8 * 16, groups, 24), torch.randn(8 * 16, groups, 24)
    positions = torch.tensor([60, 63, 17, -1])
    picked = msa_select(torch.randn(rows, groups, 4), positions, 3, block_tokens=16, backend="naive")
    pages, offsets = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4]).int(), torch.tensor([0, 4, 1, 0]).int()
    table = (pages, offsets) if paged else (None, None)
    expected = msa_attend(
        q,
        k,
        v,
        picked,
        positions,
        0.3,
        block_tokens=16,
        pages=table[0],
        row_page_offset=table[1],
        backend="naive",
    )
    got = attend_blocks(q, k, v, picked, positions, 0.3, 16, *table, splits=splits, tile=16)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not got[-1].any()


def test_empty_batches() -> None:
    none = torch.zeros(0, 3, 32)
    assert index_scores(none, torch.zeros(0, 3), torch.randn(5, 32), backend="triton").shape == (0, 5)
    picks = torch.zeros(0, 4, dtype=torch.int32)
    assert attend_picked(none, torch.randn(5, 32), picks, 16, scale=1.0, backend="triton").shape == (0, 3, 16)
    one = torch.randn(1, 3, 32)
    out = attend_picked(one, torch.randn(5, 32), torch.zeros(1, 0).int(), 16, scale=1.0, backend="triton")
    assert not out.any()
