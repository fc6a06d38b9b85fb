import sys
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiler.core.bundle import Bundle
from profiler.core.errors import ConfigError, ContractError, CoverageError
from profiler.core.even_load import activated_experts, local_pairs
from profiler.core.hardware import load_hardware
from profiler.core.kv import kv_layout
from profiler.core.registry import load_model
from profiler.core.stack import fold
from profiler.core.types import MoeDims, Parallel
from serving.collectives import from_hardware
from serving.core.shape import StepShape
from serving.cost import TableCost, build_cost, default_capture_sizes
from serving.cost.graphs import padding

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import priced

SPEC = load_model(priced.MODEL)
H200 = load_hardware("H200")
COUNTS = {one.name: count for one, count in fold(SPEC).components}
DENSE = [one.name for one, _ in fold(SPEC).components if one.category == "dense"]
ABSORBED = {"absorb_q", "absorb_v"}
SELECTED = ("index_scores", "index_topk", "sparse_mla")
DP8 = Parallel(dp=8, ep=8)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return priced.bundle(tmp_path_factory.mktemp("bundles"))


def cost(bundle: Bundle, **changes: object) -> TableCost:
    given: dict[str, object] = {"parallel": DP8, "hardware": H200, "max_num_batched_tokens": 4096}
    return build_cost(bundle=bundle, spec=SPEC, **(given | changes))  # type: ignore[arg-type]


def step(prefills: list[tuple[int, int]] | None = None, keys: list[int] | None = None) -> StepShape:
    prefills, keys = prefills or [], keys or []
    return StepShape(
        prefills=tuple(prefills),
        decode_requests=len(keys),
        decode_kv_sum_tokens=sum(keys),
        decode_kv_max_tokens=max(keys, default=0),
        decode_kv_capped_sum_tokens=sum(min(key, priced.CAP) for key in keys),
        sampled_sequences=len(prefills) + len(keys),
    )


def rank_us(shape: StepShape, dense_tokens: int = 0) -> float:
    """Dense and per-sequence components of a rank by the closed form; dense prefill skips the latent projections."""
    us = sum(COUNTS[name] * priced.token_us(name, shape.tokens) for name in DENSE if name not in ABSORBED)
    if sparse := shape.tokens - dense_tokens:
        us += sum(COUNTS[name] * priced.token_us(name, sparse) for name in ABSORBED)
    return us + sum(COUNTS[name] * priced.token_us(name, shape.sampled_sequences) for name in ("lm_head", "sampler"))


def group_us(tokens: int) -> float:
    """Experts of one of eight ranks, and the exchange around them."""
    assert SPEC.moe is not None
    experts = 32 * (1 - (1 - 8 / 256) ** tokens)
    out, back = tokens * SPEC.hidden * (1 + 4 / 128), tokens * SPEC.hidden * 2
    links = from_hardware(H200)
    us = priced.experts_us(tokens, experts) + links.all_gather_us(out, 8) + links.reduce_scatter_us(back, 8)
    return 58 * us


def us_of(cost: TableCost, shape: StepShape | None, ranks: int = 8) -> float:
    return cost.step_ns([shape] + [None] * (ranks - 1)) / 1e3


def test_decode_step_is_the_sum_of_its_components(bundle: Bundle) -> None:
    shape = step(keys=[5000] * 40)
    expected = rank_us(shape) + group_us(40 + 7)
    expected += sum(61 * priced.decode_us(name, 40, 5000) for name in ("index_scores", "index_topk"))
    expected += 61 * priced.decode_us("sparse_mla", 40, priced.CAP)
    assert us_of(cost(bundle), shape) == pytest.approx(expected, rel=1e-6)


def test_each_prefill_is_priced_by_itself_with_one_launch(bundle: Bundle) -> None:
    chunks = [(1000, 3000), (500, 60000), (3, 9000)]
    shape = step(chunks)
    expected = rank_us(shape) + group_us(1503 + 7)
    for name in SELECTED:
        own = [priced.prefill_us(name, c, min(k, 2048) if name == "sparse_mla" else k) for c, k in chunks[:2]]
        # One token is a decode for the indexer; a chunk of more costs what the first measured one behind it does.
        last = (16, 9000) if name != "sparse_mla" else (3, 2048)
        own.append(priced.prefill_us(name, *last))
        fixed = 2.0 * priced.weight(name)
        expected += 61 * (sum(own) - 2 * fixed)
    assert us_of(cost(bundle), shape) == pytest.approx(expected, rel=1e-6)


