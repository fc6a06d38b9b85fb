"""Properties of the sparse operators that hold for any input."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.ops.dsa import DSAConfig, DSAManager, DSAStep, KVRows, StepContext
from profiler.ops.formats import SparseKVFormat, quantize_fp8
from profiler.ops.gqa import gqa_prefill
from profiler.ops.indexer import index_scores, index_topk, select_topk_causal
from profiler.ops.mla import causal_sdpa, sparse_mla
from profiler.ops.msa import msa_attend, msa_block_scores, msa_select
from profiler.ops.sparse_sdpa import block_cyclic_slots, sparse_sdpa

PAGE = 4
fast = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)


def _rand(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@fast
@given(seeds, st.integers(1, 40), st.integers(1, 12), st.integers(1, 50), st.integers(1, 6))
def test_selection_is_the_first_topk_of_a_stable_order(
    seed: int, width: int, rows: int, topk: int, distinct: int
) -> None:
    scores = (_rand(seed, rows, width) * distinct).round()
    positions = torch.randint(-1, width, (rows,), generator=torch.Generator().manual_seed(seed))
    picked = select_topk_causal(scores, positions, topk)
    for row in range(rows):
        seen = int(positions[row]) + 1
        best = sorted(range(seen), key=lambda s: (-float(scores[row, s]), s))[:topk]
        assert picked[row].tolist() == best + [-1] * (topk - len(best))


@fast
@given(seeds, st.integers(2, 30), st.data())
def test_packing_of_a_batch_does_not_change_a_selection(seed: int, length: int, data: st.DataObject) -> None:
    q, weights, keys = _rand(seed, length, 3, 16), _rand(seed + 1, length, 3), _rand(seed + 2, length, 16)
    together = index_topk(q, weights, keys, torch.arange(length), 5)
    cut = data.draw(st.integers(1, length - 1))
    # The same rows in two chunks, the second one backwards, against other numbers of keys.
    first = index_topk(q[:cut], weights[:cut], keys[:cut], torch.arange(cut), 5)
    back = torch.arange(length - 1, cut - 1, -1)
    second = index_topk(q[back], weights[back], keys, back, 5)
    assert torch.equal(torch.cat((first, second.flip(0))), together)


@fast
@given(seeds, st.integers(1, 24), st.permutations(["a", "b", "c"]), st.sampled_from(["buffer", "paged_fp8"]))
def test_the_order_of_requests_in_a_step_changes_nothing(seed: int, length: int, order: list[str], store: str) -> None:
    lengths = {"a": length, "b": 1 + seed % 20, "c": 13}
    tables = {"a": [5, 2, 9, 0, 7, 11], "b": [1, 3, 4, 12, 6], "c": [8, 10, 13, 14]}
    data = {
        r: (_rand(seed + i, n, 128), _rand(seed + i + 7, n, 2, 128), _rand(seed + i + 9, n, 2))
        for i, (r, n) in enumerate(lengths.items())
    }
    picks: list[dict[str, torch.Tensor]] = []
    for rows in (["a", "b", "c"], order):
        config = DSAConfig("mla", (0,), topk=4, key_store=store)  # type: ignore[arg-type]
        manager = DSAManager(config, PAGE, "cpu", num_pages=16)
        placed = [KVRows(r, 0, tables[r]) for r in tables]
        manager.plan(DSAStep({"main": [(r, lengths[r]) for r in rows]}), StepContext({"mla": {"main": placed}}))
        manager.store_keys(0, torch.cat([data[r][0] for r in rows]))
        picked = manager.select(0, torch.cat([data[r][1] for r in rows]), torch.cat([data[r][2] for r in rows]))
        picks.append(dict(zip(rows, picked.split([lengths[r] for r in rows]), strict=True)))
    for request in lengths:
        assert torch.equal(picks[0][request], picks[1][request])


@fast
@given(seeds, st.integers(1, 12), st.integers(0, 12), st.integers(1, 3))
def test_sparse_with_topk_at_least_the_length_is_dense(seed: int, rows: int, before: int, heads: int) -> None:
    length = before + rows
    q, latents = _rand(seed, rows, heads, 24), _rand(seed + 1, length, 24)
    scores = index_scores(_rand(seed + 2, rows, 2, 8), _rand(seed + 3, rows, 2), _rand(seed + 4, length, 8))
    picked = select_topk_causal(scores, torch.arange(before, length), length + 3)
    sparse = sparse_mla(q[..., :16], q[..., 16:], latents, picked, 0.3)
    dense = causal_sdpa(q.transpose(0, 1), latents[None], latents[None, :, :16], 0.3).transpose(0, 1)
    torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)


@fast
@given(seeds, st.integers(1, 40), st.integers(1, 3))
def test_block_sparse_with_every_block_is_dense(seed: int, length: int, groups: int) -> None:
    q, k, v = _rand(seed, length, 2 * groups, 8), _rand(seed + 1, length, groups, 8), _rand(seed + 2, length, groups, 8)
    positions = torch.arange(length)
    scores = msa_block_scores(_rand(seed + 3, length, groups, 8), _rand(seed + 4, length, 8), positions, block_tokens=4)
    picked = msa_select(scores, positions, 10, block_tokens=4)
    out = msa_attend(q, k, v, picked, positions, 0.4, block_tokens=4)
    torch.testing.assert_close(out, gqa_prefill(q, k, v, 0.4), rtol=1e-4, atol=1e-5)


@fast
@given(seeds, st.integers(1, 5), st.integers(1, 8), st.integers(1, 6))
def test_block_cyclic_is_a_permutation_that_keeps_results(seed: int, stripes: int, chunk: int, turns: int) -> None:
    tokens = stripes * chunk * turns
    slots = block_cyclic_slots(torch.arange(tokens), tokens, stripes, chunk)
    assert sorted(slots.tolist()) == list(range(tokens))
    natural = _rand(seed, tokens, 16)
    striped = torch.empty_like(natural)
    striped[slots] = natural
    q = _rand(seed + 1, 1, 2, chunk, 16)
    indices = torch.full((1, 1, chunk, 32), -1, dtype=torch.int32)
    kept = min(tokens, 1 + seed % 32)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[:kept]
    indices[..., :kept] = order.int()
    bf16 = SparseKVFormat.BF16
    expected = sparse_sdpa(q, natural[None, None], indices, 8, kv_format=bf16, k_chunk_size=32)
    got = sparse_sdpa(
        q,
        striped[None, None],
        indices,
        8,
        kv_format=bf16,
        k_chunk_size=32,
        mesh_shape=(stripes, 1),
        block_cyclic_sp_axis=0,
        block_cyclic_chunk_local=chunk,
    )
    assert torch.equal(got, expected)


@fast
@given(seeds, st.integers(1, 31), st.floats(-3, 3))
def test_a_sink_shrinks_every_head_by_one_factor(seed: int, kept: int, sink: float) -> None:
    q, kv = _rand(seed, 1, 3, 2, 16), _rand(seed + 1, 1, 1, 40, 16)
    indices = torch.where(torch.arange(32) < kept, torch.arange(32), -1).int().expand(1, 1, 2, 32)
    sinks = torch.full((1, 1, 1, 3), sink)
    args = {"kv_format": SparseKVFormat.BF16, "k_chunk_size": 32}
    plain = sparse_sdpa(q, kv, indices, 16, **args)  # type: ignore[arg-type]
    shrunk = sparse_sdpa(q, kv, indices, 16, attention_sink=sinks, **args)  # type: ignore[arg-type]
    ratio = (shrunk / plain).flatten(0, 2)
    assert (ratio > 0).all() and (ratio <= 1 + 1e-4).all()
    assert (ratio.amax(-1) - ratio.amin(-1)).max() < 1e-3


@fast
@given(seeds, st.integers(-20, 20), st.booleans())
def test_fp8_values_that_the_format_holds_come_back_exactly(seed: int, exponent: int, power_of_two: bool) -> None:
    raw = torch.randint(0, 256, (3, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    raw[(raw & 0x7F) == 0x7F] = 0
    raw[:, 0] = 0x7E
    values = raw.view(torch.float8_e4m3fn).float() * 2.0**exponent
    codes, scales = quantize_fp8(values, 128, power_of_two=power_of_two)
    assert torch.equal(codes.float() * scales, values)
