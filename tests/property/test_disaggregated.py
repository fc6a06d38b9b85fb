"""Prefill and decode on separate engines: nothing is lost, everything ends, time and links are respected."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import LinearCost, request

from serving.core.blocks import BlockPool
from serving.core.disaggregated import Wire, run_disaggregated
from serving.core.engine import Engine, Group
from serving.core.runlog import RunLog
from serving.core.scheduler import Limits, Scheduler
from serving.policies import load_policy
from serving.routers import create_router, known_routers


@dataclass(frozen=True)
class Side:
    """One side of the cluster."""

    limits: Limits
    num_blocks: int
    ranks: int = 1
    lockstep: bool = False
    asynchronous: bool = False
    policy: str = "fcfs"
    block_tokens: int = 4
    caching: bool = True

    def groups(self, first, *, keeps=False, cost=None):
        engines = [
            Engine(
                first + index,
                Scheduler(
                    self.limits,
                    BlockPool(self.num_blocks, self.block_tokens, self.caching),
                    load_policy(self.policy),
                    attended_cap_tokens=8,
                    asynchronous=self.asynchronous,
                    keeps_finished=keeps,
                ),
            )
            for index in range(self.ranks)
        ]
        members = [engines] if self.lockstep else [[one] for one in engines]
        return [Group(some, cost or LinearCost(), asynchronous=self.asynchronous) for some in members]


@st.composite
def sides(draw, block_tokens, caching):
    chunked = draw(st.booleans())
    return Side(
        Limits(
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.integers(1, 40)) if chunked else 85,
            max_model_len_tokens=draw(st.sampled_from([50, 85])),
            chunked_prefill=chunked,
        ),
        num_blocks=draw(st.integers(4, 60)),
        ranks=draw(st.integers(1, 3)),
        lockstep=draw(st.booleans()),
        asynchronous=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        block_tokens=block_tokens,
        caching=caching,
    )


ROWS = st.lists(
    st.tuples(st.integers(0, 9_000), st.integers(1, 60), st.integers(1, 25), st.integers(0, 2)), max_size=14
)


@st.composite
def cases(draw):
    block_tokens, caching = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    wire = Wire(draw(st.sampled_from([1, 100, 5_000])), 1.0, draw(st.sampled_from([0, 10, 2_000])))
    rows = sorted(draw(ROWS))
    own = draw(sides(block_tokens, caching)), draw(sides(block_tokens, caching))
    return rows, *own, wire, draw(st.sampled_from(known_routers())), draw(st.sampled_from([None, None, 8_000]))


def play(rows, prefill, decode, wire, router, horizon_ns=None, observe=None, costs=(None, None), most=None):
    sources = prefill.groups(0, keeps=True, cost=costs[0])
    targets = decode.groups(prefill.ranks, cost=costs[1])
    requests = []
    for index, (at, prompt, out, family) in enumerate(rows):
        keys = tuple(family * 1_000 + block for block in range(prompt // prefill.block_tokens))
        requests.append(request(index, prompt, out, at, keys, index % 3))
    log = RunLog()
    traffic = run_disaggregated(
        sources, targets, requests, create_router(router), create_router(router), wire, log,
        horizon_ns=horizon_ns, observe=observe, max_concurrency=most,
    )  # fmt: skip
    return [log.records[i] for i in range(len(rows))], sources, targets, traffic, log


@settings(deadline=None, max_examples=400)
@given(cases())
def test_everything_ends_and_nothing_is_lost(case):
    rows, prefill, decode, _, _, horizon_ns = case
    ends = []

    def observe(now_ns, group):
        ends.append(now_ns)
        for one in group.engines:
            blocks = one.scheduler.blocks
            assert 0 <= blocks.used_blocks <= blocks.total_blocks
            assert one.running <= one.scheduler.limits.max_num_seqs
            assert one.scheduler.reserved >= 0

    records, sources, targets, traffic, log = play(*case, observe)
    assert ends == sorted(ends)
    assert len(log.records) == len(rows)
    for record, (at, prompt, out, _) in zip(records, rows, strict=True):
        times = [at, record.queued_ns, record.scheduled_ns, record.first_token_ns, record.finish_ns]
        reached = [time for time in times if time is not None]
        assert reached == sorted(reached)
        if record.outcome == "finished":
            assert record.emitted_tokens == out
            assert record.engine_index >= prefill.ranks, "the decode engine's"
        if record.outcome == "rejected":
            least = min(prefill.limits.max_model_len_tokens, decode.limits.max_model_len_tokens)
            blocks = min(prefill.num_blocks, decode.num_blocks) - 1
            assert prompt + out > least or prompt + out - 1 > blocks * prefill.block_tokens
    if horizon_ns is None:
        assert {one.outcome for one in records} <= {"finished", "rejected"}
        for group in (*sources, *targets):
            for one in group.engines:
                assert one.assigned == one.running == one.waiting == one.scheduler.reserved == 0
                assert one.scheduler.blocks.used_blocks == 0
        assert traffic.transfers >= sum(one.outcome == "finished" for one in records)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_equal_input_gives_equal_records(case):
    first, second = play(*case), play(*case)
    assert first[0] == second[0]
    assert first[3] == second[3]


AMPLE = Side(Limits(8, 1_000, 1_000), 500, caching=False)


class Flat:
    def __init__(self, ns):
        self.ns = ns

    def step_ns(self, shapes):
        return self.ns


def test_first_token_by_closed_form():
    """Prompt step 5,000, transfer of 25 blocks of 40 bytes at 2 GB/s behind 100 ns, then a decode step per token."""
    rows = [(0, 101, 4, 0)]
    records, _, _, traffic, _ = play(
        rows, AMPLE, AMPLE, Wire(40, 2.0, 100), "round_robin", costs=(Flat(5_000), Flat(70))
    )
    sent = 5_000 + 100 + 25 * 40 / 2
    assert records[0].first_token_ns == sent + 70
    assert records[0].finish_ns == sent + 4 * 70
    assert (traffic.transfers, traffic.blocks, traffic.transfer_ns, traffic.link_wait_ns) == (1, 25, 600, 0)


def test_transfers_into_one_engine_follow_each_other():
    """Two prompts that end together on two engines: the second transfer waits for the first."""
    rows = [(0, 101, 2, 0), (0, 101, 2, 0)]
    two = Side(AMPLE.limits, 500, ranks=2, caching=False)
    records, _, _, traffic, _ = play(rows, two, AMPLE, Wire(40, 2.0, 100), "round_robin", costs=(Flat(5_000), Flat(10)))
    assert [one.first_token_ns for one in records] == [5_610, 6_210]
    assert traffic.link_wait_ns == 600
    records, _, _, traffic, _ = play(rows, two, two, Wire(40, 2.0, 100), "round_robin", costs=(Flat(5_000), Flat(10)))
    assert [one.first_token_ns for one in records] == [5_610, 5_610], "other engines, other links"
    assert traffic.link_wait_ns == 0


def test_a_full_decode_engine_keeps_requests_in_its_admission_queue():
    """One place: the second request gets it when the first has finished, and its prompt's blocks stay until then."""
    rows = [(0, 100, 10, 0), (0, 100, 10, 0)]
    one_place = Side(Limits(1, 1_000, 1_000), 500, caching=False)
    held = []

    def observe(now_ns, group):
        if group.engines[0].index == 1:
            held.append(sources_of[0].scheduler.blocks.used_blocks)

    sources_of = []
    original = Side.groups

    class Watched(Side):
        def groups(self, first, **more):
            made = original(self, first, **more)
            if not first:
                sources_of.extend(made[0].engines)
            return made

    watched = Watched(AMPLE.limits, 500, caching=False)
    records, _, _, traffic, _ = play(
        rows, watched, one_place, Wire(40, 2.0, 100), "round_robin", None, observe, (Flat(5_000), Flat(70))
    )
    end_of_first = 5_000 + 600 + 10 * 70
    assert records[0].finish_ns == end_of_first
    assert records[1].first_token_ns == end_of_first + 600 + 70
    assert traffic.longest_queue == 1
    assert traffic.admission_wait_ns == 600 + 10 * 70
    assert held[:10] == [25] * 10 and held[-1] == 0


