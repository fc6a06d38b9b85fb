"""Kernel categories: their cells, the work of a cell against closed forms, and the routing of expert shots."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from profiling import SMALL, small_root

from profiler.core.errors import ConfigError
from profiler.core.registry import load_model
from profiler.core.shots import Fill, MoeBatch
from profiler.core.tables import KEY_COLUMNS
from profiler.kernels import attention, dense, indexer, moe, per_sequence, sparse_attention
from profiler.kernels._axes import GRIDS, Limits
from profiler.kernels._components import components_of
from profiler.kernels._work import query_key_pairs
from profiler.sweep import category_modules, plan, rank_spec, work_of

V32 = "deepseek-ai/DeepSeek-V3.2-Exp"
SHIPPED = (V32, "zai-org/GLM-5", "zai-org/GLM-5.2", "MiniMaxAI/MiniMax-M3", "Qwen/Qwen3-30B-A3B-Instruct-2507")


def limits(**changes: object) -> Limits:
    fields: dict[str, object] = {
        "grid": "coarse",
        "tp": 1,
        "ep_degrees": (8,),
        "max_model_len": 131_072,
        "max_num_batched_tokens": 8_192,
        "max_num_seqs": 256,
    }
    return Limits(**fields | changes)  # type: ignore[arg-type]


def test_every_category_is_found_and_describes_its_key_columns() -> None:
    modules = category_modules()
    assert set(modules) == set(KEY_COLUMNS)
    for name, module in modules.items():
        assert tuple(module.UNITS) == KEY_COLUMNS[module.CATEGORY][1:], name
        assert module.DRIVERS


@pytest.mark.parametrize("grid", sorted(GRIDS))
def test_axes_ascend(grid: str) -> None:
    axes = GRIDS[grid]
    for values in (
        axes.tokens,
        axes.sequences,
        axes.chunk_tokens,
        axes.context_tokens,
        axes.decode_requests,
        axes.decode_kv_tokens,
        axes.moe_tokens,
    ):
        assert all(a < b for a, b in pairwise(values))


def test_an_unknown_grid_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown grid 'corse'; did you mean 'coarse'"):
        _ = limits(grid="corse").axes


@pytest.mark.parametrize("model", SHIPPED)
def test_shots_stay_within_the_limits_and_fill_each_cell_once(model: str) -> None:
    spec = load_model(model)
    bound = limits(max_model_len=20_000, max_num_batched_tokens=3_000, max_num_seqs=96)
    categories = [c for c in category_modules() if components_of(spec, c)]  # type: ignore[arg-type]
    for category, shots in plan(spec, bound, categories).items():  # type: ignore[arg-type]
        cells = [(fill.key, name) for shot in shots for fill in shot.fills for name in fill.components]
        assert cells and len(set(cells)) == len(cells), category
        for shot in shots:
            assert shot.new_tokens <= 3_000 and len(shot.requests) <= 96
            assert all(new >= 1 and new + context <= 20_000 for new, context in shot.requests)
            if shot.moe is not None:
                assert shot.moe.tokens <= 3_000 * shot.moe.ep


def test_axes_run_to_their_limits() -> None:
    spec, bound = load_model(V32), limits(max_model_len=20_000, max_num_batched_tokens=3_000, max_num_seqs=100)
    assert max(s.new_tokens for s in dense.shots(spec, bound)) == 3_000
    assert max(len(s.requests) for s in per_sequence.shots(spec, bound)) == 100
    cells = [fill.key for shot in indexer.shots(spec, bound) for fill in shot.fills]
    # The last token of max_model_len is sampled and never computed.
    assert (3_000, 16_999, 0, 0, 0) in cells and (0, 0, 100, 19_999, 1) in cells


def test_prefill_regimes_have_cells_on_both_sides_of_the_top_k() -> None:
    spec = load_model(V32)
    short = attention.shots(spec, limits())
    assert {shot.regime for shot in short} == {"dense"}
    assert max(shot.kv_tokens for shot in short) == 2_048
    ends = {chunk: max(s.kv_tokens for s in short if s.new_tokens == chunk) for chunk in (1, 512, 1536, 2048)}
    assert set(ends.values()) == {2_048}
    tiny = attention.shots(spec, limits(grid="tiny"))
    assert [max(s.kv_tokens for s in tiny if s.new_tokens == chunk) for chunk in (16, 64)] == [2_048, 2_048]
    sparse = [shot for shot in sparse_attention.shots(spec, limits()) if not shot.fills[0].key[2]]
    assert {shot.regime for shot in sparse} == {"sparse"}
    assert min(shot.kv_tokens for shot in sparse) < 2_048 < max(shot.kv_tokens for shot in sparse)


def test_decode_key_counts_the_new_token() -> None:
    for shot in indexer.shots(load_model(V32), limits()):
        (fill,) = shot.fills
        chunk, context, requests, kv, query = fill.key
        if requests:
            assert query == 1 and shot.requests == ((1, kv - 1),) * requests
        else:
            assert shot.requests == ((chunk, context),)


def test_the_parameters_of_a_layer_are_the_sum_of_its_matrices() -> None:
    """Parameter counts per layer of DeepSeek-V3.2 as published: attention, indexer, dense MLP, router gate."""
    spec = load_model(V32)

    def parameters(*names: str) -> int:
        return sum(int(np.prod(dense.matrix(spec, name) or 0)) for name in names)

    attention_names = ("fused_qkv_a_proj", "q_b_proj", "absorb_q", "absorb_v", "o_proj")
    assert parameters(*attention_names) == 187_105_280
    assert parameters("indexer_wq_b", "indexer_wk_weights") == 13_959_168
    assert parameters("gate_up_proj", "down_proj") == 396_361_728
    assert parameters("router_gate") == 1_835_008
    assert parameters("shared_gate_up_proj", "shared_down_proj") == 44_040_192
    one_expert = moe.work(spec, "experts", (8, 1, 1, 1), "fp8")
    assert one_expert is not None and one_expert.weight_bytes == 44_040_192


def test_fused_index_projection_of_block_selection() -> None:
    """Rows of MiniMax-M3's one GEMM per rank, in units of 128: 77, 39, 20, 12 at tp 1, 2, 4, 8."""
    spec = load_model("MiniMaxAI/MiniMax-M3")
    rows = [(dense.matrix(rank_spec(spec, tp), "qkv_index_proj") or (0, 0, 0))[2] for tp in (1, 2, 4, 8)]
    assert [r // 128 for r in rows] == [77, 39, 20, 12]


def test_index_scores_and_sparse_attention_cost_the_known_operations() -> None:
    """Per query and layer: 16,384 x context for DSA scores, 570 MFLOP for absorbed attention over 2,048 latents."""
    spec = load_model(V32)
    decode = (0, 0, 1, 65_536, 1)
    scores = indexer.work(spec, "index_scores", decode, "fp8")
    attend = sparse_attention.work(spec, "sparse_mla", decode, "fp8")
    assert scores is not None and scores.flops == 16_384 * 65_536
    assert attend is not None and attend.flops == 128 * (576 + 512) * 2 * 2_048
    block = indexer.work(load_model("MiniMaxAI/MiniMax-M3"), "block_scores", (0, 0, 1, 131_072, 1), "bf16")
    assert block is not None and block.flops == 4 * 128 * 131_072 * 2


def test_sparse_attention_saturates_and_scores_do_not() -> None:
    spec = load_model(V32)

    def flops(module: object, name: str, kv: int) -> float:
        work = module.work(spec, name, (0, 0, 4, kv, 1), "fp8")  # type: ignore[attr-defined]
        return float(work.flops)

    assert flops(sparse_attention, "sparse_mla", 4_096) == flops(sparse_attention, "sparse_mla", 131_072)
    assert flops(indexer, "index_scores", 131_072) == 32 * flops(indexer, "index_scores", 4_096)


@pytest.mark.parametrize("cap", [None, 1, 5, 9, 40])
@pytest.mark.parametrize("key", [(7, 0, 0, 0, 0), (7, 5, 0, 0, 0), (1, 12, 0, 0, 0), (0, 0, 3, 9, 1), (4, 6, 2, 11, 3)])
def test_pairs_equal_a_count_query_by_query(key: tuple[int, ...], cap: int | None) -> None:
    chunk, context, requests, kv, query = key
    seen = [context + i + 1 for i in range(chunk)]
    seen += [kv - (query - 1 - j) for _ in range(requests) for j in range(query)]
    assert query_key_pairs(key, cap) == sum(min(n, cap) if cap else n for n in seen)


@pytest.mark.parametrize("model", SHIPPED)
def test_every_component_has_a_roofline(model: str) -> None:
    spec = load_model(model)
    keys = {
        "dense": (16,),
        "per_sequence": (16,),
        "attention": (16, 16, 0, 0, 0),
        "indexer": (16, 16, 0, 0, 0),
        "sparse_attention": (16, 16, 0, 0, 0),
        "moe": (8, 16, 4, 16),
    }
    for category, key in keys.items():
        for component in components_of(spec, category):  # type: ignore[arg-type]
            work = work_of(spec, component.category, component.name, key, "fp8")
            assert work is not None and (work.flops > 0 or work.bytes > 0), component.name


def test_a_key_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="5 key columns"):
        Fill("indexer", (1,), ("index_topk",))


