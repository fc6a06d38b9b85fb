"""Speculative decoding of the core and of the specification in tests/reference agree, bit for bit; nothing is lost.

Over random loads with tight KV, tiny limits, preemptions, shared prefixes, 1 to 4 ranks, all ways to count a
verification, and any acceptance.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import reference.loop
import reference.pipeline
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated import LinearCost, plain_engine, plain_request, request

from serving.core.acceptance import Acceptance, uniform
from serving.core.blocks import BlockPool
from serving.core.loop import run
from serving.core.pipeline import PipelineGroup
from serving.core.runlog import RunLog
from serving.core.scheduler import Limits
from serving.core.walk import Speculation, WalkEngine, WalkScheduler
from serving.policies import load_policy
from serving.routers import create_router

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_core_equals_reference import Case, cases
from test_pipeline_equals_reference import Staged, compared, expected, options, play


@dataclass(frozen=True)
class Drafts:
    tokens: int
    acceptance: Acceptance
    verify_as: str


@st.composite
def drafts(draw):
    tokens = draw(st.integers(1, 5))
    rates = st.lists(st.floats(0, 1), min_size=tokens, max_size=tokens).map(
        lambda row: tuple(sorted(row, reverse=True))
    )
    ends = draw(st.lists(st.integers(1, 80), min_size=1, max_size=3, unique=True).map(sorted))
    acceptance = Acceptance(tuple(ends), tuple(draw(rates) for _ in ends), draw(st.integers(0, 3)))
    return Drafts(tokens, acceptance, draw(st.sampled_from(["table", "prefill", "rows"])))


def of_core(case, drafts, cost, observe=None):
    speculation = Speculation(drafts.tokens, drafts.acceptance, drafts.verify_as)
    engines = []
    for index in range(case.ranks):
        pool = BlockPool(case.num_blocks, case.block_tokens, case.caching)
        policy = load_policy(case.policy)
        scheduler = WalkScheduler(case.limits, pool, policy, attended_cap_tokens=8, speculation=speculation)
        engines.append(WalkEngine(index, scheduler))
    members = [engines] if case.lockstep else [[one] for one in engines]
    groups = [PipelineGroup(some, cost, 1) for some in members]
    requests = [request(i, prompt, out, at, keys, rank) for i, (at, prompt, out, keys, rank) in enumerate(case.rows)]
    log = RunLog(keep_itl=True)
    run(groups, requests, create_router(case.router), log, horizon_ns=case.horizon_ns, observe=observe)
    return [log.records[i] for i in range(len(requests))], engines, log


def of_reference(case, drafts, cost):
    engines = [
        plain_engine(
            index, cap_tokens=8, policy=case.policy, speculative_tokens=drafts.tokens, acceptance=drafts.acceptance,
            verify_as=drafts.verify_as, **options(case),
        )
        for index in range(case.ranks)
    ]  # fmt: skip
    members = [engines] if case.lockstep else [[one] for one in engines]
    groups = [reference.pipeline.PipelineGroup(some, cost, 1) for some in members]
    rows = enumerate(case.rows)
    requests = [plain_request(i, prompt, out, at, keys, rank) for i, (at, prompt, out, keys, rank) in rows]
    reference.loop.run(groups, requests, create_router(case.router), horizon_ns=case.horizon_ns)
    return requests


def assert_equal(case, drafts):
    mine, theirs = Staged((1,), 0), Staged((1,), 0)
    records, _, _ = of_core(case, drafts, mine)
    requests = of_reference(case, drafts, theirs)
    assert mine.seen == theirs.seen
    assert [compared(one) for one in records] == [expected(one) for one in requests]


TAKEN_BACK = Case(
    ((0, 1, 7, (), 1), (1, 1, 2, (), 0)), Limits(8, 85, 85), num_blocks=12, block_tokens=2, policy="priority"
)
ALWAYS = Drafts(4, Acceptance((1,), ((1.0,) * 4,)), "rows")


@settings(deadline=None, max_examples=300)
@given(cases(), drafts())
@example(TAKEN_BACK, ALWAYS)
@example(replace(TAKEN_BACK, rows=((0, 1, 7, (1, 2, 3, 4), 1), (1, 1, 2, (), 0))), ALWAYS)
def test_drafts_are_scheduled_as_in_the_specification(case, drafts):
    assert_equal(replace(case, asynchronous=False, sessions=()), drafts)


@settings(deadline=None, max_examples=200)
@given(
    cases(),
    drafts(),
    st.integers(10, 40),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([2, 3, 40, 85]),
    st.lists(st.tuples(st.integers(0, 9_000), st.integers(1, 30), st.integers(1, 24)), min_size=6, max_size=14),
)
def test_drafts_are_scheduled_as_in_the_specification_under_storms(
    case, drafts, num_blocks, block_tokens, budget, lengths
):
    keys = [row[3] for row in case.rows] or [()]
    rows = tuple(
        (at, prompt, out, keys[i % len(keys)][: (prompt + out) // block_tokens], i % 3)
        for i, (at, prompt, out) in enumerate(sorted(lengths))
    )
    limits = replace(case.limits, max_num_seqs=8, max_model_len_tokens=85)
    if limits.chunked_prefill:
        limits = replace(limits, max_num_batched_tokens=budget)
    changes = {"num_blocks": num_blocks, "block_tokens": block_tokens, "ranks": 1}
    assert_equal(replace(case, rows=rows, limits=limits, asynchronous=False, sessions=(), **changes), drafts)


@settings(deadline=None, max_examples=150)
@given(cases(), drafts())
def test_drafts_lose_nothing(case, drafts):
    """Every request leaves with all its tokens, blocks come back, and limits hold."""
    case = replace(case, asynchronous=False, sessions=(), horizon_ns=None)
    cost = Staged((1,), 0)
    records, engines, log = of_core(case, drafts, cost)
    assert {one.outcome for one in records} <= {"finished", "rejected"}
    for record, (_, _, out, _, _) in zip(records, case.rows, strict=True):
        if record.outcome == "finished":
            assert record.emitted_tokens == out == len(log.itl_ns[record.index]) + 1
    for one in engines:
        assert one.assigned == one.running == one.waiting == 0
        assert one.scheduler.blocks.free_blocks == case.num_blocks - 1
    for shapes in cost.seen:
        for shape in shapes:
            assert shape is None or 0 < shape.tokens <= case.limits.max_num_batched_tokens


@settings(deadline=None, max_examples=60)
@given(cases(), st.sampled_from(["table", "prefill", "rows"]))
def test_drafts_that_are_never_accepted_emit_one_token_per_step(case, verify_as):
    """Same emitted tokens per step as without drafts, where blocks and budget are ample."""
    limits = replace(case.limits, max_num_seqs=8, max_num_batched_tokens=1_000, long_prefill_threshold_tokens=0)
    limits = replace(limits, max_model_len_tokens=200, chunked_prefill=True)
    case = replace(case, limits=limits, num_blocks=3_000, asynchronous=False, sessions=(), horizon_ns=None, ranks=1)

    class Flat:
        weights = (1,)

        def stages_ns(self, shapes):
            return [(1_000, 0)]

    never = Drafts(3, Acceptance((1,), ((0.0, 0.0, 0.0),)), verify_as)
    with_drafts, _, _ = of_core(case, never, Flat())
    without, _, _ = play(case, Flat())
    assert [one.finish_ns for one in with_drafts] == [one.finish_ns for one in without]


def test_mean_acceptance_length_of_a_public_table():
    """1 + rates by position add up to the mean accepted length: 2.99 for three drafts (GLM-5.2, InferenceX)."""
    lengths = (1.84, 2.50, 2.99)
    rates = tuple(after - before for before, after in zip((1.0, *lengths), lengths, strict=False))
    acceptance = Acceptance((1 << 30,), (rates,), seed=1)
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=8192, max_model_len_tokens=4096)
    case = Case(tuple((0, 100, 2_000, (), 0) for _ in range(20)), limits, num_blocks=20_000, caching=False)
    records, engines, _ = of_core(case, Drafts(3, acceptance, "rows"), Staged((1,), 0))
    seen = engines[0].walk.verifications
    mean = 1 + sum(count * accepted for accepted, count in enumerate(seen)) / sum(seen)
    assert sum(seen) > 10_000
    assert mean == pytest.approx(2.99, abs=0.03)
    assert all(one.emitted_tokens == 2_000 for one in records)


def test_draws_are_uniform_and_depend_on_every_number():
    drawn = [uniform(seed, index, emitted) for seed in range(3) for index in range(40) for emitted in range(50)]
    assert len(set(drawn)) == len(drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.01)
    for low in range(10):
        assert sum(low <= 10 * one < low + 1 for one in drawn) == pytest.approx(600, abs=90)


def test_a_verification_in_the_three_ways_to_count_it():
    """One request, prompt 10, all drafts accepted: the second step verifies three drafts behind ten tokens."""
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=100, max_model_len_tokens=100)
    case = Case(((0, 10, 9, (), 0),), limits, num_blocks=50, caching=False)
    always = Acceptance((1,), ((1.0, 1.0, 1.0),))
    for way, prefills, decodes in (
        ("table", (), (1, 14, 14, 8, 4, 4)),
        ("prefill", ((4, 10),), (0, 0, 0, 0, 4, 1)),
        ("rows", (), (4, 11 + 12 + 13 + 14, 14, 32, 4, 1)),
    ):
        cost = Staged((1,), 0)
        records, _, _ = of_core(case, Drafts(3, always, way), cost)
        assert records[0].emitted_tokens == 9
        assert len(cost.seen) == 3, "one token, then four, then four"
        shape = cost.seen[1][0]
        assert (shape.prefills, shape[1:7]) == (prefills, decodes)
        assert shape.tokens == 4
        assert shape.drafted[:5] == ((), 1, 15, 15, 8)


@pytest.mark.parametrize("keys", [(), (1, 2, 3, 4)])
def test_accepted_drafts_stay_findable_when_the_step_takes_back_what_it_gave(keys):
    """The first one computed 6 of its 7 tokens, is given the last one, and then loses its blocks to the second."""
    case = replace(TAKEN_BACK, rows=((0, 1, 7, keys, 1), (1, 1, 2, (), 0)))
    cost = Staged((1,), 0)
    records, _, _ = of_core(case, ALWAYS, cost)
    assert [one.preemptions for one in records] == [1, 0]
    assert cost.seen[-1][0][:4] == ((), 1, 7, 7), "one token behind the three full blocks that it had computed"


def test_linear_cost_is_the_plain_one():
    assert Staged((1,), 0).stages_ns([None]) == [(LinearCost().step_ns([None]), 0)]
