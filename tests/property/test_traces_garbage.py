"""Damaged trace files end in a ConfigError or in fewer requests, never in another exception."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from profiler.core.errors import ConfigError
from serving.traces import TraceRequest, formats, open_trace

ROWS = {
    "mooncake": ['{"timestamp": 1500, "input_length": 1025, "output_length": 5, "hash_ids": [1, 2, 3]}'] * 2,
    "dynamo": [
        '{"timestamp": 1.5, "input_length": 5, "output_length": 5, "session_id": "a"}',
        '{"delay": 1.5, "input_length": 5, "output_length": 5, "session_id": "a"}',
    ],
    "bailian": [
        '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132, '
        '"type": "text", "turn": 1, "hash_ids": [4, 5, 6]}'
    ],
    "azure": ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10"],
    "vidur": ["arrived_at,num_prefill_tokens,num_decode_tokens", "4.314579,396,109", "5e0,396,109"],
    "burstgpt": [
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        '5,"Chat,GPT",472,18,490,Conversation log',
    ],
    "lengths": ["# arrivals=gamma rate_per_s=8 burstiness=0.5 seed=1", "prompt_tokens,output_tokens", "120,30"],
    "jsonl": [
        '{"input_toks": 5, "output_toks": 2, "arrival_time_ns": 1, "input_tok_ids": [1, 2, 3, 4, 5]}',
        '{"session_id": "s", "arrival_time_ns": 5, "sub_requests": [{"input_toks": 3, "output_toks": 2}]}',
    ],
}
pieces = st.one_of(
    st.text(max_size=4),
    st.sampled_from(
        ['"', "{", "}", "[", "]", ",", "\n", "-", "1e9", ".", "null", "true", "NaN", "0", "9" * 25, "\x00"]
    ),
)


def test_every_format_is_damaged():
    assert {module.NAME for module in formats()} == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
@given(place=st.floats(0, 1), length=st.integers(0, 12), piece=pieces, forced=st.booleans(), skip=st.booleans())
@example(place=0.9, length=0, piece='{"a":' * 5000, forced=True, skip=False)
@settings(max_examples=120, deadline=None)
def test_damage_is_refused_or_legal(tmp_path_factory, name, place, length, piece, forced, skip):
    text = "\n".join(ROWS[name]) + "\n"
    start = int(place * len(text))
    path = tmp_path_factory.mktemp("t") / "trace"
    path.write_bytes((text[:start] + piece + text[start + length :]).encode("utf-8", "surrogatepass"))
    try:
        found = list(
            open_trace(
                path,
                format_name=name if forced else None,
                on_bad_row="skip" if skip else "error",
                sessions=True,
            ).requests
        )
    except ConfigError as error:
        assert str(path) in str(error)
        return
    assert found
    for one in found:
        assert isinstance(one, TraceRequest)
        assert type(one.prompt_tokens) is type(one.output_tokens) is type(one.arrival_ns) is int
        assert one.prompt_tokens >= 1 and one.output_tokens >= 1 and one.arrival_ns >= 0


@pytest.mark.parametrize("value", [None, True, [], {}, "5", 1.5, -1, 10**30, [[1]], {"a": 1}])
@pytest.mark.parametrize("name", [name for name, rows in ROWS.items() if rows[0].startswith("{")])
def test_wrong_types_anywhere_in_a_row_are_refused(tmp_path, name, value):
    row = json.loads(ROWS[name][0])
    free = {"session_id", "timestamp", "type", "request_id", "parent_chat_id"}
    for key in row.keys() - free:
        path = tmp_path / "trace"
        path.write_text(json.dumps(row | {key: value}) + "\n")
        if value == [] and key == "input_tok_ids":
            continue
        with pytest.raises(ConfigError, match=r"trace:1: "):
            list(open_trace(path, sessions=True).requests)


@pytest.mark.parametrize("name", ROWS)
def test_an_empty_file_is_refused_whatever_it_is_read_as(tmp_path, name):
    path = tmp_path / "trace"
    for text in ("", "\n\r\n", "\ufeff"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="trace: the file is empty"):
            open_trace(path, format_name=name)


def test_a_quoted_header_is_recognised(tmp_path):
    path = tmp_path / "trace"
    path.write_text('"arrived_at","num_prefill_tokens","num_decode_tokens"\n1,2,3\n')
    assert [one.prompt_tokens for one in open_trace(path).requests] == [2]
