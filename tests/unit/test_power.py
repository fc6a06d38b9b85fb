"""Power by kernel class: which modules stand for a class, the loop inside a pass, and what a bundle keeps."""

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profiler.core.errors import ConfigError
from profiler.core.registry import load_model
from profiler.core.shots import Fill, MoeBatch, Shot
from profiler.engines.base import EngineInfo, KernelSample, PowerTarget, ShotResult
from profiler.engines.bindings import vllm_decomposed_dsa
from profiler.engines.vllm_support import card
from profiler.engines.vllm_support import power as sampling
from profiler.power import power_meta, power_targets, sample_power, with_power
from profiler.samples import Run, append_power, append_result, read_runs, start_run
from serving.pricing import kernel_watts

SPEC = load_model("deepseek-ai/DeepSeek-V3.2")
ATTENTION = "model.layers.0.self_attn"
KERNELS = (
    (f"{ATTENTION}.o_proj", "deep_gemm", 90.0),
    (f"{ATTENTION}.q_b_proj", "deep_gemm", 40.0),
    (f"{ATTENTION}.mla_attn.mla_attn.forward_mqa", "flash_fwd_splitkv", 300.0),
    (f"{ATTENTION}.indexer.indexer_op", "fp8_mqa_logits", 80.0),
    (f"{ATTENTION}.indexer.indexer_op", "topk", 40.0),
    (f"{ATTENTION}.indexer.indexer_op", "indexer_k_quant_and_cache", 5.0),
    ("model.layers.1.mlp.experts", "fused_moe_kernel", 500.0),
    ("logits_processor", "gemm", 400.0),
    ("runner.sampler", "argmax", 20.0),
)


def shot(count: int, new: int, context: int, regime: Any = "auto") -> Shot:
    return Shot((Fill("dense", (count * new,), ("o_proj",)),), ((new, context),) * count, regime)


def run_of(*shots: Shot, kernels: tuple[tuple[str, str, float], ...] = KERNELS) -> Run:
    info = EngineInfo("vllm", {"vllm": "0.26.0"}, {"name": "NVIDIA H200"}, {"block_tokens": 64}, "fp8", (), True, {})
    run = Run("m", "0" * 64, "H200", 1, "2026-12-01T00:00:00Z", "c", {"repeats": 5}, {}, info, shots, ())
    for index, one in enumerate(shots):
        if one.moe is None:
            found = tuple(
                KernelSample(index, r, module, kernel, us, 1) for module, kernel, us in kernels for r in (0, 1)
            )
            run.results[index] = ShotResult(index, found)
    return run


def test_the_module_of_most_time_stands_for_its_class() -> None:
    run = run_of(
        shot(64, 1, 16_383),
        shot(256, 1, 511),
        shot(256, 1, 16_383),
        shot(256, 1, 65_535),
        shot(1, 8_192, 16_384, "sparse"),
        shot(1, 16_384, 0, "sparse"),
        Shot((), moe=MoeBatch(1, 64)),
    )
    targets = {(t.category, t.phase): t for t in power_targets([run], SPEC, vllm_decomposed_dsa)}
    assert {key: target.module for key, target in targets.items()} == {
        **{("dense", phase): f"{ATTENTION}.o_proj" for phase in ("decode", "prefill")},
        **{("sparse_attention", p): f"{ATTENTION}.mla_attn.mla_attn.forward_mqa" for p in ("decode", "prefill")},
        **{("indexer", p): f"{ATTENTION}.indexer.indexer_op" for p in ("decode", "prefill")},
        **{("per_sequence", p): "logits_processor" for p in ("decode", "prefill")},
        **{("moe", p): None for p in ("decode", "prefill")},
    }
    assert targets["dense", "decode"].shot == shot(256, 1, 16_383)
    assert targets["dense", "prefill"].shot == shot(1, 8_192, 16_384, "sparse")
    assert targets["moe", "decode"].shot.moe == MoeBatch(1, 256)