def test_two_prompts_are_not_one_long_one(bundle: Bundle) -> None:
    model = cost(bundle)
    two, one = step([(1000, 2000), (1000, 2000)]), step([(2000, 4000)])
    assert us_of(model, two._replace(sampled_sequences=1)) < us_of(model, one)


def test_short_prefills_attend_every_key_and_skip_the_selection(bundle: Bundle) -> None:
    shape = step([(500, 1000), (2048, 0)])
    expected = rank_us(shape, dense_tokens=2548) + group_us(2548 + 7)
    name = "mla_dense_prefill"
    own = [priced.prefill_us(name, 500, 1000), priced.prefill_us(name, 2048, 0)]
    expected += 61 * (sum(own) - 2.0 * priced.weight(name))
    assert us_of(cost(bundle), shape) == pytest.approx(expected, rel=1e-6)


def test_decode_rows_bring_the_selection_back(bundle: Bundle) -> None:
    shape = step([(500, 0)], keys=[100] * 8)
    expected = rank_us(shape, dense_tokens=500) + group_us(508 + 7)
    expected += 61 * priced.prefill_us("mla_dense_prefill", 500, 0)
    for name in ("index_scores", "index_topk"):
        expected += 61 * (priced.prefill_us(name, 500, 0) + priced.decode_us(name, 8, 100))
    expected += 61 * priced.decode_us("sparse_mla", 8, 100)
    assert us_of(cost(bundle), shape) == pytest.approx(expected, rel=1e-6)


def dense_rule(longer_than_tokens: int, selects: bool) -> dict[str, object]:
    rule = {"longer_than_tokens": longer_than_tokens, "selects": selects}
    return {"grid": {"tp1/attention": {"dense_prefill": rule}}}


def test_an_engine_that_selects_for_dense_prefills_pays_for_it(tmp_path: Path) -> None:
    shape = step([(500, 1000)])
    model = cost(priced.bundle(tmp_path, **dense_rule(0, True)))
    expected = rank_us(shape, dense_tokens=500) + group_us(500 + 7)
    for name in ("mla_dense_prefill", "index_scores", "index_topk"):
        expected += 61 * priced.prefill_us(name, 500, 1000)
    assert us_of(model, shape) == pytest.approx(expected, rel=1e-6)


def test_short_chunks_run_as_decodes_do_and_do_not_end_the_dense_regime(tmp_path: Path) -> None:
    model = cost(priced.bundle(tmp_path, **dense_rule(256, False)))
    # 256 tokens behind 60,000 keys are a decode to the engine; 500 tokens at the start of a prompt run dense.
    shape = step([(256, 60000), (500, 0)])
    expected = rank_us(shape, dense_tokens=500) + group_us(756 + 7)
    expected += 61 * priced.prefill_us("mla_dense_prefill", 500, 0)
    expected += 61 * priced.prefill_us("sparse_mla", 256, priced.CAP)
    for name in ("index_scores", "index_topk"):
        both = priced.prefill_us(name, 256, 60000) + priced.prefill_us(name, 500, 0)
        expected += 61 * (both - 2.0 * priced.weight(name))
    assert us_of(model, shape) == pytest.approx(expected, rel=1e-6)
    alone = step([(256, 0)])
    names = [entry.component for entry in model.explain([alone] + [None] * 7)]
    assert "sparse_mla" in names and "mla_dense_prefill" not in names


def test_one_long_prefill_takes_the_whole_step_to_the_sparse_kernel(bundle: Bundle) -> None:
    names = [entry.component for entry in cost(bundle).explain([step([(500, 0), (500, 1549)])] + [None] * 7)]
    assert "sparse_mla" in names and "mla_dense_prefill" not in names
    names = [entry.component for entry in cost(bundle).explain([step([(500, 0), (500, 1548)])] + [None] * 7)]
    assert "sparse_mla" not in names and "mla_dense_prefill" in names


def test_the_command_for_divided_experts_is_one_that_measures_them(bundle: Bundle) -> None:
    assert bundle.profile_command(1, "moe").endswith("--tp 1 --categories moe")
    assert bundle.profile_command(8, "moe").endswith("--tp 8 --categories dense --max-num-batched-tokens N")


