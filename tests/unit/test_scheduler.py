"""Rules of vLLM V1's scheduler, each on the smallest case that shows it, for the specification in tests/reference."""

from reference.blocks import BlockManager
from reference.engine import step_shape
from reference.scheduler import Scheduler
from simulated import plain_request as request

from serving.core.scheduler import Limits


def scheduler(num_blocks=100, block_tokens=16, caching=True, **limits):
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len_tokens": 1024} | limits
    return Scheduler(Limits(**values), BlockManager(num_blocks, block_tokens, caching))


def added(target, *requests):
    for one in requests:
        target.add(one)
    return requests


def step(target):
    """Schedule one step and emit its tokens; returns (index, new tokens, context) per request."""
    batch = target.schedule(0)
    for one in batch:
        if one.emits:
            target.emit(one.request, 0)
    return [(one.request.index, one.new_tokens, one.context_tokens) for one in batch]


def test_prompts_are_chunked_to_the_token_budget():
    target = scheduler()
    added(target, request(0, prompt=150))
    assert [step(target) for _ in range(4)] == [[(0, 64, 0)], [(0, 64, 64)], [(0, 22, 128)], [(0, 1, 150)]]


def test_running_requests_come_before_waiting_ones():
    target = scheduler()
    added(target, request(0, prompt=30, output=5))
    step(target)
    added(target, request(1, prompt=100))
    assert step(target) == [(0, 1, 30), (1, 63, 0)]
    assert step(target) == [(0, 1, 31), (1, 37, 63)]


def test_an_unfinished_prefill_keeps_its_place_and_takes_the_budget():
    target = scheduler()
    added(target, request(0, prompt=100), request(1, prompt=100))
    assert step(target) == [(0, 64, 0)]
    assert step(target) == [(0, 36, 64), (1, 28, 0)]
    assert step(target) == [(0, 1, 100), (1, 63, 28)]


def test_max_num_seqs_limits_running_requests():
    target = scheduler(max_num_seqs=2)
    added(target, *(request(i, prompt=4) for i in range(3)))
    assert [index for index, _, _ in step(target)] == [0, 1]


def test_long_prefill_threshold_applies_only_beside_other_requests():
    target = scheduler(long_prefill_threshold_tokens=20)
    added(target, request(0, prompt=50))
    assert step(target) == [(0, 50, 0)]
    target = scheduler(long_prefill_threshold_tokens=20)
    added(target, request(0, prompt=50), request(1, prompt=50))
    assert step(target) == [(0, 20, 0), (1, 20, 0)]


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget():
    target = scheduler(chunked_prefill=False)
    added(target, request(0, prompt=40), request(1, prompt=40), request(2, prompt=10))
    assert step(target) == [(0, 40, 0)], "the head blocks the line although the third would fit"
    assert step(target) == [(0, 1, 40), (1, 40, 0), (2, 10, 0)]


def test_admission_needs_the_blocks_of_the_whole_sequence():
    target = scheduler(num_blocks=1 + 6, caching=False)
    added(target, request(0, prompt=32, output=9), request(1, prompt=80))
    assert step(target) == [(0, 32, 0)], "80 tokens need 5 blocks, 4 are free"
    assert target.blocks.used_blocks == 2
    assert [one.index for one in target.waiting.queue] == [1]


def test_a_waiting_request_never_preempts():
    target = scheduler(num_blocks=1 + 4, caching=False)
    first, second = added(target, request(0, prompt=40, output=20), request(1, prompt=40))
    step(target)
    step(target)
    assert (first.preemptions, second.preemptions) == (0, 0)
    assert target.running == [first]


def test_the_last_admitted_request_is_preempted_and_recomputed_from_the_front_of_the_queue():
    target = scheduler(num_blocks=1 + 4, caching=False)
    first, second = added(target, request(0, prompt=32, output=20), request(1, prompt=32, output=20))
    assert step(target) == [(0, 32, 0), (1, 32, 0)]
    added(target, request(2, prompt=4))
    assert step(target) == [(0, 1, 32)], "both need a fifth block; nothing waiting enters a step with a preemption"
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert (second.computed_tokens, second.emitted_tokens, second.blocks) == (0, 1, [])
    assert [one.index for one in target.waiting.queue] == [1, 2]
    assert step(target) == [(0, 1, 33)], "33 tokens need 3 blocks, 1 is free, and the third request waits behind"


def test_a_request_that_is_its_own_victim_ends_the_step():
    target = scheduler(num_blocks=1 + 5, caching=False)
    first, second = added(target, request(0, prompt=40, output=20), request(1, prompt=24, output=20))
    assert step(target) == [(0, 40, 0), (1, 24, 0)]
    for _ in range(8):
        assert [index for index, _, _ in step(target)] == [0, 1]
    assert step(target) == [(0, 1, 48)], "the first takes the last block; the second, at 32, finds none and is last"
    assert (first.preemptions, second.preemptions) == (0, 1)


def test_prefix_hits_skip_computed_blocks_even_within_one_step():
    target = scheduler()
    added(target, request(0, prompt=40, keys=(1, 2)), request(1, prompt=40, keys=(1, 2)))
    assert step(target) == [(0, 40, 0), (1, 8, 32)]
    assert [one.prefix_hit_tokens for one in target.running] == [0, 32]


