"""--kv-cache-gib: from the command line to the engine, and where it is refused."""

from pathlib import Path
from typing import Any

import pytest
from profiling import SMALL, FakeEngine, each_component, job, quiet, small_root

from profiler import acquire, card
from profiler.__main__ import main
from profiler.core.errors import ConfigError
from profiler.engines.base import EngineOptions


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return small_root(tmp_path / "models")


@pytest.mark.parametrize("command", ["profile", "coverage"])
def test_the_size_reaches_the_engine_and_the_recorded_command(
    command: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[EngineOptions] = []

    class Enough(Exception):
        pass

    def create(name: str, options: EngineOptions) -> FakeEngine:
        assert name == "vllm"
        started.append(options)
        return FakeEngine(options, each_component, name="vllm")

    def start_run(path: Path, run: Any) -> None:
        started.append(run.command)
        raise Enough

    monkeypatch.setattr(card, "cuda_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(acquire, "create_engine", create)
    monkeypatch.setattr(acquire, "start_run", start_run)
    samples = ["--save-samples", str(tmp_path / "s.csv.gz")]
    roots = ["--model-config-root", str(root)]
    arguments = [command, SMALL, "--hardware", "H200", "--engine", "vllm", "--kv-cache-gib", "40", *roots, *samples]
    with pytest.raises(Enough):
        main(arguments, standalone_mode=False)
    options, text = started
    assert options.kv_cache_gib == 40.0
    assert " --kv-cache-gib 40 " in str(text)


@pytest.mark.parametrize("asked", [{"hardware": "CPU"}, {"hardware": "H200", "engine": "reference"}])
def test_the_reference_engine_has_no_cache_to_size(asked: dict[str, str], root: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-gib sizes the cache of engine vllm"):
        acquire.prepare(job(kv_cache_gib=40.0, **asked), root)


def test_where_vllm_is_absent_the_size_is_refused_before_the_engine_starts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "cuda_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(acquire, "choose_engine", lambda engine, hardware: "reference")
    asked = job(hardware="H200", kv_cache_gib=40.0)
    target = acquire.prepare(asked, root)
    with pytest.raises(ConfigError, match="--kv-cache-gib"):
        acquire.measure(asked, target, 1, quiet)
