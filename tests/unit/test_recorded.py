import json
from pathlib import Path

import pytest

from profiler.core.errors import ConfigError
from serving.recorded import read_recorded, retimed

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "recorded" / "RTXPRO6000"

ROWS = [
    {"request_id": "b-0", "input_toks": 10, "output_toks": 3, "arrival_time": 1e9, "queued_ts": 50.0,
     "scheduled_ts": 50.5, "first_token_ts": 51.0, "last_token_ts": 53.0},
    {"request_id": "b-1", "input_toks": 20, "output_toks": 1, "arrival_time": 1e9 + 1, "queued_ts": 49.5,
     "scheduled_ts": 49.5, "first_token_ts": 52.0, "last_token_ts": 52.0},
]  # fmt: skip


def folder(path: Path, rows: list[dict[str, object]] | None = None, ticks: str | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    (path / "meta.json").write_text('{"model": "acme/Tiny", "vllm_version": "0.0"}')
    if ticks is not None:
        (path / "timeseries.csv").write_text(ticks)
    return path


def test_times_count_from_the_first_queueing(tmp_path: Path) -> None:
    found = read_recorded(folder(tmp_path / "run", ticks=f"{HEADER}\n1.5,9.0,1.0,1,1,0.0\n"))
    one, two = found.requests
    assert (one.queued_ns, one.scheduled_ns, one.first_token_ns, one.finish_ns) == (
        500_000_000,
        1_000_000_000,
        1_500_000_000,
        3_500_000_000,
    )
    assert two.queued_ns == 0 and two.request_id == "b-1"
    assert [(tick.time_ns, tick.running, tick.waiting) for tick in found.ticks] == [(1_500_000_000, 1, 1)]


HEADER = "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_toks": 1.5}, "input_toks must be a positive integer"),
        ({"output_toks": 0}, "output_toks must be a positive integer"),
        ({"queued_ts": "now"}, "queued_ts must be a positive number"),
        ({"last_token_ts": None}, "last_token_ts must be a positive number"),
        ({"first_token_ts": 49.0}, "must not decrease"),
        ({"request_id": 3}, "request_id must be a text"),
    ],
)
def test_malformed_requests_are_refused_by_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = folder(tmp_path / "run", [ROWS[0], ROWS[1] | change])
    with pytest.raises(ConfigError, match=rf"requests\.jsonl:2: .*{message}"):
        read_recorded(path)


def test_malformed_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"requests\.jsonl: no such file"):
        read_recorded(tmp_path)
    with pytest.raises(ConfigError, match=r"timeseries\.csv:1: the header"):
        read_recorded(folder(tmp_path / "a", ticks="t,running\n"))
    with pytest.raises(ConfigError, match=r"timeseries\.csv:2: needs numbers"):
        read_recorded(folder(tmp_path / "b", ticks=f"{HEADER}\n1.0,2.0\n"))
    (tmp_path / "b" / "requests.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match=r"requests\.jsonl:1: not valid JSON"):
        read_recorded(tmp_path / "b")
    (tmp_path / "b" / "requests.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        read_recorded(tmp_path / "b")


def trace(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_retimed_trace_is_sorted_and_keeps_its_ids(tmp_path: Path) -> None:
    recorded = read_recorded(folder(tmp_path / "run"))
    first = {"input_toks": 10, "output_toks": 3, "arrival_time_ns": 7, "input_tok_ids": [1] * 10}
    second = {"input_toks": 20, "output_toks": 1, "arrival_time_ns": 9, "request_id": "x"}
    lines = [json.loads(line) for line in retimed(trace(tmp_path / "t.jsonl", first, second), recorded).splitlines()]
    assert lines[0] == {"request_id": "x", "input_toks": 20, "output_toks": 1, "arrival_time_ns": 0}
    assert lines[1]["request_id"] == "0" and lines[1]["arrival_time_ns"] == 500_000_000
    assert lines[1]["input_tok_ids"] == [1] * 10


def test_retiming_refuses_a_trace_of_other_requests(tmp_path: Path) -> None:
    recorded = read_recorded(folder(tmp_path / "run"))
    row = {"input_toks": 10, "output_toks": 3, "arrival_time_ns": 7}
    with pytest.raises(ConfigError, match="1 requests, the recorded run has 2"):
        retimed(trace(tmp_path / "t.jsonl", row), recorded)
    with pytest.raises(ConfigError, match=r"t\.jsonl:2: input and output of 10 and 3 tokens.*20 and 1"):
        retimed(trace(tmp_path / "t.jsonl", row, row), recorded)


@pytest.mark.parametrize(
    ("model", "ttft", "tpot", "latency"),
    [
        ("Llama-3.1-8B", (7097.2, 9442.7, 16852.7, 19755.3), (32.5, 33.4, 36.5, 37.3), (28200.7, 37638.8)),
        ("Qwen3-30B-A3B-Instruct-2507", (1086.0, 138.8, 5182.6, 9587.9), (47.3, 48.9, 52.2, 53.3), (32344.6, 43901.1)),
    ],
)
def test_figures_of_the_recorded_runs(
    model: str, ttft: tuple[float, ...], tpot: tuple[float, ...], latency: tuple[float, ...]
) -> None:
    """Against the summary published with the recordings: mean, median, p90, p99 (latency: mean, p99), one decimal."""
    if not (SHARED / model).is_dir():
        pytest.skip(f"{SHARED / model} is not here")
    import numpy as np

    requests = read_recorded(SHARED / model).requests
    first = [(r.first_token_ns - r.queued_ns) / 1e6 for r in requests]
    gaps = [(r.finish_ns - r.first_token_ns) / 1e6 / (r.output_tokens - 1) for r in requests]
    total = [(r.finish_ns - r.queued_ns) / 1e6 for r in requests]

    def figures(values: list[float]) -> list[float]:
        return [float(np.mean(values)), *(float(v) for v in np.percentile(values, (50, 90, 99)))]

    assert figures(first) == pytest.approx(ttft, abs=0.06)
    assert figures(gaps) == pytest.approx(tpot, abs=0.06)
    assert figures(total)[::3] == pytest.approx(latency, abs=0.06)