def test_a_preempted_request_finds_its_own_blocks_and_keeps_its_first_hit_count():
    target = scheduler(num_blocks=1 + 5)
    first, second = added(target, request(0, prompt=48, output=17), request(1, prompt=16, output=40))
    assert step(target) == [(0, 48, 0), (1, 16, 0)]
    assert step(target) == [(0, 1, 48)], "the fifth block goes to the first"
    assert second.preemptions == 1
    for emitted in range(2, 17):
        assert step(target) == [(0, 1, 47 + emitted)], "17 tokens need 2 blocks, only its own released one is free"
    assert first not in target.running
    assert step(target) == [(1, 1, 16)], "its first block was found again, one token is left to compute"
    assert (second.prefix_hit_tokens, second.emitted_tokens) == (0, 2)


def test_nothing_is_admitted_in_a_step_with_a_preemption_even_where_it_would_fit():
    """The second request computed its own copy of the last block; once preempted it could share the first's."""
    target = scheduler(num_blocks=1 + 4)
    first, second = added(target, request(0, prompt=32, keys=(1, 2)), request(1, prompt=32, keys=(1, 2)))
    assert step(target) == [(0, 32, 0), (1, 16, 16)]
    assert step(target) == [(0, 1, 32)]
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert step(target) == [(0, 1, 33), (1, 1, 32)]


def test_impossible_requests_are_known_before_they_run():
    target = scheduler(num_blocks=1 + 4, max_model_len_tokens=100)
    assert target.can_ever_run(request(prompt=60, output=5)), "the last token is never cached: 64 tokens, 4 blocks"
    assert not target.can_ever_run(request(prompt=60, output=6))
    wide = scheduler(num_blocks=100, max_model_len_tokens=100)
    assert wide.can_ever_run(request(prompt=95, output=5))
    assert not wide.can_ever_run(request(prompt=96, output=5))


def test_step_shape_splits_prefill_and_decode():
    target = scheduler()
    added(target, request(0, prompt=30), request(1, prompt=30))
    step(target)
    added(target, request(2, prompt=61, output=1), request(3, prompt=9))
    batch = target.schedule(0)
    shape = step_shape(batch, attended_cap_tokens=31)
    assert shape.prefills == ((61, 0), (1, 0))
    assert (shape.decode_requests, shape.tokens, shape.sampled_sequences) == (2, 64, 3)
    assert (shape.decode_kv_sum_tokens, shape.decode_kv_max_tokens, shape.decode_kv_capped_sum_tokens) == (62, 31, 62)
    assert [one.request.index for one in batch if one.emits and target.emit(one.request, 0)] == [2]
    batch = target.schedule(0)
    shape = step_shape(batch, attended_cap_tokens=31)
    assert shape.prefills == ((8, 1),)
    assert (shape.decode_kv_sum_tokens, shape.decode_kv_max_tokens, shape.decode_kv_capped_sum_tokens) == (64, 32, 62)


def test_priority_serves_the_most_urgent_first_and_takes_back_what_a_less_urgent_one_was_given():
    target = Scheduler(Limits(8, 64, 1024), BlockManager(1 + 4, 16, False), "priority")
    lax, urgent = added(target, request(0, prompt=32, output=20, priority=5), request(1, prompt=31, output=20))
    assert [one.request.index for one in target.schedule(0)] == [1, 0]
    target.emit(urgent, 0)
    target.emit(lax, 0)
    assert step(target) == [(1, 1, 31)], "the laxer one, last in the order, has no block for its 33rd token"
    assert (lax.preemptions, urgent.preemptions) == (1, 0)
    for prompt, steps in ((20, [[(1, 1, 32)]]), (31, [[], [(1, 1, 32)]])):
        target = Scheduler(Limits(8, 64, 1024), BlockManager(1 + 4, 16, False), "priority")
        (lax,) = added(target, request(0, prompt=prompt, output=20, priority=5))
        assert step(target) == [(0, prompt, 0)]
        added(target, request(1, prompt=32, output=20))
        assert step(target) == [(0, 1, prompt), (1, 32, 0)]
        assert [step(target) for _ in steps] == steps, (
            "its token is taken back, or the step ends with its own preemption"
        )
        assert lax.preemptions == 1


def test_asynchronous_scheduling_runs_ahead_of_the_tokens_and_stops_at_the_last():
    """Steps composed before the token of the one before is known; the request holds its place until it is."""
    target = scheduler(max_num_seqs=1)
    first, second = added(target, request(0, prompt=10, output=2), request(1, prompt=10, output=1))
    assert [tuple(one)[1:4] for one in target.schedule(0)] == [(10, 0, True)]
    assert [tuple(one)[1:4] for one in target.schedule(0)] == [(1, 10, True)], "its input token is still in flight"
    assert target.schedule(0) == [], "both tokens are on their way, and its slot is not free yet"
    assert not target.emit(first, 1) and target.emit(first, 2)
    assert [one.request for one in target.schedule(3)] == [second]
