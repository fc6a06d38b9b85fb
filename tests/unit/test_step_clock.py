"""The core's cost per step, as the number of function calls, and the decode set against sums over its requests."""

import sys

from hypothesis import given
from hypothesis import strategies as st
from simulated import engine, request

from serving.core.decode_set import DecodeSet
from serving.core.scheduler import Limits


def calls(action) -> int:
    """How many functions, those of C included, `action` calls."""
    count = 0

    def watch(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def decoding(requests: int, finished_before: int = 0):
    """An engine in which `requests` requests decode, after others that left their blocks in the prefix cache."""
    limits = Limits(max_num_seqs=2_000, max_num_batched_tokens=100_000, max_model_len_tokens=10_000)
    one = engine(num_blocks=20_000, limits=limits)
    scheduler = one.scheduler
    for index in range(finished_before):
        scheduler.add(request(index, prompt=160, output=1, keys=tuple(range(index * 10, index * 10 + 10))))
    for step in range(2):
        scheduler.compose(step, 0)
        scheduler.end_step(step)
        if not step:
            for index in range(requests):
                scheduler.add(request(finished_before + index, prompt=33 + index % 7, output=500))
    return scheduler


def test_a_decode_step_costs_the_same_at_any_batch_and_with_any_cache() -> None:
    def step(scheduler):
        return calls(lambda: (scheduler.compose(2, 0), scheduler.end_step(2)))

    counts = {step(decoding(requests, cached)) for requests in (7, 70, 700) for cached in (0, 10, 700)}
    assert len(counts) == 1 and counts.pop() < 60


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 30), st.integers(1, 40)), max_size=12),
    st.sampled_from([None, 1, 20, 64]),
    st.sampled_from([1, 3, 16]),
)
def test_aggregates_are_the_sums_over_the_requests(rows, cap, block_tokens) -> None:
    """Rows are (computed tokens at entry, step of entry, steps that it stays)."""
    decodes = DecodeSet(block_tokens, cap)
    members = [(request(i), computed, first, first + stay) for i, (computed, first, stay) in enumerate(rows)]
    for order, (one, *_) in enumerate(members):
        one.order = order
    for step in range(75):
        for one, computed, first, last in members:
            if last == step:
                decodes.leave(one, step)
                assert one.computed_tokens == computed + step - first
            if first == step:
                decodes.enter(one, computed, step)
        decodes.cross(step)
        keys = [computed + step - first + 1 for _, computed, first, last in members if first <= step < last]
        assert decodes.count == len(keys)
        assert decodes.kv_sum_tokens(step) == sum(keys)
        assert decodes.kv_max_tokens(step) == max(keys, default=0)
        assert decodes.kv_capped_sum_tokens(step) == sum(min(key, cap) if cap else key for key in keys)
        assert decodes.opening(step) == sum((key - 1) % block_tokens == 0 for key in keys)


def test_a_prefix_longer_than_the_pool_is_evicted_from_its_end() -> None:
    one = engine(num_blocks=1 + 4)
    blocks = one.scheduler.blocks
    first, second = request(0, prompt=64, keys=(1, 2, 3, 4)), request(1, prompt=64, keys=(1, 2, 3, 4))
    blocks.take(4)
    blocks.grow(first, 4)
    blocks.add_keys(first, 64)
    blocks.release(first, 4, 64)
    blocks.take(1)
    hits, tail = blocks.lookup(second, 64)
    assert ([block.key for block in hits], tail) == ([1, 2, 3], 0)
    assert (blocks.free_blocks, blocks.used_blocks, blocks.revived(hits, tail)) == (3, 1, 3)
