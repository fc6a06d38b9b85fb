"""The replay command as a user runs it, on a bundle of closed forms (tests/priced.py) and on recorded files."""

import csv
import json
import os
import subprocess
import sys

import priced
import pytest
import yaml

import serving
from profiler.core.hardware import load_hardware
from profiler.core.paths import data_root
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.core.shape import StepShape
from serving.cost import build_cost, default_capture_sizes
from serving.metrics import COLUMNS, csv_text, summary

ROOT = data_root()
SHARED = ROOT.parent / "shared"
CLUSTER = ROOT / "configs" / "cluster" / "h200-8x-deepseek-v32-dp8-ep8.yaml"
EXAMPLE = ROOT / "workloads" / "example_trace.jsonl"
LIMITS = ("--max-num-batched-tokens", "4096")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundles")
    priced.bundle(root)
    return root


def run(*arguments, cwd=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, "-m", "serving", *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd, env=environment, timeout=120,
    )  # fmt: skip


def replay(bundles, output, *flags, cluster=CLUSTER, trace=EXAMPLE):
    return run("--cluster-config", cluster, "--dataset", trace, "--output", output, "--bundle-root", bundles, *flags)


def trace_of(folder, *rows):
    path = folder / "trace.jsonl"
    keys = ("input_toks", "output_toks", "arrival_time_ns")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return path


