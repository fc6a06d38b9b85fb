from typing import Any

import pytest

from profiler.core.errors import ConfigError
from profiler.core.hardware import load_hardware
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.placement import Placement, Refusal, natural_layout, place, plan, splits

V32, GLM5, M3 = (load_model(n) for n in ("deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5", "MiniMaxAI/MiniMax-M3"))
LLAMA = load_model("meta-llama/Llama-3.1-8B")
H200, RTX = load_hardware("H200"), load_hardware("RTXPRO6000")


def degrees(placement: Placement | Refusal) -> tuple[int, int, int, int]:
    p = placement.parallel
    return p.tp, p.pp, p.dp, p.ep


def by_degrees(result: Any) -> dict[tuple[int, int, int, int], Placement]:
    return {degrees(placement): placement for placement in result.placements}


def test_every_split_of_eight_gpus() -> None:
    found = {(s.tp, s.pp, s.dp, s.ep) for s in splits(V32, 8)}
    expected = {
        (tp, pp, dp, ep)
        for tp in range(1, 9)
        for pp in range(1, 9)
        for dp in range(1, 9)
        if tp * pp * dp == 8
        for ep in range(1, 257)
        if ep == 1 or (ep % dp == 0 and ep // dp <= tp and (tp * dp) % ep == 0)
    }
    assert found == expected
    assert len(list(splits(V32, 8))) == len(found)
    assert {(s.tp, s.pp, s.dp, s.ep) for s in splits(LLAMA, 2)} == {(1, 1, 2, 1), (2, 1, 1, 1), (1, 2, 1, 1)}


def test_max_dp_comes_first_and_is_the_natural_layout() -> None:
    placements = plan(V32, H200, 8, max_model_len=81_920).placements
    assert degrees(placements[0]) == (1, 1, 8, 8)
    assert [p.natural for p in placements] == [True] + [False] * (len(placements) - 1)
    assert natural_layout(V32, 16) == Parallel(dp=16, ep=16)
    assert natural_layout(LLAMA, 4) == Parallel(dp=4)


def test_expert_parallelism_between_off_and_everything_is_marked() -> None:
    found = by_degrees(plan(V32, H200, 8, max_model_len=81_920))
    assert found[2, 1, 4, 8].launchable and found[8, 1, 1, 1].launchable and found[8, 1, 1, 8].launchable
    assert not found[2, 1, 4, 4].launchable and not found[8, 1, 1, 4].launchable


def test_v3_2_needs_16_cards_of_96_gb() -> None:
    eight = by_degrees(plan(V32, RTX, 8, max_model_len=163_840))[1, 1, 8, 8]
    assert not eight.budget.fits
    assert eight.reason.startswith("the weights need 96.7 GiB per rank of the 85.5 GiB")
    assert eight.suggestion == "16 GPUs as tp 1 pp 1 dp 16 ep 16"
    assert by_degrees(plan(V32, RTX, 16, max_model_len=163_840))[1, 1, 16, 16].budget.fits


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_the_public_failure_of_max_dp_on_h200(kv_dtype: str) -> None:
    """V3.2-FP8 TP1 DP8 EP8 on 8 x H200 ran out of memory at 163,840 tokens and worked at 81,920."""
    failed = place(V32, H200, Parallel(dp=8, ep=8), max_model_len=163_840, kv_dtype=kv_dtype)
    assert not failed.budget.fits or failed.budget.risk is not None
    assert failed.suggestion is not None and failed.suggestion.startswith("max_model_len ")
    assert 81_920 <= int(failed.suggestion.split()[1]) < 163_840
    worked = place(V32, H200, Parallel(dp=8, ep=8), max_model_len=81_920, kv_dtype=kv_dtype)
    assert worked.budget.fits and worked.budget.risk is None and worked.suggestion is None


def test_risk_names_its_source_and_what_would_remove_it() -> None:
    risky = place(V32, H200, Parallel(dp=8, ep=8), max_model_len=163_840, kv_dtype="fp8")
    assert (
        risky.budget.risk is not None and "headroom of 5 GiB" in risky.budget.risk and "gpustack" in risky.budget.risk
    )
    assert (
        place(V32, H200, Parallel(dp=8, ep=8), max_model_len=163_840, kv_dtype="fp8", headroom_gib=0.0).budget.risk
        is None
    )


def test_dp_4_x_tp_2_is_the_largest_safe_data_parallelism_of_v3_2() -> None:
    """TP1 DP8 crashes and TP2 DP4 works on 8 x H200 (LMCache pull request 2521)."""
    for kv_dtype in ("auto", "fp8"):
        safe = plan(V32, H200, 8, max_model_len=163_840, kv_dtype=kv_dtype).largest_safe_dp
        assert safe is not None and degrees(safe) == (2, 1, 4, 8)


def test_kv_of_data_parallel_ranks_adds_up() -> None:
    found = place(V32, H200, Parallel(tp=2, dp=4, ep=8), max_model_len=81_920)
    assert found.kv_tokens_total == 4 * found.budget.kv_tokens
    assert place(M3, H200, Parallel(tp=8), max_model_len=8192).kv_tokens_total > 0


def test_tp_8_holds_no_more_kv_bytes_per_token_than_tp_4_for_m3() -> None:
    four, eight = (place(M3, H200, Parallel(tp=tp), max_model_len=8192) for tp in (4, 8))
    assert four.budget.layout.bytes_per_token == eight.budget.layout.bytes_per_token == 45_312


def test_refused_splits_say_which_rule() -> None:
    result = plan(GLM5, H200, 3, max_model_len=4096)
    assert [degrees(p) for p in result.placements] == [(1, 1, 3, 3), (1, 3, 1, 1)]
    reasons = {degrees(refusal): refusal.reasons[0] for refusal in result.refused}
    assert "expert width 2048 does not divide by 3" in reasons.pop((1, 1, 3, 1))
    assert {tp for tp, *_ in reasons} == {3}
    assert all("64 attention heads do not divide by tp 3" in reason for reason in reasons.values())


def test_uneven_experts_are_placed_by_the_fullest_rank() -> None:
    weights = {n: place(V32, H200, Parallel(dp=n, ep=n), max_model_len=4096).weights_gib for n in (23, 24, 25)}
    assert weights[24] == weights[25] < weights[23], "12, 11 and 11 experts on the fullest rank"


def test_given_degrees_filter() -> None:
    assert {degrees(p) for p in plan(V32, H200, 8, max_model_len=4096, tp=8).placements} == {
        (8, 1, 1, ep) for ep in (1, 2, 4, 8)
    }
    assert [degrees(p) for p in plan(V32, H200, 8, max_model_len=4096, tp=2, dp=4, ep=8).placements] == [(2, 1, 4, 8)]


@pytest.mark.parametrize(
    ("gpus", "given", "message"),
    [
        (8, {"tp": 3}, "tp x pp x dp must be 8"),
        (8, {"tp": 2, "dp": 2, "pp": 1}, "tp x pp x dp must be 8"),
        (8, {"tp": 0}, "tp is 0"),
        (8, {"ep": -1}, "ep is -1"),
        (0, {}, "gpus is 0"),
        (-8, {}, "gpus is -8"),
        (10**9, {}, "between 1 and 16384"),
        (32, {"tp": 32}, "fp8 block width 128"),
        (8, {"dp": 8, "ep": 4}, "ep 4 is no multiple of dp 8"),
        (8, {"tp": 8, "dcp": 3}, "dcp 3 does not divide tp 8"),
        (8, {"dcp": 0}, "dcp is 0"),
    ],
)
def test_impossible_requests(gpus: int, given: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(V32, H200, gpus, max_model_len=4096, **given)


def test_context_parallel_placements_need_a_divisible_tp() -> None:
    result = plan(GLM5, load_hardware("B200"), 8, max_model_len=4096, dcp=8)
    assert {p.parallel.tp for p in result.placements} == {8}
    assert all(p.budget.kv_tokens == p.budget.num_gpu_blocks * 512 for p in result.placements)
    assert len(result.refused) > 0


def test_more_ranks_of_the_same_split_are_suggested_where_fewer_gpus_do_than_max_dp_needs() -> None:
    """GLM-5.2 in bf16: attention weights that no tp cuts leave no room for max-DP below 32 GPUs."""
    glm, asked = load_model("zai-org/GLM-5.2"), {"max_model_len": 81_920}
    found = by_degrees(plan(glm, H200, 8, **asked))
    assert found[8, 1, 1, 8].suggestion == "16 GPUs as tp 8 pp 1 dp 2 ep 16"
    assert found[8, 1, 1, 1].suggestion == "16 GPUs as tp 8 pp 1 dp 2 ep 1"
    assert found[1, 1, 8, 8].suggestion == "32 GPUs as tp 1 pp 1 dp 32 ep 32"
    wider = by_degrees(plan(glm, H200, 16, **asked))
    assert wider[8, 1, 2, 16].budget.fits and wider[8, 1, 2, 1].budget.fits and not wider[1, 1, 16, 16].budget.fits


def test_suggestions_for_models_without_experts_widen_tp() -> None:
    qwen = load_model("Qwen/Qwen3-32B")
    found = place(qwen, load_hardware("H100"), Parallel(), max_model_len=40_960)
    assert not found.budget.fits
    assert found.suggestion is not None
    assert found.suggestion.startswith(("max_model_len", "2 GPUs as tp 2"))
