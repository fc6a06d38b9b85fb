"""KV bytes against closed forms and public engine logs. Figures and sources: docs/guide/kv-shapes.md."""

import pytest

from profiler.core.kv import gqa_bytes_per_token, kv_layout
from profiler.core.registry import load_model, load_model_config
from profiler.core.types import Parallel
from profiler.core.units import GIB

V32, V3 = "deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3"
GLM5, GLM52, M3 = "zai-org/GLM-5", "zai-org/GLM-5.2", "MiniMaxAI/MiniMax-M3"


@pytest.mark.parametrize(
    ("model", "architecture", "dtype", "mtp", "expected"),
    [
        (V32, "sm90", "bf16", 0, 78_324),
        (V32, "sm90", "fp8_ds_mla", 0, 48_068),
        (V32, "sm100", "fp8", 0, 43_188),
        (V3, "sm90", "bf16", 0, 70_272),
        (V3, "sm90", "fp8", 0, 35_136),
        (V3, "sm90", "fp8_ds_mla", 0, 40_016),
        (GLM5, "sm90", "bf16", 0, 100_152),
        (GLM5, "sm90", "fp8_ds_mla", 0, 61_464),
        (GLM5, "sm100", "fp8", 0, 55_224),
        (GLM5, "sm90", "bf16", 1, 101_436),
        (GLM5, "sm90", "fp8", 1, 62_252),
        (GLM5, "sm100", "fp8", 1, 55_932),
        (GLM52, "sm90", "bf16", 0, 92_628),
        (GLM52, "sm90", "fp8_ds_mla", 0, 53_940),
        (GLM52, "sm100", "fp8", 0, 47_700),
        (GLM52, "sm90", "bf16", 1, 93_912),
        (GLM52, "sm90", "fp8", 1, 54_728),
        (GLM52, "sm100", "fp8", 1, 48_408),
    ],
)
def test_bytes_per_token_of_mla_models(model: str, architecture: str, dtype: str, mtp: int, expected: int) -> None:
    for tp in (1, 8):
        layout = kv_layout(load_model(model), Parallel(tp=tp), architecture, dtype, mtp_layers=mtp)
        assert layout.bytes_per_token == expected, "latents and index keys are whole on every rank"


@pytest.mark.parametrize(
    ("tp", "dtype", "index", "expected"),
    [
        (1, "auto", "auto", 137_472),
        (2, "auto", "auto", 76_032),
        (4, "auto", "auto", 45_312),
        (8, "auto", "auto", 45_312),
        (4, "fp8", "fp8", 22_656),
        (8, "fp8", "auto", 29_952),
        (4, "bf16", "fp8", 38_016),
    ],
)
def test_bytes_per_token_of_m3(tp: int, dtype: str, index: str, expected: int) -> None:
    layout = kv_layout(load_model(M3), Parallel(tp=tp), "sm100", dtype, index_dtype=index)
    assert layout.bytes_per_token == expected


def test_gqa_reading_of_v3_2_is_22_times_too_much() -> None:
    wrong = gqa_bytes_per_token(load_model_config(V32))
    assert wrong == 1_748_992
    assert round(wrong / 78_324, 2) == 22.33


def test_bytes_per_layer() -> None:
    def caches(model: str, architecture: str, dtype: str) -> list[tuple[str, int, int, bool]]:
        layout = kv_layout(load_model(model), Parallel(), architecture, dtype)
        return [(c.name, c.bytes_per_token_layer, c.layers, c.tp_sharded) for c in layout.caches]

    assert caches(GLM52, "sm90", "auto") == [("mla_latent", 1152, 78, False), ("index_keys", 132, 21, False)]
    assert caches(GLM52, "sm120", "auto") == [("mla_latent", 656, 78, False), ("index_keys", 132, 21, False)]
    assert caches(GLM52, "sm100", "fp8") == [("mla_latent", 576, 78, False), ("index_keys", 132, 21, False)]
    assert caches(GLM52, "sm100", "nvfp4") == [("mla_latent", 352, 78, False), ("index_keys", 132, 21, False)]
    assert caches(M3, "sm90", "auto") == [("gqa_kv", 2048, 60, True), ("index_keys", 256, 57, False)]