def cluster_of(folder, parallel=None, **engine):
    content = yaml.safe_load(CLUSTER.read_text())
    content["instances"][0]["engine"].update(max_num_batched_tokens=4096, **engine)
    if parallel:
        content["instances"][0]["parallel"] = parallel
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_example_runs_to_its_end_and_repeats_byte_for_byte(bundles, tmp_path):
    first, second = tmp_path / "new" / "one.csv", tmp_path / "two.csv"
    done = replay(bundles, first, *LIMITS)
    assert (done.returncode, done.stderr) == (0, "")
    assert "200 finished, 0 rejected, 0 unfinished" in done.stdout
    assert "measured: H200/fp8" in done.stdout
    again = replay(bundles, second, *LIMITS, "--seed", 0)
    assert again.stdout == done.stdout
    assert first.read_bytes() == second.read_bytes()
    assert first.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert sorted(path.name for path in first.parent.iterdir()) == ["one.csv", "one.csv.summary.json"]

    rows, asked = rows_of(first), [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    assert [row["request_id"] for row in rows] == [str(number) for number in range(200)]
    assert [int(row["arrival_ns"]) for row in rows] == [row["arrival_time_ns"] for row in asked]
    assert {row["instance_id"] for row in rows} == set("01234567")
    figures = json.loads((first.parent / "one.csv.summary.json").read_text())
    assert figures["output_tokens"] == sum(row["output_toks"] for row in asked)
    assert figures["instances"][0]["kv_layout"] == "bf16"
    shared = [int(row["prefix_hit_tokens"]) for row, one in zip(rows, asked, strict=True) if "input_tok_ids" in one]
    assert set(shared) == {0, 256}, "a system prompt of 256 tokens is four blocks of 64"
    assert sum(shared) == sum(int(row["prefix_hit_tokens"]) for row in rows) == figures["prefix_hit_tokens"]


def test_times_are_those_of_the_cost_model(bundles, tmp_path):
    """One request on an idle group, nothing but the tables: every time follows from the price of its shape."""
    spec = load_model(priced.MODEL)
    cost = build_cost(
        bundle=priced.bundle(tmp_path / "own"),
        spec=spec,
        parallel=Parallel(dp=8, ep=8),
        hardware=load_hardware("H200"),
        max_num_batched_tokens=4096,
        capture_sizes=default_capture_sizes(256),
    )
    idle = [None] * 7
    steps = [
        StepShape(((4096, 0),), 0, 0, 0, 0, 0),
        StepShape(((904, 4096),), 0, 0, 0, 0, 1),
        StepShape((), 1, 5001, 5001, 2048, 1),
        StepShape((), 1, 5002, 5002, 2048, 1),
    ]
    durations = [cost.step_ns([shape, *idle]) for shape in steps]
    output = tmp_path / "run.csv"
    cluster = cluster_of(tmp_path, host_overhead_us=0, step_overhead_us=0, shared_experts_stream=False)
    done = replay(bundles, output, trace=trace_of(tmp_path, (5000, 3, 777)), cluster=cluster)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(output)
    assert int(row["ttft_ns"]) == sum(durations[:2])
    assert int(row["first_token_ns"]) == 777 + sum(durations[:2])
    assert int(row["finish_ns"]) == 777 + sum(durations)
    assert int(row["tpot_ns"]) == round((durations[2] + durations[3]) / 2)


def test_the_python_call_gives_the_same_as_the_command(bundles, tmp_path):
    trace = trace_of(tmp_path, *((100 + 40 * i, 5, i * 10**6) for i in range(20)))
    cluster = cluster_of(tmp_path)
    done = replay(bundles, tmp_path / "run.csv", trace=trace, cluster=cluster)
    assert done.returncode == 0, done.stderr
    result = serving.replay(cluster, trace, bundle_root=bundles)
    assert csv_text(result) == (tmp_path / "run.csv").read_text()
    assert summary(result) == json.loads((tmp_path / "run.csv.summary.json").read_text())


def test_limits_of_the_command_line_take_effect(bundles, tmp_path):
    trace = trace_of(tmp_path, *((3000, 20, 0) for _ in range(16)))
    makespans = []
    for flags in ((), ("--max-num-seqs", 1), ("--long-prefill-token-threshold", 256)):
        done = replay(bundles, tmp_path / "run.csv", *LIMITS, *flags, trace=trace)
        assert done.returncode == 0, done.stderr
        makespans.append(json.loads((tmp_path / "run.csv.summary.json").read_text())["makespan_ns"])
    assert makespans[1] > makespans[0]
    assert makespans[2] > makespans[0]
    figures = json.loads((tmp_path / "run.csv.summary.json").read_text())
    assert figures["instances"][0]["long_prefill_token_threshold"] == 256


def test_clients_that_wait_keep_one_request_in_flight(bundles, tmp_path):
    trace = trace_of(tmp_path, *((300, 5, 0) for _ in range(6)))
    bench = tmp_path / "bench.json"
    done = replay(bundles, tmp_path / "run.csv", *LIMITS, "--max-concurrency", 1, "--bench-json", bench, trace=trace)
    assert done.returncode == 0, done.stderr
    assert "at most 1 requests in flight" in done.stdout
    rows = rows_of(tmp_path / "run.csv")
    ends = [int(row["finish_ns"]) for row in rows]
    assert [int(row["arrival_ns"]) for row in rows] == [0, *ends[:-1]]
    found = json.loads(bench.read_text())
    assert (found["max_concurrency"], found["max_concurrent_requests"]) == (1, 1)
    assert json.loads((tmp_path / "run.csv.summary.json").read_text())["max_concurrency"] == 1
    assert replay(bundles, tmp_path / "run.csv", *LIMITS, "--max-concurrency", 0, trace=trace).returncode == 2


def test_rejected_unfinished_and_skipped_are_counted_and_the_run_ends(bundles, tmp_path):
    trace = trace_of(tmp_path, (64, 4, 0), (64, 0, 0), (900, 10, 5), (64, 4, 10), (64, 10, 10**15))
    cluster = cluster_of(tmp_path, num_gpu_blocks=9)
    done = replay(bundles, tmp_path / "run.csv", "--on-bad-row", "skip", "--horizon", 100, trace=trace, cluster=cluster)
    assert done.returncode == 0, done.stderr
    assert f"skipped {trace}:2: output_toks must be" in done.stderr
    rows = rows_of(tmp_path / "run.csv")
    assert [(row["request_id"], row["outcome"]) for row in rows] == [
        ("0", "finished"), ("2", "rejected"), ("3", "finished"), ("4", "unfinished"),
    ]  # fmt: skip
    figures = json.loads((tmp_path / "run.csv.summary.json").read_text())
    assert figures["requests"] == {"total": 4, "finished": 2, "rejected": 1, "unfinished": 1, "bad_rows_skipped": 1}
    assert (figures["horizon_ns"], figures["instances"][0]["kv_tokens_per_rank"]) == (10**11, 8 * 64)


def test_a_tight_cache_preempts_and_still_finishes_everything(bundles, tmp_path):
    trace = trace_of(tmp_path, *((500, 300, 0) for _ in range(64)))
    done = replay(bundles, tmp_path / "run.csv", trace=trace, cluster=cluster_of(tmp_path, num_gpu_blocks=33))
    assert "64 finished" in done.stdout, done.stderr
    assert sum(int(row["preemptions"]) for row in rows_of(tmp_path / "run.csv")) > 0


def test_num_reqs_takes_the_first_rows(bundles, tmp_path):
    done = replay(bundles, tmp_path / "run.csv", *LIMITS, "--num-reqs", 3)
    assert done.returncode == 0 and len(rows_of(tmp_path / "run.csv")) == 3


def bad(folder, kind):
    """(flags, expected exit code, expected text) of one way to fail."""
    trace = trace_of(folder, (10, 2, 0))
    cluster = cluster_of(folder)
    changed = yaml.safe_load(cluster.read_text())
    if kind == "missing cluster file":
        return {"cluster": folder / "absent.yaml"}, 2, "absent.yaml: no such file"
    if kind == "missing trace":
        return {"cluster": cluster, "trace": folder / "absent.jsonl"}, 2, "absent.jsonl: no such file"
    if kind == "bad row":
        return {"cluster": cluster, "trace": trace_of(folder, (10, 2, 0), (10, -2, 0))}, 2, "trace.jsonl:2: output_toks"
    if kind == "long prompt":
        return {"cluster": cluster, "trace": trace_of(folder, (81921, 2, 0))}, 2, "exceeds max_model_len 81920"
    if kind == "unknown model":
        changed["instances"][0]["model"] = "deepseek-ai/DeepSeek-V32"
        text = "did you mean 'deepseek-ai/DeepSeek-V3.2"
    elif kind == "unknown GPU":
        changed["instances"][0]["hardware"] = "H2000"
        text = "did you mean 'H200'"
    elif kind == "unknown key":
        changed["instances"][0]["engine"]["max_seqs"] = 3
        text = "unknown key 'max_seqs'; did you mean 'max_num_seqs'"
    elif kind == "illegal split":
        changed["instances"][0]["parallel"] = {"tp": 1, "dp": 8, "ep": 4}
        text = "ep 4"
    elif kind == "model length":
        changed["instances"][0]["engine"]["max_model_len"] = 10**6
        text = "takes at most 163840"
    elif kind == "no bundle":
        changed["instances"][0]["hardware"] = "B200"
        cluster.write_text(yaml.safe_dump(changed))
        return {"cluster": cluster, "trace": trace}, 3, "python -m profiler profile"
    elif kind == "outside the tables at once":
        return {"cluster": CLUSTER, "trace": trace}, 3, "is outside its table"
    elif kind == "outside the tables in the run":
        return {"cluster": cluster, "trace": trace_of(folder, (75_000, 2, 0))}, 3, "is outside its table"
    elif kind == "KV layout":
        changed["instances"][0]["engine"].update(kv_cache_dtype="fp8", available_kv_gib=20.0)
        cluster.write_text(yaml.safe_dump(changed))
        return {"cluster": cluster, "trace": trace}, 4, "fp8_ds_mla"
    elif kind == "does not fit":
        changed["instances"][0]["engine"]["gpu_memory_utilization"] = 0.5
        cluster.write_text(yaml.safe_dump(changed))
        return {"cluster": cluster, "trace": trace}, 5, "weights"
    cluster.write_text(yaml.safe_dump(changed))
    return {"cluster": cluster, "trace": trace}, 2, text


@pytest.mark.parametrize(
    "kind",
    [
        "missing cluster file", "missing trace", "bad row", "long prompt", "unknown model", "unknown GPU",
        "unknown key", "illegal split", "model length", "no bundle", "outside the tables at once",
        "outside the tables in the run", "KV layout", "does not fit",
    ],
)  # fmt: skip
def test_failures_are_one_message_and_leave_old_output_alone(bundles, tmp_path, kind):
    files, code, text = bad(tmp_path, kind)
    output = tmp_path / "out" / "run.csv"
    output.parent.mkdir()
    output.write_text("old")
    done = replay(bundles, output, **files)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("error: ") and text in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert output.read_text() == "old"
    assert [path.name for path in output.parent.iterdir()] == ["run.csv"]


def test_extrapolation_is_counted(bundles, tmp_path):
    trace = trace_of(tmp_path, (75_000, 2, 0))
    done = replay(bundles, tmp_path / "run.csv", *LIMITS, "--allow-extrapolation", trace=trace)
    assert done.returncode == 0, done.stderr
    assert "extrapolated lookups" in done.stdout
    assert json.loads((tmp_path / "run.csv.summary.json").read_text())["extrapolated_lookups"] > 0


def test_outputs_that_cannot_be_written_are_refused_before_the_run(bundles, tmp_path):
    trace = trace_of(tmp_path, (10, 2, 0))
    for output, text in ((tmp_path, "is a folder"), (trace, "overwrite an input"), (trace / "run.csv", "is a file")):
        done = replay(bundles, output, *LIMITS, trace=trace)
        assert done.returncode == 2 and text in done.stderr


def test_an_interrupted_run_leaves_nothing(bundles, tmp_path, monkeypatch):
    from profiler import cli
    from serving import __main__, api

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "run", interrupted)
    flags = {"--cluster-config": CLUSTER, "--dataset": EXAMPLE, "--output": tmp_path / "out" / "run.csv",
             "--bundle-root": bundles, "--max-num-batched-tokens": 4096}  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["serving", *(str(part) for pair in flags.items() for part in pair)])
    with pytest.raises(SystemExit) as stopped:
        cli.run(__main__.main, "python -m serving")
    assert stopped.value.code == 130
    assert not (tmp_path / "out").exists()


