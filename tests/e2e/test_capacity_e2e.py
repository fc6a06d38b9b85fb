"""sweep, report, size, describe and launch as a user runs them, on a bundle of closed forms (tests/priced.py)."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time

import priced
import pytest
import yaml

from profiler.core.paths import data_root
from serving.report.validated import RUNS
from serving.sweeps.results import read_results

ROOT = data_root()
EXAMPLE = ROOT / "workloads" / "example_trace.jsonl"
MODEL = priced.MODEL
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
LIMITS = {"max_model_len": 65536, "max_num_batched_tokens": 4096, "max_num_seqs": 64}


def run(*arguments, **options):
    command = [sys.executable, "-m", "serving", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=240, **options)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundles")
    watts = dict.fromkeys(
        ("dense", "per_sequence", "attention", "indexer", "sparse_attention", "moe", "collective", "other"), 500.0
    )
    priced.bundle(root, power={"watts": watts})
    return root


def spec_of(folder, bundles, **changes):
    content = {
        "name": "closed forms", "models": [MODEL], "hardware": ["H200"], "gpus": [8],
        "placements": [{"dp": 8, "ep": 8}, {"pp": 8}], "limits": [LIMITS], "workload": str(EXAMPLE), "requests": 40,
        "rates_per_s": [0.5, 2.0, 8.0], "seeds": [1, 2], "slo": {"ttft_ms": 4000, "tpot_ms": 400, "percentile": 90},
        "bundle_root": str(bundles), "allow_extrapolation": True,
    }  # fmt: skip
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


@pytest.fixture(scope="module")
def swept(tmp_path_factory, bundles):
    folder = tmp_path_factory.mktemp("swept")
    done = run("sweep", spec_of(folder, bundles), "--output", folder / "out", "--workers", 2)
    assert done.returncode == 0, done.stderr
    return folder / "out", done


def rows_of(folder):
    with (folder / "results.csv").open() as stream:
        return list(csv.DictReader(stream))


def test_a_sweep_leaves_one_table_with_every_point_and_refusal(swept):
    folder, done = swept
    rows = rows_of(folder)
    assert [row["status"] for row in rows] == ["refused"] + ["done"] * 6
    assert rows[0]["reason"]
    assert {(row["rate_per_s"], row["seed"]) for row in rows[1:]} == {
        (rate, seed) for rate in ("0.5", "2.0", "8.0") for seed in "12"
    }
    assert all(int(row["finished"]) == 40 for row in rows[1:])
    assert "6 of 6 points" in done.stderr and "left" in done.stderr
    assert "6 done, 1 refused" in done.stdout


def test_a_killed_sweep_goes_on_where_it_was_and_gives_the_same_table(swept, bundles, tmp_path):
    spec = spec_of(tmp_path, bundles)
    again, command, kept = killed_and_again(tmp_path, spec)
    resumed = int(re.search(r"(\d+) found finished", again.stderr)[1])
    assert resumed >= kept >= 2
    assert (tmp_path / "out" / "results.csv").read_bytes() == (swept[0] / "results.csv").read_bytes()
    third = run(*command[3:])
    assert "0 points run, 6 found finished" in third.stderr


def killed_and_again(tmp_path, spec):
    """A sweep into tmp_path/out, killed after two points and started again; its command, and the points kept."""
    command = [sys.executable, "-m", "serving", "sweep", str(spec), "--output", str(tmp_path / "out"), "--workers", "1"]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    journal = tmp_path / "out" / "points.jsonl"
    end = time.monotonic() + 120
    while time.monotonic() < end and (not journal.exists() or journal.read_text().count("\n") < 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out" / "results.csv").exists()
    kept = journal.read_text().count("\n") - 1
    again = run(*command[3:])
    assert again.returncode == 0, again.stderr
    return again, command, kept


def test_users_are_swept_killed_resumed_and_reported(bundles, tmp_path):
    loads = {"rates_per_s": None, "concurrencies": [16, 1, 4, 64]}
    spec = spec_of(tmp_path, bundles, placements=[{"dp": 8, "ep": 8}], seeds=[1, 2], **loads)
    content = yaml.safe_load(spec.read_text())
    spec.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    again, _, kept = killed_and_again(tmp_path, spec)
    assert int(re.search(r"(\d+) found finished", again.stderr)[1]) >= kept >= 2
    whole = run("sweep", spec, "--output", tmp_path / "whole", "--workers", 2)
    assert whole.returncode == 0, whole.stderr
    table = (tmp_path / "out" / "results.csv").read_bytes()
    assert table == (tmp_path / "whole" / "results.csv").read_bytes()
    rows = rows_of(tmp_path / "out")
    for seed in "12":
        own = [row for row in rows if row["seed"] == seed]
        assert [row["concurrency"] for row in own] == ["1", "4", "16", "64"]
        assert {row["rate_per_s"] for row in own} == {""} and {row["finished"] for row in own} == {"40"}
        output = [float(row["output_tokens_per_s"]) for row in own]
        assert output == sorted(output)
        assert [float(row["in_flight_mean"]) <= int(row["concurrency"]) + 1e-9 for row in own] == [True] * 4
    text = " ".join(whole.stdout.split())
    assert "SLO users" in text and "Too short: with 64 users" in text
    for name in ("r.md", "r.html", "r.csv"):
        assert run("report", tmp_path / "out", "--output", tmp_path / name).returncode == 0
    page, document = (tmp_path / "r.md").read_text(), (tmp_path / "r.html").read_text()
    assert "Most users per GPU within the SLO: tp1 dp8 ep8 on 8 H200" in page and "## From few users to many" in page
    assert "requests/s" not in page and "requests/s" not in document.split("<script>")[0]
    assert "concurrency" in (tmp_path / "r.csv").read_text().splitlines()[0].split(",")


def test_a_sweep_of_rates_and_users_is_refused_before_anything_runs(bundles, tmp_path):
    done = run("sweep", spec_of(tmp_path, bundles, concurrencies=[4]), "--output", tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "sweep.yaml: rates_per_s and concurrencies are both given; remove one" in done.stderr


def test_other_inputs_are_not_mixed_into_results(swept, bundles, tmp_path):
    done = run("sweep", spec_of(tmp_path, bundles, requests=41), "--output", swept[0])
    assert done.returncode == 2 and "other inputs (sweep differ)" in done.stderr


def test_parquet_holds_the_same_rows(swept, bundles, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    done = run("sweep", spec_of(tmp_path, bundles), "--output", swept[0], "--format", "parquet")
    assert done.returncode == 0, done.stderr
    table = parquet.read_table(swept[0] / "results.parquet").to_pylist()
    assert [row["status"] for row in table] == [row["status"] for row in rows_of(swept[0])]
    assert [row["rate_per_s"] for row in table[1:]] == [float(row["rate_per_s"]) for row in rows_of(swept[0])[1:]]


def test_a_ray_cluster_gives_the_same_table(bundles, tmp_path):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    changes = {"placements": [{"dp": 8, "ep": 8}], "rates_per_s": [2.0], "seeds": [1, 2]}
    spec = spec_of(tmp_path, bundles, **changes)
    environment = {**ENVIRONMENT, "PYTHONWARNINGS": "ignore"}
    for name, flags in (("ray", ("--executor", "ray")), ("process", ())):
        command = ("sweep", str(spec), "--output", str(tmp_path / name), "--workers", "1", *flags)
        done = subprocess.run(
            [sys.executable, "-m", "serving", *command],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert "2 points run" in done.stderr
    assert (tmp_path / "ray" / "results.csv").read_bytes() == (tmp_path / "process" / "results.csv").read_bytes()


def test_the_screen_needs_no_tables(tmp_path):
    content = {"name": "s", "mode": "screen", "models": [MODEL], "hardware": ["H200", "H100"], "gpus": [8]}
    (tmp_path / "screen.yaml").write_text(yaml.safe_dump(content | {"placements": "all"}))
    done = run("sweep", tmp_path / "screen.yaml", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 52 and {row["status"] for row in rows} == {"fits", "refused"}
    shown = run("report", tmp_path / "out").stdout
    assert shown.splitlines()[0].count("layouts fit. Most KV per GPU") == 1
    assert "sequences per rank" in shown and "tp1 dp8 ep8" in shown
    assert run("report", tmp_path / "out", "--output", tmp_path / "r.html").returncode == 0


def test_a_screen_in_which_nothing_fits_has_its_table_and_the_code_of_capacity(tmp_path):
    content = {"name": "s", "mode": "screen", "models": [MODEL], "hardware": ["H200"], "gpus": [1]}
    (tmp_path / "screen.yaml").write_text(yaml.safe_dump(content))
    done = run("sweep", tmp_path / "screen.yaml", "--output", tmp_path / "out")
    assert done.returncode == 5, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: no point ran (1 refused); nearest: tp1 dp1: the weights")
    assert [row["kind"] for row in rows_of(tmp_path / "out")] == ["capacity"]


def test_markdown_and_csv_say_what_the_terminal_says(swept, tmp_path):
    for name in ("r.md", "r.csv"):
        assert run("report", swept[0], "--output", tmp_path / name).returncode == 0
    shown = run("report", swept[0]).stdout
    assert "Highest rate per GPU within the SLO" in shown and "tokens/s of a user" in shown
    text = (tmp_path / "r.md").read_text()
    for heading in ("Capacity per layout", "What was refused", "Provenance", "How far to trust it", "Inputs"):
        assert f"## {heading}" in text
    assert "Energy of a decoded token" in text
    (command,) = re.findall(r"^python -m serving launch .*$", text.replace("\\", ""), re.MULTILINE)
    started = run(*command.split()[3:], "--format", "json")
    assert started.returncode == 0, started.stderr
    words = json.loads(started.stdout)["command"]
    assert words[words.index("--data-parallel-size") + 1] == "8"
    assert words[words.index("--max-num-seqs") + 1] == str(LIMITS["max_num_seqs"])
    assert (tmp_path / "r.csv").read_text().count("\n") == len(rows_of(swept[0])) + 1


def test_prices_come_from_the_user_alone(swept, tmp_path):
    (tmp_path / "p.yaml").write_text("currency: EUR\nsource: quote 17\nper_gpu_hour: {H200: 2.5}\npue: 1.25\n")
    for flags in ((), ("--prices", tmp_path / "p.yaml")):
        assert run("report", swept[0], "--output", tmp_path / "r.md", *flags).returncode == 0
        text = (tmp_path / "r.md").read_text()
        assert ("EUR per M output" in text) == bool(flags) == ("Prices: quote 17" in text)
        assert ("PUE 1.25" in text) == bool(flags)
        assert ("No prices were given" in text) == (not flags)


def test_projected_tables_are_refused_unless_asked_for_and_marked_everywhere(tmp_path):
    note = {"from": {"hardware": "B200"}, "to": {"hardware": "H200"}, "error_band": None}
    priced.bundle(tmp_path / "bundles", provenance="projected", projection=note)
    changes = {"placements": [{"dp": 8, "ep": 8}], "rates_per_s": [0.5], "seeds": [1]}
    done = run("sweep", spec_of(tmp_path, tmp_path / "bundles", **changes), "--output", tmp_path / "no")
    assert done.returncode == 4 and "--allow-projected" in done.stdout
    assert "error: no point ran (1 refused); nearest: tp1 dp8 ep8: " in done.stderr
    assert {row["kind"] for row in rows_of(tmp_path / "no")} == {"contract"}
    spec = spec_of(tmp_path, tmp_path / "bundles", **changes, allow_projected=True)
    assert run("sweep", spec, "--output", tmp_path / "yes").returncode == 0
    assert [row["provenance"] for row in rows_of(tmp_path / "yes")] == ["projected"]
    for name in ("r.md", "r.html"):
        assert run("report", tmp_path / "yes", "--output", tmp_path / name).returncode == 0
        text = (tmp_path / name).read_text()
        assert "Projected, not measured." in text and "ep8, projected" in text
        assert "projected from B200; how far that is off is not known" in text
    assert "Projected, not measured." in " ".join(run("report", tmp_path / "yes").stdout.split())


def test_sessions_of_a_description_are_replayed(bundles, tmp_path):
    trace = ROOT / "workloads" / "agentic_sessions.jsonl"
    assert run("describe", "fit", trace, tmp_path / "workload.yaml").returncode == 0
    changes = {"placements": [{"dp": 8, "ep": 8}], "rates_per_s": [0.5], "seeds": [1], "requests": 5}
    spec = spec_of(tmp_path, bundles, workload="workload.yaml", **changes)
    done = run("sweep", spec, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path / "out")
    assert row["status"] == "done" and int(row["finished"]) > 5  # calls, not sessions
    assert int(row["prefix_hit_tokens"]) > 0


def test_reports_of_nothing_are_refused(tmp_path):
    assert run("report", tmp_path).returncode == 2
    done = run("report", tmp_path, "--output", tmp_path / "r.pdf")
    assert done.returncode == 2 and ".html" in done.stderr


def test_a_size_is_searched_resumed_and_reported(bundles, tmp_path):
    flags = (
        "size", MODEL, "--hardware", "H200", "--gpus", 8, "--workload", EXAMPLE, "--bundle-root", bundles,
        "--allow-extrapolation", "--requests", 40, "--seeds", "1,2", "--tolerance", 0.2, "--max-model-len", 65536,
        "--max-num-batched-tokens", 4096, "--max-num-seqs", 64, "--percentile", 90, "--output", tmp_path / "out",
    )  # fmt: skip
    done = run(*flags, "--ttft-ms", 4000, "--rate", 30)
    assert done.returncode == 0, done.stderr
    header, points = read_results(tmp_path / "out")
    assert re.match(r"30 requests/s need \d+ H200: \d+ x \(tp1 dp8 ep8\)", header["size"]["verdict"][0])
    rows = [point["row"] for point in points]
    limits = [row for row in rows if row["status"] == "limit"]
    assert len(limits) == 2 and all(row["highest_rate_per_s"] for row in limits)
    whole = next(row for row in rows if row["status"] == "done" and row["replicas"] > 1)
    assert whole["slo_met"] and whole["rate_per_s"] == 30
    assert run(*flags, "--ttft-ms", 4000, "--rate", 30).stdout == done.stdout
    assert run("report", tmp_path / "out", "--output", tmp_path / "r.html").returncode == 0
    assert "30 requests/s need" in (tmp_path / "r.html").read_text()

    impossible = run(*flags[:-1], tmp_path / "none", "--ttft-ms", 0.001)
    assert impossible.returncode == 5
    assert re.search(r"No layout keeps the SLO. Nearest: .*dp 8.* limited by ttft_ms", impossible.stderr)


def test_one_seed_is_enough_for_a_size(bundles, tmp_path):
    done = run(
        "size", MODEL, "--hardware", "H200", "--gpus", 8, "--workload", EXAMPLE, "--bundle-root", bundles,
        "--allow-extrapolation", "--requests", 10, "--seeds", "1", "--tolerance", 0.5, "--max-model-len", 65536,
        "--max-num-batched-tokens", 4096, "--max-num-seqs", 64, "--percentile", 90, "--output", tmp_path / "out",
        "--ttft-ms", 4000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, points = read_results(tmp_path / "out")
    (limit,) = [point["row"] for point in points if point["row"]["status"] == "limit"]
    assert limit["highest_rate_per_s"] and limit["seed"] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ttft-ms", 5), "one of percentile"),
        (("--tpot-ms", 5, "--percentile", 99), "wait for ever"),
        (("--ttft-ms", 5, "--percentile", 99, "--seeds", "1,1"), "different"),
        (("--ttft-ms", 5, "--percentile", 99, "--requests", 500, "--seeds", "0"), "has 200 requests"),
        (("--ttft-ms", 5, "--percentile", 99, "--rate", -1), "above 0"),
    ],
)
def test_bad_sizes_are_refused_before_anything_runs(tmp_path, flags, message):
    base = ("size", MODEL, "--hardware", "H200", "--gpus", 8, "--workload", EXAMPLE, "--output", tmp_path / "out")
    done = run(*base, *flags)
    assert done.returncode == 2 and message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_becomes_a_description_and_a_trace_again(tmp_path):
    assert run("describe", "fit", EXAMPLE, tmp_path / "d.yaml").returncode == 0
    assert yaml.safe_load((tmp_path / "d.yaml").read_text())["kind"] == "workload"
    made = run("describe", "make", tmp_path / "d.yaml", tmp_path / "t.jsonl", "--requests", 25, "--seed", 3)
    assert made.returncode == 0, made.stderr
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 25
    assert run("describe", "fit", EXAMPLE, tmp_path / "d.json").returncode == 2


def test_launch_refuses_what_would_not_start():
    base = ("launch", MODEL, "--hardware", "H200", "--dp", 8)
    good = run(*base, "--max-model-len", 81920, "--format", "json")
    assert json.loads(good.stdout)["command"][:3] == ["vllm", "serve", MODEL]
    bad = run(*base)
    assert bad.returncode == 5 and "the largest max_model_len that fits" in bad.stderr
    assert run(*base, "--max-model-len", 81920, "--format", "compose").returncode == 2


def test_error_bars_are_those_of_the_validation_page():
    page = (ROOT / "docs" / "validation.md").read_text()
    for one in RUNS:
        table = page.split(one.heading + "\n")[1].split("\n### ")[0].split("\n## ")[0].splitlines()
        if one.label:
            names = next(row for row in table if "TTFT mean" in row).split("|")[2:-1]
            (line,) = [row for row in table if row.startswith(f"| {one.label} |")]
            shown = {name.strip(): float(text) for name, text in zip(names, line.split("|")[2:-1], strict=True)}
            assert shown == one.errors_percent
            continue
        for name, percent in one.errors_percent.items():
            (line,) = [row for row in table if row.startswith(f"| {name} |")]
            found = float(re.search(r"\(([+-][\d.]+) %\)", line.split("|")[3])[1])
            assert percent == pytest.approx(found, abs=0.5), (one.run, name)
