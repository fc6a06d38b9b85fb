"""The reference engine: every component has a call that computes, memory is checked, failures are results."""

from pathlib import Path

import pytest
from profiling import SMALL, small_root

from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.registry import load_model, load_model_config
from profiler.core.shots import Fill, MoeBatch, Shot
from profiler.core.stack import fold
from profiler.engines.base import EngineOptions, create_engine, known_engines

torch = pytest.importorskip("torch")

from profiler.engines.reference import ReferenceEngine  # noqa: E402
from profiler.engines.reference_support import attention, bench, dense, experts  # noqa: E402
from profiler.engines.reference_support.bench import Bench  # noqa: E402
from profiler.ops.formats import SparseKVFormat  # noqa: E402
from profiler.sweep import rank_spec  # noqa: E402

BUILDERS = dense.BUILDERS | attention.BUILDERS | experts.BUILDERS


def options(model: str, root: Path | None = None, **changes: object) -> EngineOptions:
    spec = load_model(model, root)
    fields: dict[str, object] = {
        "model": spec.name,
        "config": load_model_config(model, root),
        "spec": spec,
        "hardware": "CPU",
        "tp": 1,
        "ep_degrees": (1,),
        "kv_cache_dtype": "auto",
        "block_tokens": None,
        "max_model_len": 4_096,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 16,
    }
    return EngineOptions(**fields | changes)  # type: ignore[arg-type]


@pytest.fixture
def small(tmp_path: Path) -> ReferenceEngine:
    return ReferenceEngine(options(SMALL, small_root(tmp_path)))


def new_bench(root: Path, packed: bool = False) -> Bench:
    kv_format = SparseKVFormat.FP8_PACKED if packed else SparseKVFormat.BF16
    return Bench(rank_spec(load_model(SMALL, root), 1), torch.device("cpu"), torch.bfloat16, kv_format)


@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5.2", "MiniMaxAI/MiniMax-M3"])
def test_every_component_of_a_sparse_model_has_a_call(model: str) -> None:
    names = {component.name for component, _ in fold(load_model(model)).components}
    assert names <= BUILDERS.keys()