@pytest.mark.parametrize(
    ("model", "reach"), [(V32, 0.4957), ("zai-org/GLM-5", 0.661832), ("MiniMaxAI/MiniMax-M3", 0.417808)]
)
def test_a_token_reaches_a_rank_as_often_as_the_selection_rule_says(model: str, reach: float) -> None:
    """P(token reaches one of 8 ranks): closed form for ungrouped routing, simulated rule for grouped DeepSeek."""
    dims = load_model(model).moe
    assert dims is not None
    ids = moe.topk_ids(dims, MoeBatch(ep=8, tokens=20_000, seed=3))
    ranks = ids // (dims.num_experts // 8)
    found = np.mean([(ranks == rank).any(axis=1).mean() for rank in range(8)])
    assert found == pytest.approx(reach, abs=0.004)


def test_routing_gives_every_token_distinct_experts_and_repeats_exactly() -> None:
    dims = load_model(V32).moe
    assert dims is not None
    batch = MoeBatch(ep=8, tokens=500, skew=1.5)
    ids = moe.topk_ids(dims, batch)
    assert ids.shape == (500, 8) and ids.min() >= 0 and ids.max() < 256
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert (ids == moe.topk_ids(dims, batch)).all()
    groups = ids // 32
    assert max(len(set(row)) for row in groups.tolist()) <= 4


