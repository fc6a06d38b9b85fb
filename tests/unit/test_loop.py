"""The event loop against closed forms of a linear cost."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import LinearCost, engine, group, in_sessions, replayed, request

from serving.core.loop import run
from serving.core.runlog import RunLog, percentile, rank_value
from serving.core.scheduler import Limits
from serving.routers import create_router

FLAT = LinearCost(base_ns=1_000, token_ns=0, key_ns=0)
WIDE = Limits(max_num_seqs=64, max_num_batched_tokens=1024, max_model_len_tokens=4096)


def replay(groups, requests, **options):
    return replayed(groups, requests, **options)


def gaps_of(log):
    found = {}
    for value, count in zip(*log.gaps(), strict=True):
        found[value] = found.get(value, 0) + count
    return {value: count for value, count in found.items() if count}


def test_one_request_takes_one_step_per_token():
    (record,), log = replay([group(engine(limits=WIDE), cost=FLAT)], [request(prompt=10, output=4, arrival_ns=50)])
    assert (record.queued_ns, record.scheduled_ns, record.first_token_ns, record.finish_ns) == (50, 50, 1_050, 4_050)
    assert (record.itl_p50_ns, record.itl_p99_ns) == (1_000, 1_000)
    assert gaps_of(log) == {1_000: 3}


def test_the_step_cost_sees_growing_keys():
    cost = LinearCost(base_ns=100, token_ns=0, key_ns=1)
    (record,), _ = replay([group(engine(limits=WIDE), cost=cost)], [request(prompt=10, output=3)])
    prefill, decodes = 100 + 10 * 10 // 2, (100 + 11) + (100 + 12)
    assert (record.first_token_ns, record.finish_ns) == (prefill, prefill + decodes)


def test_an_arrival_during_a_step_is_queued_at_its_end():
    records, _ = replay(
        [group(engine(limits=WIDE), cost=FLAT)],
        [
            request(0, output=3, arrival_ns=0),
            request(1, output=1, arrival_ns=1),
            request(2, output=1, arrival_ns=1_000),
        ],
    )
    assert [record.queued_ns for record in records] == [0, 1_000, 1_000], "arrivals come before a step end of that time"
    assert [record.first_token_ns for record in records] == [1_000, 2_000, 2_000]


def test_simultaneous_arrivals_share_the_first_step():
    records, _ = replay([group(engine(limits=WIDE), cost=FLAT)], [request(i, output=1, arrival_ns=7) for i in range(3)])
    assert [record.finish_ns for record in records] == [1_007] * 3


def test_an_idle_cluster_jumps_to_the_next_arrival():
    records, _ = replay(
        [group(engine(limits=WIDE), cost=FLAT)],
        [request(0, output=1), request(1, output=1, arrival_ns=10**15)],
    )
    assert records[1].first_token_ns == 10**15 + 1_000


def test_ranks_in_lockstep_wait_for_the_slowest_and_independent_ones_do_not():
    cost = LinearCost(base_ns=0, token_ns=10, key_ns=0)
    requests = [request(0, prompt=500, output=2), request(1, prompt=10, output=2)]
    engines = [engine(i, limits=WIDE) for i in range(2)]
    records, _ = replay([group(*engines, cost=cost)], requests)
    assert [record.first_token_ns for record in records] == [5_000, 5_000]
    engines = [engine(i, limits=WIDE) for i in range(2)]
    requests = [request(0, prompt=500, output=2), request(1, prompt=10, output=2)]
    records, _ = replay([group(one, cost=cost) for one in engines], requests)
    assert [record.first_token_ns for record in records] == [5_000, 100]


def test_an_idle_rank_joins_at_the_next_boundary_of_its_group():
    engines = [engine(i, limits=WIDE) for i in range(2)]
    records, _ = replay(
        [group(*engines, cost=FLAT)], [request(0, output=3, arrival_ns=0), request(1, output=1, arrival_ns=300)]
    )
    assert (records[1].queued_ns, records[1].first_token_ns, records[1].engine_index) == (1_000, 2_000, 1)


def test_a_request_that_never_fits_is_rejected_and_the_run_ends():
    small = engine(num_blocks=3, block_tokens=16, limits=WIDE)
    requests = [request(0, prompt=100), request(1, prompt=10), request(2, prompt=5000, arrival_ns=5)]
    records, _ = replay([group(small, cost=FLAT)], requests)
    assert [record.outcome for record in records] == ["rejected", "finished", "rejected"]
    assert (records[0].queued_ns, records[0].scheduled_ns, records[0].finish_ns) == (0, None, None)


def test_the_horizon_leaves_requests_unfinished():
    records, _ = replay(
        [group(engine(limits=WIDE), cost=FLAT)],
        [request(0, output=2), request(1, output=9), request(2, arrival_ns=10_000)],
        horizon_ns=3_500,
    )
    assert [record.outcome for record in records] == ["finished", "unfinished", "unfinished"]
    assert (records[1].emitted_tokens, records[1].finish_ns) == (3, None)
    assert records[2].queued_ns is None


def test_requests_out_of_order_are_refused():
    for late in (5, -1):
        with pytest.raises(ValueError, match="request 1 arrives before"):
            replay([group(engine(limits=WIDE), cost=FLAT)], [request(0, arrival_ns=6), request(1, arrival_ns=late)])


def test_a_cost_without_time_is_refused():
    with pytest.raises(ValueError, match="at least 1 ns"):
        replay([group(engine(limits=WIDE), cost=LinearCost(0, 0, 0))], [request()])


def test_round_robin_and_least_loaded():
    def engines_of(router, requests):
        log = RunLog()
        groups = [group(engine(i, limits=WIDE), cost=FLAT) for i in range(3)]
        run(groups, requests, create_router(router), log)
        return [log.records[i].engine_index for i in range(len(requests))]

    lengths = [9, 1, 1, 1, 1, 1]
    spaced = [request(i, output=length, arrival_ns=1_500 * i) for i, length in enumerate(lengths)]
    assert engines_of("round_robin", spaced) == [0, 1, 2, 0, 1, 2]
    spaced = [request(i, output=length, arrival_ns=1_500 * i) for i, length in enumerate(lengths)]
    assert engines_of("least_loaded", spaced) == [0, 1, 2, 1, 1, 2], "rank 0 is busy for 9 steps; ties rotate"
    burst = [request(i, output=2) for i in range(6)]
    assert sorted(engines_of("least_loaded", burst)) == [0, 0, 1, 1, 2, 2]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.sampled_from([0, 1, 50, 90, 99, 100]))
def test_percentile_is_numpys(values, percent):
    counts = {value: values.count(value) for value in values}
    assert math.isclose(percentile(counts, percent), float(np.percentile(values, percent)), abs_tol=1e-9)
    assert rank_value(sorted(values), percent) == percentile(counts, percent)


def test_asynchronous_scheduling_lets_a_request_wait_one_more_step():
    """The step that begins when it arrives is composed already; it joins the one after."""
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=1024, max_model_len_tokens=4096)
    for asynchronous, expected in ((False, [1_000, 2_000, 3_000]), (True, [1_000, 3_000, 4_000])):
        one = group(engine(limits=limits, asynchronous=asynchronous), cost=FLAT, asynchronous=asynchronous)
        requests = [request(0, output=9), request(1, output=1, arrival_ns=500), request(2, output=1, arrival_ns=1_500)]
        records, _ = replay([one], requests)
        assert [record.first_token_ns for record in records] == expected
        assert records[0].finish_ns == 9_000
        assert [record.queued_ns for record in records] == [0, 1_000, 2_000]


def test_asynchronous_scheduling_frees_a_slot_one_step_late():
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=1024, max_model_len_tokens=4096)
    for asynchronous, expected in ((False, [2_000, 3_000]), (True, [2_000, 3_000])):
        one = group(engine(limits=limits, asynchronous=asynchronous), cost=FLAT, asynchronous=asynchronous)
        records, _ = replay([one], [request(0, output=2), request(1, output=1)])
        assert [record.finish_ns for record in records] == expected, "nothing else runs: the slot is free at once"
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=1024, max_model_len_tokens=4096)
    for asynchronous, expected in ((False, [2_000, 9_000, 3_000]), (True, [2_000, 9_000, 4_000])):
        one = group(engine(limits=limits, asynchronous=asynchronous), cost=FLAT, asynchronous=asynchronous)
        records, _ = replay([one], [request(0, output=2), request(1, output=9), request(2, output=1)])
        assert [record.finish_ns for record in records] == expected


def test_a_call_arrives_its_tools_duration_after_the_call_before_it():
    """Steps of 1,000 ns: two tokens until 2,000, the tool until 2,500, three tokens until 5,500, no tool."""
    own = in_sessions([request(i, output=2 + i % 2) for i in range(3)], [(0, 0), (0, 500), (0, 0)])
    records, _ = replay([group(engine(limits=WIDE), cost=FLAT)], own)
    assert [record.arrival_ns for record in records] == [0, 2_500, 5_500]
    assert [record.finish_ns for record in records] == [2_000, 5_500, 7_500]


def test_a_call_released_as_a_step_ends_finds_the_next_step_begun():
    asked = [request(0, output=1), request(1, output=1), request(2, output=9)]
    records, _ = replay([group(engine(limits=WIDE), cost=FLAT)], in_sessions(asked, [(0, 0), (0, 0), None]))
    assert (records[1].arrival_ns, records[1].queued_ns, records[1].first_token_ns) == (1_000, 2_000, 3_000)


def test_calls_behind_a_rejected_one_are_rejected_and_those_past_the_horizon_unfinished():
    asked = [request(0), request(1, prompt=5_000), request(2), request(3, output=3), request(4)]
    own = in_sessions(asked, [(0, 0), (0, 7), (0, 7), (1, 0), (1, 10_000)])
    records, _ = replay([group(engine(limits=WIDE), cost=FLAT)], own, horizon_ns=9_000)
    assert [record.outcome for record in records] == ["finished", "rejected", "rejected", "finished", "unfinished"]
    assert [record.arrival_ns for record in records] == [0, 3_007, None, 0, 13_000]
    assert (records[4].queued_ns, records[4].engine_index) == (None, -1)


def test_calls_released_at_one_time_arrive_by_index_behind_requests_of_that_time():
    """Request 0 ends at 2,000 and 2 at 1,000; their calls and request 4 arrive at 3,000, round robin over 3 engines."""
    asked = [request(0, output=2), request(1), request(2, output=1), request(3), request(4, arrival_ns=3_000)]
    own = in_sessions(asked, [(0, 0), (0, 1_000), (1, 0), (1, 2_000), None])
    records, _ = replay([group(engine(i, limits=WIDE), cost=FLAT) for i in range(3)], own)
    assert [record.arrival_ns for record in records] == [0, 3_000, 0, 3_000, 3_000]
    assert [record.engine_index for record in records] == [0, 0, 1, 1, 2]


def test_one_request_at_a_time_arrives_when_the_one_before_is_done():
    """Steps of 1,000 ns, one token each: arrivals at the ends of those before, latencies without any waiting."""
    records, _ = replay(
        [group(engine(limits=WIDE), cost=FLAT)],
        [request(0, output=3), request(1, output=2, arrival_ns=10), request(2, output=1, arrival_ns=9_000)],
        max_concurrency=1,
    )
    assert [(one.arrival_ns, one.first_token_ns, one.finish_ns) for one in records] == [
        (0, 1_000, 3_000),
        (3_000, 4_000, 5_000),
        (9_000, 10_000, 10_000),
    ]


def test_rejected_requests_free_their_places_and_the_held_ones_never_arrive():
    records, _ = replay(
        [group(engine(limits=WIDE), cost=FLAT)],
        [request(0, prompt=9_000), request(1, output=4), request(2, output=1)],
        max_concurrency=1,
        horizon_ns=2_500,
    )
    assert [one.outcome for one in records] == ["rejected", "unfinished", "unfinished"]
    assert [one.arrival_ns for one in records] == [0, 0, None]


def test_calls_of_sessions_take_places_too():
    own = in_sessions([request(0, output=2), request(1, output=2), request(2, output=2)], [(0, 0), (0, 500), None])
    records, _ = replay([group(engine(limits=WIDE), cost=FLAT)], own, max_concurrency=1)
    assert [one.arrival_ns for one in records] == [0, 4_000, 2_000], "the other one was there before the second call"
