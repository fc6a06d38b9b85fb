"""Plans of shots: which categories, merged batches, memory, per-rank widths."""

from dataclasses import replace

import pytest

from profiler.core.errors import ConfigError
from profiler.core.registry import load_model
from profiler.core.shots import Fill, MoeBatch, Shot
from profiler.kernels._axes import Limits
from profiler.sweep import (
    batch_of,
    choose_categories,
    contained,
    kv_blocks_tokens,
    merge,
    plan,
    rank_spec,
    shared_categories,
    split_by_memory,
)

V32 = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
M3 = load_model("MiniMaxAI/MiniMax-M3")
LLAMA = load_model("meta-llama/Llama-3.1-8B")
LIMITS = Limits("coarse", 1, (1,), 32_768, 4_096, 64)


def test_a_model_is_measured_in_the_categories_that_it_runs() -> None:
    assert choose_categories(V32, None, 1) == (
        "attention",
        "dense",
        "indexer",
        "moe",
        "per_sequence",
        "skew",
        "sparse_attention",
    )
    assert choose_categories(LLAMA, None, 1, skip_skew=True) == ("attention", "dense", "per_sequence")
    assert "moe" not in choose_categories(V32, None, 8)


@pytest.mark.parametrize(
    ("spec", "asked", "tp", "message"),
    [
        (V32, ["indexr"], 1, r"unknown category 'indexr'; did you mean 'indexer'"),
        (LLAMA, ["indexer"], 1, "runs no kernels of category 'indexer'"),
        (V32, ["moe"], 2, "at --tp 1 only, not at 2"),
    ],
)
def test_wrong_categories_are_refused(spec: object, asked: list[str], tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_categories(spec, asked, tp)  # type: ignore[arg-type]


def test_the_indexer_of_dsa_does_the_same_work_at_every_degree() -> None:
    assert shared_categories(V32, (1, 2, 4, 8)) == ("indexer",)
    assert shared_categories(M3, (1,)) == ("indexer",)
    assert shared_categories(M3, (1, 2)) == ()
    assert shared_categories(LLAMA, (1, 2)) == ()


@pytest.mark.parametrize("grid", ["coarse", "full"])
def test_sparse_attention_alone_has_few_points_beyond_its_cap(grid: str) -> None:
    limits = Limits(grid, 2, (1,), 163_840, 8_192, 256)
    both = plan(V32, limits, ("indexer", "sparse_attention"))["sparse_attention"]
    alone = plan(V32, limits, ("sparse_attention",))["sparse_attention"]
    assert set(alone) < set(both)

    def lines(shots: list[Shot], prefill: bool) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for shot in shots:
            chunk, context, requests, keys, _ = (int(value) for value in shot.fills[0].key)
            if bool(chunk) == prefill:
                found.setdefault(chunk if prefill else requests, []).append(context if prefill else keys)
        return {line: sorted(at) for line, at in found.items()}

    for prefill in (True, False):
        whole, few = lines(both, prefill), lines(alone, prefill)
        assert whole.keys() == few.keys()
        for line, points in whole.items():
            assert [at for at in few[line] if at <= 2_048] == [at for at in points if at <= 2_048]
            beyond = [at for at in few[line] if at > 2_048]
            assert beyond[-1] == points[-1] and len(beyond) <= 4
            assert not prefill or {16_384, 65_536} <= set(beyond)
    batches = {batch_of(shot, True) for shot in alone}
    assert contained(V32, limits, ("sparse_attention",)) <= batches


def test_merging_keeps_every_cell_and_runs_each_batch_once() -> None:
    shots = [s for found in plan(V32, LIMITS, choose_categories(V32, None, 1)).values() for s in found]
    merged = merge(shots)
    cells = {(f.category, f.key, f.components) for s in shots for f in s.fills}
    assert {(f.category, f.key, f.components) for s in merged for f in s.fills} == cells
    assert sum(len(s.fills) for s in merged) == len(cells)
    batches = [replace(s, fills=()) for s in merged]
    assert len(set(batches)) == len(batches) < len(shots)
    tokens = [s.new_tokens for s in merged if s.moe is None]
    assert tokens == sorted(tokens) and all(s.moe for s in merged[len(tokens) :])


def test_one_pass_serves_projections_indexer_and_attention() -> None:
    shots = [s for found in plan(V32, LIMITS, choose_categories(V32, None, 1)).values() for s in found]
    one = next(s for s in merge(shots) if s.requests == ((1_024, 0),) and s.regime == "sparse")
    assert {fill.category for fill in one.fills} == {"dense", "indexer", "sparse_attention"}


def test_shots_beyond_the_memory_are_set_apart() -> None:
    fill = Fill("per_sequence", (2,), ("lm_head",))
    small, large = Shot((fill,), ((1, 63), (1, 64))), Shot((fill,), ((1, 1_000),) * 2)
    assert kv_blocks_tokens(small, 64) == 64 + 128
    assert split_by_memory([small, large], 192, 64) == ([small], [large])
    assert split_by_memory([small, large], 191, 64) == ([], [small, large])
    assert split_by_memory([small, large], None, 64) == ([small, large], [])
    experts = Shot((Fill("moe", (1, 8, 4, 16), ("experts",)),), moe=MoeBatch(1, 8))
    assert split_by_memory([experts], 0, 64) == ([experts], [])


@pytest.mark.parametrize(("tp", "heads", "index_heads"), [(1, 128, 64), (2, 64, 64), (8, 16, 64)])
def test_index_heads_of_token_selection_are_never_divided(tp: int, heads: int, index_heads: int) -> None:
    rank = rank_spec(V32, tp)
    assert rank.indexer is not None and rank.moe is not None
    assert (rank.num_heads, rank.indexer.num_heads) == (heads, index_heads)
    assert (rank.hidden, rank.intermediate) == (7_168, 18_432 // tp)
    assert (rank.moe.intermediate, rank.moe.num_experts, rank.moe.shared_intermediate) == (2_048, 256, 2_048 // tp)


@pytest.mark.parametrize(("tp", "kv_heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_index_heads_of_block_selection_follow_the_kv_heads(tp: int, kv_heads: int) -> None:
    rank = rank_spec(M3, tp)
    assert rank.gqa is not None and rank.indexer is not None
    assert (rank.gqa.num_kv_heads, rank.indexer.num_heads) == (kv_heads, kv_heads)


def test_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="128 attention heads do not divide by tp 3"):
        rank_spec(V32, 3)


def test_labels_say_what_runs() -> None:
    fill = Fill("per_sequence", (3,), ("lm_head",))
    assert Shot((fill,), ((1, 63),) * 3).label == "per_sequence 3 x (new 1, context 63) auto"
    experts = Shot((Fill("moe", (8, 64, 20, 64), ("experts",)),), moe=MoeBatch(8, 64, 1.5))
    assert experts.label == "moe ep=8 tokens=64 skew=1.5"