def test_an_engine_told_to_stay_on_the_sparse_path_does(bundle: Bundle) -> None:
    shape = step([(500, 0), (500, 1548)])
    model = cost(bundle, dense_prefill=False)
    names = [entry.component for entry in model.explain([shape] + [None] * 7)]
    assert {"sparse_mla", "index_scores", "index_topk"} <= set(names) and "mla_dense_prefill" not in names
    assert us_of(model, shape) > us_of(cost(bundle), shape) > 0


def test_cards_without_the_dense_kernel_always_select(bundle: Bundle) -> None:
    model = cost(bundle, hardware=load_hardware("RTXPRO6000"))
    names = [entry.component for entry in model.explain([step([(500, 0)])] + [None] * 7)]
    assert "sparse_mla" in names and "mla_dense_prefill" not in names


@pytest.mark.parametrize("name", ["sparse_mla", "index_scores", "index_topk"])
def test_a_kernel_is_priced_from_its_own_table_alone(bundle: Bundle, tmp_path: Path, name: str) -> None:
    shape = step([(4000, 100)], keys=[3000] * 10)
    category = "sparse_attention" if name == "sparse_mla" else "indexer"
    table = bundle.table(1, category)  # type: ignore[arg-type]
    slower = [(*row[:-2], float(row[-2]) * (2 if row[0] == name else 1), row[-1]) for row in table.rows()]
    changed = {category: priced.make_table(category, slower)}  # type: ignore[arg-type]
    before = {entry.component: entry.us for entry in cost(bundle).explain([shape] + [None] * 7)}
    other = priced.bundle(tmp_path, changed)  # type: ignore[arg-type]
    after = {entry.component: entry.us for entry in cost(other).explain([shape] + [None] * 7)}
    assert after[name] == pytest.approx(2 * before[name], rel=1e-6)
    assert {k: v for k, v in after.items() if k != name} == {k: v for k, v in before.items() if k != name}


def test_group_waits_for_its_slowest_rank_and_gathers_all_tokens(bundle: Bundle) -> None:
    model = cost(bundle)
    slow, fast = step([(4000, 0)]), step(keys=[100] * 20)
    both = model.step_ns([fast, slow] + [None] * 6) / 1e3
    own = rank_us(slow) + 61 * sum(priced.prefill_us(name, 4000, 0) for name in SELECTED)
    assert both == pytest.approx(own + group_us(4000 + 20 + 6), rel=1e-6)
    assert model.step_ns([slow, fast] + [None] * 6) == model.step_ns([None, fast] + [None] * 5 + [slow])


def test_idle_rank_runs_one_token_without_attention(bundle: Bundle) -> None:
    expected = sum(COUNTS[name] * priced.token_us(name, 1) for name in DENSE) + group_us(8)
    assert us_of(cost(bundle), None) == pytest.approx(expected, rel=1e-6)


def test_graphs_pad_every_rank_to_the_largest(bundle: Bundle) -> None:
    sizes = default_capture_sizes(256)
    model, eager = cost(bundle, capture_sizes=sizes), cost(bundle)
    five, eight = step(keys=[100] * 5), step(keys=[100] * 8)
    padded = {entry.component: entry for entry in model.explain([five] + [None] * 7)}
    assert padded["o_proj"].us == pytest.approx(61 * priced.token_us("o_proj", 8))
    assert padded["experts"].us == pytest.approx(58 * priced.experts_us(64, 32 * (1 - (31 / 32) ** 64)), rel=1e-4)
    assert model.step_ns([eight] * 8) == eager.step_ns([eight] * 8)
    # One rank beyond the largest graph sends every rank to eager mode.
    assert model.step_ns([five, step([(4000, 0)])] + [None] * 6) == eager.step_ns(
        [five, step([(4000, 0)])] + [None] * 6
    )


def test_decode_graphs_leave_steps_with_prefills_unpadded(bundle: Bundle) -> None:
    sizes = default_capture_sizes(256)
    both, decodes, eager = (
        cost(bundle, capture_sizes=sizes),
        cost(bundle, capture_sizes=sizes, prefills_in_graphs=False),
        cost(bundle),
    )
    decode = StepShape((), 13, 13 * 4096, 4096, 13 * 2048, 13)
    mixed = StepShape(((20, 0),), 13, 13 * 4096, 4096, 13 * 2048, 14)
    assert decodes.computed_tokens([decode]) == both.computed_tokens([decode]) == [16]
    assert decodes.step_ns([decode]) == both.step_ns([decode]) != eager.step_ns([decode])
    assert (decodes.computed_tokens([mixed]), both.computed_tokens([mixed])) == ([33], [40])
    assert decodes.step_ns([mixed]) == eager.step_ns([mixed]) != both.step_ns([mixed])


