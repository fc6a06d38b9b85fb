"""Traces over random requests: writing and reading is lossless, and hashes tell what token ids tell."""

from dataclasses import replace
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.content import Keys, block_keys
from serving.trace_tools.edit import Lengths, Window, by_arrival, cut, filtered, merged, rescaled, units
from serving.trace_tools.write import write_trace
from serving.traces import PrefixHashes, TraceRequest, open_trace

ids = st.integers(0, 5)


@st.composite
def contents(draw, prompt_tokens, output_tokens):
    kind = draw(st.sampled_from(["none", "ids", "hashes"]))
    if kind == "ids":
        prompt = tuple(draw(st.lists(ids, min_size=prompt_tokens, max_size=prompt_tokens)))
        output = tuple(draw(st.lists(ids, min_size=output_tokens, max_size=output_tokens)))
        return {"prompt_ids": prompt, "output_ids": draw(st.sampled_from([None, output]))}
    if kind == "hashes":
        block_tokens = draw(st.integers(1, 4))
        tokens = draw(st.integers(0, prompt_tokens + output_tokens))
        blocks = -(-tokens // block_tokens)
        return {
            "prefix": PrefixHashes(tuple(draw(st.lists(ids, min_size=blocks, max_size=blocks))), block_tokens, tokens)
        }
    return {}


@st.composite
def traces(draw):
    """Requests and sessions in order of arrival, with everything that JSON lines can say."""
    made = []
    arrival_ns = 0
    for number in range(draw(st.integers(1, 6))):
        arrival_ns += draw(st.integers(0, 3 * 10**9))
        priority = draw(st.integers(-2, 2))
        calls = draw(st.sampled_from([0, 0, 1, 3]))
        for index in range(max(calls, 1)):
            prompt_tokens, output_tokens = draw(st.integers(1, 9)), draw(st.integers(1, 4))
            placed = {"session_id": draw(st.sampled_from([None, "open"]))}
            if calls:
                wait_ns = draw(st.integers(0, 10**10)) if index else 0
                placed = {"session_id": f"s{number}", "call_index": index, "tool_duration_ns": wait_ns}
            made.append(
                TraceRequest(
                    draw(st.sampled_from([f"s{number}/{index}" if calls else str(number), f"own-{number}-{index}"])),
                    arrival_ns,
                    prompt_tokens,
                    output_tokens,
                    priority=priority,
                    **placed,
                    **draw(contents(prompt_tokens, output_tokens)),
                )
            )
    return made


def there_and_back(folder, requests, name, **options):
    path = folder / "trace"
    write_trace(path, requests, name)
    return list(open_trace(path, sessions=True, format_name=name, **options).requests)


@given(trace=traces())
@settings(max_examples=150, deadline=None)
def test_json_lines_say_everything(tmp_path_factory, trace):
    assert there_and_back(tmp_path_factory.mktemp("t"), trace, "jsonl") == trace


@given(trace=traces())
@settings(max_examples=100, deadline=None)
def test_dynamo_rows_keep_times_lengths_and_sessions(tmp_path_factory, trace):
    bare = [
        replace(
            one,
            prompt_ids=None,
            output_ids=None,
            prefix=None,
            session_id=(one.call_index is not None and one.session_id) or None,
        )
        for one in trace
    ]
    found = there_and_back(tmp_path_factory.mktemp("t"), bare, "dynamo")
    # a session of one call is a request with a session name there
    alone = {unit[0].request_id for unit in units(bare) if len(unit) == 1 and unit[0].call_index is not None}
    assert found == [replace(one, call_index=None) if one.request_id in alone else one for one in bare]


@pytest.mark.parametrize(
    ("name", "step_ns"), [("mooncake", 10**6), ("azure", 100), ("vidur", 1), ("burstgpt", 1), ("bailian", 1)]
)
@given(trace=traces())
@settings(max_examples=40, deadline=None)
def test_other_formats_keep_times_and_lengths_to_their_resolution(tmp_path_factory, name, step_ns, trace):
    flat = [replace(one, call_index=None, tool_duration_ns=0) for one in trace]
    found = there_and_back(tmp_path_factory.mktemp("t"), flat, name)
    start_ns = flat[0].arrival_ns if name == "azure" else 0
    for old, new in zip(flat, found, strict=True):
        assert (new.prompt_tokens, new.output_tokens) == (old.prompt_tokens, old.output_tokens)
        assert abs(old.arrival_ns - start_ns - new.arrival_ns) <= step_ns


@given(
    sequences=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=8),
    hash_tokens=st.integers(1, 6),
    block_tokens=st.integers(1, 6),
)
@settings(max_examples=300, deadline=None)
def test_hashes_of_token_ids_tell_what_the_ids_tell(sequences, hash_tokens, block_tokens):
    """Hash the prompts in one block length, key them in another: two requests share a key only where their ids agree up
    to the block's end, and always where they agree up to the end of the hash blocks that hold it."""
    by_ids = [TraceRequest(str(n), 0, len(one), 1, tuple(one)) for n, one in enumerate(sequences)]
    hasher = Keys(hash_tokens)
    hashed = [
        replace(one, prompt_ids=None, prefix=PrefixHashes(hasher.of_prompt(one), hash_tokens, one.prompt_tokens))
        for one in by_ids
    ]
    keys = block_keys(hashed, block_tokens)
    exact = block_keys(by_ids, block_tokens)
    for left in range(len(sequences)):
        assert len(keys[left]) == len(sequences[left]) // block_tokens
        for right in range(left):
            for place, (one, two) in enumerate(zip(keys[left], keys[right], strict=False)):
                end = -(-(place + 1) * block_tokens // hash_tokens) * hash_tokens
                agree = exact[left][place] == exact[right][place]
                if one == two:
                    assert agree
                longer = (sequences[left][:end], sequences[right][:end])
                if longer[0] == longer[1] and (len(longer[0]) == end or len(sequences[left]) == len(sequences[right])):
                    assert one == two
    if hash_tokens == block_tokens:
        assert [[a == b for a in keys[0] for b in one] for one in keys] == [
            [a == b for a in exact[0] for b in one] for one in exact
        ]


@given(trace=traces(), factor=st.fractions(Fraction(1, 7), 7))
@settings(max_examples=60, deadline=None)
def test_rescaling_keeps_order_and_scales_every_arrival(trace, factor):
    scaled = list(rescaled(trace, factor))
    assert all(
        abs(new.arrival_ns - old.arrival_ns * factor) <= Fraction(1, 2) for old, new in zip(trace, scaled, strict=True)
    )
    assert scaled == by_arrival(scaled)
    assert list(rescaled(trace, Fraction(1))) == trace


@given(trace=traces(), skip=st.integers(0, 4), rows=st.integers(1, 4), start=st.integers(0, 4 * 10**9))
@settings(max_examples=60, deadline=None)
def test_cuts_are_slices_of_the_rows(trace, skip, rows, start):
    kept = list(cut(trace, Window(start_ns=start, skip=skip, count=rows), keep_times=True))
    late = [unit for unit in units(trace) if unit[0].arrival_ns >= start]
    assert kept == [call for unit in islice(late, skip, skip + rows) for call in unit]
    moved = list(cut(trace, Window(start_ns=start, skip=skip, count=rows)))
    assert len({old.arrival_ns - new.arrival_ns for old, new in zip(kept, moved, strict=True)}) <= 1
    assert all(one.arrival_ns >= 0 for one in moved)


@given(trace=traces(), most=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_filters_keep_sessions_whole(trace, most):
    kept = list(filtered(trace, Lengths(max_prompt_tokens=most)))
    assert kept == [call for unit in units(trace) if max(one.prompt_tokens for one in unit) <= most for call in unit]


@given(parts=st.lists(traces(), min_size=2, max_size=3))
@settings(max_examples=60, deadline=None)
def test_merging_loses_nothing_and_mixes_no_content(parts):
    merged_trace = list(merged(parts))
    assert merged_trace == by_arrival(merged_trace)
    assert len({one.request_id for one in merged_trace}) == len(
        {(n, one.request_id) for n, part in enumerate(parts) for one in part}
    )
    for position, part in enumerate(parts):
        own = [one for one in merged_trace if one.request_id.startswith(f"{position}:")]
        assert [(one.arrival_ns, one.prompt_tokens) for one in own] == [
            (one.arrival_ns, one.prompt_tokens) for one in part
        ]
    hashed = [(one.request_id[0], set(one.prefix.ids)) for one in merged_trace if one.prefix is not None]
    assert all(not mine & theirs for origin, mine in hashed for other, theirs in hashed if origin != other)
