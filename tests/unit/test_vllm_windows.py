"""Windows of shots, adaptive repeats and the recorders of the vLLM engine, without a GPU and without vLLM."""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from profiler.core.shots import Fill, Shot
from profiler.core.types import MoeDims
from profiler.engines.base import EngineInfo, KernelSample, ShotResult, most_repeats
from profiler.engines.vllm_engine import VllmEngine
from profiler.engines.vllm_support import recorder, repeats, state, trace
from profiler.samples import Run
from profiler.visits import latest


@dataclass(frozen=True)
class Event:
    """What the profiler hands out: calls, not fields."""

    what: str
    device: str = "cpu"
    start: int = 0
    length: int = 0
    thread: int = 1
    correlation: int = 0

    def name(self) -> str:
        return self.what

    def device_type(self) -> str:
        return self.device

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.length

    def device_resource_id(self) -> int:
        return self.thread

    def correlation_id(self) -> int:
        return self.correlation


def test_events_in_memory_give_what_a_trace_gives() -> None:
    events = [
        Event(trace.shot_range_name(3, 1), start=0, length=100_000),
        Event("mod|layers.0", start=10_000, length=50_000),
        Event("mod|layers.0.q", start=20_000, length=10_000),
        Event("mod|layers.9", start=20_000, length=10_000, thread=2),
        Event("Activity Buffer Request", start=21_000, correlation=2),
        Event("cudaLaunchKernel", start=15_000, correlation=1),
        Event("cuLaunchKernelEx", start=25_000, correlation=2),
        Event("cudaMemcpyAsync", start=80_000, correlation=3),
        Event("cudaLaunchKernel", start=150_000, correlation=4),
        Event("a", "cuda", 900_000, 1_500, 7, 1),
        Event("b", "cuda", 910_000, 2_500, 7, 2),
        Event("b", "cuda", 920_000, 500, 7, 2),
        Event("Memcpy HtoD (Pinned -> Device)", "cuda", 930_000, 1_000, 7, 3),
        Event("late", "cuda", 940_000, 1_000, 7, 4),
        Event("mod|layers.0.q", "cuda", 900_000, 30_000, 7, 0),
    ]
    assert trace.kernel_times_of(events, "cpu") == {
        (3, 1, "layers.0", "a"): (1.5, 1),
        (3, 1, "layers.0.q", "b"): (3.0, 2),
        (3, 1, "", "Memcpy HtoD (Pinned -> Device)"): (1.0, 1),
    }


def test_ranges_are_recorded_only_while_the_switch_is_on_and_operators_never() -> None:
    torch = pytest.importorskip("torch")
    switch = trace.Switch()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    trace.annotate_modules(model, switch)
    trace.annotate_method(model, "extra_repr", switch, "method")
    rows = torch.zeros(2, 4)

    def block() -> None:
        with trace.shot_range(0, 0):
            model(rows)
            model.extra_repr()

    block()
    result = recorder._ranges_and_device(switch, block)
    assert not switch.on
    assert sorted(event.name() for event in result.events()) == ["mod|0", "mod|1", "mod|method", "shot|0|0"]
    kinds = {event.device_type() for event in result.events()}
    assert kinds == {torch.autograd.DeviceType.CPU}
    threads = {event.device_resource_id() for event in result.events()}
    assert len(threads) == 1
    assert not any("_sparsight" in name and value for name, value in model[0].__dict__.items())


def test_a_range_is_closed_when_its_module_raises() -> None:
    torch = pytest.importorskip("torch")
    switch = trace.Switch()

    class Broken(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, rows: Any) -> Any:
            raise ValueError("broken")

    model = torch.nn.Sequential(Broken())
    trace.annotate_modules(model, switch)

    def block() -> None:
        with pytest.raises(ValueError, match="broken"):
            model(torch.zeros(1))

    result = recorder._ranges_and_device(switch, block)
    assert [event.name() for event in result.events()] == ["mod|0"]


def test_without_kernels_nothing_is_proven_and_the_full_trace_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    switch = trace.Switch()
    found, what = recorder.checked(switch, lambda: None)
    assert what == "full trace"
    assert found(lambda: None) == {}


