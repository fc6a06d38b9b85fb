"""Replaying traces of other formats on the shipped tables."""

from profiler.core.paths import data_root
from serving.api import replay
from serving.metrics import csv_text
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
