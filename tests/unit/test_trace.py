"""Reading request traces."""

import json
from pathlib import Path

import pytest

from profiler.core.errors import ConfigError
from serving.content import block_keys
from serving.traces import TraceRequest, read_trace

SHARED = Path(__file__).resolve().parents[2].parent / "shared"

GOOD = {"input_toks": 5, "output_toks": 2, "arrival_time_ns": 10}


def write(folder: Path, *rows: dict[str, object] | str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_rows_become_requests(tmp_path):
    path = write(
        tmp_path, GOOD, "", GOOD | {"input_tok_ids": [1, 2, 3, 4, 5], "output_tok_ids": [7, 8], "request_id": "a"}
    )
    trace = read_trace(path)
    assert trace.format == "jsonl"
    assert trace.requests == (
        TraceRequest("0", 10, 5, 2),
        TraceRequest("a", 10, 5, 2, (1, 2, 3, 4, 5), (7, 8)),
    )


def test_limit_counts_rows_and_does_not_read_on(tmp_path):
    path = write(tmp_path, GOOD, GOOD, "not json")
    assert len(read_trace(path, limit=2).requests) == 2
    with pytest.raises(ConfigError):
        read_trace(path)


BAD_ROWS = [
    (GOOD | {"output_toks": 0}, "output_toks must be an integer of at least 1, found 0"),
    (GOOD | {"input_toks": 0}, "input_toks must be an integer of at least 1"),
    (GOOD | {"input_toks": -3}, "found -3"),
    (GOOD | {"arrival_time_ns": -1000}, "arrival_time_ns must be an integer of at least 0"),
    ({"input_toks": 5, "output_toks": 2}, "arrival_time_ns is missing"),
    (GOOD | {"input_toks": "133"}, 'input_toks must be an integer of at least 1, found "133"'),
    (GOOD | {"input_toks": 13.7}, "found 13.7"),
    (GOOD | {"input_toks": 13.0}, "found 13.0"),
    (GOOD | {"input_toks": True}, "found true"),
    (GOOD | {"arrival_time_ns": None}, "found null"),
    (GOOD | {"arrival_time_ns": 2**63}, "arrival_time_ns must be"),
    (GOOD | {"input_tok_ids": [1, 2]}, "input_tok_ids has 2 ids for 5 tokens"),
    (GOOD | {"input_tok_ids": [1, 2, 3, 4, -1]}, "list of integers"),
    (GOOD | {"output_tok_ids": "ab"}, "list of integers"),
    (GOOD | {"request_id": ""}, "non-empty"),
    (GOOD | {"request_id": 1.5}, "found 1.5"),
    (GOOD | {"output_tok": 2}, "did you mean 'output_toks'"),
    ('{"input_toks": 5, "input_toks": 6, "output_toks": 2, "arrival_time_ns": 10}', "'input_toks' appears twice"),
    ('{"input_toks": NaN, "output_toks": 2, "arrival_time_ns": 10}', "NaN is not a number"),
    ('{"input_toks": 5, "output_toks"', "not valid JSON"),
    ("[1, 2]", "must be a JSON object, found list"),
    (GOOD | {"arrival_time_ns": 9}, "before the row above it"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=[message[:30] for _, message in BAD_ROWS])
def test_bad_rows_are_refused_with_their_line_or_skipped(tmp_path, row, message):
    path = write(tmp_path, GOOD, "", row, GOOD)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert caught.value.exit_code == 2
    trace = read_trace(path, on_bad_row="skip")
    assert [request.request_id for request in trace.requests] == ["0", "2"], "row numbers stay those of the file"
    assert [line for line, _ in trace.skipped] == [3]


def test_a_prompt_beyond_the_model_length_is_a_bad_row(tmp_path):
    path = write(tmp_path, GOOD, GOOD | {"input_toks": 6})
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: a prompt of 6 tokens exceeds max_model_len 5"):
        read_trace(path, max_prompt_tokens=5)
    assert len(read_trace(path, max_prompt_tokens=5, on_bad_row="skip").requests) == 1


def test_repeated_ids_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="'a' appears twice"):
        read_trace(write(tmp_path, GOOD | {"request_id": "a"}, GOOD | {"request_id": "a"}))


def test_sessions_are_refused_even_when_bad_rows_are_skipped(tmp_path):
    session = {"session_id": "s", "arrival_time_ns": 0, "sub_requests": [{"input_toks": 1, "output_toks": 1}]}
    for rows in ([session], [GOOD, session]):
        for on_bad_row in ("error", "skip"):
            with pytest.raises(ConfigError, match=rf":{len(rows)}: a line of an agentic session"):
                read_trace(write(tmp_path, *rows), on_bad_row=on_bad_row)


def test_files_that_are_no_trace(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="is a folder"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="empty"):
        read_trace(write(tmp_path, "", ""))
    with pytest.raises(ConfigError, match=r":1: no known trace format.*Known: .*jsonl \(input_toks"):
        read_trace(write(tmp_path, "a,b,c"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(tmp_path / "binary")
    with pytest.raises(ConfigError, match="no usable rows: all 1 are bad, the first in line 1"):
        read_trace(write(tmp_path, GOOD | {"input_toks": 0}), on_bad_row="skip")


def test_hostile_rows_are_refused_unless_they_are_legal(tmp_path):
    path = SHARED / "traces" / "hostile_rows.jsonl"
    if not path.exists():
        pytest.skip("shared traces are absent")
    for case in map(json.loads, path.read_text().splitlines()):
        written = write(tmp_path, *(case["rows"] if "rows" in case else [case["row"]]))
        if case["expect"].startswith("accepted"):
            assert len(read_trace(written).requests) == 1, case["case"]
            continue
        with pytest.raises(ConfigError, match=r"trace\.jsonl:\d: "):
            read_trace(written)


def test_a_public_trace_reads_to_its_known_sums():
    path = SHARED / "traces" / "llmservingsim_sharegpt_qwen3-32b_300_sps10.first200.notokens.jsonl"
    if not path.exists():
        pytest.skip("shared traces are absent")
    requests = read_trace(path).requests
    assert len(requests) == 200
    assert sum(request.prompt_tokens for request in requests) == 170_906
    assert sum(request.output_tokens for request in requests) == 135_527
    assert requests[-1].arrival_ns == 18_909_729_446


def test_block_keys_are_equal_exactly_for_equal_prefixes():
    def keys_of(*ids, block_tokens=2):
        rows = [TraceRequest(str(i), 0, len(one), 1, tuple(one)) for i, one in enumerate(ids)]
        return block_keys(rows, block_tokens)

    assert keys_of([1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 9, 9], [3, 4, 3, 4]) == [(0, 1), (0, 1), (0, 2), (3, 4)]
    assert keys_of([1], [1, 2, 3]) == [(), (0,)]


def test_output_ids_extend_the_chain_of_their_prompt():
    first = TraceRequest("0", 0, 3, 3, (1, 2, 3), (4, 5, 6))
    second = TraceRequest("1", 0, 6, 1, (1, 2, 3, 4, 5, 6))
    without = TraceRequest("2", 0, 3, 3, None, (4, 5, 6))
    assert block_keys([first, second, without], 2) == [(0, 1, 2), (0, 1, 2), ()]
