import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from plotly.offline import get_plotlyjs

from profiler.core.errors import ConfigError
from serving.commands.compare import command as compare_command
from serving.commands.retime import command as retime_command
from serving.comparison import compare, compare_runs
from serving.metrics import COLUMNS
from serving.recorded import read_recorded

MS = 1_000_000
# id, tokens in, tokens out, then milliseconds: queued, scheduled, first token, last token
RECORDED = [("b-0", 10, 3, 0, 0, 100, 300), ("b-1", 20, 1, 50, 60, 250, 250), ("b-2", 30, 5, 60, 400, 500, 900)]
# arrival, queued, scheduled, first token, last token
SIMULATED = [(1000, 1000, 1000, 1090, 1250), (1050, 1060, 1060, 1300, 1300), (1055, 1060, 1400, 1500, 2000)]


def recorded(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    rows = []
    for name, prompt, output, *stamps in RECORDED:
        keys = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
        times = {key: 5.0 + ms / 1e3 for key, ms in zip(keys, stamps, strict=True)}
        rows.append({"request_id": name, "input_toks": prompt, "output_toks": output, **times})
    (path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "meta.json").write_text('{"model": "acme/Tiny", "vllm_version": "0.0", "engine_kwargs": {}}')
    header = "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct"
    (path / "timeseries.csv").write_text(f"{header}\n0.2,0,0,2,1,0\n0.35,0,0,0,1,0\n")
    return path


def run(path: Path, ids: tuple[str, ...] = ("0", "1", "2"), order: tuple[int, ...] = (0, 1, 2), **changes: str) -> Path:
    lines = [",".join(COLUMNS)]
    for at in order:
        _, prompt, output, *_ = RECORDED[at]
        arrival, queued, scheduled, first, finish = (ms * MS for ms in SIMULATED[at])
        row = dict.fromkeys(COLUMNS, "0") | {
            "request_id": ids[at], "prompt_tokens": str(prompt), "output_tokens": str(output),
            "arrival_ns": str(arrival), "queued_ns": str(queued), "scheduled_ns": str(scheduled),
            "first_token_ns": str(first), "finish_ns": str(finish), "tpot_ns": "", "outcome": "finished",
        }  # fmt: skip
        lines.append(",".join((row | changes).values()))
    path.write_text("\n".join(lines) + "\n")
    return path


def figures(found: object) -> dict[tuple[str, str], tuple[float, float]]:
    return {(one.metric, one.statistic): (one.simulated_ms, one.recorded_ms) for one in found.figures}  # type: ignore[attr-defined]


def test_figures_by_hand(tmp_path: Path) -> None:
    found = compare(run(tmp_path / "run.csv"), read_recorded(recorded(tmp_path / "r")))
    by = figures(found)
    assert by["ttft", "mean"] == pytest.approx(((90 + 240 + 440) / 3, (100 + 200 + 440) / 3))
    assert by["ttft", "p50"] == pytest.approx((240, 200))
    assert by["tpot", "mean"] == pytest.approx(((80 + 125) / 2, (100 + 100) / 2))
    assert by["latency", "mean"] == pytest.approx(((250 + 240 + 940) / 3, (300 + 200 + 840) / 3))
    assert by["latency", "p90"] == pytest.approx((250 + 0.8 * (940 - 250), 300 + 0.8 * (840 - 300)))
    assert by["makespan", "total"] == pytest.approx((1000, 900))
    assert found.error_ms == pytest.approx({"ttft": 50 / 3, "tpot": 22.5, "latency": (50 + 40 + 100) / 3})
    # At 0.2 s two run and one waits in both; at 0.35 s one waits in both and none runs.
    assert found.load == {"running": 0.0, "waiting": 0.0}
    percent = next(one.difference_percent for one in found.figures if (one.metric, one.statistic) == ("tpot", "mean"))
    assert percent == pytest.approx(2.5)


def test_counting_from_arrival(tmp_path: Path) -> None:
    found = compare(run(tmp_path / "run.csv"), read_recorded(recorded(tmp_path / "r")), since="arrival")
    assert figures(found)["ttft", "mean"][0] == pytest.approx((90 + 250 + 445) / 3)
    assert figures(found)["makespan", "total"] == pytest.approx((1000, 900))


@pytest.mark.parametrize("ids", [("0", "1", "2"), ("b-0", "b-1", "b-2")])
def test_requests_are_paired_by_their_ids(tmp_path: Path, ids: tuple[str, ...]) -> None:
    both = read_recorded(recorded(tmp_path / "r"))
    plain = compare(run(tmp_path / "a.csv"), both)
    found = compare(run(tmp_path / "b.csv", ids, order=(2, 0, 1)), both)
    assert (found.figures, found.error_ms, found.load) == (plain.figures, plain.error_ms, plain.load)
    assert [one.request_id for one in found.pairs] == list(ids), "in the recorded order"


def test_other_ids_are_paired_by_row(tmp_path: Path) -> None:
    both = read_recorded(recorded(tmp_path / "r"))
    named, numbered = (
        compare(path, both) for path in (run(tmp_path / "a.csv", ("x", "y", "z")), run(tmp_path / "b.csv"))
    )
    assert (named.figures, named.error_ms) == (numbered.figures, numbered.error_ms)
    with pytest.raises(ConfigError, match=r"request z has 30 tokens in and 5 out.*b-0 10 and 3"):
        compare(run(tmp_path / "a.csv", ("x", "y", "z"), order=(2, 0, 1)), both)


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    both = read_recorded(recorded(tmp_path / "r"))
    with pytest.raises(ConfigError, match="2 requests, the recorded run has 3"):
        compare(run(tmp_path / "a.csv", order=(0, 1)), both)
    with pytest.raises(ConfigError, match=r"a\.csv:2: outcome is 'rejected'"):
        compare(run(tmp_path / "a.csv", outcome="rejected"), both)
    with pytest.raises(ConfigError, match=r"a\.csv:2: times and counts must be integers"):
        compare(run(tmp_path / "a.csv", finish_ns="1.5"), both)
    with run(tmp_path / "a.csv").open("a") as stream:
        stream.write("1,2\n")
    with pytest.raises(ConfigError, match=r"a\.csv:5: 2 cells, a row has 16"):
        compare(tmp_path / "a.csv", both)
    (tmp_path / "b.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"b\.csv:1: not the CSV of a replay"):
        compare(tmp_path / "b.csv", both)


def test_command_prints_each_format(tmp_path: Path) -> None:
    arguments = [str(run(tmp_path / "run.csv")), str(recorded(tmp_path / "r"))]
    table = CliRunner().invoke(compare_command, arguments, catch_exceptions=False).stdout
    assert "3 requests, acme/Tiny, vLLM 0.0, simulated since queued" in table
    assert "+2.50 %" in table
    text = CliRunner().invoke(compare_command, [*arguments, "--format", "csv"], catch_exceptions=False).stdout
    assert "tpot,mean,102.500000,100.000000,2.500000" in text.splitlines()
    parsed = json.loads(
        CliRunner().invoke(compare_command, [*arguments, "--format", "json"], catch_exceptions=False).stdout
    )
    assert parsed["figures"]["tpot"]["mean"]["difference_percent"] == pytest.approx(2.5)
    assert parsed["engine"]["vllm_version"] == "0.0"


def test_retime_writes_a_trace(tmp_path: Path) -> None:
    source = tmp_path / "t.jsonl"
    rows = [{"input_toks": p, "output_toks": o, "arrival_time_ns": 1} for _, p, o, *_ in RECORDED]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = str(recorded(tmp_path / "r"))
    CliRunner().invoke(retime_command, [str(source), folder, str(tmp_path / "out.jsonl")], catch_exceptions=False)
    times = [json.loads(line)["arrival_time_ns"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert times == [0, 50 * MS, 60 * MS]
    with pytest.raises(ConfigError, match="overwrite"):
        CliRunner().invoke(retime_command, [str(source), folder, str(source)], catch_exceptions=False)


def other(path: Path, **changes: str) -> Path:
    """SIMULATED with every time since arrival doubled, rows in reverse."""
    plain = run(path, order=(2, 1, 0)).read_text().splitlines()
    lines = [plain[0]]
    for text in plain[1:]:
        row = dict(zip(COLUMNS, text.split(","), strict=True))
        for name in ("queued_ns", "scheduled_ns", "first_token_ns", "finish_ns"):
            row[name] = str(2 * int(row[name]) - int(row["arrival_ns"]))
        lines.append(",".join((row | (changes if row["request_id"] == "1" else {})).values()))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_two_runs_by_hand(tmp_path: Path) -> None:
    found = compare_runs(run(tmp_path / "a.csv"), other(tmp_path / "b.csv"))
    by = figures(found)
    assert by["ttft", "mean"] == pytest.approx(((90 + 250 + 445) / 3, 2 * (90 + 250 + 445) / 3))
    assert by["tpot", "mean"] == pytest.approx(((80 + 125) / 2, 80 + 125))
    assert by["latency", "p50"] == pytest.approx((250, 500))
    assert found.error_ms["ttft"] == pytest.approx((90 + 250 + 445) / 3)
    assert all(one.difference_percent == pytest.approx(-50) for one in found.figures if one.metric != "makespan")
    assert (found.requests, found.load, found.left_out) == (3, None, 0)
    assert [(one.request_id, one.start_s) for one in found.pairs] == [("0", 0.0), ("1", 0.05), ("2", 0.055)]
    since_queued = compare_runs(tmp_path / "a.csv", tmp_path / "b.csv", since="queued")
    assert figures(since_queued)["ttft", "mean"][0] == pytest.approx((90 + 240 + 440) / 3)


def test_a_run_equals_itself(tmp_path: Path) -> None:
    found = compare_runs(run(tmp_path / "a.csv"), run(tmp_path / "b.csv", order=(1, 2, 0)))
    assert {one.difference_percent for one in found.figures} == {0.0}
    assert set(found.error_ms.values()) == {0.0}


def test_requests_that_did_not_finish_in_both_runs_are_left_out(tmp_path: Path) -> None:
    found = compare_runs(run(tmp_path / "a.csv"), other(tmp_path / "b.csv", outcome="rejected", finish_ns=""))
    assert (found.requests, found.left_out) == (2, 1)
    assert [one.request_id for one in found.pairs] == ["0", "2"]
    with pytest.raises(ConfigError, match="no request finished in both"):
        compare_runs(run(tmp_path / "c.csv", outcome="unfinished"), tmp_path / "b.csv")


def test_two_runs_of_other_requests_are_refused(tmp_path: Path) -> None:
    first = run(tmp_path / "a.csv")
    with pytest.raises(ConfigError, match=r"only .*a\.csv has request '2' \(1 such requests\)"):
        compare_runs(first, run(tmp_path / "b.csv", order=(0, 1)))
    with pytest.raises(
        ConfigError, match=r"a\.csv:3 and .*b\.csv:3: request '1' has 20 tokens in and 1 out in one, 21"
    ):
        compare_runs(first, other(tmp_path / "b.csv", prompt_tokens="21"))
    with pytest.raises(ConfigError, match="appears twice"):
        compare_runs(first, run(tmp_path / "b.csv", ids=("0", "0", "2")))


def invoke(*arguments: object) -> str:
    return CliRunner().invoke(compare_command, list(map(str, arguments)), catch_exceptions=False).stdout


def test_command_compares_two_runs(tmp_path: Path) -> None:
    pair = run(tmp_path / "a.csv"), other(tmp_path / "b.csv", outcome="rejected")
    table = invoke(*pair)
    assert "2 requests of two replays, since arrival" in table
    assert "did not finish in both: 1" in table and "-50.00 %" in table
    assert "tpot,mean,102.500000,205.000000,-50.000000" in invoke(*pair, "--format", "csv").splitlines()
    parsed = json.loads(invoke(*pair, "--format", "json"))
    assert parsed["figures"]["tpot"]["mean"] == pytest.approx(
        {"first_ms": 102.5, "second_ms": 205.0, "difference_percent": -50.0}
    )
    assert parsed["requests_left_out"] == 1


def drawn(page: str) -> list[list[dict[str, object]]]:
    """The traces of every plot of the page, in order."""
    decoder = json.JSONDecoder()
    return [
        decoder.raw_decode(page, found.end() - 1)[0] for found in re.finditer(r'"(?:ttft|tpot|latency)\d",\s*\[', page)
    ]


def test_the_page_draws_every_pair_and_escapes_what_files_say(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    ids = (evil, "1", "2")
    source = run(tmp_path / "a&<b>.csv", ids)
    page = tmp_path / "page.html"
    invoke(source, run(tmp_path / "b.csv", ids, order=(2, 1, 0)), "--html", page)
    text = page.read_text()
    assert evil not in text and "&lt;script&gt;alert(1)" in text.replace("\\u0026", "&").replace("\\u003c", "<")
    assert "a&amp;&lt;b&gt;.csv" in text and "a&<b>.csv" not in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text.replace(get_plotlyjs(), "")), "nothing is fetched"
    plots = drawn(text)
    assert len(plots) == 9, "a scatter, the distributions and the errors of three metrics"
    scatter, distributions, errors = plots[:3]
    assert scatter[1]["x"] == scatter[1]["y"] == pytest.approx([90, 250, 445])
    assert [trace["x"] for trace in distributions] == [pytest.approx([90, 250, 445])] * 2
    assert distributions[0]["y"] == pytest.approx([1 / 3, 2 / 3, 1])
    assert (errors[0]["x"], errors[0]["y"]) == (pytest.approx([0, 0.05, 0.055]), pytest.approx([0, 0, 0]))


def test_the_page_of_a_recorded_run(tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    invoke(run(tmp_path / "run.csv"), recorded(tmp_path / "r"), "--html", page)
    scatter, _, errors = drawn(page.read_text())[:3]
    assert (scatter[1]["x"], scatter[1]["y"]) == (pytest.approx([100, 200, 440]), pytest.approx([90, 240, 440]))
    assert errors[0]["y"] == pytest.approx([-10, 40, 0])
    assert "acme/Tiny, vLLM 0.0" in page.read_text()
    for path, message in ((tmp_path / "run.csv", "would overwrite an input"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=message):
            invoke(tmp_path / "run.csv", tmp_path / "r", "--html", path)
