import pytest

from profiler.core.errors import ConfigError
from profiler.core.kv import KvLayout, blocks_for, kv_layout, mla_bytes
from profiler.core.registry import load_model
from profiler.core.types import Parallel

V32, GLM5, M3 = (load_model(n) for n in ("deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5", "MiniMaxAI/MiniMax-M3"))
V3, QWEN = load_model("deepseek-ai/DeepSeek-V3"), load_model("Qwen/Qwen3-30B-A3B-Instruct-2507")


@pytest.mark.parametrize(
    ("architecture", "dtype", "layout", "backend"),
    [
        ("sm90", "auto", "bf16", "FLASH_ATTN_MLA_SPARSE"),
        ("sm90", "bf16", "bf16", "FLASH_ATTN_MLA_SPARSE"),
        ("sm90", "fp8", "fp8_ds_mla", "FLASHMLA_SPARSE"),
        ("sm100", "auto", "bf16", "FLASHMLA_SPARSE"),
        ("sm100", "fp8", "fp8", "FLASHINFER_MLA_SPARSE"),
        ("sm100", "fp8_ds_mla", "fp8_ds_mla", "FLASHMLA_SPARSE"),
        ("sm120", "auto", "fp8_ds_mla", "FLASHINFER_MLA_SPARSE_SM120"),
        ("sm120", "fp8", "fp8_ds_mla", "FLASHINFER_MLA_SPARSE_SM120"),
        ("sm120", "bf16", "fp8_ds_mla", "FLASHINFER_MLA_SPARSE_SM120"),
    ],
)
def test_what_a_dtype_means_depends_on_the_architecture(
    architecture: str, dtype: str, layout: str, backend: str
) -> None:
    found = kv_layout(V32, Parallel(), architecture, dtype)
    assert (found.layout, found.backend) == (layout, backend)


def test_few_heads_choose_another_backend_on_sm100() -> None:
    assert kv_layout(V32, Parallel(tp=8), "sm100").backend == "FLASHINFER_MLA_SPARSE"
    assert kv_layout(V32, Parallel(tp=4), "sm100").backend == "FLASHMLA_SPARSE"


def test_sm120_refuses_bf16_for_glm() -> None:
    with pytest.raises(ConfigError, match="bf16 KV is refused"):
        kv_layout(GLM5, Parallel(), "sm120", "bf16")


def test_gpus_without_a_sparse_kernel_are_refused() -> None:
    with pytest.raises(ConfigError, match="no sparse MLA kernel for sm89"):
        kv_layout(V32, Parallel(), "sm89")
    assert kv_layout(V3, Parallel(), "sm89").bytes_per_token == 70_272


def test_layouts_of_another_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match="a layout of MLA caches"):
        kv_layout(M3, Parallel(), "sm90", "fp8_ds_mla")
    with pytest.raises(ConfigError, match="this model attends every key"):
        kv_layout(V3, Parallel(), "sm100", "nvfp4")
    with pytest.raises(ConfigError, match="has no indexer"):
        kv_layout(V3, Parallel(), "sm100", index_dtype="fp8")
    with pytest.raises(ConfigError, match="not as bf16"):
        kv_layout(V32, Parallel(), "sm100", index_dtype="bf16")


def test_unknown_dtypes_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fp8_ds_mla'"):
        kv_layout(V32, Parallel(), "sm90", "fp8_dsmla")


def test_index_keys_follow_neither_weights_nor_main_cache() -> None:
    sizes = {
        kv_layout(load_model(name), Parallel(), "sm100", dtype).caches[1].bytes_per_token_layer
        for name in ("zai-org/GLM-5", "zai-org/GLM-5-FP8")
        for dtype in ("bf16", "fp8", "fp8_ds_mla", "nvfp4")
    }
    assert sizes == {132}
    assert kv_layout(M3, Parallel(), "sm90", "fp8").caches[1].bytes_per_token_layer == 256