@pytest.mark.parametrize(("launches", "expected"), [(100, "events in memory"), (97, "short trace"), (0, "short trace")])
def test_a_recorder_must_find_the_launches_of_the_full_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launches: int, expected: str
) -> None:
    key = (0, 0, "m", "kernel")
    monkeypatch.setattr(recorder, "through_trace", lambda switch: lambda block: {key: (5.0, 100)})
    monkeypatch.setattr(recorder, "short_trace", lambda switch: lambda block: {key: (5.0, 99)})

    def in_memory(switch: trace.Switch) -> Any:
        def record(block: Any) -> Any:
            if not launches:
                raise RuntimeError("no such function")
            return {key: (5.0, launches)}

        return record

    monkeypatch.setattr(recorder, "in_memory", in_memory)
    assert recorder.checked(trace.Switch(), lambda: None)[1] == expected
    told = capsys.readouterr().err
    assert ("are not read from events in memory" in told) == (expected != "events in memory")


def samples(*us: float) -> list[KernelSample]:
    return [KernelSample(0, repeat, "m", "k", value, 1) for repeat, value in enumerate(us)]


def test_long_passes_that_agree_are_timed_three_times() -> None:
    assert repeats.first(5, 200.0) == 3
    assert repeats.first(2, 200.0) == 2
    assert repeats.first(5, 49.0) == 5
    assert repeats.further(samples(1e5, 1.001e5, 1.002e5), 5) == range(0)
    assert repeats.further(samples(1e5, 1.2e5, 1.4e5), 5) == range(3, 5)
    assert repeats.further(samples(1e5, 1.2e5, 1.4e5, 1e5, 1.4e5), 5) == range(0)


def test_a_pass_that_is_long_on_the_host_alone_gets_all_that_are_asked_for() -> None:
    assert repeats.further(samples(100, 101, 100), 5) == range(3, 5)


def test_short_passes_that_spread_are_timed_up_to_three_times_as_often() -> None:
    assert repeats.further(samples(100, 101, 100, 101, 100), 5) == range(0)
    assert repeats.further(samples(100, 120, 100, 120, 100), 5) == range(5, 10)
    assert repeats.further(samples(*(100, 120) * 5), 5) == range(10, 15)
    assert repeats.further(samples(*(100, 120) * 8), 5) == range(0)
    assert repeats.further(samples(100), 1) == range(0)
    assert repeats.further([], 5) == range(0)


class Fake(VllmEngine):
    """The engine's loop over steps that take no device: every step notes its shot, every profile sums what ran."""

    def __init__(self, times: dict[int, list[float]], broken: dict[int, str]) -> None:
        self._boot: Any = SimpleNamespace(runner=SimpleNamespace(execute_model_state=1))
        self._spent_s = defaultdict(float)
        self.ran: list[int] = []
        self.profiles: list[list[int]] = []
        self._recorder = self._record
        self._experts_reached: Any = SimpleNamespace(reached=self._reached)
        self.times, self.broken = times, broken

    def _step(self, shot: Shot, tokens: Any = None) -> None:
        index = shot.requests[0][1]
        if index in self.broken:
            raise RuntimeError(self.broken[index])
        self.ran.append(index)

    def _reached(self, run: Any) -> float:
        before = len(self.ran)
        run()
        assert len(self.ran) == before + 1
        return 10.0 + self.ran[-1]

    def _record(self, block: Any) -> Any:
        before = len(self.ran)
        block()
        ran = self.ran[before:]
        self.profiles.append(ran)
        found = {}
        for index in dict.fromkeys(ran):
            first = self.ran[:before].count(index) - 2  # without the warm-up runs
            for k in range(ran.count(index)):
                us = self.times.get(index, [10.0])
                found[index, first + k, "m", "k"] = (us[(first + k) % len(us)], 1)
        return found


def shots(count: int) -> list[Shot]:
    return [Shot((Fill("dense", (i + 1,), ("x",)),), ((1, i),)) for i in range(count)]


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("no_device")
def test_every_shot_comes_out_once_in_order_and_windows_are_bounded() -> None:
    engine = Fake({}, {})
    results = list(engine.run(shots(40), 2, 5))
    assert [r.shot_index for r in results] == list(range(40))
    assert all(len(r.samples) == 5 and r.failure is None for r in results)
    assert [len(set(profile)) for profile in engine.profiles] == [16, 16, 8]
    assert engine.ran.count(7) == 2 + 5


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("warmup", [1, 2])
def test_experts_are_counted_in_a_run_that_is_not_timed(warmup: int) -> None:
    engine = Fake({}, {3: "broken"})
    results = list(engine.run(shots(5), warmup, 4))
    assert [r.reached_experts for r in results] == [10.0, 11.0, 12.0, None, 14.0]
    assert [engine.ran.count(i) for i in range(5)] == [warmup + 4] * 3 + [0, warmup + 4]