def test_a_module_of_several_classes_stands_for_none_and_cut_experts_are_not_run() -> None:
    operator = f"{ATTENTION}.indexer.indexer_op"
    mixed = ((operator, "topk", 60.0), (operator, "indexer_k_quant_and_cache", 50.0))
    run = run_of(shot(8, 1, 99), kernels=mixed)
    assert {target.category for target in power_targets([run], SPEC, vllm_decomposed_dsa)} == {"moe"}
    run.tp = 8
    assert power_targets([run], SPEC, vllm_decomposed_dsa) == []


def sensor_of(watts: list[float]) -> sampling.Sensor:
    def read() -> tuple[float, float, float, float]:
        return watts[-1], 1980.0, 3201.0, 40.0

    return read


def test_a_class_is_sampled_inside_a_pass_and_the_module_is_left_as_it_was() -> None:
    class Module:
        def __init__(self) -> None:
            self.calls: list[int] = []

        def forward(self, x: int) -> int:
            self.calls.append(x)
            return x + 1

    module, watts, passes = Module(), [100.0], []
    synchronised: list[int] = []

    def step() -> None:
        watts.append(600.0)
        passes.append((module.forward(1), module.forward(5)))

    found = sampling.in_a_pass(module, "forward", step, sensor_of(watts), 0.1, lambda: synchronised.append(1))
    assert passes == [(2, 6)], "the pass gets the values of a single call"
    assert module.calls.count(5) == 1
    assert module.calls.count(1) == 1 + found["calls"]
    assert found["watts"] == 600.0
    assert found["sm_clock_mhz"] == 1980.0
    assert found["readings"] >= 1
    assert synchronised
    assert "forward" not in vars(module)
    with pytest.raises(RuntimeError, match="calls no forward of Module"):
        sampling.in_a_pass(module, "forward", lambda: None, sensor_of(watts), 0.1, lambda: None)


def test_a_method_replaced_before_is_replaced_and_put_back() -> None:
    thing = SimpleNamespace(work=lambda x: x * 2)
    before = thing.work
    with pytest.raises(ZeroDivisionError), sampling.replaced(thing, "work", lambda original: lambda x: original(x) + 1):
        assert thing.work(3) == 7
        raise ZeroDivisionError
    assert thing.work is before


def test_only_later_readings_count_and_a_broken_sensor_ends_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(i / 10, 100.0 if i < 5 else 700.0, 1000.0, 3000.0, 40.0) for i in range(11)]
    assert sampling.Readings(rows).settled()["watts"] == 700.0
    assert sampling.Readings().settled() == {}

    def broken() -> tuple[float, float, float, float]:
        raise OSError("gone")

    with sampling.reading(broken) as readings:
        time.sleep(0.05)
    assert readings.rows == []
    assert "gone" in capsys.readouterr().err


def test_a_target_that_fails_costs_its_sample_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sampling, "nvml_sensor", lambda: (sensor_of([90.0]), "a stand-in"))
    monkeypatch.setattr(sampling, "gpu_facts", lambda: {"sm_clock_mhz": 1980.0})

    def fails(sensor: sampling.Sensor) -> dict[str, Any]:
        raise KeyError("no such module")

    def works(sensor: sampling.Sensor) -> dict[str, Any]:
        return sampling.alone(lambda: time.sleep(0.001), sensor, 0.05, lambda: None)

    todo = [({"category": "dense", "phase": "decode"}, fails), ({"category": "moe", "phase": "decode"}, works)]
    found = sampling.measure(todo, 0.05)
    assert [sample["category"] for sample in found["samples"]] == ["moe"]
    assert found["samples"][0]["watts"] == found["idle"]["watts"] == 90.0
    assert "no such module" in capsys.readouterr().err


POWER: dict[str, Any] = {
    "sensor": "NVML instant power",
    "every_ms": 20,
    "samples": [
        {"category": "dense", "phase": "prefill", "watts": 690.0},
        {"category": "dense", "phase": "decode", "watts": 480.0},
        {"category": "attention", "phase": "prefill", "watts": 650.0},
    ],
    "idle": {"watts": 120.0, "sm_clock_mhz": 1980.0},
    "card_before": {"sm_clock_mhz": 345.0},
    "card_after": {"sm_clock_mhz": 1980.0},
}


