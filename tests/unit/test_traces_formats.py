"""Every trace format: its rows, and what is wrong with bad ones."""

import json
import math
from itertools import islice, pairwise

import pytest

from profiler.core.errors import ConfigError
from serving.traces import PrefixHashes, TraceRequest, formats, open_trace, read_trace
from serving.traces._arrivals import Arrivals, times_ns

MOONCAKE = {"timestamp": 1500, "input_length": 1025, "output_length": 5, "hash_ids": [1, 2, 3]}
DYNAMO = {"timestamp": 1500.25, "input_length": 600, "output_length": 5, "session_id": "a"}
BAILIAN = {
    "chat_id": 7,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 33,
    "output_length": 132,
    "type": "text",
    "turn": 1,
    "hash_ids": [4, 5, 6],
}
AZURE = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10")
VIDUR = ("arrived_at,num_prefill_tokens,num_decode_tokens", "4.314579,396,109")
BURSTGPT = ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,ChatGPT,472,18,490,API log")
LENGTHS = ("# arrivals=constant rate_per_s=4", "prompt_tokens,output_tokens", "120,30")


def text_of(rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def write(folder, *rows):
    path = folder / "trace"
    path.write_text(text_of(rows))
    return path


GOOD = {
    "mooncake": ([MOONCAKE], TraceRequest("0", 1_500_000_000, 1025, 5, prefix=PrefixHashes((1, 2, 3), 512, 1025))),
    "dynamo": ([DYNAMO], TraceRequest("0", 1_500_250_000, 600, 5, session_id="a")),
    "bailian": (
        [BAILIAN],
        TraceRequest("0", 61_114_000_000, 33, 132, prefix=PrefixHashes((4, 5, 6), 16, 33), session_id="7"),
    ),
    "azure": (AZURE, TraceRequest("0", 0, 4808, 10)),
    "vidur": (VIDUR, TraceRequest("0", 4_314_579_000, 396, 109)),
    "burstgpt": (BURSTGPT, TraceRequest("0", 5_000_000_000, 472, 18)),
    "lengths": (LENGTHS, TraceRequest("0", 250_000_000, 120, 30)),
    "jsonl": (
        [{"input_toks": 5, "output_toks": 2, "arrival_time_ns": 10}],
        TraceRequest("0", 10, 5, 2),
    ),
}


def test_every_format_is_tried_below():
    assert {module.NAME for module in formats()} == GOOD.keys()


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("last", [True, False])
def test_rows_are_recognised_and_read(tmp_path, name, ending, mark, last):
    rows, expected = GOOD[name]
    text = mark + text_of(rows).replace("\n", ending)
    path = tmp_path / "trace"
    path.write_bytes((text if last else text.rstrip()).encode())
    trace = read_trace(path)
    assert (trace.format, trace.requests) == (name, (expected,))


BAD_MOONCAKE = [
    ({"output_length": 0}, "output_length must be an integer of at least 1, found 0"),
    ({"input_length": 0, "hash_ids": []}, "input_length must be an integer of at least 1"),
    ({"input_length": 13.7}, "found 13.7"),
    ({"input_length": "1025"}, 'found "1025"'),
    ({"timestamp": -1}, "timestamp must be an integer of milliseconds of at least 0, found -1"),
    ({"timestamp": 61.114}, "found 61.114; fractions are of the format dynamo"),
    ({"timestamp": 10**17}, "timestamp must be"),
    ({"timestamp": None}, "found null"),
    ({"timestamp": 1499}, "before the row above it"),
    ({"hash_ids": [1, 2]}, "hash_ids has 2 ids, 1025 tokens need 3 (one per block of 512)"),
    ({"hash_ids": list(range(65))}, "65 would fit blocks of 16 (--hash-block-tokens 16)"),
    ({"hash_ids": [1, 2, -3]}, "integers of at least 0"),
    ({"hash_ids": [1, 2, 3.0]}, "integers of at least 0"),
    ({"hash_ids": "123"}, "integers of at least 0"),
    ({"session_id": "a"}, "format dynamo"),
    ({"tokens": 1}, "unknown key 'tokens'"),
    ({"timestamp": math.nan}, "NaN is not a number"),
]


def refused_or_skipped(path, line, message):
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
    trace = read_trace(path, on_bad_row="skip")
    assert [where for where, _ in trace.skipped] == [line]
    return trace


@pytest.mark.parametrize(("change", "message"), BAD_MOONCAKE, ids=[message for _, message in BAD_MOONCAKE])
def test_bad_mooncake_rows(tmp_path, change, message):
    trace = refused_or_skipped(write(tmp_path, MOONCAKE, "", MOONCAKE | change, MOONCAKE), 3, message)
    assert [request.request_id for request in trace.requests] == ["0", "2"]


def test_a_missing_timestamp_is_not_zero(tmp_path):
    row = {key: value for key, value in MOONCAKE.items() if key != "timestamp"}
    refused_or_skipped(write(tmp_path, MOONCAKE, row), 2, "timestamp is missing")


def test_a_block_length_can_be_given(tmp_path):
    path = write(tmp_path, MOONCAKE | {"hash_ids": list(range(17))})
    with pytest.raises(ConfigError, match="64"):
        read_trace(path)
    (request,) = open_trace(path, hash_block_tokens=64).requests
    assert request.prefix == PrefixHashes(tuple(range(17)), 64, 1025)
    with pytest.raises(ConfigError, match="azure have no hash blocks"):
        open_trace(write(tmp_path, *AZURE), hash_block_tokens=64)


BAD_BAILIAN = [
    ({"hash_ids": [1, 2]}, "33 tokens need 3 (one per block of 16)"),
    ({"timestamp": "61.1"}, 'timestamp must be a number of seconds of at least 0, found "61.1"'),
    ({"timestamp": -0.5}, "found -0.5"),
    ({"turn": 0}, "turn must be"),
    ({"parent_chat_id": -2}, "parent_chat_id must be an integer of at least -1"),
    ({"type": 3}, "type must be a text"),
    ({"output_length": 0}, "output_length must be"),
]


@pytest.mark.parametrize(("change", "message"), BAD_BAILIAN, ids=[message for _, message in BAD_BAILIAN])
def test_bad_bailian_rows(tmp_path, change, message):
    refused_or_skipped(write(tmp_path, BAILIAN, BAILIAN | change), 2, message)


def test_bailian_chats_are_sessions_by_their_first_chat(tmp_path):
    rows = [
        BAILIAN,
        BAILIAN | {"chat_id": 8, "parent_chat_id": 7, "turn": 2},
        BAILIAN | {"chat_id": 9, "parent_chat_id": 8, "turn": 3},
        BAILIAN | {"chat_id": 11, "parent_chat_id": 10, "turn": 2},
        BAILIAN | {"chat_id": 12},
    ]
    assert [request.session_id for request in read_trace(write(tmp_path, *rows)).requests] == [
        "7",
        "7",
        "7",
        "10",
        "12",
    ]


BAD_TABLES = [
    (AZURE, "2023-11-16 18:17:03.97996001234,1,1", "up to nine digits"),
    (AZURE, "2023-02-30 18:17:03,1,1", "TIMESTAMP must be"),
    (AZURE, "1700158623.97,1,1", "TIMESTAMP must be"),
    (AZURE, "2023-11-16 18:17:02,1,1", "is before the first row's"),
    (AZURE, "2023-11-16 18:17:04+00:00,1,1", "time zone in all rows or in none"),
    (AZURE, "2023-11-16 18:17:04,0,1", "ContextTokens must be an integer of at least 1, found '0'"),
    (AZURE, "2023-11-16 18:17:04,12.0,1", "found '12.0'"),
    (AZURE, "2023-11-16 18:17:04,1_0,1", "found '1_0'"),
    (AZURE, "2023-11-16 18:17:04,+1,1", "found '+1'"),
    (AZURE, "2023-11-16 18:17:04, 1,1", "found ' 1'"),
    (AZURE, "2023-11-16 18:17:04,\u0661,1", "ContextTokens must be"),
    (AZURE, "2023-11-16 18:17:04,99999999999999999999,1", "ContextTokens must be"),
    (AZURE, "2023-11-16 18:17:04,1", "2 fields, the header has 3"),
    (AZURE, "2023-11-16 18:17:04,1,", "GeneratedTokens must be an integer of at least 1, found ''"),
    (AZURE, '2023-11-16 18:17:04,"1,1', "not valid CSV"),
    (VIDUR, "4.3,396,109", "before the row above it"),
    (VIDUR, "nan,396,109", "arrived_at must be a number of seconds of at least 0, found 'nan'"),
    (VIDUR, "inf,396,109", "found 'inf'"),
    (VIDUR, "-1,396,109", "found '-1'"),
    (VIDUR, "1e30,396,109", "found '1e30'"),
    (VIDUR, ",396,109", "found ''"),
    (VIDUR, "5,396,-1", "num_decode_tokens must be"),
    (BURSTGPT, "6,ChatGPT,472,0,472,API log", "a call that failed"),
    (BURSTGPT, "6,ChatGPT,472,18,491,API log", "Total tokens is 491, request and response sum to 490"),
    (LENGTHS, "0,3", "prompt_tokens must be"),
]


@pytest.mark.parametrize(("table", "row", "message"), BAD_TABLES, ids=[row for _, row, _ in BAD_TABLES])
def test_bad_rows_of_tables(tmp_path, table, row, message):
    refused_or_skipped(write(tmp_path, *table, row), len(table) + 1, message)


BAD_HEADERS = [
    ("TIMESTAMP,ContextTokens", "column GeneratedTokens is missing"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens,Tokens", "unknown column 'Tokens'"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens,TIMESTAMP", "column TIMESTAMP appears twice"),
    ("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio", "trace generate --lengths"),
    ("prompt_tokens,output_tokens", "a list of lengths has no arrivals"),
    ("# arrivals=poisson rate_per_s=8", "arrivals=poisson needs rate_per_s, seed; found rate_per_s"),
    ("# arrivals=weibull rate_per_s=8 seed=0", "one of poisson, gamma, constant, at-once"),
    ("# arrivals=constant rate_per_s=0", "rate_per_s must be from"),
    ("# arrivals=constant rate_per_s=x", "must be numbers"),
    ("# arrivals=at-once", "the header prompt_tokens,output_tokens is missing below"),
]


@pytest.mark.parametrize(("header", "message"), BAD_HEADERS, ids=[message for _, message in BAD_HEADERS])
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_bad_header_refuses_the_file_whatever_is_asked(tmp_path, header, message, on_bad_row):
    with pytest.raises(ConfigError) as caught:
        read_trace(write(tmp_path, header), on_bad_row=on_bad_row)
    assert ":1: " in str(caught.value)
    assert message in str(caught.value)


def test_columns_in_any_order_and_quoted_fields(tmp_path):
    path = write(tmp_path, "num_decode_tokens,arrived_at,num_prefill_tokens", '"109",1e-3,396', "1,0.0010000004,2")
    assert [(one.arrival_ns, one.prompt_tokens) for one in read_trace(path).requests] == [
        (1_000_000, 396),
        (1_000_000, 2),
    ]


def test_azure_of_2024_with_zone_and_whole_seconds(tmp_path):
    path = write(tmp_path, AZURE[0], "2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 01:00:08+01:00,2399,6")
    assert [one.arrival_ns for one in read_trace(path).requests] == [0, 7_990_070_000]


def test_burstgpt_sessions(tmp_path):
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = write(tmp_path, header, "1.5,abc,2.25,GPT-4,1,2,3,Conversation log", "2,,1,GPT-4,1,2,3,API log")
    assert [one.session_id for one in read_trace(path).requests] == ["abc", None]


def test_a_file_that_two_formats_claim_names_both(tmp_path):
    both = [
        ({"input_toks": 5, "output_toks": 2, "arrival_time_ns": 0} | MOONCAKE, "jsonl, mooncake"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens,arrived_at", "azure, vidur"),
    ]
    for row, names in both:
        with pytest.raises(ConfigError, match=f"more than one format claims it: {names}"):
            read_trace(write(tmp_path, row))
    with pytest.raises(ConfigError, match="unknown key 'timestamp'"):
        list(open_trace(write(tmp_path, both[0][0]), format_name="jsonl").requests)
    with pytest.raises(ConfigError, match="unknown trace format 'moncake'; did you mean 'mooncake'"):
        open_trace(write(tmp_path, MOONCAKE), format_name="moncake")


@pytest.mark.parametrize("name", ["mooncake", "dynamo", "bailian"])
def test_a_cut_off_last_line_is_refused_with_its_line(tmp_path, name):
    row = json.dumps(GOOD[name][0][0])
    path = tmp_path / "trace"
    path.write_text(f"{row}\n{row[: len(row) // 2]}")
    refused_or_skipped(path, 2, "not valid JSON")
    path.write_text(row[: len(row) // 2])
    with pytest.raises(ConfigError, match=r":1: not valid JSON"):
        read_trace(path)


def test_long_and_deep_json_is_refused(tmp_path):
    refused_or_skipped(write(tmp_path, MOONCAKE, "[" * 100_000), 2, "nested too deeply")
    huge = json.dumps(MOONCAKE).replace("1500", "9" * 5000)
    refused_or_skipped(write(tmp_path, MOONCAKE, huge), 2, "")
    refused_or_skipped(write(tmp_path, DYNAMO, json.dumps(DYNAMO).replace("1500.25", "1e999999")), 2, "timestamp must")


def test_dynamo_turns_wait_for_each_other_where_they_have_delays(tmp_path):
    rows = [
        {"timestamp": 10, "input_length": 600, "output_length": 5, "session_id": "a"},
        {"created_time": 20.5, "input_tokens": 7, "output_tokens": 5},
        {"delay": 1.5, "input_length": 700, "output_length": 6, "session_id": "a", "hash_ids": [1, 2]},
    ]
    path = write(tmp_path, *rows)
    with pytest.raises(ConfigError, match=r"trace:1: a line of an agentic session"):
        read_trace(path)
    found = list(open_trace(path, sessions=True).requests)
    assert found == [
        TraceRequest("0", 10_000_000, 600, 5, session_id="a", call_index=0),
        TraceRequest(
            "2",
            10_000_000,
            700,
            6,
            prefix=PrefixHashes((1, 2), 512, 700),
            session_id="a",
            call_index=1,
            tool_duration_ns=1_500_000,
        ),
        TraceRequest("1", 20_500_000, 7, 5),
    ]


BAD_DYNAMO = [
    ({"delay": 3, "session_id": "b", "input_length": 1, "output_length": 1}, "delay needs a row with a timestamp"),
    (DYNAMO | {"delay": 3}, "timestamp and delay exclude each other"),
    (DYNAMO | {"input_tokens": 3}, "input_tokens and input_length are the same field"),
    ({"timestamp": 1500.25, "text_input": "hello", "output_length": 1}, "text_input and no token counts"),
    (DYNAMO | {"type": "other"}, "type must be 'mooncake_trace'"),
    (DYNAMO | {"hash_ids": [1]}, "600 tokens need 2"),
    ({"input_length": 3, "output_length": 1}, "timestamp is missing"),
    ({"timestamp": 1500.25, "input_length": 3}, "output_length is missing"),
]


@pytest.mark.parametrize(("row", "message"), BAD_DYNAMO, ids=[message for _, message in BAD_DYNAMO])
def test_bad_dynamo_rows(tmp_path, row, message):
    refused_or_skipped(write(tmp_path, DYNAMO, row), 2, message)


SESSION = {
    "session_id": "s",
    "arrival_time_ns": 5,
    "sub_requests": [
        {"input_toks": 3, "output_toks": 2, "tool_duration_ns": 70, "input_tok_ids": [1, 2, 3]},
        {"input_toks": 6, "output_toks": 1, "tool_duration_ns": 99},
    ],
}


def calls_of(path, **options):
    return list(open_trace(path, sessions=True, **options).requests)


def test_agentic_sessions_become_calls(tmp_path):
    flat = {"input_toks": 5, "output_toks": 2, "arrival_time_ns": 5, "session_id": "t"}
    assert calls_of(write(tmp_path, SESSION, flat)) == [
        TraceRequest("s/0", 5, 3, 2, (1, 2, 3), session_id="s", call_index=0),
        TraceRequest("s/1", 5, 6, 1, session_id="s", call_index=1, tool_duration_ns=70),
        TraceRequest("1", 5, 5, 2, session_id="t"),
    ]
    assert len(calls_of(write(tmp_path, SESSION, flat), limit=1)) == 2, "a session counts as one row"


BAD_SESSIONS = [
    ({"sub_requests": []}, "sub_requests must be a list of at least one"),
    ({"sub_requests": [3]}, "sub_requests must be a list of at least one"),
    ({"sub_requests": [{"input_toks": 3}]}, "sub_requests[0]: output_toks is missing"),
    ({"sub_requests": [SESSION["sub_requests"][0] | {"tool_duration_ns": 1.5}]}, "tool_duration_ns must be an integer"),
    ({"sub_requests": [SESSION["sub_requests"][1] | {"request_id": "x"}] * 2}, "the same request_id"),
    ({"session_id": "s"}, "session_id 's' appears twice"),
    ({"input_toks": 3}, "unknown key 'input_toks'"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SESSIONS, ids=[message for _, message in BAD_SESSIONS])
def test_bad_sessions_are_refused_or_skipped_whole(tmp_path, change, message):
    path = write(tmp_path, SESSION, SESSION | {"session_id": "other"} | change)
    with pytest.raises(ConfigError) as caught:
        calls_of(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)
    assert len(calls_of(path, on_bad_row="skip")) == 2


def test_a_session_with_one_prompt_too_long_is_bad_as_a_whole(tmp_path):
    path = write(tmp_path, SESSION, SESSION | {"session_id": "u", "sub_requests": SESSION["sub_requests"][:1]})
    with pytest.raises(ConfigError, match=":1: a prompt of 6 tokens"):
        calls_of(path, max_prompt_tokens=5)
    assert [one.request_id for one in calls_of(path, max_prompt_tokens=5, on_bad_row="skip")] == ["u/0"]


BAD_HASHES = [
    ({"hash_ids": [1]}, "hash_block_tokens is missing"),
    ({"hash_ids": [1], "hash_block_tokens": 4, "hash_tokens": 7}, "hash_ids has 1 ids, 7 tokens need 2"),
    ({"hash_ids": [1, 2], "hash_block_tokens": 4, "hash_tokens": 8}, "prompt and output have 7 tokens"),
    (
        {"hash_ids": [1], "hash_block_tokens": 4, "hash_tokens": 4, "input_tok_ids": [1, 2, 3, 4, 5]},
        "exclude each other",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_HASHES, ids=[message for _, message in BAD_HASHES])
def test_bad_hashes_of_json_lines(tmp_path, change, message):
    good = {"input_toks": 5, "output_toks": 2, "arrival_time_ns": 0}
    refused_or_skipped(write(tmp_path, good, good | change), 2, message)


def test_rows_out_of_order_can_be_accepted(tmp_path):
    path = write(tmp_path, MOONCAKE, MOONCAKE | {"timestamp": 3})
    assert [one.arrival_ns for one in open_trace(path, ordered=False).requests] == [1_500_000_000, 3_000_000]


def gaps_s(arrivals, count=20_000):
    return [(later - sooner) / 1e9 for sooner, later in pairwise(islice(times_ns(arrivals), count))]


@pytest.mark.parametrize(
    ("arrivals", "mean_s", "variation"),
    [
        (Arrivals("poisson", 8.0, 1), 1 / 8, 1.0),
        (Arrivals("gamma", 8.0, 1, 0.25), 1 / 8, 2.0),
        (Arrivals("gamma", 8.0, 1, 4.0), 1 / 8, 0.5),
        (Arrivals("constant", 8.0, 1), 1 / 8, 0.0),
        (Arrivals("at-once", 1.0, 1), 0.0, None),
    ],
)
def test_gaps_have_the_moments_of_their_process(arrivals, mean_s, variation):
    """Gamma gaps of shape k have the coefficient of variation k ** -0.5; the exponential is k = 1."""
    gaps = gaps_s(arrivals)
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(mean_s, rel=0.05)
    if variation is not None:
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
        assert spread == pytest.approx(variation, rel=0.05, abs=1e-6)


def test_a_list_of_lengths_keeps_the_arrivals_of_its_line(tmp_path):
    rows = ("# arrivals=gamma rate_per_s=8 burstiness=0.5 seed=3", "prompt_tokens,output_tokens", "10,1", "0,1", "30,3")
    trace = read_trace(write(tmp_path, *rows), on_bad_row="skip")
    times = list(islice(times_ns(Arrivals("gamma", 8.0, 3, 0.5)), 3))
    assert [request.arrival_ns for request in trace.requests] == [times[0], times[2]]
    assert read_trace(write(tmp_path, *rows), on_bad_row="skip") == trace