def test_engines_are_found_in_the_folder() -> None:
    assert known_engines() == ("reference", "vllm")
    with pytest.raises(ConfigError, match="unknown engine 'refrence'; did you mean 'reference'"):
        create_engine("refrence", options("zai-org/GLM-5"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("requests", [((5, 0),), ((1, 63),) * 3, ((4, 100), (1, 70))])
def test_calls_compute_what_a_layer_does(tmp_path: Path, packed: bool, requests: tuple[tuple[int, int], ...]) -> None:
    """Shapes and finiteness of what the timed calls return, for prefill, decode and mixed batches."""
    one = new_bench(small_root(tmp_path), packed)
    shot = Shot((), requests)
    tokens, heads = shot.new_tokens, 4
    attended = attention.BUILDERS["sparse_mla"](one, shot)()
    assert attended.shape == (tokens, heads, 512) and attended.isfinite().all()
    parts = attention.BUILDERS["mla_dense_prefill"](one, shot)()
    assert [tuple(p.shape) for p in parts] == [(new, heads, 128) for new, _ in requests]
    scores = attention.BUILDERS["index_scores"](one, shot)()
    assert [tuple(s.shape) for s in scores] == [(new, new + context) for new, context in requests]
    picks = attention.BUILDERS["index_topk"](one, shot)()
    for (new, context), picked in zip(requests, picks, strict=True):
        assert ((picked >= 0).sum(1) == torch.arange(context + 1, context + new + 1).clamp(max=2048)).all()
    for name, width in (("gate_up_proj", 1024), ("o_proj", 256), ("q_b_proj", 4 * 192), ("embedding", 256)):
        assert dense.BUILDERS[name](one, shot)().shape == (tokens, width)
    assert dense.BUILDERS["lm_head"](one, shot)().shape == (len(requests), 1024)
    slots = dense.BUILDERS["step_inputs"](one, shot)()[2]
    assert len(set(slots.tolist())) == tokens


def test_cache_writes_keep_the_row_formats(tmp_path: Path) -> None:
    shot = Shot((), ((5, 0),))
    root = small_root(tmp_path)
    assert dense.BUILDERS["kv_cache_write"](new_bench(root), shot)().shape == (5, 576)
    packed = dense.BUILDERS["kv_cache_write"](new_bench(root, packed=True), shot)()
    assert packed.shape == (5, 656) and packed.dtype is torch.uint8
    assert dense.BUILDERS["indexer_cache_write"](new_bench(root), shot)().shape == (5, 132)


def test_decode_requests_attend_rows_of_their_own(tmp_path: Path) -> None:
    one = new_bench(small_root(tmp_path))
    picks = attention._picked(one, ((1, 63), (1, 99), (2, 10)))
    ranges = [(row[row >= 0].min().item(), row[row >= 0].max().item()) for row in picks]
    assert ranges == [(0, 63), (64, 163), (164, 174), (164, 175)]


def test_experts_run_the_slice_of_their_rank(tmp_path: Path) -> None:
    one = new_bench(small_root(tmp_path))
    out = experts.BUILDERS["experts"](one, Shot((), moe=MoeBatch(ep=4, tokens=32)))()
    assert out.shape == (32, 256) and out.isfinite().all()
    assert {name: w.shape[0] for name, w in one.weights.items()} == {
        "w13 of 4 of 16 experts (ep 4)": 4,
        "w2 of 4 of 16 experts (ep 4)": 4,
    }
    # A token without a local expert gets nothing from this rank.
    assert (out.abs().sum(1) == 0).any() and (out.abs().sum(1) > 0).any()


def test_results_come_shot_by_shot_with_every_component(small: ReferenceEngine) -> None:
    fill = Fill("per_sequence", (2,), ("lm_head", "sampler"))
    shots = [Shot((fill,), ((1, 63),) * 2), Shot((Fill("dense", (4,), ("q_a_norm",)),), ((4, 0),))]
    first, second = small.run(shots, warmup=1, repeats=3)
    assert [(s.module, s.kernel, s.repeat) for s in first.samples] == [
        ("per_sequence", name, repeat) for name in ("lm_head", "sampler") for repeat in range(3)
    ]
    assert all(sample.duration_us > 0 and sample.launches == 1 for sample in first.samples)
    assert [s.shot_index for s in second.samples] == [1, 1, 1] and second.failure is None


def test_a_component_without_an_operator_fails_its_shot_and_the_run_goes_on(small: ReferenceEngine) -> None:
    shots = [Shot((Fill("dense", (4,), (name,)),), ((4, 0),)) for name in ("warp_drive", "q_a_norm")]
    bad, good = small.run(shots, warmup=0, repeats=1)
    assert bad.failure == "the reference engine has no operator for 'warp_drive'"
    assert good.failure is None and good.samples


def test_memory_that_is_not_there_fails_the_shot(small: ReferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "free_bytes", lambda device: 1 << 20)
    shots = [Shot((Fill("moe", (1, 4, 8, 16), ("experts",)),), moe=MoeBatch(ep=1, tokens=4))]
    (result,) = small.run(shots, warmup=0, repeats=1)
    assert result.failure is not None
    assert "out of memory: weights of w13 of 16 of 16 experts (ep 1) take" in result.failure


def test_weights_are_random_and_repeat(tmp_path: Path) -> None:
    one, other = (new_bench(small_root(tmp_path)) for _ in range(2))
    big = one.weight("head", 3_000, 512)
    assert torch.equal(big, other.weight("head", 3_000, 512))
    assert big.float().std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert one.weight("head", 3_000, 512) is big


def test_what_ran_is_described(small: ReferenceEngine) -> None:
    info = small.info()
    assert info.weights == "bf16" and not info.whole_forward
    assert info.layer_kinds == ("mla-full-dense", "mla-full-moe")
    assert info.gpu["name"] == "CPU" and info.versions["torch"] == torch.__version__
    assert info.kv["layout"] == "bf16" and info.kv["block_tokens"] == 64 and info.kv["tokens"] > 4_096
    assert info.kv["caches"] == [
        {"name": "mla_latent", "bytes_per_token_layer": 1_152},
        {"name": "index_keys", "bytes_per_token_layer": 132},
    ]


def test_the_packed_cache_is_656_bytes(tmp_path: Path) -> None:
    info = ReferenceEngine(options(SMALL, small_root(tmp_path), kv_cache_dtype="fp8")).info()
    assert info.kv["layout"] == "fp8_ds_mla"
    assert [cache["bytes_per_token_layer"] for cache in info.kv["caches"]] == [656, 132]


@pytest.mark.parametrize(("model", "dtype"), [(SMALL, "nvfp4"), ("MiniMaxAI/MiniMax-M3", "fp8")])
def test_cache_formats_without_an_operator_are_refused(tmp_path: Path, model: str, dtype: str) -> None:
    root = small_root(tmp_path) if model == SMALL else None
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {dtype}: the reference engine measures"):
        ReferenceEngine(options(model, root, kv_cache_dtype=dtype))


def test_a_vllm_engine_without_vllm_says_what_is_missing() -> None:
    with pytest.raises(AcquisitionError, match="vllm"):
        create_engine("vllm", options("zai-org/GLM-5"))
