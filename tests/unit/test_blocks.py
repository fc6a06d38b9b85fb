import pytest
from reference.blocks import BlockManager
from simulated import plain_request as request


def test_the_null_block_is_never_handed_out():
    manager = BlockManager(num_blocks=4, block_tokens=16, prefix_caching=False)
    assert (manager.total_blocks, manager.free_blocks, manager.used_blocks) == (3, 3, 0)
    holder = request()
    assert manager.allocate(holder, 48)
    assert sorted(holder.blocks) == [1, 2, 3]
    assert not manager.allocate(request(1), 1)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_are_whole(tokens, blocks):
    manager = BlockManager(8, 16, prefix_caching=False)
    holder = request()
    assert manager.allocate(holder, tokens)
    assert len(holder.blocks) == blocks == manager.used_blocks


def test_growth_takes_a_block_only_at_a_boundary():
    manager = BlockManager(8, 16, prefix_caching=False)
    holder = request(prompt=15)
    manager.allocate(holder, 15)
    for computed, held in [(15, 1), (16, 2), (17, 2)]:
        holder.computed_tokens = computed
        manager.allocate(holder, 1)
        assert len(holder.blocks) == held


def test_a_refused_allocation_changes_nothing():
    manager = BlockManager(4, 16, prefix_caching=True)
    first = request(0, prompt=32, keys=(1, 2))
    manager.allocate(first, 32)
    manager.release(first)
    second = request(1, prompt=40, keys=(1, 2))
    cached = manager.cached_prefix(second)
    assert len(cached) == 2
    assert not manager.allocate(second, 8, cached, reserve_tokens=16 * 4)
    assert second.blocks == []
    assert manager.free_blocks == 3
    assert manager.cached_prefix(second) == cached


def test_the_reserve_must_be_free_but_is_not_taken():
    manager = BlockManager(5, 16, prefix_caching=False)
    assert not manager.allocate(request(0, prompt=80), 16, reserve_tokens=80)
    holder = request(1, prompt=64)
    assert manager.allocate(holder, 16, reserve_tokens=64)
    assert manager.used_blocks == 1


def test_cached_blocks_that_are_free_count_as_needed():
    """A hit on a free block removes it from the free queue, so it does not make room for others."""
    manager = BlockManager(4, 16, prefix_caching=True)
    first = request(0, prompt=32, keys=(1, 2))
    manager.allocate(first, 32)
    manager.release(first)
    second = request(1, prompt=49, keys=(1, 2, 3))
    assert not manager.allocate(second, 17, manager.cached_prefix(second))
    third = request(2, prompt=48, keys=(1, 2, 3))
    assert manager.allocate(third, 16, manager.cached_prefix(third))
    assert manager.free_blocks == 0


def test_shared_blocks_are_counted_once_and_stay_until_the_last_user():
    manager = BlockManager(10, 16, prefix_caching=True)
    first, second = request(0, prompt=33, keys=(1, 2)), request(1, prompt=33, keys=(1, 2))
    manager.allocate(first, 33)
    manager.allocate(second, 1, manager.cached_prefix(second))
    assert first.blocks[:2] == second.blocks[:2]
    assert manager.used_blocks == 4
    manager.release(first)
    assert manager.used_blocks == 3
    manager.release(second)
    assert manager.used_blocks == 0


def test_the_last_token_is_always_computed():
    manager = BlockManager(10, 16, prefix_caching=True)
    first = request(0, prompt=32, keys=(1, 2))
    manager.allocate(first, 32)
    assert len(manager.cached_prefix(request(1, prompt=32, keys=(1, 2)))) == 1
    assert len(manager.cached_prefix(request(2, prompt=33, keys=(1, 2)))) == 2


def test_a_hit_stops_at_the_first_miss():
    manager = BlockManager(10, 16, prefix_caching=True)
    manager.allocate(request(0, prompt=64, keys=(1, 2, 3, 4)), 64)
    assert len(manager.cached_prefix(request(1, prompt=64, keys=(1, 9, 3, 4)))) == 1
    assert manager.cached_prefix(request(2, prompt=64, keys=(9, 2, 3, 4))) == []


def test_partial_blocks_are_not_cached():
    manager = BlockManager(10, 16, prefix_caching=True)
    manager.allocate(request(0, prompt=64, keys=(1, 2, 3, 4)), 31)
    assert len(manager.cached_prefix(request(1, prompt=64, keys=(1, 2, 3, 4)))) == 1


def test_eviction_order_blank_then_fresh_then_least_recent_tail_first():
    manager = BlockManager(8, 16, prefix_caching=True)
    old, new = request(0, prompt=48, keys=(1, 2, 3)), request(1, prompt=40, keys=(11, 12))
    manager.allocate(old, 48)
    manager.allocate(new, 40)
    old_blocks, new_blocks = list(old.blocks), list(new.blocks)
    manager.release(old)
    manager.release(new)
    reuse = request(2, prompt=16 * 7)
    manager.allocate(reuse, 16 * 7)
    blank, fresh = new_blocks[2], 7
    assert reuse.blocks == [blank, fresh, *reversed(old_blocks), *reversed(new_blocks[:2])]


def test_an_evicted_block_loses_its_key():
    manager = BlockManager(3, 16, prefix_caching=True)
    first = request(0, prompt=32, keys=(1, 2))
    manager.allocate(first, 32)
    manager.release(first)
    other = request(1, prompt=16)
    manager.allocate(other, 16)
    assert len(manager.cached_prefix(request(2, prompt=33, keys=(1, 2)))) == 1


def test_a_hit_protects_a_released_block_from_eviction():
    manager = BlockManager(4, 16, prefix_caching=True)
    first = request(0, prompt=48, keys=(1, 2, 3))
    manager.allocate(first, 48)
    manager.release(first)
    sharer = request(1, prompt=17, keys=(1,))
    manager.allocate(sharer, 1, manager.cached_prefix(sharer))
    other = request(2, prompt=16)
    manager.allocate(other, 16)
    assert len(manager.cached_prefix(request(3, prompt=33, keys=(1, 2)))) == 1


def test_content_without_ids_is_found_again_only_by_its_own_request():
    manager = BlockManager(10, 16, prefix_caching=True)
    first = request(0, prompt=40)
    manager.allocate(first, 40)
    manager.release(first)
    assert manager.cached_prefix(request(1, prompt=40)) == []
    assert len(manager.cached_prefix(first)) == 2


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(10, 16, prefix_caching=False)
    first = request(0, prompt=40, keys=(1, 2))
    manager.allocate(first, 40)
    assert manager.cached_prefix(request(1, prompt=40, keys=(1, 2))) == []