@pytest.mark.usefixtures("no_device")
def test_only_shots_that_spread_are_timed_further() -> None:
    engine = Fake({1: [100.0, 150.0]}, {})
    results = list(engine.run(shots(3), 2, 5))
    assert [len(r.samples) for r in results] == [5, 15, 5]
    assert [s.repeat for s in results[1].samples] == list(range(15))
    assert [set(p) for p in engine.profiles] == [{0, 1, 2}, {1}, {1}]


@pytest.mark.usefixtures("no_device")
def test_a_failed_shot_is_told_and_the_others_go_on_until_the_device_is_lost() -> None:
    engine = Fake({}, {2: "out of memory", 20: "Triton Error [CUDA]: an illegal memory access was encountered"})
    results = list(engine.run(shots(40), 2, 5))
    assert [r.shot_index for r in results] == list(range(40))
    assert results[2].failure == "RuntimeError: out of memory"
    assert [r.shot_index for r in results if r.failure is None] == [i for i in range(16) if i != 2]
    assert all("illegal memory access" in (r.failure or "") for r in results[16:])


@pytest.mark.usefixtures("no_device")
def test_a_device_lost_while_the_profiler_ends_fails_its_window_and_the_rest() -> None:
    engine = Fake({}, {})

    def record(block: Any) -> Any:
        found = engine._record(block)
        if 20 in engine.ran:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return found

    engine._recorder = record
    results = list(engine.run(shots(40), 2, 5))
    assert [r.shot_index for r in results if r.failure is None] == list(range(16))
    assert len(results) == 40
    assert all("unspecified launch failure" in (r.failure or "") for r in results[16:])


@pytest.mark.usefixtures("no_device")
def test_a_stop_in_a_window_leaves_the_windows_before_it() -> None:
    class Stopped(Fake):
        def _step(self, shot: Shot) -> None:
            if shot.requests[0][1] == 20:
                raise KeyboardInterrupt
            super()._step(shot)

    got = []
    with pytest.raises(KeyboardInterrupt):
        for result in Stopped({}, {}).run(shots(40), 2, 5):
            got.append(result)
    assert [r.shot_index for r in got] == list(range(16))


def info(rule: dict[str, Any]) -> EngineInfo:
    return EngineInfo("vllm", {}, {}, {"block_tokens": 64}, "fp8", ("a",), True, rule)


def test_a_second_look_begins_behind_the_most_repeats_of_the_first() -> None:
    rule = {"repeat_rule": dict(repeats.RULE)}
    assert most_repeats(info({}), 5) == 5
    assert most_repeats(info(rule), 5) == 15
    one = shots(1)
    many = [KernelSample(0, r, "m", "k", 1.0, 1) for r in (*range(10), *range(15, 20))]
    for settings, parts in ((rule, (10, 5)), ({}, (5, 10))):
        run = Run("m", "x", "H200", 1, "t", "c", {"repeats": 5}, {}, info(settings), tuple(one), ())
        run.results[0] = ShotResult(0, tuple(many))
        first, second = latest([run]).looks[0]
        assert (len(first.samples), len(second.samples)) == parts


class Evened(VllmEngine):
    """The engine's own evening of loads, on steps that only note their tokens."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        spec = SimpleNamespace(moe=MoeDims(8, 2, 16, 0, 0, has_bias=True))
        limits = SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens, max_model_len=65536, spec=spec)
        self._options: Any = limits
        self._boot: Any = SimpleNamespace(model=SimpleNamespace(modules=list))
        self._vocab = 1 << 20
        self.ran: list[tuple[Any, ...]] = []

    def _step(self, shot: Shot, tokens: Any = None) -> None:
        self.ran.append((shot.requests, tuple(tokens.tolist()), str(tokens.dtype)))


@pytest.mark.parametrize(("most", "count"), [(4096, 4096), (32768, 16384)])
def test_loads_are_evened_on_tokens_that_no_other_pass_has(
    monkeypatch: pytest.MonkeyPatch, most: int, count: int
) -> None:
    torch = pytest.importorskip("torch")

    def even_loads(model: Any, moe: MoeDims, run: Any) -> dict[str, int]:
        run()
        run()
        return {"routers": 1}

    monkeypatch.setattr("profiler.engines.vllm_support.balance.even_loads", even_loads)
    engine = Evened(most)
    assert engine._even_loads() == {"routers": 1}
    (requests, first, kind), (_, second, _) = engine.ran
    assert requests == ((count, 0),) and kind == "int32" and len(first) == len(second) == count
    of_passes = torch.randint(0, 1 << 20, (count,), generator=torch.Generator().manual_seed(state.SEED)).tolist()
    same = [
        sum(a == b for a, b in zip(one, other, strict=True))
        for one, other in ((first, second), (first, of_passes), (second, of_passes))
    ]
    assert max(same) < count / 100
