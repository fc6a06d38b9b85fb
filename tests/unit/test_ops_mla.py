"""Latent attention: absorbed and expanded forms agree, paged decode, GQA; refusals."""

import itertools

import pytest
import torch

from profiler.ops.formats import SparseKVFormat, dequantize_mla_rows, quantize_mla_rows
from profiler.ops.gqa import gqa_decode, gqa_prefill
from profiler.ops.mla import absorb_q, absorb_v, causal_sdpa, mla_decode, mla_prefill, page_slots, sparse_mla


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Float64, (H, T, D) queries at the last T of S positions, one query at a time."""
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    for head, row in itertools.product(range(q.shape[0]), range(q.shape[1])):
        group = head // (q.shape[0] // k.shape[0])
        seen = k.shape[1] - q.shape[1] + row + 1
        weights = (k[group, :seen].double() @ q[head, row].double() * scale).softmax(-1)
        out[head, row] = weights @ v[group, :seen].double()
    return out


@pytest.mark.parametrize(("count", "length"), [(6, 6), (6, 20), (1, 9)])
@pytest.mark.parametrize("groups", [4, 2])
def test_causal_sdpa_matches_float64(count: int, length: int, groups: int) -> None:
    q, k, v = torch.randn(4, count, 16), torch.randn(groups, length, 16), torch.randn(groups, length, 8)
    torch.testing.assert_close(causal_sdpa(q, k, v, 0.3).double(), _causal(q, k, v, 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("count", "length"), [(6, 6), (5, 21)])
def test_absorbed_and_expanded_mla_agree(count: int, length: int) -> None:
    heads, nope, rope, value, rank = 3, 16, 8, 12, 32
    q_nope, q_pe = torch.randn(count, heads, nope).double(), torch.randn(count, heads, rope).double()
    latents = torch.randn(length, rank + rope).double()
    kv_b = torch.randn(heads, nope + value, rank).double()
    expanded = mla_prefill(q_nope, q_pe, latents, kv_b, 0.2)
    indices = torch.arange(length, dtype=torch.int32).repeat(count, 1)
    indices[indices > length - count + torch.arange(count)[:, None]] = -1
    attended = sparse_mla(absorb_q(q_nope, kv_b[:, :nope]), q_pe, latents, indices, 0.2)
    absorbed = absorb_v(attended, kv_b[:, nope:].transpose(1, 2))
    torch.testing.assert_close(absorbed, expanded, rtol=1e-10, atol=1e-12)


def test_sparse_mla_with_topk_at_least_the_length_is_dense_decode() -> None:
    query, cache = torch.randn(3, 4, 40), torch.randn(8, 4, 40)
    table, lengths = torch.tensor([[5, 0, 2], [7, 1, 3], [4, 6, 0]]), torch.tensor([9, 1, 12])
    out = mla_decode(query[..., :32], query[..., 32:], cache, table, lengths, 0.2)
    for row, length in enumerate(lengths.tolist()):
        keys = cache[table[row]].flatten(0, 1)[:length]
        expected = _causal(query[row, :, None], keys[None], keys[None, :, :32], 0.2)[:, 0]
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-5)


def test_packed_decode() -> None:
    query, rows = torch.randn(1, 2, 576), quantize_mla_rows(torch.randn(2, 4, 576))
    args = (torch.tensor([[1, 0]]), torch.tensor([7]), 0.05)
    out = mla_decode(query[..., :512], query[..., 512:], rows, *args, kv_format=SparseKVFormat.FP8_PACKED)
    wide = dequantize_mla_rows(rows, torch.float32)
    torch.testing.assert_close(out, mla_decode(query[..., :512], query[..., 512:], wide, *args))


def test_page_slots() -> None:
    slots = page_slots(torch.tensor([[3, 1], [2, 0]]), torch.tensor([3, 0]), 2, 4)
    assert slots.tolist() == [[6, 7, 2, -1], [-1] * 4]


@pytest.mark.parametrize("groups", [4, 1])
def test_gqa(groups: int) -> None:
    q, k, v = torch.randn(5, 4, 16), torch.randn(12, groups, 16), torch.randn(12, groups, 16)
    swap_q, swap_k, swap_v = (x.transpose(0, 1) for x in (q, k, v))
    expected = _causal(swap_q, swap_k, swap_v, 0.25).transpose(0, 1)
    torch.testing.assert_close(gqa_prefill(q, k, v, 0.25).double(), expected, rtol=1e-4, atol=1e-5)
    k_pages, v_pages = (x.new_full((6, 4, groups, 16), float("nan")) for x in (k, v))
    table, lengths = torch.tensor([[4, 1, 5], [0, 0, 0]]), torch.tensor([12, 0])
    for page, values in zip((k_pages, v_pages), (k, v), strict=True):
        page[table[0]] = values.unflatten(0, (3, 4))
    out = gqa_decode(q[3:], k_pages, v_pages, table, lengths, 0.25)
    keys = _causal(swap_q[:, 3:4], swap_k, swap_v, 0.25)[:, 0]
    torch.testing.assert_close(out[0].double(), keys, rtol=1e-4, atol=1e-5)
    assert not out[1].any()


def test_refusals_name_the_argument() -> None:
    q, latents = torch.randn(2, 3, 40), torch.randn(9, 40)
    picks = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rows: expected shape \(N, 40\), found \(9, 39\)"):
        sparse_mla(q[..., :32], q[..., 32:], latents[:, :39], picks, 1.0)
    with pytest.raises(ValueError, match=r"indices: values 0 \.\. 9 lie outside -1 \.\. 8"):
        sparse_mla(q[..., :32], q[..., 32:], latents, picks + torch.tensor([0, 0, 0, 9]).int(), 1.0)
    with pytest.raises(ValueError, match="q: packed rows hold 576 features, the queries have 40"):
        sparse_mla(q[..., :32], q[..., 32:], latents, picks, 1.0, kv_format=SparseKVFormat.FP8_PACKED)
    with pytest.raises(ValueError, match="sink: expected shape"):
        sparse_mla(q[..., :32], q[..., 32:], latents, picks, 1.0, sink=torch.zeros(4))
    with pytest.raises(ValueError, match="3 keys for 4 queries"):
        causal_sdpa(torch.randn(1, 4, 8), torch.randn(1, 3, 8), torch.randn(1, 3, 8), 1.0)
    with pytest.raises(ValueError, match="kv_b: expected more than 16 outputs"):
        mla_prefill(torch.randn(2, 1, 16), torch.randn(2, 1, 8), torch.randn(2, 40), torch.randn(1, 16, 32), 1.0)
    with pytest.raises(ValueError, match=r"lengths: values 9 \.\. 9"):
        mla_decode(q[:1, :, :32], q[:1, :, 32:], torch.randn(2, 4, 40), torch.zeros(1, 2).int(), torch.tensor([9]), 1.0)
    with pytest.raises(ValueError, match="width: 9 positions exceed 2 pages of 4"):
        page_slots(torch.zeros(1, 2).int(), torch.tensor([3]), 4, 9)
    pages = torch.randn(2, 4, 3, 40)
    with pytest.raises(ValueError, match="page_table: values 2"):
        gqa_decode(q, pages, pages, torch.full((2, 1), 2), torch.ones(2).int(), 1.0)
    with pytest.raises(ValueError, match="2 KV heads do not divide 3"):
        gqa_prefill(q, torch.randn(2, 2, 40), torch.randn(2, 2, 40), 1.0)
