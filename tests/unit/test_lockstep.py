"""Data-parallel groups: the slowest rank, padding, waves and their sync interval, and what they cost to simulate."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.engine import Group
from serving.core.loop import run
from serving.core.runlog import RunLog
from serving.core.shape import StepShape
from serving.routers import create_router


@dataclass
class Seen:
    """100 ns a step; keeps the shapes."""

    step: int = 100
    shapes: list[tuple[StepShape | None, ...]] = field(default_factory=list)

    def step_ns(self, shapes: Sequence[StepShape | None]) -> int:
        self.shapes.append(tuple(shapes))
        return self.step


def lockstep(ranks: int, cost: Seen, *, sync_steps: int, asynchronous: bool = False) -> Group:
    engines = [simulated.engine(rank, asynchronous=asynchronous) for rank in range(ranks)]
    return Group(engines, cost, asynchronous=asynchronous, sync_steps=sync_steps)


def replayed(group: Group, *requests, router: str = "round_robin"):
    log = RunLog()
    run([group], requests, create_router(router), log)
    return [log.records[i] for i in range(len(requests))]


@pytest.mark.parametrize(
    ("output", "dummies"),
    [(1, 0), (2, 15), (16, 1), (17, 0), (18, 15), (33, 0)],
)
def test_a_wave_ends_after_its_first_step_or_a_whole_interval_later(output: int, dummies: int) -> None:
    """One request of `output` steps: agreements after steps 1, 17, 33; at most 15 dummy steps follow."""
    cost = Seen()
    group = lockstep(2, cost, sync_steps=16)
    (record,) = replayed(group, simulated.request(prompt=4, output=output))
    assert group.dummy_steps == dummies
    assert group.steps == output + dummies
    assert [any(shapes) for shapes in cost.shapes] == [True] * output + [False] * dummies
    assert record.finish_ns == 100 * output


def test_a_request_that_arrives_in_a_dummy_step_starts_after_it() -> None:
    cost = Seen()
    group = lockstep(2, cost, sync_steps=16)
    first, second = replayed(
        group, simulated.request(0, prompt=4, output=2), simulated.request(1, prompt=4, output=2, arrival_ns=350)
    )
    assert first.finish_ns == 200
    assert second.first_token_ns == 500  # the dummy step from 300 to 400 ends, then its own
    idle = replayed(
        lockstep(2, Seen(), sync_steps=1),
        simulated.request(0, prompt=4, output=2),
        simulated.request(1, prompt=4, output=2, arrival_ns=350),
    )
    assert idle[1].first_token_ns == 450


def test_a_new_wave_counts_from_its_own_first_step() -> None:
    group = lockstep(2, Seen(), sync_steps=16)
    replayed(
        group, simulated.request(0, prompt=4, output=2), simulated.request(1, prompt=4, output=1, arrival_ns=100_000)
    )
    assert group.dummy_steps == 15  # of the first wave; the second ends with its first step


def test_a_single_engine_runs_no_dummy_steps() -> None:
    group = lockstep(1, Seen(), sync_steps=16)
    replayed(group, simulated.request(prompt=4, output=2))
    assert (group.dummy_steps, group.steps) == (0, 2)


@settings(deadline=None, max_examples=30)
@given(
    ranks=st.sampled_from([2, 3, 8]),
    sync_steps=st.sampled_from([1, 2, 16]),
    asynchronous=st.booleans(),
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(0, 3000)), min_size=1, max_size=20),
)
def test_every_request_completes_once_whatever_the_interval(
    ranks: int, sync_steps: int, asynchronous: bool, sizes: list[tuple[int, int, int]]
) -> None:
    arrivals = sorted(size[2] for size in sizes)
    requests = [
        simulated.request(i, prompt=p, output=o, arrival_ns=at)
        for i, ((p, o, _), at) in enumerate(zip(sizes, arrivals, strict=True))
    ]
    group = lockstep(ranks, Seen(), sync_steps=sync_steps, asynchronous=asynchronous)
    records = replayed(group, *requests, router="least_loaded")
    assert all(record.outcome == "finished" for record in records)
    assert all(r.finish_ns >= r.first_token_ns > at for r, at in zip(records, arrivals, strict=True))
    assert all(engine.assigned == 0 for engine in group.engines)


def test_simulating_a_rank_step_costs_the_same_with_64_ranks_as_with_8() -> None:
    """Within a factor of three: the clock of a shared machine is no better."""

    def seconds_per_rank_step(ranks: int) -> float:
        group = lockstep(ranks, Seen(), sync_steps=16)
        requests = [simulated.request(i, prompt=8, output=300) for i in range(2 * ranks)]
        begin = time.process_time()
        assert all(record.outcome == "finished" for record in replayed(group, *requests))
        return (time.process_time() - begin) / (group.steps * ranks)

    seconds_per_rank_step(2)
    few = min(seconds_per_rank_step(8) for _ in range(3))
    many = min(seconds_per_rank_step(64) for _ in range(2))
    assert many < 3 * few
