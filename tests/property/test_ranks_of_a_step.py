"""Many ranks of a step: the price that looks everything up once is that of every rank by itself, bit for bit."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.core.bundle import read_bundle
from profiler.core.hardware import load_hardware
from profiler.core.paths import default_bundle_root
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.core.shape import StepShape
from serving.cost import TableCost, build_cost, default_capture_sizes
from serving.cost.build import Stage
from serving.cost.lines import nanoseconds
from serving.cost.step import part_of

VARIANTS = {"deepseek-ai/DeepSeek-V3.2-Exp": "fp8", "MiniMaxAI/MiniMax-M3": "bf16"}


@cache
def cost(model: str, *, last_layers: int | None = None, extrapolate: bool = False) -> TableCost:
    spec = load_model(model)
    options: dict[str, Any] = {}
    if last_layers is not None:
        options["stage"] = Stage(replace(spec, layers=spec.layers[-last_layers:]), False, True)
    return build_cost(
        bundle=read_bundle(default_bundle_root() / "H200" / model / VARIANTS[model]),
        spec=spec,
        parallel=Parallel(dp=8, ep=8),
        hardware=load_hardware("H200"),
        max_num_batched_tokens=2048,
        capture_sizes=default_capture_sizes(256),
        allow_extrapolation=extrapolate,
        captured_keys=81_920,
        **options,
    )


@st.composite
def shapes(draw: st.DrawFn, longest: int = 60_000) -> StepShape | None:
    """A rank's batch: most are idle or one decode, as in a group that is not full."""
    prefills = draw(st.lists(st.tuples(st.integers(1, 900), st.integers(0, longest)), max_size=2))
    kind = draw(st.sampled_from(["idle", "one", "one", "some", "mixed"]))
    if kind == "idle":
        return None
    if kind != "mixed":
        prefills = []
    keys = draw(st.lists(st.integers(1, longest), min_size=1, max_size=1 if kind == "one" else 40))
    if kind == "mixed" and draw(st.booleans()):
        keys = []
    if not keys and not prefills:
        return None
    return StepShape(
        tuple(prefills), len(keys), sum(keys), max(keys, default=0), sum(min(k, 2048) for k in keys),
        len(keys) + len(prefills),
    )  # fmt: skip


def slow_ns(cost: TableCost, group: list[StepShape | None]) -> int:
    return max(cost.ranks_ns(group)) + sum(map(nanoseconds, cost.group_lines(group, cost.computed_tokens(group))))


@pytest.mark.parametrize("model", VARIANTS)
@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(shapes(), min_size=8, max_size=8), min_size=1, max_size=3))
def test_the_slowest_of_all_ranks(model: str, steps: list[list[StepShape | None]]) -> None:
    one = cost(model)
    for group in [*steps, *steps]:
        assert one.step_ns(group) == slow_ns(one, group)


@pytest.mark.parametrize("model", VARIANTS)
@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(shapes(), min_size=8, max_size=8), min_size=1, max_size=3), st.booleans())
def test_a_part_of_the_model_that_shares_its_kernels_costs_the_same(
    model: str, steps: list[list[StepShape | None]], whole_first: bool
) -> None:
    """A step may be priced for the part alone, and in any order."""
    whole, part = cost(model), cost(model, last_layers=57)
    shared = part_of(whole, part)
    for group in steps:
        if whole_first:
            assert whole.step_ns(group) == slow_ns(whole, group)
        assert shared.step_ns(group) == slow_ns(part, group)


@settings(deadline=None, max_examples=30)
@given(st.lists(shapes(longest=600_000), min_size=8, max_size=8))
def test_lookups_beyond_the_tables_count_for_every_rank(group: list[StepShape | None]) -> None:
    one = cost("deepseek-ai/DeepSeek-V3.2-Exp", extrapolate=True)

    def counted(price: Any) -> tuple[int, Any]:
        before = one.extrapolated.copy()
        return price(), one.extrapolated - before

    slow_ns(one, group)  # what is kept is kept
    slow = counted(lambda: slow_ns(one, group))
    assert counted(lambda: one.step_ns(group)) == slow
