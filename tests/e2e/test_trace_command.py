"""`python -m serving trace` as it is called."""

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from profiler.core.errors import ConfigError
from profiler.core.paths import data_root
from serving.__main__ import main
from serving.traces import open_trace, read_trace

WORKLOADS = data_root() / "workloads"
ROWS = [{"input_toks": 100 * (n + 1), "output_toks": n + 1, "arrival_time_ns": n * 2_000_000_000} for n in range(6)]


def trace(*words):
    main.main(["trace", *map(str, words)], prog_name="serving", standalone_mode=False)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def read(path):
    return [(one.arrival_ns, one.prompt_tokens, one.request_id) for one in read_trace(path).requests]


def test_convert_and_what_is_lost(rows, tmp_path, capsys):
    hashed = ROWS[0] | {"hash_ids": [3], "hash_block_tokens": 64, "hash_tokens": 64, "request_id": "x", "priority": 1}
    hashed["arrival_time_ns"] = 1234
    rows.write_text(json.dumps(hashed) + "\n")
    trace("convert", rows, tmp_path / "out.csv", "--output-format", "azure")
    assert (tmp_path / "out.csv").read_text().splitlines()[1] == "2000-01-01 00:00:00.0000012,100,1"
    said = capsys.readouterr()
    assert said.out == ""
    for what in ("prefix hashes: 1 requests lose theirs", "request ids: 1", "priorities: 1", "1 arrivals are rounded"):
        assert what in said.err


def test_rescale(rows, tmp_path):
    trace("rescale", rows, tmp_path / "a.jsonl", "--time-factor", "0.5")
    assert [one[0] for one in read(tmp_path / "a.jsonl")] == [n * 10**9 for n in range(6)]
    trace("rescale", rows, tmp_path / "b.jsonl", "--rate", "4")
    assert [one[0] for one in read(tmp_path / "b.jsonl")] == [n * 250_000_000 for n in range(6)]


def test_cut(rows, tmp_path):
    out = tmp_path / "a.jsonl"
    trace("cut", rows, out, "--from", "2", "--to", "8")
    assert read(out) == [(0, 200, "1"), (2 * 10**9, 300, "2"), (4 * 10**9, 400, "3")]
    trace("cut", rows, out, "--skip", "4", "--keep-times")
    assert read(out) == [(8 * 10**9, 500, "4"), (10 * 10**9, 600, "5")]
    trace("cut", rows, out, "--rows", "1")
    assert read(out) == [(0, 100, "0")]


def test_filter_and_merge(rows, tmp_path):
    out, both = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    trace("filter", rows, out, "--min-prompt-tokens", "300", "--max-total-tokens", "404")
    assert [one[1:] for one in read(out)] == [(300, "2"), (400, "3")]
    trace("merge", out, rows, both)
    assert [one[2] for one in read(both)] == ["1:0", "1:1", "0:2", "1:2", "0:3", "1:3", "1:4", "1:5"]


def test_summary_as_json_and_as_a_table(rows, capsys):
    trace("summary", rows, "--json")
    figures = json.loads(capsys.readouterr().out)
    assert figures["requests"] == 6
    assert figures["prompt_tokens"] | {"p90": 0, "p95": 0, "p99": 0} == {
        "sum": 2100, "mean": 350.0, "min": 100, "p50": 350.0, "p90": 0, "p95": 0, "p99": 0, "max": 600,
    }  # fmt: skip
    assert figures["arrivals"]["requests_per_s"] == 0.6
    assert figures["arrivals"]["gap_coefficient_of_variation"] == 0.0
    trace("summary", rows)
    table = capsys.readouterr().out
    assert "100.00% of prompts" in table
    assert "2,100" in table


def test_skipped_rows_are_counted_and_named(rows, tmp_path, capsys):
    with rows.open("a") as stream:
        stream.write('{"input_toks": 0, "output_toks": 1, "arrival_time_ns": 20000000000}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:7: input_toks"):
        trace("summary", rows)
    trace("summary", rows, "--json", "--on-bad-row", "skip")
    said = capsys.readouterr()
    assert json.loads(said.out)["bad_rows_skipped"] == 1
    assert f"skipped {rows}:7: input_toks" in said.err


def test_rows_out_of_order_are_sorted_on_demand(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(ROWS)))
    with pytest.raises(ConfigError, match="in order of arrival"):
        trace("convert", path, tmp_path / "a.jsonl")
    assert not (tmp_path / "a.jsonl").exists(), "a refused input leaves no output behind"
    trace("convert", path, tmp_path / "a.jsonl", "--sort")
    assert [one[0] for one in read(tmp_path / "a.jsonl")] == [row["arrival_time_ns"] for row in ROWS]