def test_skew_concentrates_the_load() -> None:
    dims = load_model("zai-org/GLM-5").moe
    assert dims is not None
    counts = [
        np.bincount(moe.topk_ids(dims, MoeBatch(ep=1, tokens=2_000, skew=skew)).ravel(), minlength=256).max()
        for skew in (0.0, 1.5)
    ]
    assert counts[1] > 2 * counts[0]


def test_expert_cells_are_what_the_routing_really_reaches() -> None:
    spec = load_model(V32)
    assert spec.moe is not None
    shots = moe.shots(spec, limits(ep_degrees=(8, 32)))
    for shot in shots:
        assert shot.moe is not None
        ep, tokens, activated, pairs = shot.fills[0].key
        assert (ep, tokens) == (shot.moe.ep, shot.moe.tokens)
        assert 1 <= activated <= min(pairs, 256 // ep)
        if tokens <= 4_096:
            assert (activated, pairs) == moe.local_load(spec.moe, shot.moe)
        if not shot.moe.skew and tokens >= 256:
            assert pairs == pytest.approx(tokens * 8 / ep, rel=0.2)


def test_experts_are_whole() -> None:
    spec = load_model(V32)
    assert spec.moe is not None and moe.local_experts(spec.moe, 32) == 8
    with pytest.raises(ConfigError, match="ep 3 does not divide 256 experts"):
        moe.local_experts(spec.moe, 3)
    assert moe.shots(spec, limits(tp=2)) == []


def test_the_small_model_has_the_components_of_its_big_sister(tmp_path: Path) -> None:
    small = load_model(SMALL, small_root(tmp_path))
    big = load_model(V32)
    for category in KEY_COLUMNS:
        assert components_of(small, category) == components_of(big, category)
