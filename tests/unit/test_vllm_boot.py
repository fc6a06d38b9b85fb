"""Starting vLLM, with a stand-in module that has its shape: what is passed on, what is reached, what is refused."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from profiler.core.errors import AcquisitionError
from profiler.engines.vllm_support import boot


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keyword arguments of every vllm.LLM, each with the config.json that its model folder held."""
    seen: list[dict[str, Any]] = []
    runner = SimpleNamespace(name="runner")
    core = SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))
    )

    class LLM:
        def __init__(self, **keywords: Any) -> None:
            if keywords.get("max_model_len") == 13:
                raise ValueError("no KV cache left")
            seen.append({**keywords, "config": json.loads(Path(keywords["model"], "config.json").read_text())})
            self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))

    module = ModuleType("vllm")
    module.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return seen


def test_an_engine_is_started_on_the_config_and_its_parts_are_reached(calls: list[dict[str, Any]]) -> None:
    started = boot.start({"hidden_size": 64}, max_model_len=128, enforce_eager=True)
    (call,) = calls
    assert call["config"] == {"hidden_size": 64}
    assert call["load_format"] == "dummy" and call["max_model_len"] == 128 and call["trust_remote_code"] is False
    assert started.runner.name == "runner" and started.worker.model_runner is started.runner
    assert Path(call["model"], "config.json").exists()
    started.folder.cleanup()
    assert not Path(call["model"]).exists()


def test_an_engine_that_does_not_start_says_why(calls: list[dict[str, Any]]) -> None:
    with pytest.raises(AcquisitionError, match="vllm did not start: ValueError: no KV cache left"):
        boot.start({}, max_model_len=13)
    assert calls == []


def test_an_absent_vllm_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(AcquisitionError, match=r"vllm is not installed: pip install 'sparsight\[vllm\]'"):
        boot.installed_version()


WANTED = {"SPARSIGHT_TEST_A": "0", "SPARSIGHT_TEST_B": "1"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that is read and set: an empty one, without vllm."""
    own: dict[str, str] = {}
    monkeypatch.setattr(boot, "os", SimpleNamespace(environ=own))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return own


def test_an_environment_is_set_before_vllm_is_imported(environment: dict[str, str]) -> None:
    boot.set_environment(WANTED)
    assert environment.items() >= WANTED.items()


@pytest.mark.parametrize("there", [{}, {"SPARSIGHT_TEST_A": "0"}])
def test_vllm_imported_before_its_environment_is_refused(
    environment: dict[str, str], calls: list[dict[str, Any]], there: dict[str, str]
) -> None:
    environment.update(there)
    with pytest.raises(AcquisitionError, match="vllm was imported before its environment was set"):
        boot.set_environment(WANTED)
    assert environment == there


def test_vllm_imported_behind_the_same_environment_is_fine(
    environment: dict[str, str], calls: list[dict[str, Any]]
) -> None:
    environment.update(WANTED)
    boot.set_environment(WANTED)
    assert environment.items() >= WANTED.items()


@pytest.mark.parametrize("imported", [False, True])
def test_another_value_is_refused(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, imported: bool) -> None:
    if imported:
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    environment.update(WANTED | {"SPARSIGHT_TEST_B": "2"})
    with pytest.raises(AcquisitionError, match=r"unset them first: \{'SPARSIGHT_TEST_B': '2'\}"):
        boot.set_environment(WANTED)


@pytest.mark.parametrize(
    ("gib", "memory"),
    [
        (None, {"gpu_memory_utilization": 0.8}),
        # vllm 0.26, config/cache.py: kv_cache_memory_bytes; the utilisation is then only what must be free to start.
        (40.5, {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 43486543872}),
    ],
)
def test_a_cache_of_a_given_size_is_not_measured(
    gib: float | None, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    seen: dict[str, Any] = {}

    def start(config: Any, **keywords: Any) -> None:
        seen.update(keywords)
        raise Stopped

    monkeypatch.setattr(boot, "start", start)
    with pytest.raises(Stopped):
        boot.boot(
            {}, max_model_len=1, max_num_batched_tokens=1, max_num_seqs=1, kv_cache_dtype="auto", block_tokens=None,
            utilization=0.8, kv_cache_gib=gib,
        )  # fmt: skip
    assert {key: value for key, value in seen.items() if "memory" in key} == memory


def test_the_sampler_that_no_step_uses_is_not_compiled_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    boot.set_environment({"A": "1"})
    assert os.environ == {"A": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    monkeypatch.setattr(os, "environ", {"VLLM_USE_FLASHINFER_SAMPLER": "1"})
    boot.set_environment({"A": "1"})
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
