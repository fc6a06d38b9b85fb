"""Invariants I1-I5 and I7 of the replay loop, over random loads, tight KV, tiny limits, both policies
and 1 to 4 ranks."""

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import LinearCost, engine, group, in_sessions, request

from serving.core.loop import run
from serving.core.runlog import RunLog
from serving.core.scheduler import Limits
from serving.policies import known_policies
from serving.routers import create_router, known_routers


@dataclass(frozen=True)
class Case:
    rows: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    limits: Limits
    num_blocks: int
    block_tokens: int
    caching: bool
    ranks: int
    lockstep: bool
    router: str
    horizon_ns: int | None
    policy: str
    asynchronous: bool


@st.composite
def cases(draw):
    block_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    prefixes = st.lists(st.integers(0, 2), max_size=6)
    rows = draw(
        st.lists(st.tuples(st.integers(0, 4_000), st.integers(1, 60), st.integers(1, 25), prefixes), max_size=14)
    )
    chunked = draw(st.booleans())
    return Case(
        rows=tuple(sorted((at, prompt, out, chain(ids, prompt // block_tokens)) for at, prompt, out, ids in rows)),
        limits=Limits(
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.integers(1, 40)) if chunked else 85,
            max_model_len_tokens=draw(st.sampled_from([20, 50, 85])),
            long_prefill_threshold_tokens=draw(st.sampled_from([0, 0, 1, 7])),
            chunked_prefill=chunked,
        ),
        num_blocks=draw(st.integers(2, 60)),
        block_tokens=block_tokens,
        caching=draw(st.booleans()),
        ranks=draw(st.integers(1, 4)),
        lockstep=draw(st.booleans()),
        router=draw(st.sampled_from(known_routers())),
        horizon_ns=draw(st.sampled_from([None, None, 3_000, 100_000])),
        policy=draw(st.sampled_from(known_policies())),
        asynchronous=draw(st.booleans()),
    )


def chain(ids, length):
    """Keys in which an equal key means an equal prefix: base-3 numbers that grow digit by digit."""
    keys, prefix = [], 1
    for identifier in ids[:length]:
        prefix = prefix * 3 + identifier
        keys.append(prefix)
    return tuple(keys)


def build(case):
    engines = [
        engine(
            index,
            num_blocks=case.num_blocks,
            block_tokens=case.block_tokens,
            prefix_caching=case.caching,
            limits=case.limits,
            cap_tokens=8,
            policy=case.policy,
            asynchronous=case.asynchronous,
        )
        for index in range(case.ranks)
    ]
    members = [engines] if case.lockstep else [[one] for one in engines]
    groups = [group(*some, asynchronous=case.asynchronous) for some in members]
    requests = [request(i, prompt, out, at, keys, i % 3) for i, (at, prompt, out, keys) in enumerate(case.rows)]
    return engines, groups, requests


def play(case, observe=None):
    engines, groups, requests = build(case)
    log = RunLog()
    run(groups, requests, create_router(case.router), log, horizon_ns=case.horizon_ns, observe=observe)
    return engines, requests, log


@settings(deadline=None, max_examples=150)
@given(cases())
def test_requests_are_conserved(case):
    """I1: every request leaves with one outcome, and without a horizon none is left unfinished."""
    engines, requests, log = play(case)
    assert sorted(log.records) == list(range(len(requests)))
    outcomes = [log.records[i].outcome for i in range(len(requests))]
    if case.horizon_ns is None:
        assert "unfinished" not in outcomes
        assert all(one.assigned == one.waiting == one.running == 0 for one in engines)
    for one, outcome in zip(requests, outcomes, strict=True):
        if outcome == "rejected":
            too_long = one.prompt_tokens + one.output_tokens > case.limits.max_model_len_tokens
            assert too_long or one.peak_tokens > (case.num_blocks - 1) * case.block_tokens


@settings(deadline=None, max_examples=150)
@given(cases())
def test_blocks_are_conserved(case):
    """I2: after every step, used + free = total, and used is what the running requests hold."""
    total = case.num_blocks - 1

    def observe(now_ns, stepped):
        for one in stepped.engines:
            blocks = one.scheduler.blocks
            assert blocks.used_blocks + blocks.free_blocks == blocks.total_blocks == total
            assert 0 <= blocks.used_blocks <= total
            counted, own = set(), 0
            for running in one.scheduler.running:
                computed = running.computed_tokens
                if running.decoding:
                    computed = running.base + stepped.composed
                counted.update(map(id, running.chain))
                own += blocks.blocks_for(computed) - len(running.chain)
            assert blocks.used_blocks == len(counted) + own, "used are those that running requests hold"
            assert not any(waiting.chain for _, waiting in one.scheduler.waiting)

    engines, _, _ = play(case, observe)
    if case.horizon_ns is None:
        assert all(one.scheduler.blocks.free_blocks == total for one in engines)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_time_moves_forward_and_limits_hold(case):
    """I3: step ends never go back; the running set and the step respect the limits."""
    ends = []

    class Watching(LinearCost):
        def step_ns(self, shapes):
            for shape in shapes:
                assert shape is None or 0 < shape.tokens <= case.limits.max_num_batched_tokens
                assert shape is None or shape.sampled_sequences <= case.limits.max_num_seqs
            return LinearCost.step_ns(self, shapes)

    def observe(now_ns, stepped):
        ends.append(now_ns)
        assert all(one.running <= case.limits.max_num_seqs for one in stepped.engines)

    _, groups, requests = build(case)
    for one in groups:
        one.cost = Watching()
    run(groups, requests, create_router(case.router), RunLog(), horizon_ns=case.horizon_ns, observe=observe)
    assert ends == sorted(ends)
    assert case.horizon_ns is None or all(end <= case.horizon_ns for end in ends)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_times_are_ordered_and_tokens_complete(case):
    """I4: arrival <= queued <= scheduled < first token <= finish. I5: tokens emitted = output tokens."""
    _, requests, log = play(case)
    for one in requests:
        record = log.records[one.index]
        times = [one.arrival_ns, record.queued_ns, record.scheduled_ns, record.first_token_ns, record.finish_ns]
        reached = [time for time in times if time is not None]
        assert reached == sorted(reached) and times[: len(reached)] == reached
        if record.first_token_ns is not None:
            assert record.scheduled_ns < record.first_token_ns
        if record.outcome == "finished":
            assert None not in times
            assert record.emitted_tokens == one.output_tokens
        else:
            assert record.finish_ns is None
            assert record.emitted_tokens < one.output_tokens
        assert record.prefix_hit_tokens < one.prompt_tokens
        assert case.caching or record.prefix_hit_tokens == 0
    emitted = sum(record.emitted_tokens for record in log.records.values())
    started = sum(record.first_token_ns is not None for record in log.records.values())
    assert sum(log.gaps()[1]) == emitted - started


@settings(deadline=None, max_examples=60)
@given(cases())
def test_equal_input_gives_equal_records(case):
    """I7."""
    assert play(case)[2].records == play(case)[2].records


@settings(deadline=None, max_examples=60)
@given(cases())
def test_work_conserving(case):
    """I6: in every step, each rank that has a request schedules at least one token; a rank without runs a dummy.

    Without asynchronous scheduling, where a rank may wait for its last token in flight; in order of arrival, where a
    request never has to give way to one that was admitted later.
    """
    case = replace(case, asynchronous=False, policy="fcfs")

    @dataclass(frozen=True)
    class Watching(LinearCost):
        ranks: tuple = ()

        def step_ns(self, shapes):
            for shape, rank in zip(shapes, self.ranks, strict=True):
                assert (shape is not None) == bool(rank.scheduler.running or rank.scheduler.waiting)
            return LinearCost.step_ns(self, shapes)

    _, groups, requests = build(case)
    for one in groups:
        one.cost = Watching(ranks=one.engines)
    run(groups, requests, create_router(case.router), RunLog(), horizon_ns=case.horizon_ns)


@settings(deadline=None, max_examples=150)
@given(cases(), st.data())
def test_calls_of_sessions_wait_for_the_calls_before_them(case, data):
    """A call is released exactly its tool's duration after the call before it, never before; the calls of a session
    run one after another; every call is counted, and those behind a rejected one are rejected without having arrived.
    """
    case = replace(case, router=data.draw(st.sampled_from(["session_affinity", case.router])))
    tools = st.sampled_from([0, 1, 900, 50_000])
    count = len(case.rows)
    sessions = data.draw(st.lists(st.tuples(st.integers(0, 3), tools) | st.none(), min_size=count, max_size=count))
    _, groups, requests = build(case)
    log = RunLog()
    run(groups, in_sessions(requests, sessions), create_router(case.router), log, horizon_ns=case.horizon_ns)
    assert sorted(log.records) == list(range(count)), "each once"
    before = {}
    for one, session in zip(requests, sessions, strict=True):
        record = log.records[one.index]
        if session is not None and session[0] in before:
            earlier = before[session[0]]
            if earlier.outcome == "finished":
                assert record.arrival_ns == earlier.finish_ns + session[1]
            else:
                assert (record.arrival_ns, record.queued_ns, record.engine_index) == (None, None, -1)
                assert record.outcome == earlier.outcome
        else:
            assert record.arrival_ns == case.rows[one.index][0]
        for after in (record.queued_ns, record.scheduled_ns, record.first_token_ns, record.finish_ns):
            assert after is None or after >= record.arrival_ns
        if session is not None:
            before[session[0]] = record
    if case.horizon_ns is None:
        assert "unfinished" not in {record.outcome for record in log.records.values()}
    if case.router == "session_affinity":
        for number in range(4):
            homes = {log.records[i].engine_index for i in range(count) if sessions[i] and sessions[i][0] == number}
            assert len(homes - {-1}) <= 1