def test_padding_rule() -> None:
    sizes = default_capture_sizes(128)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24) and sizes[-1] == 256
    assert default_capture_sizes(1024)[-3:] == (480, 496, 512)
    assert default_capture_sizes(10) == (1, 2, 4, 8, 16)
    assert [padding(sizes)[tokens] for tokens in (1, 3, 100, 255, 256)] == [1, 4, 104, 256, 256]
    assert len(padding(sizes)) == 257, "no graph covers more"
    assert padding(()) == ()


def test_price_list_adds_up_to_the_nanosecond(bundle: Bundle) -> None:
    model = cost(bundle, host_us=123.4)
    groups = [
        [step([(777, 1234), (33, 0)], keys=[311] * 17)] + [None] * 7,
        [step(keys=[9999] * 3), step([(4000, 5)])] + [None] * 6,
    ]
    for shapes in groups:
        lines = model.explain(shapes)
        assert sum(round(entry.us * 1000) for entry in lines) == model.step_ns(shapes)
        assert lines[-1] == ("host", 1, 123.4, "stated")
        assert {entry.provenance for entry in lines} == {"measured", "computed", "stated"}
    calls = {entry.component: entry.calls for entry in model.explain(groups[0])}
    assert (calls["experts"], calls["sparse_mla"], calls["gate_up_proj"], calls["embedding"]) == (58, 61, 3, 1)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.lists(st.integers(1, 60000), min_size=1, max_size=40), more=st.integers(1, 5000))
def test_cost_grows_with_keys_and_is_flat_beyond_the_cap(bundle: Bundle, keys: list[int], more: int) -> None:
    """Invariant I9: monotone in keys for kernels that read all of them, flat beyond the cap for those that do not."""
    model = cost(bundle)
    before = {e.component: e.us for e in model.explain([step(keys=keys)] + [None] * 7)}
    longer = [key + more for key in keys]
    after = {e.component: e.us for e in model.explain([step(keys=longer)] + [None] * 7)}
    assert after["index_scores"] >= before["index_scores"]
    assert after["sparse_mla"] >= before["sparse_mla"]
    if min(keys) >= priced.CAP:
        assert after["sparse_mla"] == before["sparse_mla"]


def test_folding_layers_equals_summing_them(bundle: Bundle) -> None:
    """Invariant I10: a model of n equal layers costs n times one layer, beside its prologue and head."""
    shape = step([(100, 5000)], keys=[300] * 4)
    dense_kind, moe_kind = SPEC.kinds
    lines = {}
    for layers in ((dense_kind,), (moe_kind,), SPEC.layers):
        spec = replace(SPEC, layers=layers)
        model = build_cost(bundle=bundle, spec=spec, parallel=DP8, hardware=H200, max_num_batched_tokens=4096)
        lines[layers] = model.step_ns([shape] + [None] * 7) / 1e3
    once = sum(priced.token_us(name, shape.tokens) for name in DENSE if COUNTS[name] == 1)
    once += sum(priced.token_us(name, shape.sampled_sequences) for name in ("lm_head", "sampler"))
    summed = once + 3 * (lines[(dense_kind,)] - once) + 58 * (lines[(moe_kind,)] - once)
    assert lines[SPEC.layers] == pytest.approx(summed, rel=1e-5)


def test_shape_outside_the_tables_is_refused_or_counted(bundle: Bundle) -> None:
    beyond = step(keys=[70000] * 4)
    with pytest.raises(CoverageError, match=r"index_scores: decode_requests 4, decode_kv_tokens 70000.*-len 70000$"):
        us_of(cost(bundle), beyond)
    model = cost(bundle, allow_extrapolation=True)
    first = us_of(model, beyond)
    assert model.extrapolated == {"index_scores": 1, "index_topk": 1}
    assert us_of(model, beyond) == first
    assert model.extrapolated == {"index_scores": 2, "index_topk": 2}
    lines = {entry.component: entry.us for entry in model.explain([beyond] + [None] * 7)}
    assert lines["index_scores"] == pytest.approx(61 * priced.decode_us("index_scores", 4, 70000), rel=1e-4)


