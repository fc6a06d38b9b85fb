"""MiniMax-M3 on the vLLM engine: kernels bound to components, per-rank shapes, the buffer of selected blocks."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.bind import bind, matcher, stack_spec
from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.registry import load_model, load_model_config, read_model
from profiler.core.shots import Fill, Shot
from profiler.core.stack import fold, stack_of
from profiler.engines.base import EngineInfo, KernelSample, ShotResult, find_binding
from profiler.engines.bindings import vllm_msa
from profiler.engines.vllm_support import boot, msa
from profiler.engines.vllm_support.overrides import per_rank_config
from profiler.engines.vllm_support.state import shifted_norms
from profiler.kernels._components import names_of
from profiler.samples import Run

NAME = "MiniMaxAI/MiniMax-M3"
M3 = load_model(NAME)
CONFIG = load_model_config(NAME)
ONE_OF_EACH = ("gqa-none-dense", "gqa-block-moe")
LEADING = ("gqa-none-dense",) * 3 + ("gqa-block-moe",)
BACKENDS = ["FLASH_ATTN", "MINIMAX_M3_SPARSE", "MINIMAX_M3_SPARSE_INDEXER"]


def info(kinds: tuple[str, ...] = ONE_OF_EACH) -> EngineInfo:
    return EngineInfo("vllm", {"vllm": "0.26.0"}, {}, {}, "bf16", kinds, True, {"attention_backends": BACKENDS})


# (module, kernel, component) of one pass of vLLM 0.26.0's models/minimax_m3 with one layer of each kind, module paths
# and Triton kernel names from its source: D is the dense layer, S the sparse one. test_vllm_msa_recorded.py has a pass
# as it was recorded.
D, S = "model.layers.0", "model.layers.1"
ALWAYS = [
    ("runner.prepare_inputs", "Memcpy HtoD (Pinned -> Device)", "dense/step_inputs"),
    ("runner.prepare_inputs", "_compute_slot_mapping_kernel", "dense/step_inputs"),
    ("runner.build_attention_metadata", "flash::prepare_varlen_num_blocks_kernel", "dense/step_inputs"),
    ("runner.build_attention_metadata", "at::native::unrolled_elementwise_kernel<direct_copy>", "dense/step_inputs"),
    ("runner.build_attention_metadata", "tensor_kernel_scan_innermost_dim<int>", "dense/step_inputs"),
    ("", "vectorized_gather_kernel", "dense/step_inputs"),
    ("model.embed_tokens", "at::native::indexSelectLargeIndex", "dense/embedding"),
    (f"{D}.input_layernorm", "flashinfer::norm::RMSNormKernel", "dense/layernorm"),
    (f"{D}.self_attn.qkv_proj", "nvjet_tst_128x256", "dense/qkv_proj"),
    (f"{D}.self_attn", "vllm::fusedMiniMaxM3QNormRopeKVInsertKernel", "dense/qk_norm"),
    (f"{D}.self_attn.attn", "vllm::reshape_and_cache_flash_kernel", "attention/attention"),
    (f"{D}.self_attn.attn", "flash::FlashAttnFwdSm90", "attention/attention"),
    (f"{D}.self_attn.attn", "flash::FlashAttnFwdCombine", "attention/attention"),
    (f"{D}.self_attn.o_proj", "nvjet_tst_256x128", "dense/o_proj"),
    (f"{D}.post_attention_layernorm", "flashinfer::norm::FusedAddRMSNormKernel", "dense/layernorm"),
    (f"{D}.mlp.gate_up_proj", "nvjet_tst_256x128", "dense/gate_up_proj"),
    (f"{D}.mlp.act_fn", "vllm::silu_and_mul_with_clamp_kernel", "dense/act_fn"),
    (f"{D}.mlp.down_proj", "nvjet_tst_256x128", "dense/down_proj"),
    (f"{S}.input_layernorm", "flashinfer::norm::FusedAddRMSNormKernel", "dense/layernorm"),
    (f"{S}.self_attn.qkv_proj", "nvjet_tst_128x256", "dense/qkv_index_proj"),
    (f"{S}.self_attn", "vllm::fusedMiniMaxM3QNormRopeKVInsertKernel", "dense/qknorm_rope_insert"),
    (f"{S}.self_attn.o_proj", "nvjet_tst_256x128", "dense/o_proj"),
    (f"{S}.post_attention_layernorm", "flashinfer::norm::FusedAddRMSNormKernel", "dense/layernorm"),
    (f"{S}.block_sparse_moe.gate", "fp32_router_gemm_kernel", "dense/router_gate"),
    (f"{S}.block_sparse_moe.shared_experts.gate_up_proj", "nvjet_tst_128x64", "dense/shared_gate_up_proj"),
    (f"{S}.block_sparse_moe.shared_experts.act_fn", "vllm::silu_and_mul_with_clamp_kernel", "dense/shared_act_fn"),
    (f"{S}.block_sparse_moe.shared_experts.down_proj", "nvjet_tst_128x64", "dense/shared_down_proj"),
    (f"{S}.block_sparse_moe.experts", "void vllm::moe::topkGating<4, 128, 4, 16>", "dense/router_topk"),
    (f"{S}.block_sparse_moe.experts", "vllm::moe::moe_align_block_size_kernel<int>", "moe/experts"),
    (f"{S}.block_sparse_moe.experts", "vllm::moe::count_and_sort_expert_tokens_kernel<int>", "moe/experts"),
    (f"{S}.block_sparse_moe.experts", "fused_moe_kernel", "moe/experts"),
    (f"{S}.block_sparse_moe.experts", "vllm::silu_and_mul_with_clamp_kernel", "moe/experts"),
    (f"{S}.block_sparse_moe.experts", "vllm::moe::moe_sum_kernel<c10::BFloat16, 4>", "moe/experts"),
    (
        f"{S}.block_sparse_moe.experts",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>",
        "dense/moe_combine",
    ),
    ("model.norm", "flashinfer::norm::FusedAddRMSNormKernel", "dense/final_layernorm"),
    ("logits_processor", "nvjet_tst_512x32", "per_sequence/lm_head"),
    ("runner.sampler", "at::native::reduce_kernel<ArgMaxOps>", "per_sequence/sampler"),
]
PREFILL = [
    (f"{S}.self_attn.indexer.impl", "_index_block_score_kernel", "indexer/block_scores"),
    (f"{S}.self_attn.indexer.impl", "_topk_index_kernel", "indexer/block_topk"),
    (f"{S}.self_attn", "_gqa_sparse_fwd_kernel", "sparse_attention/sparse_gqa"),
]
DECODE = [
    (f"{S}.self_attn.indexer.impl", "_decode_index_score_kernel", "indexer/block_scores"),
    (f"{S}.self_attn.indexer.impl", "_topk_index_partial_kernel", "indexer/block_topk"),
    (f"{S}.self_attn.indexer.impl", "_topk_index_merge_kernel", "indexer/block_topk"),
    (f"{S}.self_attn", "_gqa_sparse_decode_kernel", "sparse_attention/sparse_gqa"),
    (f"{S}.self_attn", "_merge_topk_attn_out_kernel", "sparse_attention/sparse_gqa"),
]
UNKNOWN = [
    (f"{S}.self_attn", "nvjet_tst_128x256"),
    (f"{S}.self_attn.indexer.impl", "some_other_kernel"),
    ("", "large_unknown_gemm"),
]


def _bound(module: str, kernel: str, kinds: tuple[str, ...] = ONE_OF_EACH) -> str | None:
    rule = matcher(vllm_msa.rules(stack_spec(M3, info(kinds))))(module, kernel, "auto")
    return None if rule is None else f"{rule.category}/{rule.name}"


@pytest.mark.parametrize(("module", "kernel", "component"), [*ALWAYS, *PREFILL, *DECODE])
def test_every_kernel_of_a_pass_has_its_component(module: str, kernel: str, component: str) -> None:
    assert _bound(module, kernel) == component
    moved = module.replace("layers.1", "layers.3")
    assert _bound(moved, kernel, LEADING) == component, "the same kernel behind three dense layers"


@pytest.mark.parametrize(("module", "kernel"), UNKNOWN)
def test_a_kernel_that_no_source_names_stays_unbound(module: str, kernel: str) -> None:
    assert _bound(module, kernel) is None


def test_layers_are_told_by_the_stack_and_not_by_the_whole_model() -> None:
    module = "model.layers.1.self_attn.qkv_proj"
    assert _bound(module, "nvjet", ONE_OF_EACH) == "dense/qkv_index_proj"
    assert _bound(module, "nvjet", LEADING) == "dense/qkv_proj"


def test_the_binding_is_found_by_the_attention_back_end() -> None:
    assert find_binding(info()) is vllm_msa


@pytest.mark.parametrize(
    ("requests", "kernels", "key"),
    [(((64, 0),), PREFILL, (64, 0, 0, 0, 0)), (((1, 63),) * 2, DECODE, (0, 0, 2, 64, 1))],
)
def test_a_pass_fills_every_table(requests: Any, kernels: list[tuple[str, str, str]], key: tuple[int, ...]) -> None:
    """10 us per kernel: the cells of a pass, times their calls, give back what the pass took."""
    keys = {"dense": (64,), "per_sequence": (2,), "attention": key, "indexer": key, "sparse_attention": key}
    fills = tuple(Fill(category, k, names_of(M3, category)) for category, k in keys.items())  # type: ignore[arg-type]
    shot = Shot(fills=fills, requests=requests)
    samples = tuple(KernelSample(0, 0, module, kernel, 10.0, 1) for module, kernel, _ in [*ALWAYS, *kernels])
    found = bind([ShotResult(0, samples)], [shot], M3, info(), vllm_msa)
    assert not found.problems and not found.unbound and found.bound_share == 1.0
    calls = {(c.category, c.name): n for c, n in fold(stack_spec(M3, info())).components}
    total = sum(row.time_us * calls[row.category, row.name] for row in found.rows)
    experts = sum(component == "moe/experts" for _, _, component in ALWAYS)
    assert total == pytest.approx(10.0 * (len(samples) - experts))
    cells = {row.name: row.time_us for row in found.rows}
    assert cells["qk_norm"] == cells["rotary_emb"] == 5.0
    assert cells["layernorm"] == 10.0 and cells["step_inputs"] == 60.0


def test_the_first_norm_without_a_residual_is_left_out_of_the_others() -> None:
    times = [4.0 if m == f"{D}.input_layernorm" else 10.0 for m, _, _ in ALWAYS]
    kernels = zip(ALWAYS, times, strict=True)
    samples = tuple(KernelSample(0, 0, module, kernel, us, 1) for (module, kernel, _), us in kernels)
    shot = Shot(fills=(Fill("dense", (64,), ("layernorm", "final_layernorm")),), requests=((64, 0),))
    found = bind([ShotResult(0, samples)], [shot], M3, info(), vllm_msa)
    assert {row.name: row.time_us for row in found.rows} == {"layernorm": 10.0, "final_layernorm": 10.0}


def test_coverage_accepts_a_component_that_its_carrier_shows() -> None:
    from profiler.coverage import coverage, refuse_incomplete

    prefill, decode = Shot(fills=(), requests=((64, 0),)), Shot(fills=(), requests=((1, 63),))
    results = {
        index: ShotResult(index, tuple(KernelSample(index, 0, m, k, 10.0, 1) for m, k, _ in [*ALWAYS, *own]))
        for index, own in enumerate((PREFILL, DECODE))
    }
    run = Run(NAME, "", "H200", 1, "", "", {}, {}, info(), (prefill, decode), (), results)
    found = coverage([run], M3, vllm_msa)
    assert not found.missing
    refuse_incomplete(found)


@pytest.mark.parametrize(("tp", "kv_heads", "heads"), [(1, 4, 64), (2, 2, 32), (4, 1, 16), (8, 1, 8)])
def test_per_rank_shapes_keep_the_config_nested(tp: int, kv_heads: int, heads: int) -> None:
    rank = per_rank_config(CONFIG, tp)
    text = rank["text_config"]
    assert text["num_attention_heads"] == heads and text["num_key_value_heads"] == kv_heads
    assert text["sparse_attention_config"]["sparse_num_index_heads"] == kv_heads
    assert text["dense_intermediate_size"] == 12288 // tp and text["intermediate_size"] == 3072 // tp
    assert text["vocab_size"] == 200064 // tp
    unchanged = ("hidden_size", "head_dim", "num_local_experts", "num_experts_per_tok", "moe_layer_freq")
    assert all(text[key] == CONFIG["text_config"][key] for key in unchanged)
    assert read_model(NAME, rank).indexer is not None, "still a config that the engine and this profiler read"
    assert CONFIG["text_config"]["num_key_value_heads"] == 4, "the config that came in is left alone"


def test_a_degree_that_no_head_count_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide num_attention_heads"):
        per_rank_config(CONFIG, 3)


def test_the_text_backbone_is_started_alone() -> None:
    layers, small = stack_of(M3, CONFIG)
    assert layers == (0, 3)
    served = msa.backbone(small)
    assert served["architectures"] == ["MiniMaxM3SparseForCausalLM"] and "auto_map" not in served
    assert served["model_type"] == "minimax_m3_vl" and served["text_config"] == small["text_config"]
    assert served["text_config"]["sparse_attention_config"]["sparse_attention_freq"] == [0, 1]
    assert msa.is_msa(CONFIG) and not msa.is_msa(load_model_config("zai-org/GLM-5"))


def test_the_block_length_is_that_of_the_selection() -> None:
    assert msa.block_tokens(CONFIG) == 128
    with pytest.raises(ConfigError, match="sparse_block_size"):
        msa.block_tokens({"text_config": {}})


def test_the_engine_is_started_on_the_backbone_with_pages_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts vLLM on this model, to profile or to record, gets the same; other models are started as asked."""
    asked: list[dict[str, Any]] = []

    def llm(model: str, **keywords: Any) -> Any:
        asked.append(keywords | {"config": json.loads(Path(model, "config.json").read_text())})
        core = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=None)))
        return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))

    prepared: list[int] = []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=llm))
    monkeypatch.setattr(msa, "prepare", lambda config, keywords: prepared.append(keywords["block_size"]))
    glm = load_model_config("zai-org/GLM-5")
    for config, keywords in ((CONFIG, {"max_num_seqs": 4}), (CONFIG, {"block_size": 256}), (glm, {})):
        boot.start(config, **keywords).folder.cleanup()
    assert [one.get("block_size") for one in asked] == [128, 256, None] and prepared == [128, 256]
    assert asked[0]["config"]["architectures"] == [msa.BACKBONE] and asked[0]["max_num_seqs"] == 4
    assert asked[2]["config"]["architectures"] == ["GlmMoeDsaForCausalLM"]