@pytest.mark.parametrize(
    ("model", "tp", "architecture", "dtype", "expected"),
    [
        (V32, 1, "sm90", "auto", 5_012_736),
        (V32, 1, "sm100", "auto", 4352 * 1152),
        (V32, 1, "sm90", "fp8", 3_076_352),
        (GLM5, 1, "sm90", "auto", 6_409_728),
        (M3, 1, "sm90", "auto", 17_596_416),
        (M3, 4, "sm100", "auto", 5_799_936),
    ],
)
def test_bytes_per_block(model: str, tp: int, architecture: str, dtype: str, expected: int) -> None:
    assert kv_layout(load_model(model), Parallel(tp=tp), architecture, dtype).bytes_per_block == expected


def test_cache_tensors_of_a_public_log() -> None:
    """LMCache issue 3339: GLM-5-FP8 TP8 EP8 with MTP shows 158 tensors, index ones [4372, 64, 132]."""
    layout = kv_layout(load_model("zai-org/GLM-5-FP8"), Parallel(tp=8, ep=8), "sm90", "fp8", mtp_layers=1)
    assert sum(cache.layers for cache in layout.caches) == 158
    assert 4372 * layout.block_tokens == 279_808


@pytest.mark.parametrize(
    ("model", "architecture", "dtype", "tokens", "logged_gib"),
    [
        (V32, "sm90", "fp8_ds_mla", 975_424, 43.67),
        (GLM5, "sm100", "fp8", 464_768, 23.91),
        (V3, "sm100", "fp8", 524_288, 17.16),
    ],
)
def test_sglang_lines_allocate_one_page_more(
    model: str, architecture: str, dtype: str, tokens: int, logged_gib: float
) -> None:
    """SGLang logs the size of tokens + one page of 64, and GiB as "GB"; the GLM-5.2 line counts 78 index caches."""
    layout = kv_layout(load_model(model), Parallel(), architecture, dtype)
    assert (tokens + 64) * layout.bytes_per_token / GIB == pytest.approx(logged_gib, abs=0.005)


def test_the_index_keys_that_a_bug_report_missed() -> None:
    """SGLang PR 11309: 1,462,784 tokens were logged as 54.52 GiB and really took 65.49."""
    with_keys = kv_layout(load_model(V32), Parallel(), "sm90", "fp8_ds_mla").bytes_per_token
    latents = kv_layout(load_model(V3), Parallel(), "sm90", "fp8_ds_mla").bytes_per_token
    assert 1_462_784 * latents / GIB == pytest.approx(54.52, abs=0.01)
    assert 1_462_784 * with_keys / GIB == pytest.approx(65.49, abs=0.01)


def test_offloaded_bytes_of_public_recipes() -> None:
    """vLLM recipes PR 754 and 893: 8 ranks x 53,940 B x tokens."""
    per_token = kv_layout(load_model("zai-org/GLM-5.2-FP8"), Parallel(tp=8), "sm90", "fp8").bytes_per_token
    assert 8 * per_token * 2_560 == 1_104_691_200
    assert 8 * per_token * 138_496 == 59_763_793_920
    assert 8 * per_token * 44_288 == 19_111_157_760


def test_pipeline_stages_count_the_widest() -> None:
    spec = load_model(V32)
    assert kv_layout(spec, Parallel(tp=8, pp=4), "sm90", "bf16").bytes_per_token == 16 * (1152 + 132)
    per_stage = [kv_layout(spec, Parallel(pp=4), "sm90", "bf16", stage=i).bytes_per_token for i in range(4)]
    assert per_stage == [15 * 1284, 15 * 1284, 16 * 1284, 15 * 1284]