def test_what_the_decode_engine_has_cached_is_not_sent():
    rows = [(0, 101, 2, 1), (50_000, 101, 2, 1)]
    cached = Side(AMPLE.limits, 500)
    _, _, _, traffic, _ = play(rows, cached, cached, Wire(40, 2.0, 100), "round_robin", costs=(Flat(5_000), Flat(70)))
    assert (traffic.transfers, traffic.blocks) == (2, 25)


@pytest.mark.parametrize(("prompt", "out"), [(900, 200), (10, 2_000)])
def test_what_the_decode_engine_can_never_run_is_rejected_on_arrival(prompt, out):
    records, *_ = play([(7, prompt, out, 0)], AMPLE, AMPLE, Wire(40, 2.0, 100), "round_robin")
    assert (records[0].outcome, records[0].queued_ns, records[0].engine_index) == ("rejected", 7, -1)


@settings(deadline=None, max_examples=100)
@given(cases(), st.integers(1, 4))
def test_no_more_in_flight_than_clients_allow(case, most):
    rows = case[0]
    records, *_ = play(*case, most=most)
    assert len(records) == len(rows)
    spans = [(one.arrival_ns, one.finish_ns) for one in records if one.outcome == "finished"]
    for begin, _ in spans:
        assert sum(other <= begin < end for other, end in spans) <= most
    assert all(one.arrival_ns is None or one.arrival_ns >= at for one, (at, *_) in zip(records, rows, strict=True))
    if case[5] is None:
        assert {one.outcome for one in records} <= {"finished", "rejected"}
