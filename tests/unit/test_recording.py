"""Recording without an engine: arrivals, step log, files, and that what is written is what `compare` reads."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.core.errors import ConfigError
from serving.recorded import read_recorded
from serving.recording.drive import Finished, play
from serving.recording.files import read_steps, steps_text, ticks, write_recording
from serving.recording.steps import Chunk, Decode, Step, batches, changes, stand_outs
from serving.recording.vllm_driver import EngineArguments, Limits, prompt_token_ids
from serving.traces import PrefixHashes, TraceRequest


class Clock:
    """Time that only sleeping and stepping move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


class Engine:
    """Each step takes 30 ms and gives every running request one token."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.left: dict[str, int] = {}
        self.seen: dict[str, list[float]] = {}
        self.batches: list[list[str]] = []

    def add(self, request: TraceRequest) -> None:
        self.left[request.request_id] = request.output_tokens
        self.seen[request.request_id] = [self.clock.now]

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Finished]:
        self.batches.append(list(self.left))
        self.clock.now += 0.030
        done = []
        for name in list(self.left):
            self.seen[name].append(self.clock.now)
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
                stamps = self.seen[name]
                done.append(Finished(name, 8, len(stamps) - 1, 1e9, stamps[0], stamps[0], stamps[1], stamps[-1]))
        return done


def trace(*rows: tuple[float, int]) -> list[TraceRequest]:
    return [TraceRequest(str(i), round(at * 1e9), 8, tokens) for i, (at, tokens) in enumerate(rows)]


def test_requests_enter_at_their_arrival_or_when_the_running_step_ends() -> None:
    clock = Clock()
    engine = Engine(clock)
    finished = play(engine, trace((0.0, 2), (0.010, 1), (1.0, 1)), clock=clock, sleep=clock.sleep)
    assert [one.request_id for one in finished] == ["0", "1", "2"]
    assert engine.batches == [["0"], ["0", "1"], ["2"]]
    queued = [round(one.queued_ts - 100.0, 3) for one in finished]
    assert queued == [0.0, 0.030, 1.0]


def test_every_request_finishes_and_keeps_trace_order() -> None:
    clock = Clock()
    finished = play(Engine(clock), trace((0, 9), (0, 1), (0, 4)), clock=clock, sleep=clock.sleep)
    assert [(one.request_id, one.output_tokens) for one in finished] == [("0", 9), ("1", 1), ("2", 4)]


def step(start_s: float, wall_us: float, prefill: int = 0, decodes: int = 8, running: int = 8) -> Step:
    return Step(start_s, wall_us, None, int(prefill > 0), prefill, 0, decodes, decodes * 100, running, 1, 0.5, 0)


def test_a_step_that_stalls_stands_out_and_a_long_prefill_does_not() -> None:
    steps = [step(i * 0.02, 20_000) for i in range(20)]
    steps += [step(1.0 + i, 400_000, prefill=8192) for i in range(4)]
    assert stand_outs(steps) == []
    steps[7] = step(0.14, 23_000_000)
    assert stand_outs(steps) == [7]


def test_ticks_count_tokens_where_they_were_scheduled() -> None:
    steps = [
        step(0.1, 1, prefill=100, decodes=0, running=1),
        step(0.6, 1, decodes=4, running=4),
        step(2.2, 1, decodes=2),
    ]
    assert ticks(steps, 1.0) == [
        (1.0, 100.0, 4.0, 4, 1, 50.0),
        (2.0, 0.0, 0.0, 4, 1, 50.0),
        (3.0, 0.0, 2.0, 8, 1, 50.0),
    ]


def test_a_recording_is_read_back(tmp_path: Path) -> None:
    clock = Clock()
    finished = play(Engine(clock), trace((0, 3), (0.5, 2)), clock=clock, sleep=clock.sleep)
    parts = dict.fromkeys(("add_us", "schedule_us", "launch_us", "sample_us", "wait_us", "update_us"), 12.5)
    steps = [
        replace(step(0.0, 30_000), chunks=(Chunk(0, 8, 0), Chunk(1, 5, 64)), graph="NONE", padded_tokens=13, **parts),
        replace(step(0.03, 30_000), joined=(Decode(0, 9), Decode(1, 70)), gpu_us=812.4, gpu_start_s=0.031),
        replace(step(0.06, 30_000), left=(0,), preemptions=1),
    ]
    write_recording(tmp_path, {"instances": []}, {"model": "m"}, {"num_gpu_blocks": 7}, finished, steps, 1.0)
    recorded = read_recorded(tmp_path)
    assert [(r.prompt_tokens, r.output_tokens) for r in recorded.requests] == [(8, 3), (8, 2)]
    assert recorded.requests[0].finish_ns == 90_000_000
    assert read_steps(tmp_path) == steps
    assert json.loads((tmp_path / "vllm" / "engine.json").read_text()) == {"num_gpu_blocks": 7}
    once = (tmp_path / "vllm" / "steps.csv.gz").read_bytes()
    write_recording(tmp_path, {"instances": []}, {"model": "m"}, {"num_gpu_blocks": 7}, finished, steps, 1.0)
    assert (tmp_path / "vllm" / "steps.csv.gz").read_bytes() == once
    assert not list(tmp_path.rglob(".*"))


def test_a_broken_step_log_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_steps(tmp_path)
    (tmp_path / "steps.csv.gz").write_text("step")
    with pytest.raises(ConfigError, match="not a gzip file"):
        read_steps(tmp_path)
    text = steps_text([step(0.0, 30_000)])
    for changed, place in ((text.replace("wall_us", "wall_ms"), "gz:1: the header"), (text[:-3], "gz:2: ")):
        (tmp_path / "steps.csv.gz").write_bytes(gzip.compress(changed.encode()))
        with pytest.raises(ConfigError, match=place):
            read_steps(tmp_path)


@given(st.lists(st.dictionaries(st.integers(0, 5), st.integers(1, 1_000), max_size=5), max_size=12))
def test_batches_come_back_from_their_changes(sets: list[dict[int, int]]) -> None:
    """Each set of decode requests mostly goes on from the one before, as an engine's do, and else is anything."""
    before: dict[int, int] = {}
    steps, wanted = [], []
    for place, drawn in enumerate(sets):
        goes_on = {request: keys + 1 for request, keys in before.items() if (request + place) % 3}
        now = [Decode(*one) for one in (goes_on | drawn).items()]
        joined, left = changes(before, now)
        steps.append(replace(step(0.0, 1.0), joined=joined, left=left))
        wanted.append(sorted(now))
    assert [sorted(decodes) for _, decodes in batches(steps)] == wanted


