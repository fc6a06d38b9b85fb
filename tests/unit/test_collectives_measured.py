"""Measuring collectives: the plan, two real processes over gloo, the arithmetic of times, and a stand-in of a GPU."""

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from profiler.collectives import clock, operations
from profiler.collectives.cases import Case, missing, plan, powers_of_two
from profiler.collectives.launch import Found, environment, launch
from profiler.collectives.operations import Operation, Ranks
from profiler.collectives.outcome import outcome, per_call_us
from profiler.collectives.provenance import started
from profiler.commands.collectives import command
from profiler.core.collective_table import CollectiveRow, read_collectives
from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.load import read_yaml

pytest.importorskip("torch", reason="the ranks are processes of torch.distributed")

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def silent(done: int, total: int, label: str) -> None:
    return None


def test_the_plan_has_what_exists_and_nothing_else() -> None:
    assert powers_of_two(1000, 4096) == (1024, 2048, 4096)
    two = plan(2, OPERATIONS, ("nccl", "vllm-custom"), ("graph", "eager"), (1024, 2048))
    assert len(two) == 5 * 2 * 2 + 2 * 2
    four = plan(4, OPERATIONS, ("nccl", "vllm-custom"), ("graph", "eager"), (1024, 2048))
    assert {case.operation for case in two} - {case.operation for case in four} == {"send"}
    assert {case.mode for case in plan(2, OPERATIONS, ("gloo",), ("graph", "eager"), (1024,))} == {"eager"}
    row = CollectiveRow("all_reduce", "nccl", 4, "bf16", 1024, "graph", 5.0, 0.0)
    assert set(four) - set(missing(four, 4, [row])) == {Case("all_reduce", "nccl", "graph", 1024)}
    assert missing(two, 2, [row]) == two


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 1}, "--ranks 1: a collective needs at least 2"),
        ({"ranks": 3}, "--ranks 3: 1024 bytes of bf16 do not divide among them"),
        ({"operations": ("all_reduc",)}, "unknown operation 'all_reduc'; did you mean 'all_reduce'"),
        ({"backends": ("ncl",)}, "unknown backend 'ncl'"),
        ({"modes": ("replay",)}, "unknown mode 'replay'"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "ranks": 2, "operations": OPERATIONS, "backends": ("nccl",), "modes": ("graph",), "sizes": (1024,)
    }  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        plan(**(good | changes))


def test_sums_in_place_stay_finite() -> None:
    """2**-60, eight ranks: a batch and the call before it stay below the largest bf16 number, 2**127 or so."""
    for size in powers_of_two(1024, 1 << 28):
        case = Case("all_reduce", "nccl", "graph", size)
        assert 1 <= case.short_calls < case.calls
        assert (case.calls + 1) * math.log2(8) - 60 < 120


def found(long_us: list[float], short_us: list[float] = [], **line: Any) -> Found:  # noqa: B006
    return Found({}, {0: {"case": 0, "long_us": long_us, "short_us": short_us, "single_us": long_us, **line}}, "")


def test_a_batch_lasts_until_its_slowest_rank_and_what_it_costs_once_falls_out() -> None:
    case = Case("all_reduce", "nccl", "graph", 1024)  # 32 calls, and 8
    assert per_call_us(case, [[10 + 32 * 5.0, 10 + 32 * 7.0], [10 + 32 * 6.0, 0.0]], [[10 + 8 * 6.0] * 3] * 2) == [
        pytest.approx(6.0),
        pytest.approx(6.0 + 32 * 1.0 / 24),
    ]
    assert per_call_us(case, [[64.0], [96.0]], [[], []]) == [3.0]
    good = outcome([case], [found([10 + 32 * 5.0] * 4, [10 + 8 * 5.0] * 4), found([0.0] * 4, [0.0] * 4)])
    assert good.rows == (CollectiveRow("all_reduce", "nccl", 2, "bf16", 1024, "graph", 5.0, 0.0),)
    assert good.single_us == (170.0,)


