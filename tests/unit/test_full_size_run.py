"""The script of multi-GPU recordings: all but the engine on a made-up one, and the step log on a made-up worker."""

import csv
import gzip
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from profiler.core.load import sha256_of
from profiler.core.registry import load_model
from serving.config import load_cluster
from serving.recorded import read_recorded
from serving.traces import read_trace

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "perf" / "full_size_run.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("full_size_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def call(out: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), "dp2", "--out", str(out), "--stand-in", "--layers", "4"]
    sizes = ["--chat-requests", "30", "--poisson-requests", "20", "--poisson-rate", "200", "--workloads"]
    return subprocess.run([*command, *sizes, *more], capture_output=True, text=True, check=False)


def test_runs_are_recorded_once_and_continued(tmp_path: Path) -> None:
    first = call(tmp_path, "chat")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "chat: play 1 of 30" in first.stdout and "chat: play 2 of 30" in first.stdout
    both = call(tmp_path, "chat,poisson", "--warm-requests", "3")
    assert both.returncode == 0 and "chat: play" not in both.stdout
    assert "poisson: play 1 of 3 " in both.stdout and "poisson: play 2 of 20" in both.stdout
    assert "recorded already" in call(tmp_path, "chat,poisson").stdout
    chat = read_recorded(tmp_path / "dp2" / "chat")
    assert len(chat.requests) == 30 and chat.ticks
    assert chat.meta["engine_kwargs"]["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}
    rows = [json.loads(line) for line in (chat.path / "requests.jsonl").read_text().splitlines()]
    assert [row["request_id"] for row in rows] == [str(index) for index in range(30)]
    assert {row["engine"] for row in rows} == {0, 1}
    instance = load_cluster(tmp_path / "dp2" / "chat" / "config.json").instances[0]
    assert (instance.parallel.dp, instance.parallel.ep, instance.parallel.tp) == (2, 2, 1)
    with gzip.open(chat.path / "steps_dp1_rank0.csv.gz", "rt") as stream:
        assert next(csv.reader(stream)) == list(script().COLUMNS)
    trace = (tmp_path / "dp2" / "poisson" / "poisson.jsonl").read_text().splitlines()
    arrivals = [json.loads(line)["arrival_time_ns"] for line in trace]
    assert arrivals == sorted(arrivals) and 0.02 < arrivals[-1] / 1e9 < 0.5


def test_work_that_does_not_fit_is_left_for_the_next_call(tmp_path: Path) -> None:
    short = call(tmp_path, "chat", "--seconds", "0.001")
    assert short.returncode == 3 and "TimeoutError" in short.stderr
    assert not (tmp_path / "dp2" / "chat").exists()


def test_runs_can_be_predicted_before_they_are_made(tmp_path: Path) -> None:
    done = call(tmp_path, "chat,long", "--prepare", "--long-requests", "3")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "dp2" / "long"
    assert f"--dataset {folder}/long.jsonl" in done.stdout
    assert [one.prompt_tokens for one in read_trace(folder / "long.jsonl").requests] == [32768] * 3
    assert load_cluster(folder / "config.json").instances[0].layers == 4
    assert "chat: play 2 of 30" in call(tmp_path, "chat").stdout  # it is not taken for a recorded one


def test_predictions_say_what_to_run_and_what_they_are_of(tmp_path: Path) -> None:
    done = call(tmp_path, "chat,poisson", "--predict", str(tmp_path / "predicted"))
    assert done.returncode == 0, done.stderr
    (chat, poisson) = (
        json.loads((tmp_path / "predicted" / "dp2" / f"{name}.json").read_text()) for name in ("chat", "poisson")
    )
    assert (chat["rate_per_s"], poisson["rate_per_s"]) == (None, 200.0)  # the given rate
    assert poisson["record"].endswith("--poisson-requests 20 --workloads poisson --poisson-rate 200.0")
    check_prediction(tmp_path / "predicted" / "dp2" / "poisson.json", poisson, tmp_path / "again")
    assert chat["memory_gib"]["weights"] > 1 and chat["latency_ms"]["p90"] > chat["ttft_ms"]["p50"] > 0


def test_a_predicted_load_has_half_of_the_predicted_rate(tmp_path: Path) -> None:
    module = script()
    command = [sys.executable, str(SCRIPT), "tp2", "--expert-parallel", "--layers", "4", "--out", str(tmp_path)]
    sizes = ["--chat-requests", "20", "--poisson-requests", "10", "--workloads", "chat,poisson"]
    subprocess.run([*command, *sizes, "--predict", str(tmp_path / "predicted")], check=True, capture_output=True)
    (chat, poisson) = (
        json.loads((tmp_path / "predicted" / "tp2-ep" / f"{name}.json").read_text()) for name in ("chat", "poisson")
    )
    assert poisson["rate_per_s"] == round(chat["requests_per_s"] / 2, 2)
    assert "--predict" not in poisson["record"]
    assert module.parsed(poisson["record"].split()[2:]).poisson_rate == poisson["rate_per_s"]
    check_prediction(tmp_path / "predicted" / "tp2-ep" / "poisson.json", poisson, tmp_path / "again")


def check_prediction(path: Path, found: dict[str, Any], scratch: Path) -> None:
    """Its command plays the trace that was predicted, in the layout of its cluster file, inside the tables."""
    module = script()
    options = module.parsed(found["record"].split()[2:])
    folder = scratch / found["workload"]
    folder.mkdir(parents=True)
    module.write_trace(folder, module.workload(found["workload"], options, {}))
    assert sha256_of(folder / f"{folder.name}.jsonl") == found["trace"]["sha256"]
    (instance,) = load_cluster(path.parent / "cluster.json").instances
    assert (
        (instance.parallel.tp, instance.parallel.dp) == module.layout(found["layout"]) == module.layout(options.layout)
    )
    whole = options.expert_parallel or instance.parallel.dp > 1
    assert instance.parallel.ep == (instance.parallel.tp * instance.parallel.dp if whole else 1)
    assert path.parent.name == module.folder_name(options)
    asked = instance.engine
    assert (asked.max_model_len_tokens, asked.max_num_seqs) == (options.max_model_len, options.max_num_seqs)
    assert found["finished"] == found["trace"]["requests"] and found["extrapolated_lookups"] == 0
    memory = dict(found["memory_gib"])
    total = memory.pop("requested_memory")
    assert sum(memory.values()) == pytest.approx(total, abs=0.01)
    layers = instance.layers or load_model(instance.model).num_layers
    block_gib = layers * 1284 * found["block_tokens"] / 2**30  # 1,152 B of latent and 132 of index key per token
    assert found["num_gpu_blocks"] == pytest.approx(memory["available_kv_cache_memory"] / block_gib, abs=2)


PREDICTIONS = sorted(path for path in (ROOT / "tests" / "recorded" / "predictions").glob("*/*.json")
                     if path.name != "cluster.json")  # fmt: skip


@pytest.mark.parametrize("path", PREDICTIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_predictions_can_be_run(path: Path, tmp_path: Path) -> None:
    check_prediction(path, json.loads(path.read_text()), tmp_path)


def test_lengths_and_rates() -> None:
    module = script()
    requests = module.chat(4000, None, 81920)
    assert sum(one.prompt_tokens for one in requests) / 4000 == pytest.approx(219, rel=0.08)
    assert sum(one.output_tokens for one in requests) / 4000 == pytest.approx(197, rel=0.08)
    later = module.chat(4000, 50.0, 81920)
    assert later[-1].arrival_ns / 1e9 == pytest.approx(80, rel=0.1)
    assert [module.layout(text) for text in ("tp8", "dp8", "tp4dp2")] == [(8, 1), (1, 8), (4, 2)]
    with pytest.raises(SystemExit, match="is no layout"):
        module.layout("pp2")


def test_half_of_the_rate_at_which_chat_finished(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    rows = [{"queued_ts": 10.0, "last_token_ts": 12.0}, {"queued_ts": 10.5, "last_token_ts": 14.0}]
    (tmp_path / "vllm" / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert script().half_rate(tmp_path) == 0.25


def test_ticks_add_engines_up() -> None:
    rows = [(100.2, 0, 3, 1, 0.5, 40, 3, 0), (100.4, 1, 2, 0, 0.25, 10, 2, 0), (101.5, 1, 1, 0, 0.25, 0, 1, 0)]
    found = [line.split(",") for line in script().ticks(rows, 100.0, 1.0).splitlines()[1:]]
    assert found == [["1.0", "50.0", "5.0", "5", "1", "37.5"], ["2.0", "0.0", "1.0", "4", "1", "37.5"]]


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.monotonic()

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1e3


class Runner:
    """A model runner that takes 2 ms to launch and 1 ms to sample."""

    kv_cache_config = SimpleNamespace(num_blocks=77)
    model_memory_usage = 1 << 30
    attn_groups = ()

    def _determine_batch_execution_and_padding(self, tokens: int) -> tuple[Any, Any]:
        return SimpleNamespace(name="FULL"), SimpleNamespace(num_tokens=8 * -(-tokens // 8))

    def execute_model(self, output: Any) -> str:
        if output.total_num_scheduled_tokens:
            self._determine_batch_execution_and_padding(output.total_num_scheduled_tokens)
            time.sleep(2e-3)
        return "hidden"

    def sample_tokens(self, grammar: Any) -> str:
        time.sleep(1e-3)
        return "tokens"

    def _dummy_run(self, tokens: int, uniform_decode: bool) -> None:
        self._determine_batch_execution_and_padding(tokens)


def scheduled(new: dict[str, int], cached: dict[str, tuple[int, int]], tokens: dict[str, int]) -> Any:
    """new: computed tokens by request. cached: (computed, output) tokens by request."""
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(tokens.values()),
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=n) for name, n in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[n for n, _ in cached.values()],
            is_context_phase=lambda name: name in cached and cached[name][1] == 0,
        ),
    )


def test_a_worker_logs_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(Event=Event, synchronize=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    module = script()
    runner = Runner()
    worker = module.Steps()
    worker.model_runner, worker.rank = runner, 1
    worker.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_rank=3),
        cache_config=SimpleNamespace(block_size=64),
        compilation_config=SimpleNamespace(cudagraph_mode="FULL"),
        scheduler_config=SimpleNamespace(async_scheduling=True),
    )
    worker.sparsight_install(False)
    worker.sparsight_clear()
    steps = [
        scheduled({"a": 0, "b": 64}, {}, {"a": 10, "b": 5}),
        scheduled({}, {"a": (10, 1), "b": (69, 0)}, {"a": 1, "b": 1}),  # the last prompt token of b alone
        scheduled({}, {}, {}),
        scheduled({}, {"a": (11, 2), "b": (70, 1)}, {"a": 1, "b": 1}),
    ]
    for output in steps:
        assert runner.execute_model(output) == "hidden"
        if output.total_num_scheduled_tokens:
            assert runner.sample_tokens(None) == "tokens"
    runner._dummy_run(1, uniform_decode=True)
    worker.sparsight_write(str(tmp_path))
    facts = json.loads((tmp_path / "dp3-rank1.json").read_text())
    assert (facts["num_gpu_blocks"], facts["requests"], facts["memory_gib"]) == (77, ["a", "b"], {"weights": 1.0})
    rows = [dict(zip(module.COLUMNS, row, strict=True)) for row in facts["steps"]]
    counts = [(row["prefill_requests"], row["prefill_tokens"], row["prefill_context_tokens"],
               row["decode_requests"], row["decode_kv_tokens"]) for row in rows]  # fmt: skip
    assert counts == [(2, 15, 64, 0, 0), (1, 1, 69, 1, 11), (0, 0, 0, 2, 12 + 71), (0, 0, 0, 0, 0)]
    assert [row["dummy"] for row in rows] == [0, 0, 0, 1]
    assert [row["padded_tokens"] for row in rows] == [16, 8, 8, 8]
    assert all(3_000 <= row["gpu_us"] < 60_000 for row in rows[:3])


@pytest.mark.parametrize(("name", "flags", "ep"), [("tp2", [], 1), ("tp2", ["--expert-parallel"], 2), ("dp2", [], 2)])
def test_experts_are_spread_with_data_parallelism_or_when_asked(name: str, flags: list[str], ep: int) -> None:
    module = script()
    options = module.parsed([name, "--out", "runs", *flags])
    arguments = module.engine_arguments(options, *module.layout(name))
    assert arguments["enable_expert_parallel"] is (ep > 1)
    assert module.cluster(options, arguments, 61, {})["instances"][0]["parallel"]["ep"] == ep
    assert "moe_backend" not in arguments
    named = module.parsed([name, "--out", "runs", *flags, "--moe-backend", "triton"])
    assert module.engine_arguments(named, 1, 1)["moe_backend"] == "triton"