def test_limits_of_a_play_are_read_and_others_refused() -> None:
    assert Limits.parse("") == Limits()
    assert Limits.parse("max_num_seqs=32,num_gpu_blocks=3000") == Limits(max_num_seqs=32, num_gpu_blocks=3000)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        Limits.parse("max_num_seq=32")
    for text in ("num_gpu_blocks=1", "max_num_seqs=0", "max_num_seqs=many", "max_num_seqs"):
        with pytest.raises(ConfigError, match="positive integer"):
            Limits.parse(text)


def test_pieces_run_what_is_written() -> None:
    arguments = EngineArguments(8192, 2048, 16, "auto", 0.9, None, None, "piecewise", (1, 512), True, True, False, 1)
    assert arguments.keywords()["compilation_config"] == {
        "mode": 3, "backend": "eager", "custom_ops": ["all"], "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [1, 512],
    }  # fmt: skip


def test_modes_become_engine_arguments() -> None:
    def keywords(mode: str, sizes: tuple[int, ...] | None = None) -> dict[str, Any]:
        return EngineArguments(8192, 2048, 16, "auto", 0.9, None, None, mode, sizes, True, True, False, 1).keywords()

    graphs = keywords("decode-graphs", (1, 2))
    assert graphs["compilation_config"] == {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]
    }  # fmt: skip
    assert keywords("eager", (1, 2))["enforce_eager"] and "compilation_config" not in keywords("eager", (1, 2))
    assert "compilation_config" not in keywords("engine") and not keywords("engine")["enforce_eager"]


def test_equal_prefix_hashes_become_equal_tokens() -> None:
    def tokens(name: str, *blocks: int) -> list[int]:
        prefix = PrefixHashes(blocks, 16, 40)
        return prompt_token_ids(TraceRequest(name, 0, 40, 1, prefix=prefix), 1000)

    one, two = tokens("a", 1, 2, 3), tokens("b", 1, 2, 4)
    assert len(one) == len(two) == 40
    assert one[:32] == two[:32] and one[32:] != two[32:]
    # Hashes may reach into the answer.
    assert len(prompt_token_ids(TraceRequest("a", 0, 33, 7, prefix=PrefixHashes((1, 2, 3), 16, 40)), 1000)) == 33
    alone = [prompt_token_ids(TraceRequest(name, 0, 40, 1), 1000) for name in ("a", "a", "b")]
    assert alone[0] == alone[1] != alone[2]
    assert prompt_token_ids(TraceRequest("a", 0, 3, 1, prompt_ids=(7, 8, 9)), 1000) == [7, 8, 9]
