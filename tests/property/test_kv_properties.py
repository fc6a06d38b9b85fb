"""Bytes never shrink when a layer, a head or a dtype's width is added."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from profiler.core.kv import kv_layout
from profiler.core.registry import load_model
from profiler.core.types import IndexerDims, LayerKind, ModelSpec, Parallel

V32, M3 = load_model("deepseek-ai/DeepSeek-V3.2"), load_model("MiniMaxAI/MiniMax-M3")

dsa_layers = st.lists(st.sampled_from(["full", "shared"]), min_size=1, max_size=40).map(
    lambda kinds: tuple(LayerKind("mla", kind, "moe") for kind in kinds)  # type: ignore[arg-type]
)
architectures = st.sampled_from(["sm90", "sm100", "sm120"])


def per_token(spec: ModelSpec, architecture: str = "sm100", dtype: str = "auto", tp: int = 1) -> int:
    return kv_layout(spec, Parallel(tp=tp), architecture, dtype).bytes_per_token


@given(dsa_layers, st.sampled_from(["full", "shared"]), architectures)
def test_a_layer_adds_bytes(layers: tuple[LayerKind, ...], kind: str, architecture: str) -> None:
    fewer = replace(V32, layers=layers)
    more = replace(V32, layers=(*layers, LayerKind("mla", kind, "moe")))  # type: ignore[arg-type]
    assert per_token(more, architecture) > per_token(fewer, architecture)


@given(dsa_layers)
def test_a_wider_dtype_adds_bytes(layers: tuple[LayerKind, ...]) -> None:
    spec = replace(V32, layers=layers)
    sizes = [per_token(spec, "sm100", dtype) for dtype in ("nvfp4", "fp8", "fp8_ds_mla", "bf16")]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4


@given(dsa_layers, st.integers(1, 8))
def test_index_bytes_grow_with_full_layers_and_width_only(layers: tuple[LayerKind, ...], heads: int) -> None:
    def index_bytes(spec: ModelSpec) -> int:
        caches = kv_layout(spec, Parallel(), "sm90").caches
        return sum(c.bytes_per_token_layer * c.layers for c in caches if c.name == "index_keys")

    spec = replace(V32, layers=layers)
    full = sum(kind.selection == "full" for kind in layers)
    assert index_bytes(spec) == 132 * full
    assert index_bytes(replace(spec, indexer=IndexerDims(heads, 128, 2048))) == 132 * full
    assert index_bytes(replace(spec, indexer=IndexerDims(64, 256, 2048))) == (256 + 8) * full


@given(st.integers(0, 6).map(lambda power: 2**power), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_gqa_bytes_shrink_with_tp_down_to_one_head(kv_heads: int, tp: int) -> None:
    gqa = replace(M3.gqa, num_kv_heads=kv_heads)  # type: ignore[type-var]
    spec = replace(M3, gqa=gqa, layers=(LayerKind("gqa", "none", "dense"),) * 3, indexer=None, moe=None)
    assert per_token(spec, tp=tp) == 3 * 2 * 128 * 2 * max(1, kv_heads // tp)
    assert per_token(spec, tp=tp) >= per_token(spec, tp=min(64, 2 * tp))


@given(dsa_layers, st.integers(1, 8))
def test_stages_share_the_layers_and_the_widest_counts(layers: tuple[LayerKind, ...], pp: int) -> None:
    pp = min(pp, len(layers))
    spec, split = replace(V32, layers=layers), Parallel(pp=pp)
    stages = [kv_layout(spec, split, "sm90", stage=i).bytes_per_token for i in range(pp)]
    assert sum(stages) == per_token(spec, "sm90")
    assert kv_layout(spec, split, "sm90").bytes_per_token == max(stages)
