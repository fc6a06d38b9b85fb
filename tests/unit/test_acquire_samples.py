"""Sample files: what is written is read back, a torn end is dropped, malformed files are named."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiling import FakeEngine, each_component

from profiler.core.errors import ConfigError
from profiler.core.registry import load_model, load_model_config
from profiler.core.shots import Fill, MoeBatch, Shot
from profiler.engines.base import EngineOptions, KernelSample, ShotResult
from profiler.samples import Run, append_result, plain_info, read_runs, shot_from_json, shot_to_json, start_run

V32 = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
OPTIONS = EngineOptions(V32.name, load_model_config(V32.name), V32, "CPU", 1, (1,), "auto", None, 4096, 512, 8)
SHOTS = (
    Shot((Fill("dense", (8,), ("o_proj",)),), ((8, 0),), "sparse"),
    Shot((Fill("moe", (8, 64, 20, 64), ("experts",)),), moe=MoeBatch(8, 64, 1.5, 3)),
)


def new_run(shots: tuple[Shot, ...] = SHOTS) -> Run:
    info = plain_info(FakeEngine(OPTIONS, each_component).info())
    protocol = {"warmup": 0, "repeats": 2}
    return Run(
        V32.name, "abc", "CPU", 1, "2026-01-01T00:00:00Z", "profile", protocol, {"grid": "tiny"}, info, shots, ()
    )


def sample(index: int, repeat: int, kernel: str = "gemm<float, 4>") -> KernelSample:
    return KernelSample(index, repeat, "model.layers.0.o_proj", kernel, 1.0 / 3 + repeat, 2)


requests = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 4096)), max_size=6)


@given(requests, st.sampled_from(["auto", "sparse", "dense"]))
def test_shots_survive_the_file_form(batch: list[tuple[int, int]], regime: str) -> None:
    shot = Shot((Fill("dense", (8,), ("o_proj", "q_b_proj")),), tuple(batch), regime)  # type: ignore[arg-type]
    assert shot_from_json(shot_to_json(shot)) == shot


def test_runs_are_read_back_exactly(tmp_path: Path) -> None:
    path, run = tmp_path / "s.csv.gz", new_run()
    start_run(path, run)
    results = {
        0: ShotResult(0, (sample(0, 0), sample(0, 1))),
        1: ShotResult(1, (sample(1, 0),), "CUDA error: an illegal memory access"),
    }
    for result in results.values():
        append_result(path, result)
    (back,) = read_runs([path])
    run.results.update(results)
    assert back == run


def test_later_runs_follow_in_the_same_file_and_in_others(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gz", tmp_path / "b.gz"
    for path in (first, first, second):
        start_run(path, new_run())
        append_result(path, ShotResult(0, (sample(0, 0),)))
    assert [len(run.results) for run in read_runs([first, second])] == [1, 1, 1]


@pytest.mark.parametrize("lost_bytes", [1, 8, 40])
def test_a_killed_writer_loses_the_shot_in_flight_only(tmp_path: Path, lost_bytes: int) -> None:
    path = tmp_path / "s.gz"
    start_run(path, new_run())
    append_result(path, ShotResult(0, (sample(0, 0),)))
    append_result(path, ShotResult(1, (sample(1, 0),)))
    path.write_bytes(path.read_bytes()[:-lost_bytes])
    (run,) = read_runs([path])
    assert list(run.results) == [0]
    start_run(path, new_run())
    append_result(path, ShotResult(1, (sample(1, 0),)))
    assert [list(run.results) for run in read_runs([path])] == [[0], [1]]


def test_names_with_line_breaks_stay_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "s.gz"
    start_run(path, new_run())
    append_result(path, ShotResult(0, (sample(0, 0, 'a\nb, \u2028"c"'),), "first\nsecond"))
    (run,) = read_runs([path])
    assert run.results[0].samples[0].kernel == 'a b, "c"'
    assert run.results[0].failure == "first second"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no samples"),
        ("0,0,m,k,1.0,1,\n", r":1: a row before the first run"),
        ("#run {}\n", r":1: not the start of a run \(KeyError"),
        ("#run [\n", r":1: not the start of a run"),
    ],
)
def test_malformed_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(ConfigError, match=message):
        read_runs([path])


@pytest.mark.parametrize(
    ("row", "message"),
    [("0,0,m,k,fast,1,", "not a sample"), ("7,0,m,k,1.0,1,", "shot 7 of 2"), ("0,0", "not a sample")],
)
def test_malformed_rows_are_refused_by_line(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "s.gz"
    start_run(path, new_run())
    with path.open("ab") as stream:
        stream.write(gzip.compress(f"{row}\n".encode()))
    with pytest.raises(ConfigError, match=f":3: {message}"):
        read_runs([path])


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_runs([tmp_path / "none.gz"])
    (tmp_path / "text").write_text("hello", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no samples"):
        read_runs([tmp_path / "text"])
