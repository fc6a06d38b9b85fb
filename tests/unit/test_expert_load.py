"""The routing block of a cluster file: what it changes in the price of a step, and what it refuses."""

import json
from pathlib import Path

import priced
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from profiler.core.errors import ConfigError
from profiler.core.grid import Outside, make_grid
from profiler.core.hardware import load_hardware
from profiler.core.paths import data_root
from profiler.core.registry import load_model
from profiler.core.types import ModelSpec, Parallel
from profiler.core.weights import engine_weights
from serving.collectives import from_hardware
from serving.config import Routing, load_cluster
from serving.core.shape import StepShape
from serving.cost import build_cost
from serving.cost.experts import Experts
from serving.deployment import deploy
from serving.expert_load import routed_load
from serving.expert_placement import make_placement
from serving.routing import BusiestRank, reach_probability

V32, M3 = load_model("deepseek-ai/DeepSeek-V3.2-Exp"), load_model("MiniMaxAI/MiniMax-M3")
GROUP = Parallel(dp=8, ep=8)
CLUSTER = data_root() / "configs" / "cluster" / "h200-8x-deepseek-v32-dp8-ep8.yaml"
DECODE = StepShape((), 32, 32 * 5000, 5000, 32 * 2048, 32)


ZIPF = {"gate": "zipf", "options": {"exponent": 0.8}}


def lines(tmp_path: Path, **options: object) -> dict[str, float]:
    cost = build_cost(
        bundle=priced.bundle(tmp_path),
        spec=V32,
        parallel=GROUP,
        hardware=load_hardware("H200"),
        max_num_batched_tokens=4096,
        **options,  # type: ignore[arg-type]
    )
    return {entry.component: entry.us for entry in cost.explain([DECODE] * 8)}


def test_the_busiest_rank_costs_what_its_pairs_and_experts_cost(tmp_path: Path) -> None:
    """256 tokens over 8 ranks: an even load is 256 pairs; the excess is that of the drawn busiest rank."""
    load = routed_load(V32, GROUP, Routing(gate="grouped_topk"), 4096 * 8)
    assert load is not None
    more_pairs, more_experts = load.busiest.factors(256)
    assert 1.05 < more_pairs < 1.2
    even, routed = lines(tmp_path / "a"), lines(tmp_path / "b", routing=load)
    reached = 32 * (1 - (1 - 8 / 256) ** 256)
    assert even["experts"] == pytest.approx(58 * priced.experts_us(256, reached), rel=1e-6)
    expected = priced.experts_us(256 * more_pairs, min(32, reached * more_experts))
    assert routed["experts"] == pytest.approx(58 * expected, rel=1e-6)
    assert {k: v for k, v in even.items() if k != "experts"} == {k: v for k, v in routed.items() if k != "experts"}


def test_skewed_popularity_costs_more_and_a_better_placement_less() -> None:
    zipf = {"gate": "zipf", "options": (("exponent", 0.8),)}
    by_placement = [
        routed_load(V32, GROUP, Routing(placement=name, **zipf), 1024)  # type: ignore[arg-type]
        for name in ("linear", "eplb_global")
    ]
    even = routed_load(V32, GROUP, Routing(gate="uniform"), 1024)
    assert even is not None
    linear, balanced = (load.busiest.factors(1024)[0] for load in by_placement if load is not None)
    assert linear > balanced > even.busiest.factors(1024)[0]


def test_dispatch_back_ends_send_what_is_needed(tmp_path: Path) -> None:
    links = from_hardware(load_hardware("H200"))
    gathered = lines(tmp_path / "a")
    found = lines(tmp_path / "b", all2all_backend="deepep_high_throughput")
    assert "dispatch experts" not in gathered and "all_gather experts" not in found
    # The model's own rule: 0.4956 of the group's 256 tokens reach a rank; fp8 with a scale per 128 elements.
    sent = 256 * 0.4956
    out, back = sent * 7168 * (1 + 4 / 128), sent * 7168 * 2
    assert found["dispatch experts"] == pytest.approx(58 * links.all_to_all_us(out, 8), rel=0.01)
    assert found["combine experts"] == pytest.approx(58 * links.all_to_all_us(back, 8), rel=0.01)
    every = lines(tmp_path / "c", all2all_backend="deepep_low_latency")
    assert every["combine experts"] == pytest.approx(58 * links.all_to_all_us(256 * 8 / 8 * 7168 * 2, 8), rel=1e-6)


