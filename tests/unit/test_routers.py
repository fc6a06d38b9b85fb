from collections import Counter

import pytest
from simulated import engine, group, in_sessions, replayed, request

from profiler.core.errors import ConfigError
from serving.core.scheduler import Asked, Limits
from serving.policies import load_policy
from serving.routers import create_router, known_routers
from serving.routers.least_loaded import score


def test_score_grows_with_waiting_requests_once_the_cache_is_half_full():
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=1024, max_model_len_tokens=4096)
    one = engine(num_blocks=1 + 12, block_tokens=16, limits=limits)
    for index in range(5):
        one.submit(request(index, prompt=48))
    one.take_in(0, [])
    one.scheduler.compose(0, 0)
    assert (one.running, one.waiting, one.kv_usage) == (3, 2, 0.75)
    assert score(one) == 5 + 6 * 2 * 0.25


def test_score_counts_requests_that_are_still_on_their_way():
    one = engine()
    one.submit(request())
    assert score(one) == 1


def test_policies_see_prompt_lengths_and_never_those_of_outputs():
    """I11: the length of an output is not known when a request is queued."""
    assert not any("output" in name for name in Asked._fields)
    first, second = Asked(0, 5, 100, 3), Asked(1, 9, 10, -1)
    assert [load_policy(name).rank(first) < load_policy(name).rank(second) for name in ("fcfs", "priority")] == [
        True,
        False,
    ]


def test_unknown_names_propose_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'least_loaded'"):
        create_router("least-loaded")
    with pytest.raises(ConfigError, match="did you mean 'fcfs'"):
        load_policy("fcsf")


def test_each_router_is_a_file():
    assert known_routers() == ("least_loaded", "power_of_two", "prefix_aware", "round_robin", "session_affinity")


def filled(keys, prompt=64):
    """An engine whose cache holds the blocks `keys`, with nothing in flight."""
    one = engine(num_blocks=40, block_tokens=16)
    asked = request(99, prompt=prompt, output=1, keys=keys)
    one.submit(asked)
    one.take_in(0, [])
    one.scheduler.compose(0, 0)
    one.scheduler.end_step(0)
    one.assigned, one.assigned_tokens = 0, 0
    return one


def test_prefix_aware_goes_where_the_longest_prefix_is_cached():
    engines = [filled((1, 2)), filled((1, 2, 3, 4)), filled((7, 8, 9))]
    asked = request(0, prompt=70, keys=(1, 2, 3, 4))
    assert [one.cached_tokens(asked) for one in engines] == [32, 64, 0]
    assert create_router("prefix_aware")(engines, asked) == 1
    assert engines[1].cached_tokens(request(0, prompt=64, keys=(1, 2, 3, 4))) == 48, "the last token is computed"


def test_prefix_aware_leaves_the_cached_engine_once_it_has_more_in_flight_than_the_prefix_saves():
    engines = [filled((1, 2, 3, 4)), filled(())]
    asked = request(0, prompt=70, keys=(1, 2, 3, 4))
    for in_flight, expected in ((63, 0), (65, 1)):
        engines[0].assigned_tokens = in_flight
        assert create_router("prefix_aware")(engines, asked) == expected


def test_prefix_aware_without_contents_balances_prompt_tokens():
    engines = [engine(i) for i in range(2)]
    route = create_router("prefix_aware")
    chosen = []
    for index, prompt in enumerate((100, 30, 30, 30, 5)):
        chosen.append(route(engines, request(index, prompt=prompt)))
        engines[chosen[-1]].submit(request(index, prompt=prompt))
    assert chosen == [0, 1, 1, 1, 1]


def test_power_of_two_never_takes_the_most_loaded_and_draws_from_the_seed():
    engines = [engine(i) for i in range(4)]
    for index in range(9):
        engines[2].submit(request(index))
    draws = [[create_router("power_of_two", seed)(engines, request()) for _ in range(1)] for seed in range(40)]
    assert {position for (position,) in draws} == {0, 1, 3}
    routes = [create_router("power_of_two", 5), create_router("power_of_two", 5), create_router("power_of_two", 6)]
    first, same, other = ([route(engines, request()) for _ in range(50)] for route in routes)
    assert first == same != other
    assert create_router("power_of_two")(engines[:1], request()) == 0


def test_power_of_two_is_uniform_over_equal_engines():
    """4,000 draws over 4 equal engines: each is first of its pair with 1/4; six standard deviations are 164."""
    route = create_router("power_of_two", 1)
    engines = [engine(i) for i in range(4)]
    counts = Counter(route(engines, request()) for _ in range(4_000))
    assert all(abs(counts[position] - 1_000) < 165 for position in range(4))


def test_session_affinity_keeps_the_calls_of_a_session_together():
    asked = [request(i, output=1 + i % 4, arrival_ns=i // 3, keys=()) for i in range(12)]
    own = in_sessions(asked, [(i % 3, 10) for i in range(12)])
    records, _ = replayed([group(engine(i)) for i in range(3)], own, "session_affinity")
    homes = [{records[i].engine_index for i in range(session, 12, 3)} for session in range(3)]
    assert [len(home) for home in homes] == [1, 1, 1]
    assert set.union(*homes) == {0, 1, 2}, "first calls spread as least_loaded does"


def test_session_affinity_ignores_load_once_a_session_has_an_engine():
    engines = [engine(i) for i in range(3)]
    route = create_router("session_affinity")
    asked = [request(i) for i in range(6)]
    for one, session in zip(asked, ("a", "b", "a", None, "a", "b"), strict=True):
        one.session = session
    first = route(engines, asked[0])
    for one in asked:
        engines[first].submit(one)
    other = route(engines, asked[1])
    assert other != first
    assert [route(engines, asked[i]) for i in (2, 4, 5)] == [first, first, other]
    assert route(engines, asked[3]) != first, "no session: the least loaded"


def test_a_session_moves_between_engines_under_another_router():
    own = in_sessions([request(i, arrival_ns=0) for i in range(4)], [(0, 10)] * 4)
    records, _ = replayed([group(engine(i)) for i in range(2)], own, "round_robin")
    assert [record.engine_index for record in records] == [0, 1, 0, 1]
