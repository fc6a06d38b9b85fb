"""Coverage: every microsecond is bound, known or named, and what is missing ends with exit code 3."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from profiling import SMALL, FakeEngine, SampleMaker, each_component, job, quiet, small_root

from profiler import acquire
from profiler.core.errors import CoverageError
from profiler.core.shots import Shot
from profiler.coverage import Coverage, as_json, coverage, kind_of, refuse_incomplete, representative_shots
from profiler.engines.base import EngineOptions, KernelSample, find_binding
from profiler.samples import Run

Measure = Callable[..., tuple[Run, Coverage]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Runs the representative shots on an engine without a device and accounts for them."""

    def run(make: SampleMaker = each_component, **facts: object) -> tuple[Run, Coverage]:
        def create(name: str, options: EngineOptions) -> FakeEngine:
            return FakeEngine(options, make, **facts)

        monkeypatch.setattr(acquire, "create_engine", create)
        target = acquire.prepare(job(), small_root(tmp_path / "models"))
        shots = {1: representative_shots(target.spec, target.limits[1])}
        measured = acquire.measure(job(), acquire.with_shots(target, shots), 1, quiet)
        return measured, coverage([measured], target.spec, find_binding(measured.info))

    return run


def test_every_kind_of_batch_is_run_and_accounted_for(measure: Measure) -> None:
    run, found = measure()
    assert [kind.kind for kind in found.kinds] == ["prefill", "dense prefill", "decode", "mixed", "experts"]
    for kind in found.kinds:
        # Mean of three repeats of 100, 101 and 102 us per component.
        assert kind.device_us == kind.bound_us == pytest.approx(101.0 * len(kind.components))
    assert found.complete and not found.missing
    refuse_incomplete(found)
    assert json.loads(json.dumps(as_json(found, run)))["complete"] is True


def test_an_uncovered_kernel_is_named_with_its_module_and_time(measure: Measure) -> None:
    def make(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
        stray = KernelSample(index, repeat, "model.extra", "mystery_kernel", 500.0, 1)
        return [*each_component(index, shot, repeat), *([stray] if kind_of(shot) == "decode" else [])]

    run, found = measure(make)
    (kernel,) = next(kind for kind in found.kinds if kind.kind == "decode").uncovered
    assert (kernel.kernel, kernel.module, kernel.us, kernel.material) == ("mystery_kernel", "model.extra", 500.0, True)
    with pytest.raises(CoverageError, match=r"500\.0 us .*decode: model\.extra  mystery_kernel") as error:
        refuse_incomplete(found)
    assert error.value.exit_code == 3
    report = next(kind for kind in as_json(found, run)["kinds"] if kind["kind"] == "decode")
    assert report["uncovered"][0]["us"] == 500.0 and report["device_us"] - report["bound_us"] == pytest.approx(500.0)


def test_a_kernel_below_a_hundredth_is_listed_and_not_material(measure: Measure) -> None:
    def make(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
        return [*each_component(index, shot, repeat), KernelSample(index, repeat, "", "tiny_copy", 0.5, 1)]

    _, found = measure(make)
    assert all(not one.material for kind in found.kinds for one in kind.uncovered)
    assert found.complete


def test_a_component_that_no_kernel_belongs_to_is_missing(measure: Measure) -> None:
    def make(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
        return [sample for sample in each_component(index, shot, repeat) if sample.kernel != "index_topk"]

    _, found = measure(make)
    assert [component.name for component in found.missing] == ["index_topk"]
    with pytest.raises(CoverageError, match="no kernel of indexer/index_topk in any pass"):
        refuse_incomplete(found)


def test_a_failed_batch_is_not_complete(measure: Measure) -> None:
    _, found = measure(failures={"moe": "out of memory"})
    with pytest.raises(CoverageError, match=r"failed: moe ep=1 .*: out of memory"):
        refuse_incomplete(found)


def test_wrong_module_names_bind_nothing(measure: Measure) -> None:
    """A binding of other modules than those that ran accounts for nothing, and says so for every kernel."""

    def make(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
        return [replace(s, module=f"other.{s.module}") for s in each_component(index, shot, repeat)]

    _, found = measure(make)
    assert all(kind.bound_us == 0.0 and kind.uncovered for kind in found.kinds)
    assert not found.complete and SMALL