def test_reach_of_a_model_without_groups_is_exact() -> None:
    from serving.routing import own_reach

    assert M3.moe is not None
    assert own_reach(M3.moe, 8) == float(reach_probability(M3.moe, 8)) == pytest.approx(31837 / 76200)


def cluster(tmp_path: Path, routing: dict[str, object], **engine: object) -> Path:
    content = yaml.safe_load(CLUSTER.read_text())
    content["instances"][0]["engine"].update(max_num_batched_tokens=4096, **engine)
    content["instances"][0]["routing"] = routing
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_cluster_file_names_gate_placement_and_back_end(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text(json.dumps([1] * 255 + [500]))
    priced.bundle(tmp_path / "bundles")
    path = cluster(tmp_path, {"gate": "histogram", "counts": "counts.json"}, all2all_backend="deepep_high_throughput")
    (instance,) = load_cluster(path).instances
    found = deploy(instance, 0, tmp_path / "bundles", False)
    even = deploy(load_cluster(cluster(tmp_path, {})).instances[0], 0, tmp_path / "bundles", False)
    shapes = [DECODE] * 8
    experts = {e.component: e.us for e in found.cost.explain(shapes)}
    assert "dispatch experts" in experts
    assert experts["experts"] > {e.component: e.us for e in even.cost.explain(shapes)}["experts"]


@pytest.mark.parametrize(
    ("routing", "engine", "message"),
    [
        ({"gate": "zipff"}, {}, "did you mean 'zipf'"),
        ({"gate": "zipf", "options": {"expnent": 1.0}}, {}, "did you mean 'exponent'"),
        ({"gate": "uniform", "placement": "linaer"}, {}, "did you mean 'linear'"),
        ({"placement": "eplb"}, {}, "an even load is the same for every placement"),
        ({"gate": "uniform", "counts": "counts.json"}, {}, "a counts file belongs to gate histogram"),
        ({"gate": "histogram", "counts": "gone.json"}, {}, "gone.json: No such file"),
        ({"gate": "zipf", "bias": "bias.json"}, {}, "a bias file belongs to gate grouped_topk"),
        ({"gate": "grouped_topk", "bias": "gone.json"}, {}, "gone.json: No such file"),
        ({"gate": "evn"}, {}, "did you mean 'even'"),
        ({"gate": "histogram"}, {}, "needs counts"),
        ({"gates": "uniform"}, {}, "unknown key 'gates'"),
        (ZIPF | {"redundant": 8}, {}, "redundant 8 with placement linear.*eplb or eplb_global, or redundant 0"),
        (ZIPF | {"placement": "eplb", "redundant": 31}, {}, "31 copies do not divide over ep 8; .* are 24 and 32"),
        (ZIPF | {"placement": "eplb", "redundant": 3}, {}, "the nearest that do are 0 and 8"),
        (ZIPF | {"placement": "eplb", "redundant": -8}, {}, "routing.redundant: .*greater than or equal to 0"),
        (ZIPF | {"placement": "eplb", "redundant": 1024}, {}, "routing.redundant: .*less than or equal to 1023"),
        (ZIPF | {"placement": "eplb", "redundent": 8}, {}, "unknown key 'redundent'; did you mean 'redundant'"),
        ({"placement": "eplb", "redundant": 8}, {}, "an even load is the same for every placement"),
        ({}, {"all2all_backend": "deepep"}, "unknown all2all back end 'deepep'"),
    ],
)
def test_bad_routing_is_refused(
    tmp_path: Path, routing: dict[str, object], engine: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        (instance,) = load_cluster(cluster(tmp_path, routing, **engine)).instances
        routed_load(V32, GROUP, instance.routing, 1024)


def test_a_dense_model_and_too_many_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        routed_load(load_model("meta-llama/Llama-3.1-8B"), Parallel(dp=2), Routing(gate="uniform"), 64)
    with pytest.raises(ConfigError, match="256 ranks for 128 experts"):
        routed_load(M3, Parallel(dp=256, ep=256), Routing(gate="uniform"), 64)


def test_copies_of_divided_experts_are_refused() -> None:
    routing = Routing(gate="uniform", placement="eplb", redundant=8)
    with pytest.raises(ConfigError, match=r"redundant 8 with ep 1: .*; use ep 8 or redundant 0"):
        routed_load(V32, Parallel(dp=8), routing, 64)


@given(st.integers(0, 20), st.sampled_from([(1, 8), (2, 4), (8, 1), (1, 16)]), st.sampled_from([V32, M3]))
def test_every_rank_holds_its_part_of_the_copies(steps: int, split: tuple[int, int], spec: ModelSpec) -> None:
    """A layer's copies add the weights of copies / ep experts to each rank, and nothing else."""
    tp, dp = split
    parallel = Parallel(tp=tp, dp=dp, ep=tp * dp)
    copies = steps * parallel.ep
    assert spec.moe is not None
    plain, more = (engine_weights(spec, parallel, redundant_experts=n).groups for n in (0, copies))
    held = spec.moe.num_experts // parallel.ep
    assert more["routed"] * held == plain["routed"] * (held + steps)
    assert {k: v for k, v in more.items() if k != "routed"} == {k: v for k, v in plain.items() if k != "routed"}
    placed = make_placement("eplb_global", spec.moe.num_experts, parallel.ep, redundant=copies)
    assert {len(slots) for slots in placed.slots} == {held + steps}


def test_copies_take_kv_memory_and_even_the_load(tmp_path: Path) -> None:
    priced.bundle(tmp_path / "bundles")
    found = {}
    for copies in (0, 32):
        path = cluster(tmp_path, ZIPF | {"placement": "eplb_global", "redundant": copies}, max_model_len=16384)
        (instance,) = load_cluster(path).instances
        found[copies] = deploy(instance, 0, tmp_path / "bundles", False)
    plain, more = found[0].deployment, found[32].deployment
    assert (plain.redundant_experts, more.redundant_experts) == (0, 32)
    # 58 layers of four experts more: three matrices of 7168 x 2048 in fp8, an fp32 scale for 128 x 128 of them.
    copies_bytes = 58 * 4 * 3 * 7168 * 2048 * (1 + 4 / 128**2)
    lost = (plain.num_gpu_blocks - more.num_gpu_blocks) * found[0].kv.bytes_per_block
    assert lost == pytest.approx(copies_bytes, abs=found[0].kv.bytes_per_block)
    pairs = {
        copies: one.table_cost.explain([StepShape(((2048, 0),), 0, 0, 0, 0, 1)] * 8) for copies, one in found.items()
    }
    experts = {copies: next(e.us for e in entries if e.component == "experts") for copies, entries in pairs.items()}
    assert experts[32] < experts[0], "the busiest rank has fewer pairs"


def test_copies_that_are_read_take_time_and_where_computing_takes_longer_they_do_not() -> None:
    """32 experts take 32 x 10 us to read and 1 us for each pair; four copies more, a rank of 36."""
    assert V32.moe is not None
    pairs = (1.0, 100.0, 200.0, 10_000.0)
    points = [(p, e, max(10.0 * e, p)) for p in pairs for e in (0.0, 32.0)]
    grid = make_grid(("local_pairs", "activated_experts"), points, lambda x, y, other: y, Outside("experts", "", False))
    load = BusiestRank((1,), (1.0,), (36 / 32,), 36)
    one = Experts("experts", 1, V32.moe, 8, grid, "measured", 32, load)
    assert one.load(300) == (300, pytest.approx(36, rel=1e-3))
    assert one.line(10_000).us == pytest.approx(10_000)
    few, reached = one.load(150)
    assert reached > 32 and one.line(150).us == pytest.approx(10 * reached, rel=1e-4) and few == 150
