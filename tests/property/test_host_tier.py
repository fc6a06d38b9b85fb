"""KV blocks in host memory: nothing is lost, capacity and time are respected, closed forms."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import LinearCost, request

from serving.core.engine import Engine, Group
from serving.core.host_tier import HostMemory, TieredPool
from serving.core.loop import run
from serving.core.runlog import RunLog
from serving.core.scheduler import Limits, Scheduler
from serving.cost.offload import OffloadCost
from serving.policies import load_policy
from serving.routers import create_router


@dataclass(frozen=True)
class Case:
    rows: tuple
    limits: Limits
    num_blocks: int
    block_tokens: int
    host: HostMemory
    ranks: int
    lockstep: bool
    asynchronous: bool


def play(case, cost=None, observe=None):
    engines = []
    for index in range(case.ranks):
        ahead = 2 if case.asynchronous else 1
        pool = TieredPool(case.num_blocks, case.block_tokens, case.host, ahead)
        policy = load_policy("fcfs")
        scheduler = Scheduler(case.limits, pool, policy, attended_cap_tokens=8, asynchronous=case.asynchronous)
        engines.append(Engine(index, scheduler))
    members = [engines] if case.lockstep else [[one] for one in engines]
    priced = OffloadCost(cost or LinearCost(), case.host)
    groups = [Group(some, priced, asynchronous=case.asynchronous) for some in members]
    requests = [request(i, prompt, out, at, keys) for i, (at, prompt, out, keys) in enumerate(case.rows)]
    log = RunLog()
    run(groups, requests, create_router("round_robin"), log, observe=observe)
    return [log.records[i] for i in range(len(requests))], engines


@st.composite
def cases(draw):
    block_tokens = draw(st.sampled_from([1, 2, 4]))
    row = st.tuples(st.integers(0, 9_000), st.integers(1, 60), st.integers(1, 25), st.integers(0, 2))
    rows = sorted(draw(st.lists(row, max_size=14)))
    return Case(
        tuple(
            (at, prompt, out, tuple(family * 1_000 + i for i in range((prompt + out) // block_tokens)))
            for at, prompt, out, family in rows
        ),
        Limits(draw(st.integers(1, 6)), draw(st.integers(1, 40)), draw(st.sampled_from([50, 85]))),
        draw(st.integers(4, 60)),
        block_tokens,
        HostMemory(draw(st.integers(1, 80)), draw(st.sampled_from([1, 50, 3_000])), draw(st.sampled_from([0, 500]))),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@settings(deadline=None, max_examples=300)
@given(cases())
def test_nothing_is_lost_and_the_host_is_never_too_full(case):
    def observe(now_ns, group):
        for one in group.engines:
            pool = one.scheduler.blocks
            assert pool.used_blocks + pool.free_blocks == pool.total_blocks
            assert 0 <= pool.used_blocks <= pool.total_blocks
            assert pool.use.stored - pool.use.evicted <= case.host.blocks

    records, engines = play(case, observe=observe)
    for record, (_, _, out, _) in zip(records, case.rows, strict=True):
        assert record.outcome in ("finished", "rejected")
        assert record.outcome == "rejected" or record.emitted_tokens == out
    for one in engines:
        use = one.scheduler.blocks.use
        assert one.running == one.waiting == one.scheduler.blocks.used_blocks == 0
        assert use.hit_gpu + use.hit_host <= use.asked
    assert play(case)[0] == records


class Flat:
    def step_ns(self, shapes):
        return 1_000


ROOMY = Limits(8, 1_000, 1_000)


def again(num_blocks, host, gap_ns=1_000_000):
    """A prompt of ten blocks, another that pushes it out of a small cache, and the first one again."""
    first, other = tuple(range(10)), tuple(range(100, 110))
    rows = ((0, 41, 1, first), (gap_ns, 41, 1, other), (2 * gap_ns, 41, 1, first))
    return play(Case(rows, ROOMY, num_blocks, 4, host, 1, False, False), Flat())


def test_what_the_cache_has_lost_comes_from_the_host_and_costs_time():
    records, (engine,) = again(12, HostMemory(100, 30, 500))
    use = engine.scheduler.blocks.use
    assert (use.asked, use.hit_gpu, use.hit_host) == (30, 0, 10)
    assert (use.stored, use.evicted) == (20, 0)
    assert [one.prefix_hit_tokens for one in records] == [0, 0, 40]
    assert [one.first_token_ns - 1_000_000 * i for i, one in enumerate(records)] == [1_000, 1_000, 1_000 + 500 + 300]


def test_what_the_cache_still_has_is_not_loaded():
    records, (engine,) = again(40, HostMemory(100, 30, 500))
    assert (engine.scheduler.blocks.use.hit_gpu, engine.scheduler.blocks.use.hit_host) == (10, 0)
    assert records[2].first_token_ns == 2_001_000


def test_a_small_host_forgets_the_oldest():
    _, (engine,) = again(12, HostMemory(10, 30, 500))
    use = engine.scheduler.blocks.use
    # The other prompt's ten blocks have replaced the first one's by then, and are replaced in their turn.
    assert (use.hit_host, use.evicted) == (0, 20)


def test_a_block_is_loaded_only_once_it_is_written():
    """Ten writes of 50,000 ns begin at the end of the first step, at 1,000: seven are done at 400,000."""
    _, (engine,) = again(12, HostMemory(100, 50_000, 0), gap_ns=200_000)
    assert engine.scheduler.blocks.use.hit_host == 7


@pytest.mark.parametrize("blocks", [0, 3])
def test_loads_of_the_slowest_rank_are_waited_for(blocks):
    from serving.core.shape import StepShape

    cost = OffloadCost(LinearCost(), HostMemory(10, 7, 100))
    shape = StepShape(((4, 0),), 0, 0, 0, 0, 1)
    loaded = [shape, shape._replace(loaded_blocks=blocks), None]
    plain = LinearCost().step_ns([shape, shape, None])
    assert cost.step_ns(loaded) == plain + (100 + 3 * 7 if blocks else 0)