def test_a_bundle_keeps_the_watts_that_energy_is_computed_from() -> None:
    meta = with_power({"x": 1}, [run_of()], {})
    assert meta == {"x": 1}
    sampled = run_of()
    sampled.power = POWER
    meta = with_power({"x": 1}, [sampled, run_of()], {})
    assert kernel_watts(meta) == {"dense": 480.0, "attention": 650.0, "other": 120.0}
    assert meta["power"]["samples"] == POWER["samples"]
    later = run_of()
    later.tp = 8
    assert with_power({}, [later], meta)["power"] == meta["power"]
    later.power = {**POWER, "samples": [{"category": "dense", "phase": "decode", "watts": 300.0}]}
    assert kernel_watts(with_power({}, [later], meta))["dense"] == 480.0, "tp 1 comes before tp 8"
    old = {"power": {"watts": {"collective": 250.0, "dense": 1.0}}}
    assert kernel_watts(with_power({}, [sampled], old)) == kernel_watts(meta) | {"collective": 250.0}
    assert power_meta({**POWER, "idle": {}})["watts"] == {"dense": 480.0, "attention": 650.0}


def test_a_sample_of_the_idle_card_says_nothing_of_its_class() -> None:
    """Calling again what copies a step's inputs leaves the card waiting: MiniMax-M3's dense decodes, 127 W of 124."""
    waiting = {"category": "dense", "phase": "decode", "watts": 124.0}
    samples = [waiting, *POWER["samples"][::2]]
    assert power_meta({**POWER, "samples": samples})["watts"] == {"dense": 690.0, "attention": 650.0, "other": 120.0}
    assert power_meta({**POWER, "samples": [waiting]})["watts"] == {"dense": 124.0, "other": 120.0}
    kernels = (("runner.prepare_inputs", "copy", 500.0), *KERNELS)
    run = run_of(shot(256, 1, 16_383), kernels=kernels)
    assert "runner.prepare_inputs" not in {one.module for one in power_targets([run], SPEC, vllm_decomposed_dsa)}


def test_power_is_sampled_once_and_a_failure_costs_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[list[PowerTarget]] = []

    def power(targets: list[PowerTarget], seconds: float) -> dict[str, Any]:
        asked.append(targets)
        return POWER

    run = run_of(shot(256, 1, 16_383))
    assert sample_power(SimpleNamespace(power=power), [run], SPEC, vllm_decomposed_dsa) == POWER
    assert {target.category for target in asked[0]} == {"dense", "sparse_attention", "indexer", "per_sequence", "moe"}
    assert sample_power(SimpleNamespace(), [run], SPEC, vllm_decomposed_dsa) is None

    def breaks(targets: list[PowerTarget], seconds: float) -> dict[str, Any]:
        raise ImportError("no NVML binding")

    assert sample_power(SimpleNamespace(power=breaks), [run], SPEC, vllm_decomposed_dsa) is None
    assert "no NVML binding" in capsys.readouterr().err
    run.power = POWER
    assert sample_power(SimpleNamespace(power=power), [run], SPEC, vllm_decomposed_dsa) is None


def test_power_is_in_the_samples_file_behind_its_run(tmp_path: Path) -> None:
    path, run = tmp_path / "s.csv.gz", run_of(shot(2, 1, 9))
    start_run(path, run)
    append_result(path, run.results[0])
    append_power(path, POWER)
    start_run(path, run_of(shot(2, 1, 9)))
    first, second = read_runs([path])
    assert first.power == POWER
    assert len(first.results[0].samples) == 2 * len(KERNELS)
    assert second.power is None
    append_result(path, ShotResult(0, (), "x"))
    from profiler.samples import _append

    _append(path, "#power {broken\n")
    with pytest.raises(ConfigError, match="power samples that are no JSON"):
        read_runs([path])