def test_a_plot_stands_alone_and_its_text_is_text(rows, tmp_path):
    hostile = tmp_path / "<img src=x onerror=alert(1)>.jsonl"
    hostile.write_bytes(rows.read_bytes())
    trace("plot", hostile, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;.jsonl</title>" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page), "nothing is fetched from elsewhere"
    trace("plot", hostile, tmp_path / "b.html")
    assert (tmp_path / "b.html").read_bytes() == page.encode()
    trace("plot", rows, tmp_path / "c.html", "--title", "</title><script>alert(1)</script>")
    assert "<script>alert(1)" not in (tmp_path / "c.html").read_text()


BAD_CALLS = [
    (["rescale", "IN", "OUT"], "one of --time-factor and --rate"),
    (["rescale", "IN", "OUT", "--rate", "0"], "--rate must be a number above 0, found '0'"),
    (["rescale", "IN", "OUT", "--rate", "1e999999999"], "--rate must be a number"),
    (["rescale", "IN", "OUT", "--time-factor", "nan"], "--time-factor must be a number"),
    (["rescale", "IN", "OUT", "--time-factor", "1e15"], "later than 2**63 ns"),
    (["cut", "IN", "OUT"], "cut needs"),
    (["cut", "IN", "OUT", "--from", "3", "--to", "3"], "--to 3 must be later than --from 3"),
    (["cut", "IN", "OUT", "--from", "100"], "no request is left"),
    (["filter", "IN", "OUT"], "at least one limit"),
    (["merge", "IN", "OUT"], "at least two traces"),
    (["convert", "IN", "IN"], "would overwrite an input"),
    (["convert", "IN", "OUT", "--output-format", "azzure"], "unknown output format 'azzure'; did you mean 'azure'"),
    (["convert", "IN", "OUT", "--output-format", "lengths"], "unknown output format 'lengths'"),
    (["convert", "IN", "OUT", "--output-format", "vidur", "--hash-block-tokens", "16"], "without hash blocks"),
    (["convert", "IN", "OUT", "--input-format", "mooncake"], ":1: unknown key 'input_toks'"),
    (["convert", "absent.jsonl", "OUT"], "no such file"),
    (["generate", "OUT", "--requests", "3", "--seed", "1", "--rate", "1"], "the lengths come from"),
    (["generate", "OUT", "--requests", "3", "--seed", "1", "--lengths", "IN"], "--rate is needed"),
    (
        ["generate", "OUT", "--requests", "9", "--seed", "1", "--rate", "1", "--lengths", "IN", "--in-order"],
        "list of 6",
    ),
    (
        ["generate", "OUT", "--requests", "3", "--seed", "1", "--rate", "1", "--lengths", "IN", "--burstiness", "2"],
        "gamma",
    ),
    (["generate", "IN", "--requests", "3", "--seed", "1", "--rate", "1", "--lengths", "IN"], "overwrite an input"),
]
_DRAWN = ["generate", "OUT", "--requests", "3", "--seed", "1", "--rate", "1", "--output-tokens", "5", "--prompt"]
BAD_CALLS += [
    ([*_DRAWN, "0"], "--prompt: '0' is not a distribution (at least 1 is needed)"),
    ([*_DRAWN, "normal:3:4"], "uniform:MIN:MAX"),
    ([*_DRAWN, "uniform:9:3"], "1 <= MIN <= MAX"),
    ([*_DRAWN, "lognormal:100:99999"], "SIGMA above 0 and at most 10"),
    ([*_DRAWN, "lognormal:100:0.01:5000:6000"], "does not reach 5000 to 6000"),
    ([*_DRAWN, "5", "--prefixes", "2"], "--prefixes, --prefix-tokens go together"),
    ([*_DRAWN, "5", "--prefixes", "2", "--prefix-tokens", "100"], "not whole blocks of 64"),
    ([*_DRAWN, "5", "--prefixes", "2", "--prefix-tokens", "64", "--prefix-share", "1.5"], "from 0 to 1"),
    ([*_DRAWN, "5", "--calls", "2"], "--calls, --added-tokens, --tool-ms go together"),
    ([*_DRAWN, "5", "--rate", "1e-30"], "rate_per_s must be from"),
]


@pytest.mark.parametrize(("words", "message"), BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_bad_calls_say_what_is_legal_and_write_nothing(rows, tmp_path, words, message):
    out = tmp_path / "out"
    before = rows.read_bytes()
    with pytest.raises(ConfigError) as caught:
        trace(*({"IN": str(rows), "OUT": str(out)}.get(word, word) for word in words))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
    assert sorted(tmp_path.iterdir()) == [rows]
    assert rows.read_bytes() == before


def test_sessions_survive_every_edit_and_are_refused_where_they_have_no_place(tmp_path):
    made, out = tmp_path / "s.jsonl", tmp_path / "o.jsonl"
    words = ["--requests", "12", "--seed", "5", "--rate", "1", "--prompt", "uniform:50:90", "--output-tokens", "20"]
    trace("generate", made, *words, "--calls", "uniform:1:4", "--added-tokens", "10", "--tool-ms", "uniform:0:900")
    calls = list(open_trace(made, sessions=True).requests)
    for before, after in pairwise(calls):
        if after.call_index:
            assert after.prompt_tokens == before.prompt_tokens + before.output_tokens + 10
            assert (after.session_id, after.arrival_ns) == (before.session_id, before.arrival_ns)
            shared = before.prefix.ids
            assert after.prefix.ids[: len(shared)] == shared, "the conversation so far is the start of the next prompt"
    trace("rescale", made, out, "--time-factor", "2")
    slow = list(open_trace(out, sessions=True).requests)
    assert [(one.tool_duration_ns, one.arrival_ns) for one in slow] == [
        (one.tool_duration_ns, 2 * one.arrival_ns) for one in calls
    ]
    trace("convert", made, tmp_path / "d.jsonl", "--output-format", "dynamo", "--hash-block-tokens", "16")
    back = list(open_trace(tmp_path / "d.jsonl", sessions=True, hash_block_tokens=16).requests)
    assert [(one.request_id, one.prompt_tokens, one.tool_duration_ns) for one in back] == [
        (one.request_id, one.prompt_tokens, one.tool_duration_ns) for one in calls
    ]
    with pytest.raises(ConfigError, match="agentic session, for which rows of the format azure have no place"):
        trace("convert", made, tmp_path / "x.csv", "--output-format", "azure")
    assert not (tmp_path / "x.csv").exists()


def test_lengths_come_from_lists_and_traces_of_any_format(rows, tmp_path):
    arxiv = tmp_path / "arxiv.csv"
    arxiv.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7,3,10,2.33\n8,4,12,2.0\n")
    out = tmp_path / "o.jsonl"
    base = ["--requests", "2", "--seed", "1", "--arrivals", "at-once", "--in-order", "--lengths"]
    for source, expected in ((arxiv, [7, 8]), (rows, [100, 200])):
        trace("generate", out, *base, source)
        assert [(one[0], one[1]) for one in read(out)] == [(0, size) for size in expected]
    arxiv.write_text("num_prefill_tokens,num_decode_tokens\n7,3\n8,-4\n")
    with pytest.raises(ConfigError, match=r"arxiv\.csv:3: num_decode_tokens"):
        trace("generate", out, *base, arxiv)


def test_drawn_lengths_have_their_mean(tmp_path, capsys):
    out = tmp_path / "o.jsonl"
    words = ["--requests", "4000", "--seed", "2", "--rate", "5"]
    trace("generate", out, *words, "--prompt", "lognormal:3000:0.8", "--output-tokens", "uniform:10:30")
    capsys.readouterr()
    trace("summary", out, "--json")
    figures = json.loads(capsys.readouterr().out)
    assert figures["prompt_tokens"]["mean"] == pytest.approx(3000, rel=0.05)
    assert figures["prompt_tokens"]["p50"] == pytest.approx(3000 * 2.718281828 ** (-0.32), rel=0.05)
    assert figures["output_tokens"]["mean"] == pytest.approx(20, rel=0.05)
    assert (figures["output_tokens"]["min"], figures["output_tokens"]["max"]) == (10, 30)
    assert figures["arrivals"]["arrivals_per_s"] == pytest.approx(5, rel=0.05)


def commands():
    block = (WORKLOADS / "README.md").read_text().split("<!-- generate -->")[1].split("<!-- end -->")[0]
    text = "\n".join(line for line in block.replace("\\\n", " ").splitlines() if line.startswith("python"))
    return [shlex.split(line) for line in text.splitlines()]


@pytest.mark.parametrize("words", commands(), ids=lambda words: Path(words[5]).name)
def test_the_shipped_workloads_are_what_their_commands_make(tmp_path, words):
    assert words[:5] == ["python", "-m", "serving", "trace", "generate"]
    out = tmp_path / "made.jsonl"
    trace("generate", out, *words[6:])
    shipped = WORKLOADS / Path(words[5]).name
    assert out.read_bytes() == shipped.read_bytes()
    assert shipped.stat().st_size < 100_000


def test_the_readme_says_what_the_workloads_hold():
    text = (WORKLOADS / "README.md").read_text()
    long = read_trace(WORKLOADS / "long_context.jsonl").requests
    share = sum(one.prompt_tokens <= 2048 for one in long) / len(long)
    assert f"{len(long)} prompts" in text
    assert f"{100 * share:.0f} % of them" in text
    calls = list(open_trace(WORKLOADS / "agentic_sessions.jsonl", sessions=True).requests)
    assert f"{len({one.session_id for one in calls})} agentic sessions, {len(calls)} calls" in text
    shared = read_trace(WORKLOADS / "shared_prefixes.jsonl").requests
    assert sum(one.prefix is not None for one in shared) / len(shared) == pytest.approx(0.85, abs=0.03)
    assert len({one.prefix.ids for one in shared if one.prefix is not None}) == 4


def test_the_process_ends_with_exit_code_2_and_one_line(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,-1,10\n")
    done = subprocess.run(
        [sys.executable, "-m", "serving", "trace", "summary", str(path)],
        capture_output=True,
        text=True,
        cwd=data_root(),
        env=os.environ,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: {path}:2: ContextTokens must be an integer of at least 1, found '-1'\n"
