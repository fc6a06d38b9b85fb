"""Slices: one table measured anew with its own settings, into the bundle that it came from or not at all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from profiling import SMALL, FakeEngine, each_component, job, quiet, small_root

from profiler import acquire
from profiler.__main__ import main
from profiler.core.bundle import read_bundle
from profiler.core.errors import ConfigError, CoverageError
from profiler.core.shots import Shot
from profiler.engines.base import EngineOptions, KernelSample

Start = Callable[..., None]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def choose(factor: float = 1.0, **facts: object) -> None:
        def make(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
            return [replace(s, duration_us=s.duration_us * factor) for s in each_component(index, shot, repeat)]

        def create(name: str, options: EngineOptions) -> FakeEngine:
            return FakeEngine(options, make, **facts)

        monkeypatch.setattr(acquire, "create_engine", create)

    choose()
    return choose


@pytest.fixture
def bundle(tmp_path: Path, start: Start) -> Path:
    the_job = job(max_num_seqs=4)
    target = acquire.prepare(the_job, small_root(tmp_path / "models"))
    run = acquire.measure(the_job, target, 1, quiet)
    folder, _ = acquire.publish([run], target, the_job, tmp_path / "perf")
    assert folder is not None
    return folder


def slice_of(tmp_path: Path, *arguments: str, category: str = "indexer") -> None:
    roots = ("--model-config-root", str(tmp_path / "models"), "--out-root", str(tmp_path / "perf"))
    main(
        ["slice", SMALL, "--hardware", "CPU", "--tp", "1", "--category", category, *roots, *arguments],
        standalone_mode=False,
    )


def test_one_table_is_replaced_and_the_others_stay(bundle: Path, tmp_path: Path, start: Start) -> None:
    before = read_bundle(bundle)
    start(factor=2.0)
    slice_of(tmp_path)
    after = read_bundle(bundle)
    assert set(after.tables) == set(before.tables)
    for key, table in before.tables.items():
        times = after.tables[key].columns["time_us"]
        expected = (
            [2 * float(t) for t in table.columns["time_us"]] if key == (1, "indexer") else table.columns["time_us"]
        )
        assert list(times) == pytest.approx(list(map(float, expected)))
    stamps = {name: entry["measured_at"] for name, entry in before.meta["files"].items() if "measured_at" in entry}
    assert all(after.meta["files"][n]["measured_at"] == at for n, at in stamps.items() if n != "tp1/indexer.csv")


def test_settings_not_given_are_those_of_the_table(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slice_of(tmp_path, "--dry-run", "--max-num-batched-tokens", "64")
    lines = capsys.readouterr().out.splitlines()
    assert "max_num_seqs: 4" in lines and "repeats: 3" in lines and "warmup: 0" in lines and "grid: tiny" in lines
    assert "max_num_batched_tokens: 64 (measured with 8192)" in lines


def test_another_engine_version_replaces_nothing(bundle: Path, tmp_path: Path, start: Start) -> None:
    before = (bundle / "tp1/indexer.csv").read_bytes()
    start(versions={"torch": "1"})
    with pytest.raises(ConfigError, match=r"measured otherwise than its other tables.*\n.*engine: .*'torch': '0'"):
        slice_of(tmp_path)
    with pytest.raises(ConfigError, match=r"protocol: "):
        slice_of(tmp_path, "--repeats", "2")
    assert (bundle / "tp1/indexer.csv").read_bytes() == before


def test_a_table_that_is_not_there_is_not_a_slice(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match=r"has no table tp1/nothing, only tp1/attention, "):
        slice_of(tmp_path, category="nothing")
    assert bundle.is_dir()
