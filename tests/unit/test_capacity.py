from typing import Any

import pytest

from profiler.core.errors import CapacityError, ConfigError
from profiler.core.hardware import load_hardware
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.capacity import default_batched_tokens, default_num_seqs, memory_budget, require_fit

V32, M3, LLAMA = (
    load_model(n) for n in ("deepseek-ai/DeepSeek-V3.2-Exp", "MiniMaxAI/MiniMax-M3", "meta-llama/Llama-3.1-8B")
)
H200, RTX, B200 = (load_hardware(n) for n in ("H200", "RTXPRO6000", "B200"))
MAX_DP = Parallel(dp=8, ep=8)


def test_engine_defaults_follow_the_memory() -> None:
    assert [default_batched_tokens(gpu) for gpu in (H200, RTX, B200)] == [8192, 8192, 16384]
    assert default_num_seqs(H200) == 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": -5}, "max_model_len is -5"),
        ({"max_model_len": 163_841}, "takes 1 to 163840"),
        ({"utilization": 0.0}, "utilization is 0.0"),
        ({"utilization": 1.01}, "at most 1"),
        ({"utilization": float("nan")}, "utilization is nan"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_batched_tokens": 10**9}, "max_num_batched_tokens is 1000000000"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"available_kv_gib": 0.0}, "available_kv_gib is 0.0"),
        ({"available_kv_gib": 1000.0}, "at most the 139.81 GiB of H200"),
        ({"non_torch_gib": -1.0}, "non_torch_gib is -1.0"),
        ({"cuda_graph_gib": float("inf")}, "cuda_graph_gib is inf"),
        ({"headroom_gib": -0.1}, "headroom_gib is -0.1"),
        ({"block_tokens": 16}, "needs a block size of 64"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        memory_budget(V32, H200, MAX_DP, **{"max_model_len": 4096, **options})


def test_a_budget_that_does_not_fit_names_every_term() -> None:
    budget = memory_budget(V32, RTX, MAX_DP, max_model_len=4096)
    assert not budget.fits and budget.num_gpu_blocks == 0 and budget.kv_available_gib < 0
    with pytest.raises(CapacityError, match="no max_model_len fits") as caught:
        require_fit(budget)
    assert caught.value.exit_code == 5
    assert all(term.name in str(caught.value) for term in budget.terms)
    require_fit(memory_budget(V32, H200, MAX_DP, max_model_len=81_920))


def test_largest_length_is_the_largest() -> None:
    budget = memory_budget(V32, H200, MAX_DP, max_model_len=163_840)
    assert not budget.fits
    largest = budget.largest_max_model_len
    assert memory_budget(V32, H200, MAX_DP, max_model_len=largest).fits
    assert not memory_budget(V32, H200, MAX_DP, max_model_len=largest + 64).fits
    safe = budget.safe_max_model_len
    assert 0 < safe < largest
    assert memory_budget(V32, H200, MAX_DP, max_model_len=safe).risk is None
    assert memory_budget(V32, H200, MAX_DP, max_model_len=safe + 64).risk is not None


def test_given_reserves_replace_the_stated_ones() -> None:
    budget = memory_budget(
        V32, H200, MAX_DP, max_model_len=4096, non_torch_gib=0.5, cuda_graph_gib=0.0, other_activation_gib=0.25
    )
    assert [budget.gib(n) for n in ("non_torch", "cuda_graphs", "other_activation")] == [0.5, 0.0, 0.25]
    assert {t.source for t in budget.terms if t.name in ("non_torch", "cuda_graphs")} == {"given"}


def test_given_kv_memory_replaces_the_budget() -> None:
    budget = memory_budget(V32, H200, MAX_DP, max_model_len=163_840, available_kv_gib=12.0)
    assert budget.terms == () and budget.parts() == {"kv": 12.0}
    assert budget.fits and budget.risk is None
    assert budget.num_gpu_blocks == 12 * 2**30 // 5_012_736


def test_the_fullest_stage_limits() -> None:
    one = memory_budget(V32, H200, Parallel(tp=4, pp=2), max_model_len=4096)
    assert one.stage in (0, 1)
    assert one.layout.bytes_per_token == 31 * 1284
    assert one.parts()["weights"] <= one.weights_bytes / 2**30


def test_the_default_utilisation_is_0_9() -> None:
    assert memory_budget(V32, H200, MAX_DP, max_model_len=4096).utilization == 0.9
