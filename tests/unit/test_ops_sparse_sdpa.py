"""sparse_sdpa against float64: formats, sinks, sentinels, batch slots, striped caches, and what it refuses."""

import itertools
from typing import Any

import pytest
import torch

from profiler.ops.formats import SparseKVFormat, dequantize_mla_rows, quantize_mla_rows
from profiler.ops.sparse_sdpa import SENTINEL, block_cyclic_slots, sparse_sdpa

BF16, RAW, PACKED = SparseKVFormat.BF16, SparseKVFormat.FP8_RAW, SparseKVFormat.FP8_PACKED


def _indices(count: int, topk: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """(1, 1, count, topk) int32 with tails of different lengths; the last row is masked throughout."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((count, topk), -1, dtype=torch.int32)
    for row in range(count - 1):
        kept = topk if row == 0 else int(torch.randint(1, topk + 1, (), generator=generator))
        rows[row, :kept] = torch.randperm(tokens, generator=generator)[:kept].int()
    return rows[None, None]


def _reference(
    q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, v_dim: int, scale: float, sink: torch.Tensor | None
) -> torch.Tensor:
    """Float64, one query and head at a time, from (T, K_DIM) cache rows."""
    out = torch.zeros(*q.shape[:3], v_dim, dtype=torch.float64)
    for head, row in itertools.product(range(q.shape[1]), range(q.shape[2])):
        picks = [i for i in indices[0, 0, row].tolist() if i >= 0]
        if not picks:
            continue
        keys = rows[picks].double()
        terms = (keys @ q[0, head, row].double() * scale).exp()
        total = terms.sum() + (0 if sink is None else (sink.double()[0, 0, 0, head] * scale).exp())
        out[0, head, row] = terms @ keys[:, :v_dim] / total
    return out


@pytest.mark.parametrize("heads", [1, 5, 32])
@pytest.mark.parametrize("with_sink", [False, True])
def test_bf16_matches_float64(heads: int, with_sink: bool) -> None:
    q, kv = torch.randn(1, heads, 7, 48).bfloat16(), torch.randn(1, 1, 90, 48).bfloat16()
    sink = torch.randn(1, 1, 1, heads).bfloat16() * 3 if with_sink else None
    indices = _indices(7, 64, 90)
    out = sparse_sdpa(q, kv, indices, 40, kv_format=BF16, attention_sink=sink, k_chunk_size=32)
    assert out.shape == (1, heads, 7, 40) and out.dtype == torch.bfloat16
    expected = _reference(q, kv[0, 0], indices, 40, 48**-0.5, sink)
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-9)
    assert not out[:, :, -1].any()


def test_unwritten_cache_rows_do_not_leak() -> None:
    q, kv = torch.randn(1, 2, 3, 32), torch.full((1, 1, 70, 32), float("nan"))
    kv[0, 0, 5:40] = torch.randn(35, 32)
    indices = _indices(3, 32, 35) + 5
    indices[indices == 4] = -1
    out = sparse_sdpa(q, kv, indices, 16, kv_format=BF16, k_chunk_size=32)
    torch.testing.assert_close(out.double(), _reference(q, kv[0, 0], indices, 16, 32**-0.5, None), rtol=1e-4, atol=1e-6)


def test_packed_and_raw_fp8_rows() -> None:
    q, latents = torch.randn(1, 3, 4, 576), torch.randn(50, 576)
    indices = _indices(4, 32, 50)
    rows = quantize_mla_rows(latents)
    out = sparse_sdpa(q, rows[None, None], indices, 512, kv_format=PACKED, scale=0.07, k_chunk_size=32)
    expected = _reference(q, dequantize_mla_rows(rows, torch.float64), indices, 512, 0.07, None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    raw = latents.to(torch.float8_e4m3fn)
    out = sparse_sdpa(q, raw[None, None], indices, 512, kv_format=RAW, scale=0.07, k_chunk_size=32)
    torch.testing.assert_close(
        out.double(), _reference(q, raw.double(), indices, 512, 0.07, None), rtol=1e-4, atol=1e-5
    )


def test_fp8_queries_give_fp8_results() -> None:
    q = torch.randn(1, 2, 3, 64).to(torch.float8_e4m3fn)
    kv, indices = torch.randn(1, 1, 40, 64).bfloat16(), _indices(3, 32, 40)
    out = sparse_sdpa(q, kv, indices, 64, kv_format=BF16, k_chunk_size=32)
    assert out.dtype == torch.float8_e4m3fn
    expected = _reference(q, kv[0, 0], indices, 64, 0.125, None)
    torch.testing.assert_close(out.double(), expected, rtol=2**-4, atol=2**-9)


def test_unsigned_sentinels_equal_signed_ones() -> None:
    q, kv, indices = torch.randn(1, 2, 5, 32), torch.randn(1, 1, 64, 32), _indices(5, 64, 64)
    unsigned = (indices.long() & SENTINEL).to(torch.uint32)
    out = [sparse_sdpa(q, kv, i, 16, kv_format=BF16, k_chunk_size=64) for i in (unsigned, indices)]
    assert torch.equal(*out)


def test_a_scaled_sink_contributes_its_exponential() -> None:
    scale, model_sink = 0.25, torch.tensor([0.7, -1.2])
    q, kv, indices = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 40, 16), _indices(3, 32, 40)
    passed = (model_sink / scale).reshape(1, 1, 1, 2)
    out = sparse_sdpa(q, kv, indices, 16, kv_format=BF16, scale=scale, attention_sink=passed, k_chunk_size=32)
    plain = sparse_sdpa(q, kv, indices, 16, kv_format=BF16, scale=scale, k_chunk_size=32).double()
    for head, row in itertools.product(range(2), range(2)):
        keys = kv[0, 0, [i for i in indices[0, 0, row].tolist() if i >= 0]].double()
        total = (keys @ q[0, head, row].double() * scale).exp().sum()
        shrunk = plain[0, head, row] * total / (total + model_sink[head].double().exp())
        torch.testing.assert_close(out[0, head, row].double(), shrunk, rtol=1e-4, atol=1e-6)


def test_chunk_size_and_kernel_config_change_nothing() -> None:
    q, kv, indices = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 300, 16), _indices(3, 256, 300)
    first = sparse_sdpa(q, kv, indices, 8, kv_format=BF16)
    for chunk, config in ((32, None), (256, {"fidelity": "high"})):
        again = sparse_sdpa(q, kv, indices, 8, kv_format=BF16, k_chunk_size=chunk, compute_kernel_config=config)
        torch.testing.assert_close(again, first)


def test_batch_slots_by_number_and_by_tensor() -> None:
    q, kv, indices = torch.randn(1, 2, 3, 16), torch.randn(4, 1, 50, 16), _indices(3, 32, 50)
    for slot in range(4):
        alone = sparse_sdpa(q, kv[slot : slot + 1], indices, 16, kv_format=BF16, k_chunk_size=32)
        for chosen in (slot, torch.tensor(slot)):
            got = sparse_sdpa(q, kv, indices, 16, kv_format=BF16, k_chunk_size=32, cache_batch_idx=chosen)
            assert torch.equal(got, alone)


def test_block_cyclic_layout_by_hand() -> None:
    # Two shards of eight rows, chunks of two tokens: 0 1 | 4 5 | 8 9 | 12 13 on shard 0, the others on shard 1.
    natural = torch.arange(-1, 16, dtype=torch.int32)
    slots = block_cyclic_slots(natural, 16, 2, 2).tolist()
    assert slots == [-1, 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


@pytest.mark.parametrize("tp_sharded", [False, True])
@pytest.mark.parametrize(("mesh", "axis"), [((2, 2), 0), ((4, 2), 0), ((2, 4), 1), ((1, 4), 1)])
def test_block_cyclic_equals_contiguous(mesh: tuple[int, int], axis: int, tp_sharded: bool) -> None:
    sp, tp = mesh[axis], mesh[1 - axis]
    count, tokens = 8, 8 * tp * sp * tp * 2
    q, natural, indices = torch.randn(1, 2, count, 16), torch.randn(tokens, 16), _indices(count, 32, tokens)
    expected = sparse_sdpa(q, natural[None, None], indices, 16, kv_format=BF16, k_chunk_size=32)
    for chunk_local in {count, tp * count}:
        stripes, chunk = (sp * tp, chunk_local // tp) if tp_sharded else (sp, chunk_local)
        shards: list[list[int]] = [[] for _ in range(stripes)]
        for start in range(0, tokens, chunk):
            shards[start // chunk % stripes].extend(range(start, start + chunk))
        striped = natural[[token for shard in shards for token in shard]]
        got = sparse_sdpa(
            q,
            striped[None, None],
            indices,
            16,
            kv_format=BF16,
            k_chunk_size=32,
            mesh_shape=mesh,
            block_cyclic_sp_axis=axis,
            block_cyclic_chunk_local=chunk_local,
            block_cyclic_cache_tp_sharded=tp_sharded,
        )
        assert torch.equal(got, expected)


def test_a_partly_filled_last_chunk() -> None:
    # Two shards of six rows, chunks of four: shard 0 holds 0-3 8 9, shard 1 holds 4-7 12 13.
    args: dict[str, Any] = {
        "kv_format": BF16,
        "k_chunk_size": 32,
        "mesh_shape": (2, 1),
        "block_cyclic_sp_axis": 0,
        "block_cyclic_chunk_local": 4,
    }
    natural = torch.randn(14, 16)
    kv = natural[[0, 1, 2, 3, 8, 9, 4, 5, 6, 7, 12, 13]]
    q, indices = torch.randn(1, 1, 4, 16), torch.full((1, 1, 4, 32), -1, dtype=torch.int32)
    indices[0, 0, :, :3] = torch.tensor([9, 13, 2])
    out = sparse_sdpa(q, kv[None, None], indices, 16, **args)
    expected = _reference(q, natural, indices, 16, 0.25, None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-6)
    indices[0, 0, 0, 0] = 10
    with pytest.raises(ValueError, match="indices: 10 lies outside the 12 rows of the cache, in chunks of 4 over 2"):
        sparse_sdpa(q, kv[None, None], indices, 16, **args)


def _call(**changes: Any) -> None:
    args: dict[str, Any] = {
        "q": torch.randn(1, 2, 4, 576),
        "kv": torch.randn(1, 1, 64, 576),
        "indices": _indices(4, 64, 64),
        "v_dim": 512,
        "kv_format": BF16,
        "k_chunk_size": 64,
    }
    args.update(changes)
    sparse_sdpa(args.pop("q"), args.pop("kv"), args.pop("indices"), args.pop("v_dim"), **args)


def _with_index(row: int, column: int, value: int) -> torch.Tensor:
    indices = _indices(4, 64, 64).clone()
    indices[0, 0, row, column] = value
    return indices


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.randn(2, 4, 576)}, r"q: expected shape \(1, H, S, K_DIM\)"),
        ({"q": torch.zeros(1, 2, 4, 576, dtype=torch.int32)}, "q: expected dtype"),
        ({"kv": torch.randn(1, 1, 64, 575)}, r"kv: expected shape \(B, 1, T, 576\), found \(1, 1, 64, 575\)"),
        ({"kv": torch.randn(1, 2, 64, 576)}, "kv: expected shape"),
        ({"kv_format": PACKED}, r"kv: expected shape \(B, 1, T, 656\)"),
        ({"kv_format": RAW}, "kv: expected dtype float8_e4m3fn"),
        ({"kv_format": "bf16"}, "kv_format: expected a SparseKVFormat, found 'bf16'"),
        (
            {"kv_format": PACKED, "q": torch.randn(1, 2, 4, 512), "kv": torch.zeros(1, 1, 64, 656, dtype=torch.uint8)},
            "q: packed rows hold 576 features, the queries have 512",
        ),
        ({"indices": torch.zeros(1, 1, 4, 64)}, "indices: expected dtype uint32 or int32"),
        ({"indices": torch.zeros(1, 1, 3, 64, dtype=torch.int32)}, "indices: expected shape"),
        ({"indices": _with_index(0, 3, 64)}, "indices: 64 lies outside the 64 rows"),
        ({"indices": _with_index(0, 63, -2)}, "indices: 4294967294 lies outside"),
        ({"indices": _with_index(0, 3, -1)}, "indices: row 0 has a masked index before"),
        ({"indices": _with_index(3, 9, 1)}, "indices: row 3 has a masked index before an unmasked one"),
        ({"k_chunk_size": 48}, "k_chunk_size: 48 must be a multiple of 32 that divides TOPK 64"),
        ({"k_chunk_size": 128}, "k_chunk_size: 128"),
        ({"v_dim": 577}, "v_dim: 577 is wider than K_DIM 576"),
        ({"v_dim": 0}, "v_dim"),
        ({"attention_sink": torch.zeros(2)}, r"attention_sink: expected shape \(1, 1, 1, 2\)"),
        ({"scale": "big"}, "scale"),
        ({"kv": torch.randn(3, 1, 64, 576)}, "cache_batch_idx: needed to choose among the 3 batch slots"),
        ({"cache_batch_idx": 1}, "cache_batch_idx: expected 0 .. 0, found 1"),
        ({"cache_batch_idx": torch.tensor(-1)}, "cache_batch_idx: values -1 .. -1 lie outside 0 .. 0"),
        ({"block_cyclic_sp_axis": 0}, "both must be given, or neither"),
        ({"block_cyclic_cache_tp_sharded": True}, "only for a block-cyclic cache"),
        ({"block_cyclic_sp_axis": 0, "block_cyclic_chunk_local": 4}, "mesh_shape"),
        ({"block_cyclic_sp_axis": 2, "block_cyclic_chunk_local": 4, "mesh_shape": (2, 2)}, "block_cyclic_sp_axis"),
        (
            {"block_cyclic_sp_axis": 0, "block_cyclic_chunk_local": 4, "mesh_shape": (3, 1)},
            "64 cache rows are no multiple of the 3 SP shards",
        ),
        (
            {"block_cyclic_sp_axis": 0, "block_cyclic_chunk_local": 16, "mesh_shape": (2, 2)},
            "block_cyclic_chunk_local: 16 is neither the 4 queries of q nor tp x that, 8",
        ),
        (
            {
                "block_cyclic_sp_axis": 0,
                "block_cyclic_chunk_local": 4,
                "mesh_shape": (2, 3),
                "block_cyclic_cache_tp_sharded": True,
            },
            "must divide over tp 3 and sp x tp 6",
        ),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_the_unchecked_mode_does_not_look_at_indices() -> None:
    _call(indices=_with_index(3, 9, 1), checked=False)
