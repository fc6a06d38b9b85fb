import pytest
from simulated import engine, request

from profiler.core.errors import ConfigError
from serving.core.scheduler import Asked, Limits
from serving.policies import load_policy
from serving.routers import create_router
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
