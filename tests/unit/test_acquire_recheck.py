"""Cells unlike their neighbours are measured a second time, and published only when both measurements agree."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiling import SMALL, FakeEngine, SampleMaker, each_component, job, quiet, small_root

from profiler import acquire, card
from profiler.core.bundle import read_bundle
from profiler.core.shots import Shot
from profiler.engines.base import EngineOptions, KernelSample
from profiler.samples import read_runs

WILD = ((1, 1_023),)  # one decode request of 1,024 keys


def wild(times: list[float]) -> SampleMaker:
    """Kernels of 100 us; at WILD those of the indexer take the next of `times` at every run of the shot."""
    runs: Counter[Shot] = Counter()

    def make(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
        if repeat == 0:
            runs[shot] += 1
        factor = times[min(runs[shot], len(times)) - 1] if shot.requests == WILD else 1.0
        return [replace(s, duration_us=s.duration_us * factor) for s in each_component(index, shot, repeat)]

    return make


def measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: SampleMaker, hardware: str = "H200"
) -> tuple[FakeEngine, acquire.Acquired, Path | None]:
    made: list[FakeEngine] = []

    def create(name: str, options: EngineOptions) -> FakeEngine:
        made.append(FakeEngine(options, make))
        return made[-1]

    monkeypatch.setattr(acquire, "create_engine", create)
    monkeypatch.setattr(card, "cuda_device_name", lambda: "NVIDIA H200")
    the_job: Any = job(hardware=hardware, engine="reference", categories=("indexer",))
    target = acquire.prepare(the_job, small_root(tmp_path / "models"))
    path = tmp_path / "s.csv.gz"
    acquire.measure(the_job, target, 1, quiet, save_to=path)
    folder, acquired = acquire.publish(read_runs([path]), target, the_job, tmp_path / "out")
    return made[0], acquired, folder


def test_one_bad_moment_is_averaged_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, acquired, _ = measured(monkeypatch, tmp_path, wild([3.0, 1.0]))
    again = [shot for shot, count in Counter(engine.ran).items() if count == 2]
    assert WILD in [shot.requests for shot in again]
    # Three repeats of 300 and three of 100: the median is no longer twice its neighbours', but they disagree.
    table = acquired.tables["indexer"].columns
    row = [
        i
        for i, (n, kv) in enumerate(zip(table["decode_requests"], table["decode_kv_tokens"], strict=True))
        if (n, kv) == (1, 1_024)
    ]
    assert max(float(table["spread_rel"][i]) for i in row) > 0.9


def test_a_cell_that_stays_wild_is_confirmed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, acquired, folder = measured(monkeypatch, tmp_path, wild([9.0, 9.0]))
    assert not acquired.refused and folder is not None
    kept = read_bundle(folder).meta["grid"]["tp1/indexer"]["quality"]
    assert any("decode_requests=1, decode_kv_tokens=1024" in line for line in kept["confirmed"])


def test_a_cell_that_two_measurements_disagree_on_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, acquired, folder = measured(monkeypatch, tmp_path, wild([9.0, 30.0]))
    assert folder is None
    reasons = [line for line in acquired.refused["indexer"] if "decode_requests=1, decode_kv_tokens=1024" in line]
    assert reasons and "two measurements gave" in reasons[0]


def test_the_processor_is_not_held_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, acquired, _ = measured(monkeypatch, tmp_path, wild([9.0, 30.0]), hardware="CPU")
    assert not acquired.refused and SMALL
