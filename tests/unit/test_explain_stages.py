"""A pipeline's step by stage: adds up to what a replay books, and the bubbles are those of its stages."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import priced
import pytest
from hypothesis import given
from hypothesis import strategies as st

import serving
from profiler.core.bundle import read_bundle, write_bundle
from profiler.core.hardware import load_hardware
from profiler.core.paths import default_bundle_root
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.config import Cluster, EngineSettings, Instance
from serving.core.pipeline import PipelineGroup
from serving.core.shape import StepShape
from serving.cost.bounds import Bounds
from serving.cost.build import build_pipeline
from serving.cost_tree import Node, rows
from serving.explain import parse_rank
from serving.explain_stages import StagedExplanation, explain_stages, staged_document, staged_page, staged_text
from serving.explained import explain_instance, ranks_of
from serving.traces import Trace, TraceRequest

SPEC, H200 = load_model(priced.MODEL), load_hardware("H200")
ENGINE = EngineSettings(4096, 2048, 16, 0, True, True, "fcfs", "auto", None, 0.9, 400, None)
SHAPE = StepShape((), 32, 32 * 5000, 5000, 32 * 2048, 32)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The closed forms at tp 1 and, once more, at tp 2."""
    root = tmp_path_factory.mktemp("bundles")
    tables = priced.tables(SPEC)
    write_bundle(root, priced.meta(), {(tp, category): table for tp in (1, 2) for category, table in tables.items()})
    return root


def staged(bundles: Path, parallel: Parallel, *batches: str) -> StagedExplanation:
    found, title = explain_instance(Instance(priced.MODEL, "H200", None, parallel, ENGINE), batches, bundles)
    assert isinstance(found, StagedExplanation) and f"pp {parallel.pp}" in title
    return found


def in_flight(stages_ns: list[tuple[int, int]], rounds: int) -> tuple[list[int], list[int]]:
    """Ends of the steps, and each stage's idle time in the last round, of an engine that always has work."""
    walk = SimpleNamespace(compose=lambda now: ([1], SHAPE), emit=lambda batch, now: [])
    engine: Any = SimpleNamespace(inbox=[], running=[1], waiting=[], assigned=0, walk=walk)
    cost = SimpleNamespace(stages_ns=lambda shapes: stages_ns)
    count = len(stages_ns)
    group = PipelineGroup([engine], cost, count)
    now = group.wake(0, []) or 0
    idle = list(group.idle_ns)
    for step in range(rounds * count):
        if step == (rounds - 1) * count:
            idle = list(group.idle_ns)
        now += group.end_step(now, []) or 0
    return list(group.times.end_ns), [after - before for after, before in zip(group.idle_ns, idle, strict=True)]


def bare(stages_ns: list[tuple[int, int]]) -> StagedExplanation:
    stages: Any = tuple(SimpleNamespace(root=Node("stage", compute / 1e3)) for compute, _ in stages_ns)
    sends = tuple(send / 1e3 for _, send in stages_ns)
    return StagedExplanation(Node("step", sum(map(sum, stages_ns)) / 1e3), stages, sends)


# So far apart that the slowest stage has held up all others after 150 rounds.
STAGE = st.tuples(st.integers(1, 20).map(lambda fifties: 50 * fifties), st.integers(0, 300))


@given(st.lists(STAGE, min_size=2, max_size=6))
def test_a_round_of_a_full_pipeline_takes_what_the_engine_takes(stages_ns: list[tuple[int, int]]) -> None:
    stages_ns[-1] = (stages_ns[-1][0], 0)
    count, found = len(stages_ns), bare(stages_ns)
    ends, idle_ns = in_flight(stages_ns, 150)
    assert ends[-1] - ends[-1 - count] == pytest.approx(1e3 * found.round_us)
    assert ends[0] == pytest.approx(1e3 * found.root.us), "the first step is alone"
    assert idle_ns == [pytest.approx(1e3 * count * bubble, abs=1e-6) for bubble in found.bubbles_us]
    assert min(found.bubbles_us) >= -1e-9


SPLITS = [Parallel(pp=2, dp=8, ep=8), Parallel(pp=3, dp=8, ep=8), Parallel(tp=2, pp=2, dp=4, ep=8)]