def test_cells_without_a_sound_result_are_lost() -> None:
    case = Case("all_reduce", "nccl", "graph", 1024)
    right, wrong = found([100.0], [50.0]), found([100.0], [50.0], wrong="nan")
    for ranks, why in (
        ([right, wrong], "its result is wrong: relative error nan"),
        ([right, Found({}, {}, "")], "not measured by every rank"),
        ([found([50.0], [60.0])] * 2, "a longer batch did not take longer"),
    ):
        got = outcome([case], ranks)
        assert not got.rows and why in got.lost[0][1]
    skipped = Found({}, {0: {"case": 0, "skipped": "too large"}}, "")
    assert outcome([case], [skipped, skipped]).skipped == ((case, "too large"),)


def run(out: Path, *more: str) -> Result:
    arguments = ["--hardware", "CPU", "--min-bytes", "1024", "--max-bytes", "2048", "--batches", "3"]
    return CliRunner().invoke(command, [*arguments, "--out-root", str(out), *more])


def test_two_processes_measure_every_operation_and_add_to_the_table(tmp_path: Path) -> None:
    samples = tmp_path / "samples.csv"
    first = run(tmp_path, "--save-samples", str(samples))
    assert first.exit_code == 0, first.output
    path = tmp_path / "CPU" / "collectives.csv"
    rows = read_collectives(path)
    assert {(row.operation, row.bytes) for row in rows} == {
        (name, size) for name in OPERATIONS for size in (1024, 2048)
    }
    assert {(row.backend, row.gpus, row.mode, row.dtype) for row in rows} == {("gloo", 2, "eager", "bf16")}
    # 10 cells, 2 ranks, 3 batches of 32 calls and 3 of one.
    assert len(samples.read_text().splitlines()) == 1 + 10 * 2 * (3 + 3)
    entry = read_yaml(tmp_path / "CPU" / "collectives.yaml")["runs"][0]
    assert entry["rows"] == {"gloo": 10} and entry["gpus"] == 2 and "torch" in entry["versions"]
    assert entry["command"].startswith("python -m profiler collectives --hardware CPU --ranks 2 --ops all_reduce,")
    again = run(tmp_path)
    assert again.exit_code == 0 and "10 cells are in" in again.stderr
    assert read_collectives(path) == rows
    four = run(tmp_path, "--ranks", "4", "--ops", "all_reduce,reduce_scatter,all_to_all", "--max-bytes", "1024")
    assert four.exit_code == 0, four.output
    assert len(read_collectives(path)) == 13
    assert set(read_collectives(path)) > set(rows)
    assert [one["gpus"] for one in read_yaml(tmp_path / "CPU" / "collectives.yaml")["runs"]] == [2, 4]


def test_wrong_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for arguments, message in (
        (["--backend", "nccl"], "CPUs are measured with gloo"),
        (["--ops", "broadcast"], "unknown operation 'broadcast'"),
        (["--min-bytes", "1025", "--max-bytes", "2000"], "no power of two"),
    ):
        result = run(tmp_path, *arguments)
        assert isinstance(result.exception, ConfigError) and message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_fails_ends_the_run_with_its_message() -> None:
    good, bad = Case("all_reduce", "gloo", "eager", 1024), Case("all_gather", "gloo", "eager", 6)
    ranks = launch([good, bad], 2, False, 1, 3, 60, silent)
    assert all(0 in one.cases and 1 not in one.cases for one in ranks)
    assert any("ended with exit status 1" in one.failure and "Error" in one.failure for one in ranks)
    result = outcome([good, bad], ranks)
    assert len(result.rows) == 1 and result.lost == ((bad, "not measured by every rank"),)


def test_a_run_ends_when_its_time_is_over() -> None:
    ranks = launch([Case("all_reduce", "gloo", "eager", 1024)], 2, False, 1, 3, 0, silent)
    assert all("was not done when the time was over" in one.failure for one in ranks)