def test_flags_are_checked(bundles, tmp_path):
    done = replay(bundles, tmp_path / "run.csv", "--max-num-seqs", 0)
    assert done.returncode == 2 and "max-num-seqs" in done.stderr
    assert run("--cluster-config", CLUSTER).returncode == 2
    done = replay(bundles, tmp_path / "run.csv", "--router", "leastloaded")
    assert done.returncode == 2 and "did you mean 'least_loaded'" in done.stderr


RECORDED = {
    # Blocks: floor((96 GiB x 0.9 - bytes of the weights) / bytes of 16 tokens of KV). Llama-3.1-8B has 8,030,261,248
    # parameters and 2 x 8 heads x 128 x 32 layers x 2 B per token.
    "Llama-3.1-8B": (
        "sharegpt-llama-3.1-8b-300-sps10.jsonl",
        1,
        (9 * 2**30 * 96 // 10 - 16060522496) // (16 * 131072),
    ),
    "Qwen3-30B-A3B-Instruct-2507": ("sharegpt-qwen3-30b-a3b-300-sps10.jsonl", 2, None),
}


@pytest.mark.parametrize("model", RECORDED)
def test_the_peers_files_run_as_they_are(tmp_path, model):
    if not (SHARED / "recorded").is_dir():
        pytest.skip("recorded runs are absent")
    trace_name, ranks, blocks = RECORDED[model]
    trace = SHARED / "recorded" / "workloads" / trace_name
    cluster = SHARED / "recorded" / "RTXPRO6000" / model / "config.json"
    result = serving.replay(cluster, trace, bundle_root=SHARED / "recorded" / "perf")
    assert [record.outcome for record in result.records] == ["finished"] * 300
    assert {record.engine_index for record in result.records} == set(range(ranks))
    asked = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [record.emitted_tokens for record in result.records] == [row["output_toks"] for row in asked]
    if blocks is not None:
        assert result.deployments[0].num_gpu_blocks == blocks
