"""What a bundle says of the KV cache is the same whichever tensor-parallel degree was measured."""

import pytest

from profiler.core.kv import kv_layout
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from profiler.engines.base import EngineInfo
from profiler.visits import kv_of_all_ranks

M3 = load_model("MiniMaxAI/MiniMax-M3")
V32 = load_model("deepseek-ai/DeepSeek-V3.2-Exp")


def info_on_a_rank(model: str, tp: int) -> EngineInfo:
    """What an engine reports of the caches that it allocated on one of `tp` ranks."""
    layout = kv_layout(load_model(model), Parallel(tp=tp), "sm90")
    return EngineInfo(
        name="vllm",
        versions={},
        gpu={},
        kv={
            "layout": layout.layout,
            "block_tokens": layout.block_tokens,
            "caches": [{"name": c.name, "bytes_per_token_layer": c.bytes_per_token_layer} for c in layout.caches],
            "tokens": 1000 * tp,
        },
        weights="bf16",
        layer_kinds=(),
        whole_forward=True,
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_grouped_heads_are_those_of_a_rank_that_has_all(tp: int) -> None:
    """Four KV heads, of which every rank holds one from tp 4 on; the index keys are whole on every rank."""
    on_a_rank = {c["name"]: c["bytes_per_token_layer"] for c in info_on_a_rank(M3.name, tp).kv["caches"]}
    assert on_a_rank == {"gqa_kv": max(512, 2048 // tp), "index_keys": 256}
    assert kv_of_all_ranks(info_on_a_rank(M3.name, tp), M3, tp) == {
        "layout": "bf16",
        "block_tokens": 128,
        "caches": [
            {"name": "gqa_kv", "bytes_per_token_layer": 2048},
            {"name": "index_keys", "bytes_per_token_layer": 256},
        ],
    }


def test_a_cache_of_other_size_than_its_heads_is_not_made_equal() -> None:
    """One that allocates all heads on every rank is another measurement, and stays one."""
    whole = info_on_a_rank(M3.name, 1)
    assert kv_of_all_ranks(whole, M3, 4) != kv_of_all_ranks(whole, M3, 1)


def test_latents_are_whole_on_every_rank() -> None:
    assert kv_of_all_ranks(info_on_a_rank(V32.name, 8), V32, 8) == kv_of_all_ranks(info_on_a_rank(V32.name, 1), V32, 1)
