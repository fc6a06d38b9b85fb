"""Pipelines of the core and of the specification in tests/reference agree, bit for bit; they finish, and lose nothing.

Over random loads with tight KV, tiny limits, preemptions, shared prefixes, 1 to 4 data-parallel ranks in lockstep or
alone, 1 to 5 stages of unequal times, both policies.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import reference.loop
import reference.pipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import LinearCost, engine, group, plain_engine, plain_request, replayed, request

from serving.core.blocks import BlockPool
from serving.core.loop import run
from serving.core.pipeline import PipelineGroup
from serving.core.runlog import RunLog
from serving.core.scheduler import Limits
from serving.core.walk import WalkEngine, WalkScheduler
from serving.policies import load_policy
from serving.routers import create_router

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_core_equals_reference import Case, cases


@dataclass
class Staged:
    """Stage i takes `weights[i]` times the linear cost, each transfer `send_ns` and one nanosecond per token."""

    weights: tuple[int, ...]
    send_ns: int

    def __post_init__(self):
        self.seen = []

    def stages_ns(self, shapes):
        self.seen.append(tuple(shapes))
        whole = LinearCost().step_ns(shapes)
        send = self.send_ns + max(shape.tokens if shape else 1 for shape in shapes)
        last = len(self.weights) - 1
        return [(weight * whole, send if at < last else 0) for at, weight in enumerate(self.weights)]


def options(case):
    return {
        "num_blocks": case.num_blocks,
        "block_tokens": case.block_tokens,
        "prefix_caching": case.caching,
        "limits": case.limits,
    }


def walk_engine(index, case, **more):
    pool = BlockPool(case.num_blocks, case.block_tokens, case.caching)
    scheduler = WalkScheduler(case.limits, pool, load_policy(case.policy), attended_cap_tokens=8, **more)
    return WalkEngine(index, scheduler)


def play(case, cost, observe=None, **more):
    engines = [walk_engine(index, case, pipelined=True) for index in range(case.ranks)]
    members = [engines] if case.lockstep else [[one] for one in engines]
    groups = [PipelineGroup(some, cost, len(cost.weights), **more) for some in members]
    requests = [request(i, prompt, out, at, keys, rank) for i, (at, prompt, out, keys, rank) in enumerate(case.rows)]
    log = RunLog()
    run(groups, requests, create_router(case.router), log, horizon_ns=case.horizon_ns, observe=observe)
    return [log.records[i] for i in range(len(requests))], groups, log


def of_reference(case, cost):
    engines = [
        plain_engine(index, cap_tokens=8, policy=case.policy, pipelined=True, **options(case))
        for index in range(case.ranks)
    ]
    members = [engines] if case.lockstep else [[one] for one in engines]
    groups = [reference.pipeline.PipelineGroup(some, cost, len(cost.weights)) for some in members]
    rows = enumerate(case.rows)
    requests = [plain_request(i, prompt, out, at, keys, rank) for i, (at, prompt, out, keys, rank) in rows]
    ends = []
    route = create_router(case.router)
    reference.loop.run(groups, requests, route, horizon_ns=case.horizon_ns, observe=lambda now, _: ends.append(now))
    return requests, ends


def compared(record):
    return (
        record.engine_index, record.outcome, record.queued_ns, record.scheduled_ns, record.first_token_ns,
        record.finish_ns, record.emitted_tokens, record.preemptions, record.prefix_hit_tokens,
    )  # fmt: skip


def expected(asked):
    return (
        asked.engine_index, asked.outcome, asked.queued_ns, asked.scheduled_ns,
        asked.token_ns[0] if asked.token_ns else None,
        asked.token_ns[-1] if asked.outcome == "finished" else None,
        asked.emitted_tokens, asked.preemptions, max(0, asked.prefix_hit_tokens),
    )  # fmt: skip


def assert_equal(case, weights, send_ns):
    mine, theirs = Staged(weights, send_ns), Staged(weights, send_ns)
    ends = []
    records, _, _ = play(case, mine, lambda now, _: ends.append(now))
    requests, expected_ends = of_reference(case, theirs)
    assert mine.seen == theirs.seen
    assert ends == expected_ends
    assert [compared(one) for one in records] == [expected(one) for one in requests]


WEIGHTS = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)


@settings(deadline=None, max_examples=300)
@given(cases(), WEIGHTS, st.sampled_from([0, 50, 3_000]))
def test_pipelines_schedule_as_the_specification(case, weights, send_ns):
    assert_equal(replace(case, asynchronous=False, sessions=()), weights, send_ns)


@settings(deadline=None, max_examples=150)
@given(
    cases(),
    WEIGHTS,
    st.integers(8, 40),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([2, 3, 40, 85]),
    st.lists(st.tuples(st.integers(0, 9_000), st.integers(1, 30), st.integers(1, 24)), min_size=6, max_size=14),
)
def test_pipelines_schedule_as_the_specification_under_storms(case, weights, num_blocks, block_tokens, budget, lengths):
    keys = [row[3] for row in case.rows] or [()]
    rows = tuple(
        (at, prompt, out, keys[i % len(keys)][: (prompt + out) // block_tokens], i % 3)
        for i, (at, prompt, out) in enumerate(sorted(lengths))
    )
    limits = replace(case.limits, max_num_seqs=8, max_model_len_tokens=85)
    if limits.chunked_prefill:
        limits = replace(limits, max_num_batched_tokens=budget)
    changes = {"num_blocks": num_blocks, "block_tokens": block_tokens, "ranks": 1}
    assert_equal(replace(case, rows=rows, limits=limits, asynchronous=False, sessions=(), **changes), weights, 10)


@settings(deadline=None, max_examples=150)
@given(cases(), WEIGHTS, st.integers(1, 16))
def test_pipelines_finish_and_lose_nothing(case, weights, sync_steps):
    """Every request leaves once, blocks are returned, at most one step per stage is in flight, time moves forward."""
    ends = []

    def observe(now_ns, stepped):
        ends.append(now_ns)
        assert stepped.steps <= stepped.composed <= stepped.steps + len(weights)
        for one in stepped.engines:
            blocks = one.scheduler.blocks
            assert 0 <= blocks.used_blocks <= blocks.total_blocks == case.num_blocks - 1

    records, groups, log = play(case, Staged(weights, 7), observe, sync_steps=sync_steps)
    assert len(log.records) == len(case.rows)
    assert ends == sorted(ends)
    for record, (at, _, out, _, _) in zip(records, case.rows, strict=True):
        times = [at, record.queued_ns, record.scheduled_ns, record.first_token_ns, record.finish_ns]
        reached = [time for time in times if time is not None]
        assert reached == sorted(reached)
        if record.outcome == "finished":
            assert record.emitted_tokens == out
    if case.horizon_ns is None:
        assert {record.outcome for record in records} <= {"finished", "rejected"}
        for one in (engine for stepped in groups for engine in stepped.engines):
            assert one.assigned == one.assigned_tokens == one.running == one.waiting == 0
            assert one.scheduler.blocks.free_blocks == case.num_blocks - 1
        assert all(stepped.steps == stepped.composed for stepped in groups)


@settings(deadline=None, max_examples=100)
@given(cases())
def test_a_pipeline_of_one_stage_is_a_plain_engine(case):
    case = replace(case, asynchronous=False, sessions=(), lockstep=False, router="round_robin")
    records, _, _ = play(case, Staged((1,), 0))
    engines = [engine(index, cap_tokens=8, policy=case.policy, **options(case)) for index in range(case.ranks)]
    requests = [request(i, prompt, out, at, keys, rank) for i, (at, prompt, out, keys, rank) in enumerate(case.rows)]
    plain, _ = replayed([group(one) for one in engines], requests, horizon_ns=case.horizon_ns)
    assert [compared(one) for one in records] == [compared(one) for one in plain]


def test_two_equal_stages_halve_the_time_between_the_tokens_of_two_batches():
    """Closed form: two requests that do not fit one step together alternate, a step leaves every stage time."""
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=10, max_model_len_tokens=1000)
    case = Case(((0, 10, 5, (), 0), (0, 10, 5, (), 0)), limits, num_blocks=100, caching=False)

    class Flat:
        weights = (1, 1)

        def stages_ns(self, shapes):
            return [(1_000, 100), (1_000, 0)]

    records, groups, _ = play(case, Flat())
    # The first leaves the second stage at 2,100; the other enters the first stage at 1,000 and ends 1,000 later.
    assert [one.first_token_ns for one in records] == [2_100, 3_100]
    assert [one.finish_ns for one in records] == [2_100 + 4 * 2_100, 3_100 + 4 * 2_100]
    assert groups[0].steps == 10