def test_extrapolated_token_counts_are_counted_every_time(bundle: Bundle) -> None:
    model = cost(bundle, allow_extrapolation=True)
    for _ in range(2):
        us_of(model, step([(4000, 0), (200, 0)]))
    assert model.extrapolated["o_proj"] == 2


def test_budget_beyond_the_dense_tables_is_refused_at_once(bundle: Bundle) -> None:
    with pytest.raises(CoverageError, match=r"tokens 8192 .*1 to 4096.*--max-num-batched-tokens 8192"):
        cost(bundle, max_num_batched_tokens=8192)


def test_bundle_of_another_contract_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="'replay'") as refused:
        cost(priced.bundle(tmp_path, contract="replay"))
    assert refused.value.exit_code == 4


def test_bundle_with_another_cap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"2176 attended tokens.*2048"):
        cost(priced.bundle(tmp_path, attended_cap_tokens=2176))


def test_bundle_on_another_kv_layout_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    bf16 = kv_layout(SPEC, DP8, "sm90", "auto")
    cost(bundle, kv=bf16)
    with pytest.raises(ContractError, match="measured on a bf16 KV cache, the run has fp8_ds_mla"):
        cost(bundle, kv=kv_layout(SPEC, DP8, "sm90", "fp8"))
    with pytest.raises(ContractError, match="blocks of 64 tokens, the run has 128"):
        cost(bundle, kv=replace(bf16, block_tokens=128))
    kv = {**priced.meta()["kv"], "caches": [{"name": "mla", "bytes_per_token_layer": 1152}]}  # type: ignore[dict-item]
    with pytest.raises(ContractError, match=r"caches of \[1152\] bytes .* the run has \[132, 1152\]"):
        cost(priced.bundle(tmp_path, kv=kv), kv=bf16)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(pp=2), "pipeline"),
        (Parallel(dp=8, ep=4), "ep 4"),
        (Parallel(dp=3, ep=3), "does not divide 256"),
    ],
)
def test_splits_that_are_not_priced_are_refused(bundle: Bundle, parallel: Parallel, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cost(bundle, parallel=parallel)


def test_missing_tables_name_the_command(bundle: Bundle) -> None:
    with pytest.raises(CoverageError, match=r"no tables of tp 8, only of tp 1\..*--tp 8$"):
        cost(bundle, parallel=Parallel(tp=8, ep=8))
    with pytest.raises(CoverageError, match=r"experts: no rows for ep 1; measured: 8"):
        cost(bundle, parallel=Parallel())


def brute_force_reached(experts: int, topk: int, local: int, tokens: int) -> float:
    picks = list(combinations(range(experts), topk))
    reached = [len({e for pick in drawn for e in pick if e < local}) for drawn in product(picks, repeat=tokens)]
    return sum(reached) / len(reached)


@pytest.mark.parametrize(("topk", "ep", "tokens"), [(1, 2, 1), (2, 2, 1), (2, 2, 3), (2, 1, 2), (3, 4, 2)])
def test_activated_experts_against_enumeration(topk: int, ep: int, tokens: int) -> None:
    moe = MoeDims(num_experts=4, topk=topk, intermediate=1, num_shared_experts=0, shared_intermediate=0)
    assert activated_experts(moe, ep, tokens) == pytest.approx(brute_force_reached(4, topk, 4 // ep, tokens))
    assert local_pairs(moe, ep, tokens) == tokens * topk / ep


def test_every_expert_is_reached_when_a_token_takes_all() -> None:
    moe = MoeDims(num_experts=4, topk=4, intermediate=1, num_shared_experts=0, shared_intermediate=0)
    assert activated_experts(moe, 2, 1) == 2.0


def test_host_time_shows_only_where_it_exceeds_an_overlapping_device(bundle: Bundle) -> None:
    shapes = [step(keys=[9999] * 3)] + [None] * 7
    device = cost(bundle).step_ns(shapes)
    assert cost(bundle, host_us=500.0).step_ns(shapes) == device + 500_000
    assert cost(bundle, host_us=500.0, host_overlaps=True).step_ns(shapes) == max(device, 500_000) == device
    slow = cost(bundle, host_us=1e6, host_overlaps=True, step_us=7.0)
    assert slow.step_ns(shapes) == 1_000_000_000
    named = {entry.component: entry.us for entry in slow.explain(shapes)}
    assert named["step overhead"] == 7.0 and sum(round(us * 1000) for us in named.values()) == 1_000_000_000
