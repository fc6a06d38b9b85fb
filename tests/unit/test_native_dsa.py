"""DeepSeek-V3.2's native module: recorded kernels bound one by one or as one tail, and what each is good for."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from profiling import SMALL, FakeEngine, job, quiet, small_root

from profiler import acquire, card
from profiler.bind import Bound, bind
from profiler.contract import replay_spec
from profiler.core.bundle import Bundle, read_bundle
from profiler.core.errors import AcquisitionError, ConfigError, ContractError, CoverageError
from profiler.core.hardware import load_hardware
from profiler.core.kv import kv_layout
from profiler.core.registry import load_model
from profiler.core.shots import Fill, Shot
from profiler.core.stack import fold
from profiler.core.types import Category, ModelSpec, Parallel
from profiler.durations import LocalStep, local_durations
from profiler.engines.base import EngineInfo, EngineOptions, KernelSample, ShotResult, find_binding
from profiler.engines.bindings import native_dsa
from profiler.families.deepseek_v32_tail import TAIL
from serving.core.shape import StepShape
from serving.cost import build_cost

V32 = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
LAYERS = ("mla-full-dense",) * 3 + ("mla-full-moe",)
NATIVE = EngineInfo(
    name="vllm",
    versions={"vllm": "0.26.0"},
    gpu={"name": "NVIDIA H200"},
    kv={},
    weights="fp8",
    layer_kinds=LAYERS,
    whole_forward=True,
    settings={"execution": "native", "attention_backends": ["DEEPSEEK_V32_INDEXER", "FLASHMLA_SPARSE"]},
)

# An 8,192-token prefill through four layers on one H200, vLLM 0.26.0: microseconds of all layers by kernel, those that
# the attention module launches itself. The absorbed products are one of the two sums recorded for the GEMMs.
TAIL_US = {
    "sparse_attn_fwd_kernel": 26_077.0,
    "_fused_q_kernel": 3_785.0,
    "ConcatMLAQKernel": 2_462.0,
    "Memcpy DtoD (Device -> Device)": 2_104.0,
    "deep_gemm::sm90_fp8_mqa_logits": 1_904.0,
    "vllm::topKPerRowPrefill": 1_418.0,
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": 1_443.0,
    "_convert_req_index_to_global_index_kernel": 355.0,
    "_fused_norm_rope_kernel": 171.0,
}
Q_B_US = 1_455.0


def recorded(shot: Shot, **more: float) -> ShotResult:
    samples = [
        KernelSample(0, 0, f"model.layers.{layer}.self_attn", kernel, us / 4, 1)
        for kernel, us in (TAIL_US | more).items()
        for layer in range(4)
    ]
    samples += [
        KernelSample(0, 0, f"model.layers.{layer}.self_attn.q_b_proj", "fp8_gemm", Q_B_US / 4, 1) for layer in range(4)
    ]
    return ShotResult(0, tuple(samples))


def bound(spec: ModelSpec, contract: str, fills: list[Fill], regime: Any = "sparse", **more: float) -> Bound:
    shot = Shot(tuple(fills), ((8_192, 0),), regime)
    return bind([recorded(shot, **more)], [shot], spec, NATIVE, find_binding(NATIVE, contract))


def times(found: Bound) -> dict[str, float]:
    return {row.name: row.time_us * 4 for row in found.rows}


def test_recorded_kernels_are_split_into_the_catalog_and_nothing_is_lost() -> None:
    key = (8_192, 0, 0, 0, 0)
    norms = ("q_a_norm", "kv_a_norm", "kv_cache_write", "indexer_k_norm", "indexer_cache_write")
    queries = ("rotary", "indexer_rotary", "indexer_quant")
    dense = (*norms, *queries, "absorb_q", "absorb_v", "q_b_proj")
    fills = [
        Fill("dense", (8_192,), dense),
        Fill("indexer", key, ("index_scores", "index_topk")),
        Fill("sparse_attention", key, ("sparse_mla",)),
    ]
    found = bound(V32, "serving", fills)
    assert not found.unbound and not found.problems and found.bound_share == 1.0
    us = times(found)
    assert us["index_scores"] == pytest.approx(1_904.0) and us["index_topk"] == pytest.approx(1_418.0)
    assert us["sparse_mla"] == pytest.approx(26_077 + 2_462 + 2_104 + 355)
    # Equal parts of the fused kernels, and of the two absorbed products.
    assert [us[name] for name in norms] == pytest.approx([171 / 5] * 5)
    assert [us[name] for name in queries] == pytest.approx([3_785 / 3] * 3)
    assert us["absorb_q"] == us["absorb_v"] == pytest.approx(1_443 / 2)
    assert sum(us.values()) == pytest.approx(sum(TAIL_US.values()) + Q_B_US)


def test_the_tail_is_everything_that_the_attention_module_launches_itself() -> None:
    spec = replay_spec(V32, (1,), (1,))
    fills = [Fill("attention", (8_192, 0, 0, 0, 0), (TAIL,)), Fill("dense", (8_192,), ("q_b_proj",))]
    us = times(bound(spec, "replay", fills))
    assert us == pytest.approx({TAIL: sum(TAIL_US.values()), "q_b_proj": Q_B_US})


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("flash_fwd_splitkv_mla_fp8_sparse_kernel", "sparse_mla"),
        ("flash_fwd_mla_combine_kernel", "sparse_mla"),
        ("get_mla_metadata_kernel", "sparse_mla"),
        ("cp_gather_and_upconvert_fp8_kv_cache", "sparse_mla"),
        ("sm90_fp8_paged_mqa_logits", "index_scores"),
        ("smxx_paged_mqa_logits_metadata", "index_scores"),
        ("cp_gather_indexer_k_quant_cache_kernel", "index_scores"),
        ("cooperative_topk_kernel", "index_topk"),
    ],
)
def test_decode_kernels_have_components(kernel: str, name: str) -> None:
    category: Category = "sparse_attention" if name == "sparse_mla" else "indexer"
    fills = [Fill(category, (8_192, 0, 0, 0, 0), (name,))]
    plain = times(bound(V32, "serving", fills))[name]
    assert times(bound(V32, "serving", fills, **{kernel: 400.0}))[name] == pytest.approx(plain + 400.0)


def test_dense_prefill_is_told_from_sparse_by_the_regime() -> None:
    fills = [Fill("attention", (8_192, 0, 0, 0, 0), ("mla_dense_prefill",))]
    name = "flash::FlashAttnFwdSm90"
    assert times(bound(V32, "serving", fills, "dense", **{name: 800.0})) == pytest.approx({"mla_dense_prefill": 800.0})


def test_the_usual_module_keeps_its_own_binding() -> None:
    usual = EngineInfo(
        "vllm", {"vllm": "0.26.0"}, {}, {}, "fp8", LAYERS, True, {"attention_backends": ["DEEPSEEK_V32_INDEXER"]}
    )
    assert find_binding(usual).FUSED == {} and find_binding(NATIVE).FUSED == native_dsa.FUSED
    with pytest.raises(AcquisitionError, match=r"bound by no module .* for contract replay"):
        find_binding(usual, "replay")


# Where each component's kernel is launched: module below the layer or whole path, and kernel.
PLACES = {
    "step_inputs": ("runner.prepare_inputs", "slot_mapping"),
    "embedding": ("model.embed_tokens", "index"),
    "input_norm": ("L.input_layernorm", "rms"),
    "fused_qkv_a_proj": ("L.self_attn.fused_qkv_a_proj", "gemm"),
    "q_b_proj": ("L.self_attn.q_b_proj", "gemm"),
    "o_proj": ("L.self_attn.o_proj", "gemm"),
    "indexer_wq_b": ("L.self_attn.indexer.wq_b", "gemm"),
    "indexer_wk_weights": ("L.self_attn.indexer.wk_weights_proj", "gemm"),
    "post_attention_norm": ("L.post_attention_layernorm", "rms"),
    "gate_up_proj": ("L.mlp.gate_up_proj", "gemm"),
    "activation": ("L.mlp.act_fn", "silu"),
    "down_proj": ("L.mlp.down_proj", "gemm"),
    "router_gate": ("L.mlp.gate", "gemm"),
    "router_topk": ("L.mlp.experts", "grouped_topk"),
    "experts": ("L.mlp.experts", "fused_moe_kernel"),
    "shared_gate_up_proj": ("L.mlp.shared_experts.gate_up_proj", "gemm"),
    "shared_activation": ("L.mlp.shared_experts.act_fn", "silu"),
    "shared_down_proj": ("L.mlp.shared_experts.down_proj", "gemm"),
    "moe_combine": ("L.mlp.experts", "vectorized_elementwise_kernel<CUDAFunctor_add>"),
    "final_norm": ("model.norm", "rms"),
    "lm_head": ("lm_head", "gemm"),
    "sampler": ("runner.sampler", "argmax"),
}
PER_CALL_US = 50.0


def tail_us(shot: Shot) -> float:
    """Tail of one layer: a launch, and work with the keys that each new token sees."""
    return 40.0 + 1e-3 * sum(new * (2 * context + new) for new, context in shot.requests)


def native_pass(index: int, shot: Shot, repeat: int) -> Iterator[KernelSample]:
    if shot.moe is not None:
        yield KernelSample(index, repeat, f"experts.ep{shot.moe.ep}", "fused_moe_kernel", PER_CALL_US, 1)
        return
    dense_path = shot.regime == "dense"
    for layer in range(4):
        dense_mlp = ("gate_up_proj", "activation", "down_proj")
        for name, (module, kernel) in PLACES.items():
            mlp = ".mlp." in module
            if not module.startswith("L.") or (mlp and (name in dense_mlp) != (layer < 3)):
                continue
            yield KernelSample(index, repeat, module.replace("L", f"model.layers.{layer}"), kernel, PER_CALL_US, 1)
        kernels = ["_fused_norm_rope_kernel", "_fused_q_kernel", "sm90_fp8_mqa_logits", "topKPerRowPrefill"]
        kernels += ["FlashAttnFwdSm90"] if dense_path else ["sparse_attn_fwd_kernel", "nvjet_bmm"]
        for kernel in kernels:
            us = tail_us(shot) / len(kernels)
            yield KernelSample(index, repeat, f"model.layers.{layer}.self_attn", kernel, us, 1)
    for module, kernel in PLACES.values():
        if not module.startswith("L."):
            yield KernelSample(index, repeat, module, kernel, PER_CALL_US, 1)


Acquire = Callable[..., tuple[Bundle, ModelSpec]]


@pytest.fixture
def acquired(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Acquire:
    """Acquires the small model on a native engine without a device and reads the bundle back."""

    def run(**changes: Any) -> tuple[Bundle, ModelSpec]:
        def create(name: str, options: EngineOptions) -> FakeEngine:
            settings = {"execution": options.execution} if options.execution == "native" else {}
            kv = {
                "layout": "fp8_ds_mla",
                "block_tokens": 64,
                "caches": [
                    {"name": "index_keys", "bytes_per_token_layer": 132},
                    {"name": "mla_latent", "bytes_per_token_layer": 656},
                ],
                "tokens": None,
            }
            settings = changes.get("settings", settings)
            return FakeEngine(
                options,
                lambda *a: list(native_pass(*a)),
                name="vllm",
                versions={"vllm": "0.26.0"},
                kv=kv,
                settings=settings,
            )

        monkeypatch.setattr(acquire, "create_engine", create)
        monkeypatch.setattr(card, "cuda_device_name", lambda: "NVIDIA H200")
        given = {key: value for key, value in changes.items() if key != "settings"}
        the_job = job(hardware="H200", engine="vllm", skip_skew=True, **given)
        target = acquire.prepare(the_job, small_root(tmp_path / "models"))
        measured = acquire.measure(the_job, target, 1, quiet)
        folder, found = acquire.publish([measured], target, the_job, tmp_path / "perf")
        assert folder is not None and not found.refused, found.refused
        return read_bundle(folder), load_model(SMALL, tmp_path / "models")

    return run


def test_four_tables_of_the_native_module_are_for_replay_alone(acquired: Acquire) -> None:
    bundle, spec = acquired(contract="replay")
    assert {category for _, category in bundle.tables} == {"attention", "dense", "moe", "per_sequence"}
    assert bundle.table(1, "attention").names == (TAIL,)
    meta = bundle.meta
    assert (meta["contract"], meta["variant"], meta["engine"]["execution"]) == (
        "replay",
        "bf16-kvfp8_ds_mla-native-replay",
        "native",
    )
    with pytest.raises(ContractError, match="contract is 'replay'") as error:
        build_cost(
            bundle=bundle, spec=spec, parallel=Parallel(), hardware=load_hardware("H200"), max_num_batched_tokens=64
        )
    assert error.value.exit_code == 4


def test_the_same_acquisition_by_kernel_serves_with_its_own_layout(acquired: Acquire) -> None:
    bundle, spec = acquired(execution="native")
    assert bundle.meta["contract"] == "serving" and bundle.meta["variant"] == "bf16-kvfp8_ds_mla-native"
    assert sum(cache["bytes_per_token_layer"] for cache in bundle.meta["kv"]["caches"]) == 656 + 132
    layout = kv_layout(spec, Parallel(), "sm90", "fp8")
    cost = build_cost(
        bundle=bundle,
        spec=spec,
        parallel=Parallel(),
        hardware=load_hardware("H200"),
        max_num_batched_tokens=64,
        kv=layout,
    )
    assert cost.kernels
    with pytest.raises(ContractError, match="fp8_ds_mla KV cache, the run has bf16"):
        build_cost(
            bundle=bundle,
            spec=spec,
            parallel=Parallel(),
            hardware=load_hardware("H200"),
            max_num_batched_tokens=64,
            kv=kv_layout(spec, Parallel(), "sm90"),
        )


def test_an_engine_without_dense_prefill_needs_no_table_of_it(acquired: Acquire) -> None:
    settings = {"execution": "native", "dense_prefill": "never"}
    bundle, spec = acquired(execution="native", settings=settings)
    assert {category for _, category in bundle.tables} == {
        "dense",
        "indexer",
        "sparse_attention",
        "moe",
        "per_sequence",
    }
    assert bundle.meta["dense_prefill"] == "never"
    cost = build_cost(
        bundle=bundle,
        spec=spec,
        parallel=Parallel(),
        hardware=load_hardware("H200"),
        max_num_batched_tokens=64,
        kv=kv_layout(spec, Parallel(), "sm90", "fp8"),
    )
    assert cost.dense_prefill is None
    # A short prompt is priced by the kernels that the engine runs for it.
    names = {line.component for line in cost.explain([StepShape(((64, 0),), 0, 0, 0, 0, 1)])}
    assert {"sparse_mla", "index_scores", "absorb_q"} <= names
    assert "mla_dense_prefill" not in names


def test_whatever_the_sparse_kernels_call_launches_is_part_of_it() -> None:
    shot = Shot((Fill("sparse_attention", (8_192, 0, 0, 0, 0), ("sparse_mla",)),), ((8_192, 0),), "sparse")
    samples = tuple(
        KernelSample(0, 0, f"model.layers.{layer}.self_attn.forward_mqa", kernel, 10.0, 1)
        for layer in range(4)
        for kernel in ("a_kernel_of_no_known_name", "elementwise_kernel<copy>", "sparse_attn_fwd_kernel")
    )
    found = bind([ShotResult(0, samples)], [shot], V32, NATIVE, find_binding(NATIVE))
    assert [(row.name, row.time_us) for row in found.rows] == [("sparse_mla", 30.0)]
    assert not found.unbound


def test_local_durations_are_the_sum_of_the_tables(acquired: Acquire) -> None:
    bundle, spec = acquired(contract="replay")
    prefill, decode, both = local_durations(
        bundle,
        spec,
        [
            LocalStep(prefills=((64, 1_024),)),
            LocalStep(decode_keys=(1_024,) * 4),
            LocalStep(prefills=((64, 1_024),), decode_keys=(512, 1_536, 1_024, 1_024)),
        ],
    )
    layers = spec.num_layers
    assert prefill.parts[TAIL] == pytest.approx(layers * tail_us(Shot((), ((64, 1_024),))), rel=1e-4)
    assert decode.parts[TAIL] == pytest.approx(layers * tail_us(Shot((), ((1, 1_023),) * 4)), rel=1e-4)
    assert both.parts[TAIL] == pytest.approx(prefill.parts[TAIL] + decode.parts[TAIL])
    replayed = replay_spec(spec, (1,), (1,))
    calls = Counter({one.name: count for one, count in fold(replayed).components})
    fixed = {name: us for name, us in prefill.parts.items() if name not in (TAIL, "experts")}
    assert fixed == pytest.approx({name: PER_CALL_US * calls[name] for name in fixed})
    assert prefill.us == pytest.approx(sum(prefill.parts.values()))


def test_local_replay_refuses_other_tables_and_steps_beyond_them(acquired: Acquire) -> None:
    serving, spec = acquired(execution="native")
    with pytest.raises(ContractError, match="local replay reads tables with contract 'replay' alone"):
        local_durations(serving, spec, [LocalStep(decode_keys=(64,))])
    bundle, _ = acquired(contract="replay")
    with pytest.raises(CoverageError, match=r"dsa_attention_tail: decode_requests 2, decode_kv_tokens 9000 is outside"):
        local_durations(bundle, spec, [LocalStep(decode_keys=(9_000, 9_000))])
    with pytest.raises(ConfigError, match="at least one request"):
        local_durations(bundle, spec, [LocalStep()])
    with pytest.raises(ConfigError, match="not of deepseek-ai"):
        local_durations(bundle, V32, [LocalStep(decode_keys=(64,))])


def test_replay_is_measured_at_degree_one_and_of_this_model_alone(tmp_path: Path) -> None:
    root = small_root(tmp_path)
    for changes in ({"tps": (2,)}, {"ep_degrees": (1, 4)}):
        with pytest.raises(ContractError, match="tp 1 and ep 1, measured and not emulated"):
            acquire.prepare(job(contract="replay", **changes), root)
    for model in ("zai-org/GLM-5", "MiniMaxAI/MiniMax-M3"):
        with pytest.raises(ContractError, match=r"the native module is that of DeepSeek-V3\.2"):
            acquire.prepare(job(contract="replay", model=model, hardware="H200"))
    with pytest.raises(ConfigError, match="unknown contract 'replai'; did you mean 'replay'"):
        acquire.prepare(job(contract="replai"), root)


def test_an_engine_that_runs_the_usual_module_is_refused(acquired: Acquire) -> None:
    with pytest.raises(AcquisitionError, match="does not run the native module"):
        acquired(contract="replay", settings={"attention_backends": ["DEEPSEEK_V32_INDEXER"]})
