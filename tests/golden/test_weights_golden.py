"""Parameters and weight bytes against published counts and logs. Figures: docs/guide/weights-and-placement.md."""

from dataclasses import replace

import pytest

from profiler.core.registry import load_model, load_model_config, read_model
from profiler.core.types import Parallel
from profiler.core.units import GIB
from profiler.core.weights import engine_weights, mtp_parameters, nominal_weights, parameters

V32, GLM5, GLM52, M3 = "deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5", "zai-org/GLM-5.2", "MiniMaxAI/MiniMax-M3"


def max_dp(gpus: int) -> Parallel:
    return Parallel(dp=gpus, ep=gpus)


@pytest.mark.parametrize(
    ("model", "total"),
    [
        (V32, 671_877_944_064),
        (GLM5, 743_911_218_432),
        (GLM52, 743_377_019_904),
        (M3, 426_174_572_928),
        ("deepseek-ai/DeepSeek-V3", 671_026_419_200),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30_532_122_624),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
    ],
)
def test_total_parameters(model: str, total: int) -> None:
    assert sum(parameters(load_model(model)).values()) == total


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (
            V32,
            {
                "attention": 11_413_422_080,
                "indexer": 851_509_248,
                "dense_mlp": 1_189_085_184,
                "gate": 106_430_464 + 14_848,
                "routed": 653_908_770_816,
                "shared": 2_554_331_136,
                "embedding": 926_679_040,
                "head": 926_679_040,
                "norm": 1_022_208,
            },
        ),
        (
            GLM5,
            {
                "attention": 12_871_532_544,
                "indexer": 730_988_544,
                "dense_mlp": 679_477_248,
                "gate": 117_964_800 + 19_200,
                "routed": 724_775_731_200,
                "shared": 2_831_155_200,
                "embedding": 951_582_720,
                "head": 951_582_720,
                "norm": 1_184_256,
            },
        ),
        (
            M3,
            {
                "attention": 6_417_285_120,
                "indexer": 224_133_120,
                "dense_mlp": 679_477_248,
                "gate": 44_826_624 + 7_296,
                "routed": 413_122_166_784,
                "shared": 3_227_516_928,
                "embedding": 1_229_193_216,
                "head": 1_229_193_216,
                "norm": 773_376,
            },
        ),
    ],
)
def test_parameters_by_group(model: str, groups: dict[str, int]) -> None:
    assert parameters(load_model(model)) == groups


def test_multi_token_prediction_layer_of_v3_2() -> None:
    assert mtp_parameters(load_model(V32)) == 11_624_027_648 + 926_679_040


@pytest.mark.parametrize(
    ("model", "dense_bytes", "expert_bytes", "dense", "experts", "share", "ranks"),
    [
        (V32, 15_308_396_800, 656_569_547_264, 14, 611, 97.7, (90.69, 52.47, 33.37, 23.81)),
        (GLM5, 32_372_696_064, 1_455_449_740_800, 30, 1355, 97.8, (199.59, 114.87, 72.51, 51.33)),
        (M3, 19_560_110_592, 832_789_035_264, 18, 776, 97.7, (115.17, 66.69, 42.45, 30.34)),
    ],
)
def test_nominal_view(
    model: str,
    dense_bytes: int,
    expert_bytes: int,
    dense: int,
    experts: int,
    share: float,
    ranks: tuple[float, ...],
) -> None:
    """The published table of whole GiB and its rows for max-DP on 8, 16, 32 and 64 GPUs."""
    nominal = nominal_weights(load_model(model))
    assert (nominal.dense_bytes, nominal.experts_bytes) == (dense_bytes, expert_bytes)
    assert (round(nominal.dense_bytes / GIB), round(nominal.experts_bytes / GIB)) == (dense, experts)
    assert round(100 * nominal.expert_share, 1) == share
    found = [nominal.per_rank_bytes(max_dp(gpus)) / GIB for gpus in (8, 16, 32, 64)]
    assert found == pytest.approx(ranks, abs=0.005)


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        (V32, (96.7, 58.6, 39.6, 30.1)),
        # Were the absorbed halves of a bf16 kv_b_proj copies, and no views of it, 206.5, 122.2, 80.0 and 58.9.
        (GLM5, tuple(with_copies - 78 * 64 * 448 * 512 * 2 / GIB for with_copies in (206.5, 122.2, 80.0, 58.9))),
        (M3, (120.6, 72.5, 48.4, 36.4)),
    ],
)
def test_engine_view_of_max_dp(model: str, ranks: tuple[float, ...]) -> None:
    found = [engine_weights(load_model(model), max_dp(gpus)).total_bytes / GIB for gpus in (8, 16, 32, 64)]
    assert found == pytest.approx(ranks, abs=0.05)


@pytest.mark.parametrize(
    ("model", "split", "logged_gib", "relative"),
    [
        # GLM-5.1-FP8 has the shapes of GLM-5-FP8; public vLLM logs print 89.34 to 89.39 GiB.
        ("zai-org/GLM-5-FP8", Parallel(tp=8), 89.34, 0.01),
        ("zai-org/GLM-5-FP8", Parallel(tp=8), 89.39, 0.01),
        (V32, Parallel(tp=8), 80.5, 0.005),
        (V32, max_dp(8), 96.8, 0.005),
    ],
)
def test_engine_view_against_logs(model: str, split: Parallel, logged_gib: float, relative: float) -> None:
    found = engine_weights(load_model(model), split).total_bytes / GIB
    assert found == pytest.approx(logged_gib, rel=relative)


@pytest.mark.parametrize(("model", "layers", "measured_gib"), [(V32, 6, 37.7), (M3, 4, 20.4)])
def test_engine_view_of_short_stacks_on_a_card(model: str, layers: int, measured_gib: float) -> None:
    """Weights that vLLM 0.26 reported on one H200 for a 6-layer V3.2 and a 4-layer M3."""
    spec = load_model(model)
    short = replace(spec, layers=spec.layers[:layers])
    assert engine_weights(short, Parallel()).total_bytes / GIB == pytest.approx(measured_gib, rel=0.01)


def test_checkpoint_size_of_glm_5_2_fp8() -> None:
    """Published as 703.74 GiB with its multi-token prediction layer, which shares the head (vLLM issue 47127)."""
    spec = load_model("zai-org/GLM-5.2-FP8")
    held = engine_weights(spec, Parallel(), mtp_layers=1)
    absorbed = held.groups["absorbed"] * 79 // 78
    stored = held.total_bytes - absorbed - held.groups["head"]
    assert stored / GIB == pytest.approx(703.74, rel=0.0005)


def test_v3_2_is_v3_and_an_indexer() -> None:
    v3, v32 = parameters(load_model("deepseek-ai/DeepSeek-V3")), parameters(load_model(V32))
    assert v32.pop("indexer") == 851_509_248
    assert v32.pop("norm") - v3.pop("norm") == 61 * 256
    assert v32 == v3


def test_bf16_and_fp8_checkpoints_have_the_same_parameters() -> None:
    assert parameters(load_model("zai-org/GLM-5-FP8")) == parameters(load_model(GLM5))
    config = load_model_config(V32)
    del config["quantization_config"]
    assert sum(parameters(read_model("org/x", config)).values()) == 671_877_944_064
