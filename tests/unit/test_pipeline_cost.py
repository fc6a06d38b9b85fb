"""Stages of a pipeline are priced by their own layers; combinations of tp, pp, dp and ep finish."""

from collections import Counter
from dataclasses import replace
from itertools import product

import priced
import pytest

import serving
from profiler.core.bundle import read_bundle, write_bundle
from profiler.core.hardware import load_hardware
from profiler.core.registry import load_model
from profiler.core.shard import stage_layers
from profiler.core.types import Parallel
from serving.collectives import from_fitted_link, from_hardware
from serving.config import EngineSettings, Instance
from serving.core.shape import StepShape
from serving.cost import build_cost
from serving.cost.build import build_pipeline, spread
from serving.traces import Trace, TraceRequest

SPEC = load_model(priced.MODEL)
H200 = load_hardware("H200")
SHAPE = StepShape(((700, 3000),), 12, 12 * 5000, 5000, 12 * 2048, 12)


class FlatLink:
    bandwidth_gbps, latency_us = 100.0, 5.0


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """The closed forms at tp 1 and, once more, at tp 2."""
    root = tmp_path_factory.mktemp("bundles")
    tables = priced.tables(SPEC)
    write_bundle(root, priced.meta(), {(tp, category): table for tp in (1, 2) for category, table in tables.items()})
    return root


@pytest.fixture(scope="module")
def bundle(bundles):
    return read_bundle(bundles / "H200" / priced.MODEL / "fp8")


def costs(bundle, parallel, **more):
    given = {"bundle": bundle, "spec": SPEC, "hardware": H200, "max_num_batched_tokens": 4096} | more
    return build_pipeline(parallel=parallel, **given)


@pytest.mark.parametrize("pp", [2, 3, 4, 7])
def test_stages_add_up_to_the_whole_model(bundle, pp):
    """Every component runs as often over all stages as in the model that is not cut, and costs the same."""
    flat = from_fitted_link(FlatLink)
    shapes = [SHAPE] + [None] * 7
    whole = build_cost(
        bundle=bundle, spec=SPEC, hardware=H200, max_num_batched_tokens=4096, collectives=flat,
        parallel=Parallel(dp=8, ep=8),
    )  # fmt: skip
    cut = costs(bundle, Parallel(dp=8, ep=8, pp=pp), collectives=flat)
    expected = {one.component: (one.calls, one.us) for one in whole.explain(shapes)}
    calls, us = Counter(), Counter()
    for stage in cut.stages:
        for one in stage.explain(shapes):
            calls[one.component] += one.calls
            us[one.component] += one.us
    assert {name: (calls[name], pytest.approx(us[name], rel=1e-6)) for name in calls} == expected
    assert len(cut.stages) == pp


def test_embedding_is_in_the_first_stage_and_the_head_in_the_last(bundle):
    cut = costs(bundle, Parallel(dp=8, ep=8, pp=3), collectives=from_fitted_link(FlatLink))
    seen = [{one.component for one in stage.explain([SHAPE] + [None] * 7)} for stage in cut.stages]
    assert ["embedding" in names for names in seen] == [True, False, False]
    assert ["lm_head" in names for names in seen] == ["sampler" in names for names in seen] == [False, False, True]
    experts = [
        next(one.calls for one in stage.explain([SHAPE] + [None] * 7) if one.component == "experts")
        for stage in cut.stages
    ]
    layers = stage_layers(SPEC, Parallel(pp=3))
    assert experts == [sum(i >= 3 for i in range_) for range_ in layers], "the first three layers are dense"


def test_what_is_sent_between_stages(bundle):
    """Two tensors of tokens x hidden in bf16; over tp ranks a slice each, gathered again behind the link."""
    links = from_hardware(H200)
    one = costs(bundle, Parallel(pp=2, dp=8, ep=8))
    rows = SHAPE.tokens * SPEC.hidden * 2
    # Ranks 0-1, 2-3, ... of two nodes: no stage boundary lies between them.
    assert one.stages_ns([SHAPE] + [None] * 7)[0][1] == 2 * round(links.send_us(rows) * 1e3)
    four = costs(bundle, Parallel(tp=2, pp=8, dp=4, ep=8))
    sends = [send for _, send in four.stages_ns([SHAPE] + [None] * 3)]
    gather = links.all_gather_us(rows, 2)
    within = links.send_us(rows / 2) + gather
    between = links.send_us(rows / 2, between_nodes=True) + gather
    # An engine has 16 ranks: stages 0-3 in one node, 4-7 in the next.
    assert sends == [pytest.approx(2e3 * us, abs=3) for us in [within] * 3 + [between] + [within] * 3] + [0]


def test_experts_of_a_stage_spread_over_nodes(bundle):
    """dp 8 x pp 2 are two nodes, and each stage has four ranks in each: its exchange crosses between them."""
    name = "all_gather experts"
    us = [
        next(one.us / one.calls for one in cost.explain([SHAPE] + [None] * 7) if one.component == name)
        for cost in (
            costs(bundle, Parallel(pp=2, dp=8, ep=8)).stages[1],
            build_cost(
                bundle=bundle, spec=SPEC, hardware=H200, max_num_batched_tokens=4096, parallel=Parallel(dp=8, ep=8)
            ),
        )
    ]
    apart = replace(from_hardware(H200), gpus_per_node=4)
    assert us[0] == pytest.approx(apart.all_gather_us((SHAPE.tokens + 7) * SPEC.hidden * (1 + 4 / 128), 8), rel=1e-5)
    assert us[0] > us[1]


def test_divided_experts_of_engines_that_fill_a_node_cross_between_nodes():
    """tp 8 x dp 2 are two nodes, and a rank exchanges its tokens with its like in the other one."""
    links = from_hardware(H200)
    between = spread(links, Parallel(tp=8, dp=2))
    assert between is not None and between.gpus_per_node == 1
    assert between.all_gather_us(1e6, 2) > links.all_gather_us(1e6, 2)
    assert spread(links, Parallel(tp=4, dp=2)) is None, "one node"
    assert spread(links, Parallel(tp=8, dp=2, ep=16)) is None, "all ranks, one node after the other"


def instance(parallel):
    engine = EngineSettings(4096, 2048, 16, 0, True, True, "fcfs", "auto", None, 0.9, 400, None)
    return Instance(priced.MODEL, "H200", None, parallel, engine)


SPLITS = [
    Parallel(tp, pp, 8 // tp, 8) for tp, pp in product((1, 2), (2, 3, 4, 8))
]  # the tables hold experts of eight ranks


@pytest.mark.parametrize("parallel", SPLITS, ids=lambda one: f"tp{one.tp}pp{one.pp}dp{one.dp}")
def test_every_combination_finishes(bundles, parallel):
    rows = [TraceRequest(str(i), i * 3_000_000, 200 + 97 * i % 1500, 1 + i % 9) for i in range(40)]
    cluster = serving.config.Cluster("c", "least_loaded", (instance(parallel),))
    result = serving.replay(cluster, Trace("jsonl", tuple(rows)), bundle_root=bundles)
    assert [one.outcome for one in result.records] == ["finished"] * 40
    assert [one.emitted_tokens for one in result.records] == [row.output_tokens for row in rows]
    assert not result.deployments[0].async_scheduling
