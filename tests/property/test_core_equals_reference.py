"""I8: the core and the specification in tests/reference schedule alike, bit for bit.

Compared are every step's shapes and end, and per request the engine, outcome, times, tokens, preemptions and prefix
hits, over random loads with tight KV, tiny limits, preemptions, shared prefixes and outputs, agentic sessions, 1 to 4
ranks, every router, both policies, and with and without asynchronous scheduling.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import reference.engine
import reference.loop
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated import LinearCost, engine, group, in_sessions, plain_engine, plain_request, request

from serving.core.loop import run
from serving.core.runlog import RunLog, percentile
from serving.core.scheduler import Limits
from serving.policies import known_policies
from serving.routers import create_router, known_routers


@dataclass(frozen=True)
class Case:
    """rows: (arrival_ns, prompt, output, keys, priority). sessions: per row (session, tool_duration_ns), or None."""

    rows: tuple[tuple[int, int, int, tuple[int, ...], int], ...]
    limits: Limits
    num_blocks: int = 20
    block_tokens: int = 4
    caching: bool = True
    ranks: int = 1
    lockstep: bool = False
    router: str = "round_robin"
    policy: str = "fcfs"
    asynchronous: bool = False
    horizon_ns: int | None = None
    max_concurrency: int | None = None
    sessions: tuple[tuple[int, int] | None, ...] = ()

    def of_session(self):
        return [*self.sessions, *[None] * len(self.rows)][: len(self.rows)]


def chain(ids, length):
    """Keys in which an equal key means an equal prefix: base-3 numbers that grow digit by digit."""
    keys, prefix = [], 1
    for identifier in ids[:length]:
        prefix = prefix * 3 + identifier
        keys.append(prefix)
    return tuple(keys)


SOME_NS = st.sampled_from([0, 0, 1, 1_500, 20_000])


@st.composite
def cases(draw):
    block_tokens = draw(st.sampled_from([1, 2, 3, 4, 16]))
    repeated = draw(st.booleans())
    prefixes = st.lists(st.integers(0, 1 if repeated else 2), max_size=12)
    late = draw(st.sampled_from([0, 4_000, 40_000]))
    row = st.tuples(st.integers(0, late), st.integers(1, 60), st.integers(1, 25), prefixes, st.integers(-1, 2))
    rows = draw(st.lists(row, max_size=14))
    chunked = draw(st.integers(0, 3)) > 0
    with_outputs = draw(st.booleans())
    policy = draw(st.sampled_from(known_policies()))
    limits = Limits(
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(1, 40)) if chunked else 85,
        max_model_len_tokens=draw(st.sampled_from([20, 50, 85, 85])),
        long_prefill_threshold_tokens=draw(st.sampled_from([0, 0, 1, 7])),
        chunked_prefill=chunked,
    )
    return Case(
        rows=tuple(
            sorted(
                (at, prompt, out, chain(ids, (prompt + out * with_outputs) // block_tokens), priority)
                for at, prompt, out, ids, priority in rows
            )
        ),
        limits=limits,
        num_blocks=draw(st.integers(2, 60)),
        block_tokens=block_tokens,
        caching=draw(st.integers(0, 3)) > 0,
        ranks=draw(st.integers(1, 4)),
        lockstep=draw(st.booleans()),
        router=draw(st.sampled_from(known_routers())),
        policy=policy,
        asynchronous=draw(st.booleans()),
        horizon_ns=draw(st.sampled_from([None, None, None, 3_000, 20_000])),
        max_concurrency=draw(st.sampled_from([None, None, 1, 2, 3, 5])),
        sessions=tuple(draw(st.lists(st.none() | st.tuples(st.integers(0, 2), SOME_NS), max_size=14))),
    )


class Watching(LinearCost):
    """Keeps the shapes of every step that it prices."""

    def __init__(self):
        object.__setattr__(self, "seen", [])
        super().__init__()

    __slots__ = ("seen",)

    def step_ns(self, shapes):
        self.seen.append(tuple(shapes))
        return LinearCost.step_ns(self, shapes)


def of_core(case):
    cost = Watching()
    options = {
        "num_blocks": case.num_blocks,
        "block_tokens": case.block_tokens,
        "prefix_caching": case.caching,
        "limits": case.limits,
        "cap_tokens": 8,
        "policy": case.policy,
    }
    engines = [engine(index, asynchronous=case.asynchronous, **options) for index in range(case.ranks)]
    members = [engines] if case.lockstep else [[one] for one in engines]
    groups = [group(*some, cost=cost, asynchronous=case.asynchronous) for some in members]
    requests = [request(i, prompt, out, at, keys, rank) for i, (at, prompt, out, keys, rank) in enumerate(case.rows)]
    log = RunLog()
    ends = []
    run(
        groups,
        in_sessions(requests, case.of_session()),
        create_router(case.router),
        log,
        horizon_ns=case.horizon_ns,
        max_concurrency=case.max_concurrency,
        observe=lambda now, _: ends.append(now),
    )
    return [log.records[i] for i in range(len(requests))], cost.seen, ends, log


def of_reference(case):
    cost = Watching()
    options = {
        "num_blocks": case.num_blocks,
        "block_tokens": case.block_tokens,
        "prefix_caching": case.caching,
        "limits": case.limits,
        "cap_tokens": 8,
        "policy": case.policy,
    }
    engines = [plain_engine(index, **options) for index in range(case.ranks)]
    members = [engines] if case.lockstep else [[one] for one in engines]
    groups = [reference.engine.Group(some, cost, case.asynchronous) for some in members]
    rows = enumerate(case.rows)
    requests = [plain_request(i, prompt, out, at, keys, rank) for i, (at, prompt, out, keys, rank) in rows]
    ends = []
    reference.loop.run(
        groups,
        in_sessions(requests, case.of_session()),
        create_router(case.router),
        horizon_ns=case.horizon_ns,
        max_concurrency=case.max_concurrency,
        observe=lambda now, _: ends.append(now),
    )
    return requests, cost.seen, ends


def assert_equal(case):
    records, seen, ends, log = of_core(case)
    requests, expected_seen, expected_ends = of_reference(case)
    assert ends == expected_ends
    assert seen == expected_seen
    gaps = Counter()
    for got, asked in zip(records, requests, strict=True):
        mine = Counter(after - before for before, after in pairwise(asked.token_ns))
        gaps += mine
        expected = {
            "engine_index": asked.engine_index,
            "outcome": asked.outcome,
            "arrival_ns": asked.arrival_ns if asked.arrival_ns >= 0 else None,
            "queued_ns": asked.queued_ns,
            "scheduled_ns": asked.scheduled_ns,
            "first_token_ns": asked.token_ns[0] if asked.token_ns else None,
            "finish_ns": asked.token_ns[-1] if asked.outcome == "finished" else None,
            "emitted_tokens": asked.emitted_tokens,
            "preemptions": asked.preemptions,
            "prefix_hit_tokens": max(0, asked.prefix_hit_tokens),
            "itl_p50_ns": round(percentile(mine, 50)) if mine else None,
            "itl_p99_ns": round(percentile(mine, 99)) if mine else None,
        }
        assert {name: getattr(got, name) for name in expected} == expected, f"request {asked.index}"
    found = Counter()
    for value, count in zip(*log.gaps(), strict=True):
        found[value] += count
    assert +found == gaps


TIGHT = Limits(max_num_seqs=8, max_num_batched_tokens=40, max_model_len_tokens=85)


# Asynchronous scheduling. The seventh request gets no token in a step that ends with a preemption, so the token that
# its next step reads is known when that is composed, and the last request finds its block in the same step.
FOUND_AT_ONCE = Case(
    (
        (0, 1, 1, (), 0), (0, 1, 1, (), 0), (0, 1, 1, (), 2), (0, 7, 5, (), 1), (1, 1, 1, (), 0), (1, 1, 1, (), 0),
        (1, 1, 2, (3, 9, 27), 0), (1, 3, 1, (3, 9, 27), 0),
    ),
    Limits(3, 3, 85), num_blocks=12, block_tokens=1, policy="priority", asynchronous=True,
)  # fmt: skip
# The first two fill blocks of the same content in one step, which takes back what it gave the second: the block of the
# first is the one that is found.
SAME = (3, 9, 27, 81, 243)
SAME_IN_ORDER = Case(
    ((0, 7, 3, SAME, 0), (0, 7, 3, SAME, 1), (1, 2, 3, (), 0)),
    Limits(3, 5, 85), num_blocks=9, block_tokens=2, policy="priority", asynchronous=True,
)  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(cases())
@example(FOUND_AT_ONCE)
@example(SAME_IN_ORDER)
@example(Case(((0, 8, 20, (), 0), (0, 8, 20, (), 0), (0, 8, 20, (), 0)), TIGHT, num_blocks=12, asynchronous=True))
@example(Case(((0, 8, 9, (), 1), (0, 8, 9, (), 0), (5, 8, 9, (), 2)), TIGHT, num_blocks=8, policy="priority"))
def test_core_schedules_as_the_specification(case):
    assert_equal(case)


@settings(deadline=None, max_examples=250)
@given(
    cases(),
    st.integers(8, 40),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([2, 3, 40, 85]),
    st.lists(st.tuples(st.integers(0, 9_000), st.integers(1, 30), st.integers(1, 24)), min_size=6, max_size=14),
)
def test_core_schedules_as_the_specification_under_storms(case, num_blocks, block_tokens, budget, lengths):
    """Many requests at once in a cache for a few of them: preemptions in most steps."""
    keys = [row[3] for row in case.rows] or [()]
    rows = tuple(
        (at, prompt, out, keys[i % len(keys)][: (prompt + out) // block_tokens], i % 3)
        for i, (at, prompt, out) in enumerate(sorted(lengths))
    )
    limits = replace(case.limits, max_num_seqs=8, max_model_len_tokens=85)
    if limits.chunked_prefill:
        limits = replace(limits, max_num_batched_tokens=budget)
    assert_equal(replace(case, rows=rows, num_blocks=num_blocks, block_tokens=block_tokens, limits=limits, ranks=1))
