"""The step log and the driver on a stand-in engine whose times are known: every part of a step is found, in both ways
of scheduling, and what they say of the batches is what the engine ran."""

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import vllm_stand_in as stand_in
from click.testing import CliRunner

from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.types import MoeDims
from serving.recorded import read_recorded
from serving.recording import vllm_driver
from serving.recording.drive import Finished, play
from serving.recording.files import read_steps
from serving.recording.step_log import StepLog
from serving.recording.steps import Chunk, Decode, Step, batches
from serving.recording.vllm_driver import EngineArguments, Limits, VllmDriver
from serving.traces import TraceRequest

FORWARD_US = 2_000.0
NO_LIMITS = Limits()
ARGUMENTS = EngineArguments(8192, 64, 4, "auto", 0.9, None, None, "decode-graphs", None, True, True, False, 1)


def trace(*rows: tuple[float, int, int]) -> list[TraceRequest]:
    return [TraceRequest(str(i), round(at * 1e9), *lengths) for i, (at, *lengths) in enumerate(rows)]


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    module.SamplingParams = lambda **given: SimpleNamespace(**given)  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


def driver_of(device: stand_in.Device, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> VllmDriver:
    """A driver of the stand-in, on its clock."""
    monkeypatch.setitem(sys.modules, "torch", stand_in.torch(device))
    driver = VllmDriver.__new__(VllmDriver)
    driver._version = "0.26.0"
    monkeypatch.setattr(vllm_driver.time, "perf_counter", device.clock)
    monkeypatch.setattr(vllm_driver, "StepLog", lambda core, runner, torch: StepLog(core, runner, torch, device.clock))
    driver._reach(stand_in.started(device, asynchronous, FORWARD_US), ARGUMENTS)
    return driver


def played(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool, requests: list[TraceRequest], limits: Limits = NO_LIMITS
) -> tuple[VllmDriver, list[Finished], list[Step]]:
    device = stand_in.Device()
    driver = driver_of(device, monkeypatch, asynchronous)
    driver.begin(requests, limits)
    finished = play(driver, requests, clock=device.clock, sleep=lambda seconds: device.host(max(seconds, 1e-6) * 1e6))
    return driver, finished, driver.steps()


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_parts_of_every_step(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    """The times of the stand-in are constants; waits follow from them."""
    _, _, steps = played(monkeypatch, asynchronous, trace((0.0, 5, 6)))
    assert len(steps) == 6
    for step in steps:
        assert step.schedule_us == pytest.approx(100.0) and step.update_us == pytest.approx(40.0)
        assert step.launch_us == pytest.approx(500.0 + (step.input_wait_us or 0.0))
        assert step.forward_launch_us == pytest.approx(300.0)
        assert step.output_us == pytest.approx(25.0)
        assert step.sample_us == pytest.approx(50.0 + (step.bookkeep_us or 0.0))
        assert step.sample_gpu_us == pytest.approx(30.0)
        assert step.forward_us >= FORWARD_US - 1e-6
        known_us = (step.updated_s - step.gpu_start_s) * 1e6 - step.update_us
        assert known_us >= step.gpu_us - 1e-6
        assert not asynchronous or known_us == pytest.approx(step.gpu_us) or step.wait_us == pytest.approx(0.0, abs=1.0)
        assert (step.graph, step.padded_tokens) == ("FULL", step.tokens + step.tokens % 2)
    assert steps[0].add_us == pytest.approx(15.0) and all(step.add_us == 0.0 for step in steps[1:])
    walls = [step.wall_us for step in steps]
    if asynchronous:
        # The device is never idle: a step follows the one before at once, however long the host takes.
        assert walls[2:5] == pytest.approx([10.0 + FORWARD_US + 30.0] * 3)
        assert all(step.bookkeep_us == pytest.approx(0.0) for step in steps)
        # Inputs of a step are copied when the one before has its inputs copied: no wait for the whole of it.
        assert all(step.input_wait_us < FORWARD_US for step in steps)
    else:
        # Host and device one after the other: schedule, prepare, launch, run, update, output.
        assert walls[1:5] == pytest.approx([100.0 + 200.0 + 300.0 + FORWARD_US + 30.0 + 40.0 + 25.0] * 4, abs=1.0)
        assert all(step.wait_us == pytest.approx(0.0, abs=1e-3) for step in steps)
        assert all(step.bookkeep_us > FORWARD_US - 100.0 for step in steps)


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_batches_are_those_that_ran(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    """A prompt of 17 tokens takes three chunks of at most 8 beside the decode tokens of one of 4 tokens."""
    _, finished, steps = played(monkeypatch, asynchronous, trace((0.0, 4, 5), (0.0, 17, 2)))
    assert [(one.request_id, one.prompt_tokens, one.output_tokens) for one in finished] == [("0", 4, 5), ("1", 17, 2)]
    assert list(batches(steps)) == [
        ((Chunk(0, 4, 0), Chunk(1, 8, 0)), ()),
        ((Chunk(1, 8, 8),), (Decode(0, 5),)),
        ((Chunk(1, 1, 16),), (Decode(0, 6),)),
        ((), (Decode(0, 7), Decode(1, 18))),
        ((), (Decode(0, 8),)),
    ]
    assert [step.sampled for step in steps] == [1, 1, 2, 2, 1]
    assert [step.decode_kv_tokens for step in steps] == [0, 5, 6, 25, 8]
    assert [step.running for step in steps][:4] == [2, 2, 2, 2]


@pytest.mark.usefixtures("fake_vllm")
def test_device_times_stand_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, steps = played(monkeypatch, True, trace((0.0, 5, 4), (0.5, 5, 1)))
    ends = [step.gpu_start_s * 1e6 + step.gpu_us for step in steps]
    starts = [step.gpu_start_s * 1e6 for step in steps]
    assert all(start >= end - 1e-3 for start, end in zip(starts[1:], ends, strict=False))
    # An idle device starts when the model runner does: after adding and scheduling.
    assert starts[-1] == pytest.approx(steps[-1].start_s * 1e6 + 100.0, abs=1.0)
    # The gap between the requests belongs to no step.
    assert max(step.wall_us for step in steps) < 10_000


@pytest.mark.usefixtures("fake_vllm")
def test_limits_hold_for_one_play_and_blocks_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.engines.vllm_engine.gpu_facts", lambda: {"name": "stand-in"})
    requests = trace(*[(0.0, 4, 2)] * 4)
    driver, _, steps = played(monkeypatch, False, requests, Limits(max_num_seqs=2, num_gpu_blocks=10))
    assert max(step.running for step in steps) == 2 and steps[0].waiting == 2
    assert {step.kv_usage for step in steps} == {0.0}  # of the blocks that are left to the play
    facts = driver.facts()
    assert (facts["num_gpu_blocks"], facts["own_num_gpu_blocks"], facts["max_num_seqs"]) == (10, 100, 2)
    assert driver._engine.logger_manager is None
    driver.begin(requests, Limits())
    assert (driver.facts()["num_gpu_blocks"], driver.facts()["max_num_seqs"]) == (100, 4)
    with pytest.raises(ConfigError, match="max_num_seqs=5: the engine has 4"):
        driver.begin(requests, Limits(max_num_seqs=5))
    driver._core.scheduler.kv_cache_manager.block_pool.free -= 1
    with pytest.raises(AcquisitionError, match="still holds KV blocks"):
        driver.begin(requests, Limits())


@pytest.mark.usefixtures("fake_vllm")
def test_a_runner_without_the_private_parts_gives_a_log_without_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    device = stand_in.Device()
    monkeypatch.setitem(sys.modules, "torch", stand_in.torch(device))
    begun = stand_in.started(device, True)
    for name in ("_bookkeeping_sync", "_determine_batch_execution_and_padding"):
        original = getattr(begun.runner, name)
        monkeypatch.setattr(type(begun.runner), name, None)
        calls = begun.runner.__dict__.setdefault("calls", {})
        calls[name] = original
    log = StepLog(begun.core, begun.runner, stand_in.torch(device), device.clock)
    assert log.missing == ["_determine_batch_execution_and_padding", "_bookkeeping_sync"]


@pytest.mark.usefixtures("fake_vllm")
def test_the_command_keeps_a_smooth_play_of_each_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two traces on one engine; the first play of the first one stalls, as compilation would make it."""
    device = stand_in.Device()

    def starts(self: VllmDriver, config: dict[str, Any], arguments: EngineArguments, moe: MoeDims) -> None:
        assert config["num_hidden_layers"] == 4 and moe.has_bias
        other = driver_of(device, monkeypatch, True)
        self.__dict__.update(other.__dict__)

    monkeypatch.setattr(VllmDriver, "__init__", starts)
    monkeypatch.setattr(vllm_driver, "check_card", lambda card: None)
    monkeypatch.setattr("profiler.engines.vllm_engine.gpu_facts", lambda: {"name": "stand-in"})
    from serving.recording import drive

    monkeypatch.setattr(drive.time, "sleep", lambda seconds: device.host(max(seconds, 1e-6) * 1e6))
    launch = stand_in.Runner._model_forward
    stalls = iter([23e6])

    def forward(self: stand_in.Runner, input_ids: Any) -> None:
        device.host(next(stalls, 0.0))
        launch(self, input_ids)

    monkeypatch.setattr(stand_in.Runner, "_model_forward", forward)
    monkeypatch.setattr(drive.play, "__defaults__", (drive.play.__defaults__[0], device.clock, drive.time.sleep))
    for name, length in (("a", 5), ("b", 11)):
        rows = [{"arrival_time_ns": i * 10**6, "input_toks": length, "output_toks": 4} for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from serving.commands.record import command

    run = CliRunner().invoke(
        command,
        ["deepseek-ai/DeepSeek-V3.2-Exp", "--hardware", "H200", "--layers", "4", "--max-model-len", "8192",
         "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--dataset", str(tmp_path / "a.jsonl"),
         "--dataset", f"{tmp_path / 'b.jsonl'}:max_num_seqs=2,num_gpu_blocks=50", "--output", str(tmp_path / "out")],
        catch_exceptions=False,
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    metas = {name: json.loads((tmp_path / "out" / name / "vllm" / "meta.json").read_text()) for name in ("a", "b")}
    assert (metas["a"]["plays"], metas["b"]["plays"]) == (2, 1)
    assert metas["a"]["stalled_steps"] == 0 and metas["b"]["limits"] == "max_num_seqs=2,num_gpu_blocks=50"
    assert max(step.running for step in read_steps(tmp_path / "out" / "b")) == 2
    assert len(read_recorded(tmp_path / "out" / "a").requests) == 6
    engine = json.loads((tmp_path / "out" / "b" / "config.json").read_text())["instances"][0]["engine"]
    assert (engine["max_num_seqs"], engine["num_gpu_blocks"], engine["cudagraph_mode"]) == (2, 50, "FULL_DECODE_ONLY")
    assert engine["cudagraph_capture_sizes"] == [1, 2, 4]


@pytest.mark.usefixtures("fake_vllm")
def test_no_play_starts_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from serving.recording.plays import Asked, play_until_smooth

    device = stand_in.Device()
    driver = driver_of(device, monkeypatch, True)
    requests = tuple(trace((0.0, 5, 3), (0.5, 5, 3)))
    asked = Asked("a", tmp_path / "a.jsonl", Limits(), "", requests, tmp_path)
    monkeypatch.setattr("serving.recording.drive.time.sleep", lambda seconds: device.host(max(seconds, 1e-6) * 1e6))
    now = time.monotonic()
    said: list[str] = []
    assert play_until_smooth(driver, asked, 4, now + 0.4, said.append, lambda label: lambda done, total: None) is None
    assert said == []
    assert play_until_smooth(driver, asked, 4, now + 60, said.append, lambda label: lambda done, total: None)
    assert len(said) == 1


MOE = MoeDims(8, 2, 16, 0, 0, has_bias=True)


@pytest.mark.usefixtures("fake_vllm")
def test_expert_loads_are_evened_on_prompts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_driver, "_BALANCE_TOKENS", 8)
    device = stand_in.Device()
    driver = driver_of(device, monkeypatch, True)
    part = SimpleNamespace(do_not_compile=False)
    model = SimpleNamespace(modules=lambda: [part])
    driver.runner.get_model = lambda: model
    ran, prompts = [], []

    def balance(model: Any, moe: MoeDims, run: Any) -> dict[str, float]:
        for _ in range(2):
            run()
            assert part.do_not_compile, "hooks of a compiled model are not run"
            prompts.append({tuple(prompt) for prompt in driver._prompts.values()})
            ran.append((model, moe, sum(step.tokens for step in driver.steps())))
        return {"routers": 1}

    monkeypatch.setattr("profiler.engines.vllm_support.balance.balance", balance)
    assert driver._balanced(MOE) == {"routers": 1}
    assert ran == 2 * [(model, MOE, 4 * 8)] and not driver.has_work() and not part.do_not_compile
    assert len(prompts[0] | prompts[1]) == 2 * 4, "a round brought prompts of another"
    # The play that follows knows nothing of it.
    requests = trace((0.0, 5, 2))
    driver.begin(requests, NO_LIMITS)
    assert driver.steps() == []


@pytest.mark.usefixtures("fake_vllm")
def test_loads_that_cannot_be_evened_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def balance(model: Any, moe: MoeDims, run: Any) -> dict[str, float]:
        raise AcquisitionError("no router with a correction bias ran")

    monkeypatch.setattr("profiler.engines.vllm_support.balance.balance", balance)
    driver = driver_of(stand_in.Device(), monkeypatch, True)
    driver.runner.get_model = lambda: SimpleNamespace(modules=list)
    assert "no router" in driver._balanced(MOE)["not_evened"]
    assert "expert loads are not evened" in capsys.readouterr().err