def test_lost_cells_are_an_error_and_the_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(cases: Any, *rest: Any) -> list[Found]:
        line = {"long_us": [64.0] * 3, "short_us": [], "single_us": [2.0] * 3}
        return [Found({"torch": "x"}, {0: {"case": 0, **line}}, "rank failed\nCUDA error")] * 2

    monkeypatch.setattr("profiler.collectives.launch.launch", half)
    result = run(tmp_path, "--ops", "all_reduce")
    assert isinstance(result.exception, AcquisitionError)
    assert "CUDA error" in str(result.exception)
    assert "gloo all_reduce eager of 2048 bytes: not measured by every rank" in str(result.exception)
    assert [row.bytes for row in read_collectives(tmp_path / "CPU" / "collectives.csv")] == [1024]


ENGINE = """
import torch.distributed as dist
class CustomAllreduce:
    def __init__(self, group, device):
        self.group, self.disabled, self.max_size = group, {disabled}, 2048
    def should_custom_ar(self, tensor):
        return tensor.numel() * tensor.element_size() < self.max_size
    def custom_all_reduce(self, tensor):
        out = tensor.clone()
        dist.all_reduce(out, group=self.group)
        return out
"""


def engine(folder: Path, disabled: bool) -> None:
    inner = folder / "vllm" / "distributed" / "device_communicators"
    inner.mkdir(parents=True)
    for one in (inner, inner.parent, inner.parent.parent):
        (one / "__init__.py").write_text("__version__ = '0.26.0'\n")
    (inner / "custom_all_reduce.py").write_text(ENGINE.format(disabled=disabled))