def test_fp8_index_keys_outside_sm100_are_noted() -> None:
    assert kv_layout(M3, Parallel(), "sm100", index_dtype="fp8").notes == ()
    assert "sm100 only" in kv_layout(M3, Parallel(), "sm120", index_dtype="fp8").notes[0]


@pytest.mark.parametrize(("spec", "size"), [(V32, 64), (GLM5, 64), (M3, 128), (V3, 64), (QWEN, 16)])
def test_block_size_of_the_engine(spec, size) -> None:  # type: ignore[no-untyped-def]
    assert kv_layout(spec, Parallel(), "sm90").block_tokens == size
    assert kv_layout(spec, Parallel(), "sm90", block_tokens=size).block_tokens == size


@pytest.mark.parametrize("size", [1, 16, 32, 128])
def test_other_block_sizes_are_refused_for_dsa(size: int) -> None:
    with pytest.raises(ConfigError, match="needs a block size of 64: the indexer's kernels"):
        kv_layout(V32, Parallel(), "sm90", block_tokens=size)


def test_other_block_sizes_are_refused_for_m3_and_gqa() -> None:
    with pytest.raises(ConfigError, match="needs a block size of 128: one KV page is one selection block"):
        kv_layout(M3, Parallel(), "sm90", block_tokens=16)
    with pytest.raises(ConfigError, match="multiple of 16"):
        kv_layout(QWEN, Parallel(), "sm90", block_tokens=24)
    with pytest.raises(ConfigError, match="block size is 0; it must be between 1 and"):
        kv_layout(QWEN, Parallel(), "sm90", block_tokens=0)
    assert kv_layout(QWEN, Parallel(), "sm90", block_tokens=32).block_tokens == 32


def test_decode_context_parallelism_multiplies_the_tokens_of_a_block() -> None:
    layout = kv_layout(GLM5, Parallel(tp=8), "sm100", dcp=8)
    assert layout.tokens_per_block == 512
    assert layout.bytes_per_block == kv_layout(GLM5, Parallel(tp=8), "sm100").bytes_per_block
    assert blocks_for(layout, 513) == 2
    with pytest.raises(ConfigError, match="dcp 3 does not divide tp 8"):
        kv_layout(GLM5, Parallel(tp=8), "sm100", dcp=3)
    with pytest.raises(ConfigError, match="dcp 4 exceeds the 2 ranks"):
        kv_layout(M3, Parallel(tp=8), "sm100", dcp=4)
    assert "log-sum-exp" in kv_layout(GLM5, Parallel(tp=8), "sm90", dcp=8).notes[0]


def test_mtp_layers_are_those_of_the_checkpoint() -> None:
    with pytest.raises(ConfigError, match="has 1 multi-token prediction layers, 2 asked for"):
        kv_layout(V32, Parallel(), "sm90", mtp_layers=2)


def test_an_mtp_layer_caches_on_the_last_stage() -> None:
    glm = load_model("zai-org/GLM-5.2")
    plain = [kv_layout(glm, Parallel(pp=2), "sm90", stage=i).bytes_per_token for i in (0, 1)]
    drafted = [kv_layout(glm, Parallel(pp=2), "sm90", mtp_layers=1, stage=i).bytes_per_token for i in (0, 1)]
    assert [b - a for a, b in zip(plain, drafted, strict=True)] == [0, 1152 + 132]


def test_rows_of_a_flat_pool_are_not_cut() -> None:
    layout = KvLayout("bf16", "", 64, kv_layout(V32, Parallel(), "sm90").caches, row_bytes=1152)
    assert layout.bytes_per_block == 5_013_504
    assert layout.bytes_per_block % 1152 == 0


def test_row_formats() -> None:
    assert [mla_bytes(512, 64, layout) for layout in ("bf16", "fp8_ds_mla", "fp8", "nvfp4_ds_mla")] == [
        1152,
        656,
        576,
        352,
    ]
