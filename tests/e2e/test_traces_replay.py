"""Replaying traces of other formats, and agentic sessions, on the shipped tables."""

import csv
import io
import json
from dataclasses import replace

import pytest

from profiler.core.errors import ConfigError
from profiler.core.paths import data_root
from serving.api import replay
from serving.config import Overrides
from serving.metrics import csv_text, summary
from serving.trace_tools.edit import Lengths, filtered
from serving.trace_tools.write import write_trace
from serving.traces import open_trace, read_trace

CLUSTER = data_root() / "configs" / "cluster" / "h200-8x-deepseek-v32-dp8-ep8.yaml"
EXAMPLE = data_root() / "workloads" / "example_trace.jsonl"


def test_hashes_of_a_trace_replay_as_its_token_ids_do(tmp_path):
    """Prompts hashed in the block length of the engine say what their ids say: no byte of the result moves."""
    hashed = tmp_path / "hashed.jsonl"
    write_trace(hashed, open_trace(EXAMPLE).requests, "dynamo", hash_block_tokens=64)
    write_trace(tmp_path / "back.jsonl", open_trace(hashed, hash_block_tokens=64).requests, "jsonl")
    again = read_trace(tmp_path / "back.jsonl")
    assert sum(one.prefix is not None for one in again.requests) == 40
    assert all(one.prompt_ids is None for one in again.requests)
    with_hashes, with_ids = replay(CLUSTER, again), replay(CLUSTER, EXAMPLE)
    assert csv_text(with_hashes) == csv_text(with_ids)
    assert sum(one.prefix_hit_tokens or 0 for one in with_ids.records) > 0


def test_lengths_and_times_alone_replay_the_same_from_any_format(tmp_path):
    """Vidur's rows keep times exactly; without content every format gives the replay of the same requests."""
    plain = tmp_path / "plain.csv"
    short = filtered(open_trace(EXAMPLE).requests, Lengths(max_total_tokens=4000))
    write_trace(plain, short, "vidur")
    write_trace(tmp_path / "burst.csv", open_trace(plain).requests, "burstgpt")
    write_trace(tmp_path / "rows.jsonl", open_trace(plain).requests, "jsonl")
    texts = {csv_text(replay(CLUSTER, tmp_path / name)) for name in ("plain.csv", "burst.csv", "rows.jsonl")}
    assert len(texts) == 1


SESSIONS = data_root() / "workloads" / "agentic_sessions.jsonl"


@pytest.mark.parametrize("router", ["least_loaded", "round_robin", "session_affinity", "prefix_aware", "power_of_two"])
def test_agentic_sessions_replay_call_by_call(router):
    """Every call of the file is one request; each arrives its tool's duration after the one before it finished."""
    result = replay(CLUSTER, SESSIONS, overrides=Overrides(router=router), seed=3)
    lines = [json.loads(line) for line in SESSIONS.read_text().splitlines()]
    rows = list(csv.DictReader(io.StringIO(csv_text(result))))
    assert len(rows) == sum(len(line["sub_requests"]) for line in lines) == 163
    at = 0
    homes = []
    for line in lines:
        calls = rows[at : at + len(line["sub_requests"])]
        at += len(calls)
        assert int(calls[0]["arrival_ns"]) == line["arrival_time_ns"]
        for before, after, asked in zip(calls, calls[1:], line["sub_requests"], strict=False):
            assert int(after["arrival_ns"]) == int(before["finish_ns"]) + asked["tool_duration_ns"]
        homes.append({row["instance_id"] for row in calls})
    figures = summary(result)
    assert figures["requests"]["finished"] == 163
    assert (max(map(len, homes)) == 1) == (router == "session_affinity")
    hits = figures["prefix_hit_tokens"] / sum(one.prompt_tokens for one in result.trace.requests)
    assert (hits > 0.7) == (router in ("session_affinity", "prefix_aware")), "the conversation is cached where it ran"
    assert csv_text(replay(CLUSTER, SESSIONS, overrides=Overrides(router=router), seed=3)) == csv_text(result)


def test_calls_out_of_place_are_refused():
    trace = read_trace(SESSIONS, limit=2, sessions=True)
    for broken in (trace.requests[1:], trace.requests[:1] + trace.requests[2:]):
        with pytest.raises(ConfigError, match="must follow its call"):
            replay(CLUSTER, replace(trace, requests=broken))


def test_times_beyond_the_simulated_clock_are_refused(tmp_path):
    late = {"input_toks": 9, "output_toks": 2, "arrival_time_ns": 2**62 + 1}
    call = {"input_toks": 9, "output_toks": 2, "tool_duration_ns": 2**61}
    session = {"session_id": "s", "arrival_time_ns": 1, "sub_requests": [call, call, call]}
    for row, name in ((late, "request 0"), (session, "request s/2")):
        path = tmp_path / "trace.jsonl"
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(ConfigError, match=f"{name}: arrives 4,611,.* ns after the start"):
            replay(CLUSTER, path)
    path.write_text(json.dumps(session | {"sub_requests": [call, call]}) + "\n")
    assert replay(CLUSTER, path).records[1].arrival_ns > 2**61
