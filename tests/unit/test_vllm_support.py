"""The parts of the vLLM engine that need neither a GPU nor vLLM."""

import pytest

from profiler.core.errors import AcquisitionError
from profiler.engines.vllm_support.batches import place_blocks
from profiler.engines.vllm_support.boot import check_version
from profiler.engines.vllm_support.jit import fp8_gemm_shapes
from profiler.engines.vllm_support.trace import kernel_times, shot_range_name


def _range(name: str, start: float, end: float, tid: int = 1) -> dict[str, object]:
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "tid": tid}


def _launch(correlation: int, at: float, tid: int = 1) -> dict[str, object]:
    event = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "tid": tid}
    return {**event, "args": {"correlation": correlation}}


def _kernel(correlation: int, name: str, duration: float) -> dict[str, object]:
    # The device runs late: its timestamps must not matter.
    return {"cat": "kernel", "name": name, "ts": 10_000, "dur": duration, "args": {"correlation": correlation}}


def test_a_kernel_belongs_to_the_innermost_range_open_at_its_launch() -> None:
    events = [
        _range(shot_range_name(3, 0), 0, 100),
        _range("mod|layers.0", 10, 60),
        _range("mod|layers.0.q", 20, 30),
        _launch(1, 5),
        _launch(2, 15),
        _launch(3, 25),
        _launch(4, 40),
        _launch(5, 80),
        _launch(6, 150),
        *(_kernel(i, f"k{i}", float(i)) for i in range(1, 7)),
    ]
    assert kernel_times(events) == {
        (3, 0, "", "k1"): (1.0, 1),
        (3, 0, "layers.0", "k2"): (2.0, 1),
        (3, 0, "layers.0.q", "k3"): (3.0, 1),
        (3, 0, "layers.0", "k4"): (4.0, 1),
        (3, 0, "", "k5"): (5.0, 1),
    }


def test_launches_of_one_kernel_in_one_module_add_up_and_repeats_stay_apart() -> None:
    events = [
        _range(shot_range_name(0, 0), 0, 50),
        _range(shot_range_name(0, 1), 60, 110),
        _range("mod|a", 10, 20),
        _range("mod|a", 70, 80),
        _launch(1, 11),
        _launch(2, 12),
        _launch(3, 71),
        *(_kernel(i, "same", 2.5) for i in (1, 2, 3)),
    ]
    assert kernel_times(events) == {(0, 0, "a", "same"): (5.0, 2), (0, 1, "a", "same"): (2.5, 1)}


def test_ranges_of_another_thread_do_not_capture_a_launch() -> None:
    events = [
        _range(shot_range_name(0, 0), 0, 50),
        _range("mod|a", 10, 20),
        _range("mod|b", 10, 20, tid=2),
        _launch(1, 15),
        _kernel(1, "k", 1.0),
    ]
    assert kernel_times(events) == {(0, 0, "a", "k"): (1.0, 1)}


def test_two_ranges_that_start_together_nest_by_length() -> None:
    events = [
        _range("mod|inner", 10, 20),
        _range("mod|outer", 10, 40),
        _range(shot_range_name(0, 0), 0, 50),
        _launch(1, 12),
        _launch(2, 30),
        _kernel(1, "k", 1.0),
        _kernel(2, "k", 1.0),
    ]
    assert kernel_times(events) == {(0, 0, "inner", "k"): (1.0, 1), (0, 0, "outer", "k"): (1.0, 1)}


def test_requests_get_disjoint_blocks_after_the_null_block() -> None:
    placed = place_blocks([(1, 63), (1, 64), (100, 0)], block_tokens=64, num_blocks=6)
    assert placed == [[1], [2, 3], [4, 5]]
    assert place_blocks([(1, 63), (1, 64), (100, 0)], block_tokens=64, num_blocks=5) is None


def test_deepseek_gemm_shapes() -> None:
    config = {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "intermediate_size": 18432,
        "index_n_heads": 64,
        "index_head_dim": 128,
    }
    assert fp8_gemm_shapes(config) == (
        (2112, 7168),
        (24576, 1536),
        (32768, 512),
        (7168, 16384),
        (36864, 7168),
        (7168, 18432),
        (4096, 7168),
        (7168, 2048),
        (8192, 1536),
    )


def test_an_engine_version_outside_the_catalog_is_refused() -> None:
    check_version("0.26.0")
    with pytest.raises(AcquisitionError, match=r"0\.31\.0.*supported: 0\.26"):
        check_version("0.31.0")
