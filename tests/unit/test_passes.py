"""Dense cells from passes that were run for other tables."""

from pathlib import Path

import pytest
from profiling import FakeEngine, each_component, job, quiet, small_root

from profiler import acquire
from profiler.core.bundle import Table
from profiler.core.shots import Shot
from profiler.engines.base import EngineOptions, KernelSample
from profiler.kernels._components import names_of


def dense_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str = "", **facts: object) -> Table:
    """Of an engine whose projections take a microsecond for each token of the pass; `missing` never runs in decodes."""
    root = small_root(tmp_path / "models")
    the_job = job()
    target = acquire.prepare(the_job, root)
    names = names_of(target.spec, "dense")

    def make(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
        own = [s for s in each_component(index, shot, repeat) if s.module != "dense"]
        if shot.moe:
            return own
        calls = {"embedding": 1, "final_norm": 1, "step_inputs": 1}
        late = 1_000.0 if shot.regime == "dense" else 0.0
        return own + [
            KernelSample(index, repeat, "dense", name, calls.get(name, 1) * (shot.new_tokens + late), 1)
            for name in names
            if not (name == missing and shot.requests[0][0] == 1 and shot.requests[0][1])
        ]

    monkeypatch.setattr(acquire, "create_engine", lambda name, options: engine(options))

    def engine(options: EngineOptions) -> FakeEngine:
        return FakeEngine(options, make, **facts)

    run = acquire.measure(the_job, target, 1, quiet)
    _, acquired = acquire.publish([run], target, the_job, tmp_path / "out")
    acquire.refuse_incomplete([acquired])
    return acquired.tables["dense"]


def cells(table: Table, name: str) -> dict[int, float]:
    columns = table.columns
    return {
        int(n): float(t)
        for layer, n, t in zip(columns["layer"], columns["tokens"], columns["time_us"], strict=True)
        if layer == name
    }


def test_a_pass_of_another_table_gives_the_projections_at_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = dense_table(tmp_path, monkeypatch)
    own = {1, 16, 64, 128}
    o_proj, inputs = cells(table, "o_proj"), cells(table, "step_inputs")
    # Batches of 4 decodes, and of a prefill beside decodes, have numbers of tokens that no dense shot has.
    assert own < o_proj.keys() and 4 in o_proj
    assert set(inputs) == own, "it goes with requests too"
    layers = 4
    assert all(time == pytest.approx(tokens / layers, rel=1e-3) for tokens, time in o_proj.items()), "dense passes too"


def test_a_pass_without_a_component_gives_no_rows_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = dense_table(tmp_path, monkeypatch, missing="o_proj")
    assert 4 not in cells(table, "o_proj") and 4 not in cells(table, "q_b_proj")


def test_an_engine_that_runs_components_alone_has_no_such_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(cells(dense_table(tmp_path, monkeypatch, whole_forward=False), "o_proj")) == {1, 16, 64, 128}