class _Attention:
    """Takes what vLLM's MiniMaxM3SparseAttention takes by keyword."""

    def __init__(self, config: str, *, topk_indices_buffer: torch.Tensor | None = None) -> None:
        self.config, self.buffer = config, topk_indices_buffer


def test_the_buffer_of_selected_blocks_is_handed_over_heads_first() -> None:
    """As allocated, the rows of tokens behind 8 decodes are an empty slice, whose address is null."""
    allocated = torch.zeros(64, 4, 16, dtype=torch.int32)
    assert allocated[:, 8:, :].data_ptr() == 0

    class Attention(_Attention):
        pass

    for _ in range(2):
        msa.hand_over_heads_first(Attention)
    buffer = Attention("c", topk_indices_buffer=allocated).buffer
    assert buffer is not None and buffer.shape == (4, 64, 16) and buffer.is_contiguous()
    assert buffer.data_ptr() == allocated.data_ptr(), "the memory, and so graphs captured on it, stays"
    assert buffer[:, 8:, :].shape == (4, 56, 16)
    assert Attention("c").buffer is None and Attention("c").config == "c"


def test_without_overlap_only_the_answer_about_dependent_launches_changes() -> None:
    class Platform:
        device_name = "cuda"

        def is_arch_support_pdl(self) -> bool:
            return True

    plain = msa.Plain(Platform())
    assert plain.is_arch_support_pdl() is False and plain.device_name == "cuda"
    with pytest.raises(AttributeError):
        _ = plain.absent


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ((1 << 20, 16384, 256), (((8192, 24576),), ((1, 32767),) * 32)),
        ((4096, 1024, 8), (((1024, 3072),), ((1, 4095),) * 8)),
        ((512, 8192, 4), (((512, 0),), ((1, 511),) * 4)),
    ],
)
def test_kernels_are_tuned_on_batches_within_the_limits(limits: tuple[int, int, int], batches: Any) -> None:
    assert msa.tuning_batches(*limits) == batches


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (8, 1)])
def test_kernels_are_tuned_by_their_launchers_before_the_engine(
    tp: int, heads: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The arguments are those of vLLM 0.26's models/minimax_m3/common/ops/index_topk.py, shapes and types included."""
    seen: dict[str, tuple[Any, ...]] = {}

    def topk(*given: Any) -> None:
        seen["prefill"] = given

    def decode(*given: Any) -> None:
        seen["decode"] = given

    best = SimpleNamespace(kwargs={"BLOCK_SIZE_K": 64}, num_warps=2)
    tuned = SimpleNamespace(fn=SimpleNamespace(best_config=best))
    kernels = SimpleNamespace(
        minimax_m3_index_topk=topk,
        minimax_m3_index_decode=decode,
        _topk_index_kernel=tuned,
        _topk_index_partial_kernel=SimpleNamespace(fn=SimpleNamespace(fn=len)),
    )
    ops = SimpleNamespace(index_topk=kernels)
    for name in ("vllm", "vllm.models", "vllm.models.minimax_m3", "vllm.models.minimax_m3.common"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "vllm.models.minimax_m3.common.ops", ops)
    monkeypatch.setattr(msa, "_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    msa.tune(per_rank_config(CONFIG, tp), 3000, 256, 4)
    assert capsys.readouterr().err == "kernels tuned in 0 s: _topk_index_kernel 64 blocks of 2 warps\n"
    scores, starts, contexts, *rest = seen["prefill"]
    assert scores.shape == (heads, 256, 32) and scores.dtype == torch.float32, "24 blocks in sixteens"
    assert starts.tolist() == [0, 256] and contexts.tolist() == [2744] and rest == [256, 16, 0, 1]
    query, cache, table, lengths, *rest = seen["decode"]
    assert query.shape == (4, heads, 128) and cache.shape == (24, 128, 128) and cache.dtype == torch.bfloat16
    assert table.shape == (4, 24) and table[3].tolist() == list(range(24)) and lengths.tolist() == [3000] * 4
    assert rest == [3000, 16, 0, 1, heads, 1, 1]
    assert {t.dtype for t in (starts, contexts, table, lengths)} == {torch.int32}


@pytest.mark.parametrize(("capability", "repaired"), [((9, 0), True), ((12, 0), True), ((10, 0), False)])
def test_before_the_engine_graphs_are_told_vllm_imported_and_the_model_repaired(
    capability: tuple[int, int], repaired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Any] = []

    class Package:
        __path__ = ()

        @property
        def LLM(self) -> None:
            order.append("vllm.LLM")

    class Attention(_Attention):
        pass

    class Model:
        @property
        def MiniMaxM3SparseAttention(self) -> type:
            order.append("model")
            return Attention

    names = ("vllm.models", "vllm.models.minimax_m3", "vllm.models.minimax_m3.nvidia")
    monkeypatch.setitem(sys.modules, "vllm", Package())
    for name in names:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "vllm.models.minimax_m3.nvidia.model", Model())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(msa, "break_graphs", lambda keywords: order.append("graphs"))
    monkeypatch.setattr(msa, "tune", lambda config, *sizes: order.append(sizes))
    msa.prepare(CONFIG, {"max_model_len": 4096, "max_num_batched_tokens": 1024, "max_num_seqs": 8})
    assert order == ["graphs", "vllm.LLM", *["model"] * repaired, (4095, 1024, 8)]
    given = Attention("c", topk_indices_buffer=torch.zeros(8, 4, 16)).buffer
    assert given is not None and given.shape == ((4, 8, 16) if repaired else (8, 4, 16))


def test_a_profiled_engine_launches_without_overlap_once_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    cache = SimpleNamespace(cache_config=SimpleNamespace(block_size=128))
    compilation = SimpleNamespace(static_forward_context={})
    runner = SimpleNamespace(
        get_model=lambda: torch.nn.Module(),
        vllm_config=SimpleNamespace(compilation_config=compilation, **vars(cache)),
        kv_cache_config=SimpleNamespace(num_blocks=7),
    )

    def start(config: Any, **keywords: Any) -> Any:
        order.append("start")
        return SimpleNamespace(runner=runner, worker=None)

    monkeypatch.setattr(boot, "start", start)
    monkeypatch.setattr(msa, "without_overlap", lambda: order.append("without overlap"))
    limits = {"max_model_len": 4096, "max_num_batched_tokens": 1024, "max_num_seqs": 8}
    started = boot.boot(CONFIG, **limits, kv_cache_dtype="auto", block_tokens=None, utilization=0.8)
    assert order == ["start", "without overlap"] and (started.num_blocks, started.block_tokens) == (7, 128)


GRAPHS = {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
WHOLE = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}


@pytest.mark.parametrize("keywords", [{"enforce_eager": True}, WHOLE, GRAPHS, {}])
def test_graphs_are_told_to_break_before_the_model_is_imported(keywords: dict[str, Any]) -> None:
    environment: dict[str, str] = {}
    msa.break_graphs(keywords, environment, {})
    assert environment == {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}


def test_graphs_of_parts_need_attention_imported_after_that() -> None:
    """Marked or not, attention is inside graphs of whole decode steps, and there is none where all is eager."""
    imported = {"vllm.model_executor.layers.attention.attention": object()}
    for keywords in ({"enforce_eager": True}, WHOLE):
        msa.break_graphs(keywords, {}, imported)
    for keywords in (GRAPHS, {}):
        with pytest.raises(AcquisitionError, match="VLLM_USE_BREAKABLE_CUDAGRAPH=1 in the environment before"):
            msa.break_graphs(keywords, {}, imported)
        chosen = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
        msa.break_graphs(keywords, chosen, imported)
        assert chosen == {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}, "who asked for another way gets it"


def test_weights_of_norms_that_add_one_are_found_by_their_class() -> None:
    class MiniMAXGemmaRMSNorm(torch.nn.Module):  # type: ignore[misc]
        pass

    class RMSNorm(torch.nn.Module):  # type: ignore[misc]
        pass

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.q_norm, self.norm = MiniMAXGemmaRMSNorm(), RMSNorm()

    assert shifted_norms(Layer()) == {"q_norm.weight"}