@pytest.mark.parametrize("parallel", SPLITS, ids=lambda one: f"tp{one.tp}pp{one.pp}dp{one.dp}")
@pytest.mark.parametrize("batches", [("12x4000",), ("1x1000@0 4x3000", "idle")])
def test_the_leaves_add_up_to_the_step(bundles: Path, parallel: Parallel, batches: tuple[str, ...]) -> None:
    tables = read_bundle(bundles / "H200" / priced.MODEL / "fp8")
    cost = build_pipeline(
        bundle=tables, spec=SPEC, parallel=parallel, hardware=H200, max_num_batched_tokens=2048, capture_sizes=(8, 16)
    )
    shapes = ranks_of([parse_rank(text, priced.CAP) for text in batches], parallel.dp)
    found = explain_stages(cost, shapes, Bounds(SPEC, parallel, H200, priced.meta()), priced.meta(), SPEC, parallel)
    assert 1e3 * found.root.us == pytest.approx(cost.step_ns(shapes), rel=1e-9)
    leaves = [node for _, node in rows(found.root) if not node.children]
    assert sum(node.us for node in leaves) == pytest.approx(found.root.us)
    for stage, sent, (compute_ns, send_ns) in zip(found.stages, found.sends_us, cost.stages_ns(shapes), strict=True):
        assert (1e3 * stage.root.us, 1e3 * sent) == (pytest.approx(compute_ns), pytest.approx(send_ns))
    assert all(node.bound_us is None or node.bound_us <= node.us for node in leaves if node.provenance == "computed")
    ends = [node.name for node in found.root.children]
    assert ends[:3] == ["stage 0", "send to stage 1", "stage 1"] and len(ends) == 2 * parallel.pp - 1


def test_calls_are_those_of_the_stages_layers(bundles: Path) -> None:
    found = staged(bundles, Parallel(pp=2, dp=8, ep=8), "12x4000")
    calls = [
        {node.name: node.calls for _, node in rows(stage.root) if not node.children and node.name != "sparse_mla"}
        for stage in found.stages
    ]
    assert [one["experts"] for one in calls] == [28, 30]
    assert ["embedding" in one for one in calls] == [True, False]
    assert ["lm_head" in one for one in calls] == [False, True]
    kinds = [node.name for node in found.stages[0].root.children if " x " in node.name]
    assert kinds == ["28 x mla-full-moe", "3 x mla-full-dense"]


def test_a_replayed_request_takes_steps_that_are_alone(bundles: Path) -> None:
    """One request, with seven idle ranks: its prefill, then a decode step with 1,001 keys and one with 1,002."""
    parallel = Parallel(pp=3, dp=8, ep=8)
    cluster = Cluster("c", "least_loaded", (Instance(priced.MODEL, "H200", None, parallel, ENGINE),))
    trace = Trace("jsonl", (TraceRequest("a", 0, 1000, 3),))
    (record,) = serving.replay(cluster, trace, bundle_root=bundles).records
    alone_ns = [1e3 * staged(bundles, parallel, text, "idle").root.us for text in ("1x1000@0", "1x1001", "1x1002")]
    assert record.first_token_ns == pytest.approx(alone_ns[0])
    assert record.finish_ns - record.first_token_ns == pytest.approx(sum(alone_ns[1:]))


@pytest.mark.parametrize("name", ["MiniMaxAI/MiniMax-M3", "deepseek-ai/DeepSeek-V3.2-Exp"])
def test_shipped_tables_add_up_by_stage(name: str) -> None:
    """Of families whose ends and layers run other kernels."""
    spec = load_model(name)
    parallel = Parallel(tp=4, pp=2, dp=2, ep=8) if "M3" in name else Parallel(tp=8, pp=4)
    folder = "bf16" if "M3" in name else "fp8"
    bundle = read_bundle(default_bundle_root() / "H200" / name / folder)
    cost = build_pipeline(bundle=bundle, spec=spec, parallel=parallel, hardware=H200, max_num_batched_tokens=4096)
    shapes = [StepShape(((900, 100),), 7, 7 * 5000, 5000, 7 * 2048, 8)] * parallel.dp
    found = explain_stages(cost, shapes, Bounds(spec, parallel, H200, bundle.meta), bundle.meta, spec, parallel)
    leaves = [node for _, node in rows(found.root) if not node.children]
    assert 1e3 * sum(node.us for node in leaves) == pytest.approx(cost.step_ns(shapes))


def test_text_document_and_page(bundles: Path) -> None:
    found = staged(bundles, Parallel(pp=2, dp=8, ep=8), "12x4000", "9x2000")
    text = staged_text(found)
    assert f"2 such steps in flight: one ends every {found.every_us:,.1f} us" in text
    assert "stage 1: busiest rank: 0 of 8" in text
    content = staged_document(found)
    assert content["step_us"] == pytest.approx(found.root.us, abs=0.01)
    busy = [stage["step_us"] + stage["bubble_us"] for stage in content["stages"]]
    assert busy == [pytest.approx(content["step_every_us"], abs=0.01)] * 2
    assert [stage["send_us"] > 0 for stage in content["stages"]] == [True, False]
    shown = staged_page(found, "a <pipeline>")
    assert shown.count('class="flame"') == 3 and "a &lt;pipeline&gt;" in shown
    bubbles = [bubble for bubble in found.bubbles_us if bubble > 0]
    assert shown.count('title="bubble:') == len(bubbles) == 1