def test_the_engines_own_all_reduce_is_asked_where_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(tmp_path, False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cases = [Case("all_reduce", "vllm-custom", "eager", size) for size in (1024, 2048)]
    ranks = launch(cases, 2, False, 1, 3, 60, silent)
    assert not any(one.failure for one in ranks)
    assert ranks[0].facts["vllm"] == "0.26.0"
    result = outcome(cases, ranks)
    assert [row.bytes for row in result.rows] == [1024]
    assert result.skipped == ((cases[1], "the engine uses it below 2048 bytes"),)


@pytest.mark.parametrize("present", [True, False])
def test_cells_of_an_absent_engine_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    if present:
        engine(tmp_path, True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cases = [Case("all_reduce", "vllm-custom", "eager", 1024), Case("all_reduce", "gloo", "eager", 1024)]
    result = outcome(cases, launch(cases, 2, False, 1, 3, 60, silent))
    assert ("refuses these GPUs" if present else "not importable") in result.skipped[0][1]
    assert [row.backend for row in result.rows] == ["gloo"]


def test_multicast_is_off_unless_the_caller_asks() -> None:
    assert environment({})["NCCL_NVLS_ENABLE"] == "0"
    assert environment({"NCCL_NVLS_ENABLE": "1"})["NCCL_NVLS_ENABLE"] == "1"
    assert started("command", 2, True)["environment"]["NVSHMEM_DISABLE_NVLS"] == "1"


class Clock:
    """torch.cuda as far as the timing uses it: a device that works off what it is given, 3 us per call."""

    def __init__(self) -> None:
        self.now, self.recording, self.log = 0.0, None, []  # type: ignore[var-annotated]
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = clock.now

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at) / 1e3

        class CUDAGraph:
            def __init__(self) -> None:
                self.calls: list[Any] = []

            def replay(self) -> None:
                clock.now += 7.0  # a launch
                for call in self.calls:
                    call()

            def reset(self) -> None:
                self.calls.clear()

        self.Event, self.CUDAGraph = Event, CUDAGraph

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def _sleep(self, cycles: int) -> None:
        self.now += 200.0

    @contextlib.contextmanager
    def graph(self, graph: Any, capture_error_mode: str) -> Iterator[None]:
        self.recording = graph
        yield
        self.recording = None

    def call(self) -> None:
        if self.recording is not None:
            self.recording.calls.append(self.call)
        else:
            self.now += 3.0


def gpu(device: Clock) -> Ranks:
    return Ranks(SimpleNamespace(cuda=device), None, None, 0, 2, True)


def test_graphs_and_launches_are_timed_on_the_device() -> None:
    device, around = Clock(), []
    case = Case("all_reduce", "nccl", "graph", 1024)
    op = Operation(device.call, lambda: None, lambda: "tensor")

    @contextlib.contextmanager
    def registered() -> Iterator[None]:
        yield
        around.append("registered")

    times = clock.time_graph(case, gpu(device), op, 4, registered, device.call)
    assert times.long_us == pytest.approx([7 + 32 * 3.0] * 4)
    assert times.short_us == pytest.approx([7 + 8 * 3.0] * 4)
    assert times.single_us == pytest.approx([7 + 3.0] * 4)
    assert around == ["registered"] * 3
    assert per_call_us(case, [times.long_us] * 2, [times.short_us] * 2) == pytest.approx([3.0] * 4)
    eager = clock.time_eager(case, gpu(device), op, 4, device.call)
    assert eager.long_us == pytest.approx([32 * 3.0] * 4) and eager.short_us == ()
    assert eager.single_us == pytest.approx([3.0] * 4)


def test_results_are_compared_with_what_every_rank_would_give() -> None:
    torch = pytest.importorskip("torch")
    for rank in (0, 1):
        ranks = Ranks(torch, None, torch.device("cpu"), rank, 2, False)
        buffers = operations.allocate(ranks, 1024)
        given = []
        for other in (0, 1):
            operations.fill(
                Case("send", "gloo", "eager", 1024), Ranks(torch, None, ranks.device, other, 2, False), buffers
            )
            assert bool(buffers.taken.isnan().all())
            given.append(buffers.given.clone())
        first, second = given
        half = slice(0, 256) if rank == 0 else slice(256, 512)
        expected = {
            "all_reduce": first + second,
            "reduce_scatter": (first + second)[half],
            "all_gather": torch.cat([first[:256], second[:256]]),
            "all_to_all": torch.cat([first[half], second[half]]),
            "send": first,
        }
        for name, result in expected.items():
            case = Case(name, "gloo", "eager", 1024)
            assert operations.relative_error(case, ranks, result) <= operations.tolerance(case)
            off = result.clone()
            off[3] += 1.0
            assert not operations.relative_error(case, ranks, off) <= operations.tolerance(case)
            off[3] = math.nan
            assert not operations.relative_error(case, ranks, off) <= operations.tolerance(case)


def test_graphs_of_every_operation_give_right_results(tmp_path: Path) -> None:
    """The whole worker, its CUDA a stand-in whose graphs record calls and repeat them."""
    ranks = 2
    cases = plan(ranks, OPERATIONS, ("nccl", "vllm-custom"), ("graph", "eager"), (1024, 4096))
    job = {
        "cases": [asdict(case) for case in cases],
        "ranks": ranks,
        "warmup": 1,
        "batches": 3,
        "rendezvous": f"file://{tmp_path / 'rendezvous'}",
        "results": str(tmp_path / "results-{rank}.jsonl"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    stand_in = str(Path(__file__).parent / "ranks_stand_in.py")
    started = [
        subprocess.Popen(
            [sys.executable, stand_in, str(tmp_path / "job.json"), str(rank)],
            env=environment(os.environ), stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, errors
    by_rank = []
    for rank in range(ranks):
        lines = [json.loads(line) for line in (tmp_path / f"results-{rank}.jsonl").read_text().splitlines()]
        by_rank.append(Found({}, {line["case"]: line for line in lines if "case" in line}, ""))
    result = outcome(cases, by_rank)
    assert not [one for one in result.lost if "wrong" in one[1] or "not measured" in one[1]]
    assert {(case.backend, case.bytes) for case, _ in result.skipped} == {("vllm-custom", 4096)}
    measured = {(row.operation, row.backend, row.mode) for row in result.rows}
    expected = {(name, "nccl", mode) for name in OPERATIONS for mode in ("graph", "eager")}
    noisy = {(case.operation, case.backend, case.mode) for case, _ in result.lost}
    assert measured | noisy == expected | {("all_reduce", "vllm-custom", mode) for mode in ("graph", "eager")}
