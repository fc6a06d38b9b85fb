"""Keys of KV blocks from prefix hashes."""

from serving.content import Keys, block_keys
from serving.traces import PrefixHashes, TraceRequest


def request(ids, block_tokens, tokens, prompt_tokens=None):
    return TraceRequest("0", 0, prompt_tokens or tokens, 1, prefix=PrefixHashes(ids, block_tokens, tokens))


def test_a_hash_block_holds_whole_kv_blocks_and_the_last_one_may_be_part_filled():
    first, second = block_keys([request((7, 8), 512, 700), request((7, 9), 512, 1024)], 64)
    assert len(first) == 700 // 64
    assert len(second) == 1024 // 64
    assert first[:8] == second[:8]
    assert not set(first[8:]) & set(second[8:])
    assert len(set(first)) == len(first)


def test_several_hash_blocks_fill_a_kv_block():
    first, second = block_keys([request((1, 2, 3, 4, 5), 16, 70), request((1, 2, 3, 9), 16, 64)], 32)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert (len(first), len(second)) == (2, 2)


def test_an_equal_id_behind_an_unequal_prefix_is_not_equal_content():
    for block_tokens in (64, 16, 8, 24):
        first, second = block_keys([request((1, 5), 16, 32), request((2, 5), 16, 32)], block_tokens)
        assert not set(first) & set(second), block_tokens


def test_ids_of_blocks_of_different_lengths_are_different_names():
    first, second = block_keys([request((1, 2), 32, 64), request((1, 2), 64, 128)], 32)
    assert not set(first) & set(second)


def test_hashes_and_token_ids_never_share_a_key():
    ids = TraceRequest("0", 0, 4, 1, prompt_ids=(0, 0, 0, 0))
    first, second = block_keys([ids, request((0, 0, 0, 0), 1, 4)], 2)
    assert len(first) == len(second) == 2
    assert not set(first) & set(second)


def test_hashes_may_cover_answers():
    (keys,) = block_keys([request((3, 4), 8, 16, prompt_tokens=10)], 8)
    assert len(keys) == 2
    assert len(Keys(8).of_prompt(request((3, 4), 8, 16, prompt_tokens=10))) == 2


def test_blocks_that_are_not_told_get_keys_of_their_own():
    keys = Keys(4)
    told = keys.of_prompt(request((1,), 4, 4, prompt_tokens=11))
    again = keys.of_prompt(request((1,), 4, 4, prompt_tokens=11))
    assert len(told) == len(again) == 3
    assert told[0] == again[0]
    assert not set(told[1:]) & set(again[1:])
    assert len(keys.of_prompt(TraceRequest("0", 0, 5, 1))) == 2


def test_a_part_filled_block_is_another_block_than_a_longer_one_of_the_same_id():
    keys = Keys(4)
    shorter, longer, full = (keys.of_prompt(request((1, 2), 4, tokens)) for tokens in (5, 6, 8))
    assert shorter[0] == longer[0] == full[0]
    assert len({shorter[1], longer[1], full[1]}) == 3
    assert keys.of_prompt(request((1, 2), 4, 5)) == shorter