def test_experts_that_a_pass_reached_are_in_the_samples_file(tmp_path: Path) -> None:
    path, run = tmp_path / "s.csv.gz", run_of(shot(2, 1, 9), shot(2, 1, 30))
    start_run(path, run)
    counted = replace(run.results[0], reached_experts=88.5)
    append_result(path, counted)
    append_result(path, run.results[1])
    assert list(read_runs([path])[0].results.values()) == [counted, run.results[1]]
    from profiler.samples import _append

    good = path.read_bytes()
    for line in ("0", "0 x", "2 9.0", "-1 9.0", "0 -1.0", "0 nan"):
        path.write_bytes(good)
        _append(path, f"#reached {line}\n")
        with pytest.raises(ConfigError, match=rf"s.csv.gz:\d+: not a count of experts.*{line}"):
            read_runs([path])


LINE = "NVIDIA H200, 580.1, 143771, 1980, 3201, 700.00, P0, 1965, 3201, 312.5, 41"


def test_facts_are_of_the_visible_card() -> None:
    asked: list[list[str]] = []

    def two_cards(command: Any) -> str | None:
        asked.append(list(command))
        return f"{LINE}\n" if command[-1] in ("--id=GPU-1", "--id=1") else None

    assert card._query(["name"], ["GPU-1", "0"], two_cards) == LINE
    assert asked == [["nvidia-smi", "--query-gpu=name", "--format=csv,noheader,nounits", "--id=GPU-1"]]
    assert card._query(["name"], ["GPU-unknown", "1"], two_cards) == LINE
    assert card._query(["name"], [None, "0"], two_cards) is None
    assert card._query(["name"], ["0"], lambda command: f"{LINE}\n{LINE}\n") is None
    facts = card._facts(LINE.replace("312.5", "[N/A]"))
    assert (facts["name"], facts["sm_clock_mhz"], facts["power_limit_w"]) == ("NVIDIA H200", 1965.0, 700.0)
    assert "power_w" not in facts


def test_the_visible_card_is_named_by_its_uuid_else_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    device = SimpleNamespace(uuid="2f1c-77")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    assert card.visible_id() == "GPU-2f1c-77"
    device.uuid = "GPU-2f1c-77"
    assert card.visible_id() == "GPU-2f1c-77"

    def none(index: int) -> Any:
        raise AssertionError("torch was built without CUDA")

    monkeypatch.setattr(torch.cuda, "get_device_properties", none)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert card.visible_id() == "1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert card.visible_id() is None


def test_the_engine_samples_modules_in_passes_and_experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from profiler.engines.vllm_engine import VllmEngine

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sampling, "nvml_sensor", lambda: (sensor_of([321.0]), "a stand-in"))
    monkeypatch.setattr(sampling, "gpu_facts", lambda: {})

    class Engine(VllmEngine):
        def __init__(self) -> None:
            self._boot: Any = SimpleNamespace(runner=SimpleNamespace(execute_model_state="left behind"))
            self.layer = torch.nn.Linear(2, 2)
            self.layer.register_forward_hook(lambda *a: self.calls.append("hook"))
            self._callables = {"model.layers.0.o_proj": (self.layer, "forward")}
            self.calls: list[str] = []
            self._spent_s = defaultdict(float)

        def _step(self, shot: Shot) -> None:
            self.calls.append("experts" if shot.moe else "pass")
            if not shot.moe:
                self.layer(torch.zeros(1, 2))

    engine = Engine()
    decode, experts = shot(4, 1, 99), Shot((), moe=MoeBatch(1, 256))
    found = engine.power(
        [
            PowerTarget("dense", "decode", decode, "model.layers.0.o_proj"),
            PowerTarget("indexer", "decode", decode, "model.layers.0.unknown"),
            PowerTarget("moe", "decode", experts, None),
        ],
        0.05,
    )
    assert [(s["category"], s["tokens"], s["kv_tokens"], s["watts"]) for s in found["samples"]] == [
        ("dense", 4, 400, 321.0),
        ("moe", 256, 0, 321.0),
    ]
    assert engine.calls.count("pass") == 3, "a warm pass each, and the one that is sampled"
    assert engine.calls.count("hook") == 3, "the module is called from inside, without its hooks"
    assert engine.calls.count("experts") == 1 + found["samples"][1]["calls"]
    assert engine._boot.runner.execute_model_state is None, "put right after the target that failed"
