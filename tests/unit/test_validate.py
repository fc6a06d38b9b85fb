"""Recordings against the simulator: steps of the stand-in engine, and recordings whose differences are known."""

import json
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from test_hosted import HOST
from test_step_log import FORWARD_US, fake_vllm, played, trace

from profiler.core.errors import ConfigError
from profiler.core.hardware import Host, HostPart, load_hardware
from profiler.core.load import sha256_of
from profiler.core.paths import default_bundle_root
from serving.capacity import memory_budget
from serving.commands.validate import command
from serving.config import load_cluster
from serving.core.shape import StepShape
from serving.cost.host import TableHost
from serving.deployment import deploy, instance_model
from serving.recording.block_counts import block_counts
from serving.recording.drive import Finished
from serving.recording.files import write_recording
from serving.recording.step_errors import by_kind, priced_steps, shapes, token_gaps_ns
from serving.recording.steps import Chunk, Decode, Step
from serving.recording.validate import validate

__all__ = ["fake_vllm"]

MODEL = "deepseek-ai/DeepSeek-V3.2-Exp"
BLANK = Step(0.0, 0.0, 0.0, 0, 0, 0, 0, 0, 1, 0, 0.0, 0)


class Constant:
    """The device's time of every step of the stand-in."""

    def step_ns(self, shapes: object) -> int:
        return round(1e3 * (10.0 + FORWARD_US + 30.0))


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_of_the_stand_in_have_the_price_that_they_took(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    _, _, steps = played(monkeypatch, asynchronous, trace((0.0, 5, 9), (0.009, 20, 4), (0.1, 7, 3)))
    # The stand-in runs prefills in graphs too.
    whole = replace(
        HOST, prepare=HostPart(HOST.prepare.fixed_us + HOST.replay.fixed_us, 0.0), replay=HostPart(0.0, 0.0)
    )
    host = TableHost(whole, 6, 512, False, asynchronous)
    priced = priced_steps(steps, Constant(), host, 2048)
    # Kinds: an engine without work at 0 and at 100 ms; the second prompt takes chunks of 8 beside the first request.
    kinds = [one.kind for one in priced]
    assert kinds[0] == "first" and kinds.count("first") == 2 and kinds.count("mixed") == 3
    assert "padded decode" in kinds
    # The device has the 10 us before the layers done while the thread launches them; the rule waits for them.
    for one in priced:
        assert one.step_us is not None and one.device_us is not None
        assert one.step_us[1] == pytest.approx(one.step_us[0], abs=31.0)
    found = by_kind(priced, "step")
    assert found["all"].steps == len(steps) and abs(found["all"].total) < 1.5 and found["mixed"].median < 1.5
    # A price of half the time is 50 % short wherever the device is what a step waits for.
    late = by_kind(priced_steps(steps, Halved(), host, 2048), "device")
    assert late["all"].total < -35.0


class Halved(Constant):
    def step_ns(self, shapes: object) -> int:
        return super().step_ns(shapes) // 2


def test_shapes_of_a_log() -> None:
    steps = [
        replace(BLANK, chunks=(Chunk(0, 5, 0), Chunk(1, 8, 0)), sampled=1),
        replace(BLANK, chunks=(Chunk(1, 2, 8),), joined=(Decode(0, 6),), sampled=2),
        replace(BLANK, joined=(Decode(1, 11),), sampled=2),
    ]
    assert list(shapes(steps, 8)) == [
        StepShape(((5, 0), (8, 0)), 0, 0, 0, 0, 1),
        StepShape(((2, 8),), 1, 6, 6, 6, 2),
        StepShape((), 2, 7 + 11, 11, 7 + 8, 2),
    ]
    assert [one.decode_kv_capped_sum_tokens for one in shapes(steps, None)] == [0, 6, 18]


def test_gaps_between_tokens() -> None:
    """Request 0 has 5 prompt tokens: tokens at 1, 2 and 3 s, preempted, computed again until 8 s; request 1 at 2 and
    3 s."""
    steps = [
        replace(BLANK, chunks=(Chunk(0, 5, 0), Chunk(1, 8, 0)), updated_s=1.0),
        replace(BLANK, chunks=(Chunk(1, 2, 8),), joined=(Decode(0, 6),), updated_s=2.0),
        replace(BLANK, joined=(Decode(1, 11),), updated_s=3.0),
        replace(BLANK, chunks=(Chunk(0, 6, 0),), left=(0, 1), updated_s=7.0),
        replace(BLANK, chunks=(Chunk(0, 2, 6),), updated_s=8.0),
    ]
    assert sorted(token_gaps_ns(steps, {0: 5, 1: 10})) == [10**9, 10**9, 10**9, 5 * 10**9]


def recording(folder: Path, scale: float, engine: dict[str, Any] | None = None) -> Path:
    """One request of 600 tokens in and 4 out on 6 layers, whose every step took `scale` times its price."""
    traces = folder / "traces"
    traces.mkdir(exist_ok=True)
    row = {"input_toks": 600, "output_toks": 4, "arrival_time_ns": 0}
    (traces / "one.jsonl").write_text(json.dumps(row) + "\n")
    cluster = {
        "instances": [
            {
                "model": MODEL,
                "layers": 6,
                "hardware": "H200",
                "engine": {
                    "max_model_len": 8192, "max_num_batched_tokens": 2048, "max_num_seqs": 16, "num_gpu_blocks": 500,
                    "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4], "host_overhead_us": 0,
                },
            }
        ]
    }  # fmt: skip
    path = folder / "H200" / f"one-{scale}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(cluster))
    deployed = deploy(load_cluster(path / "config.json").instances[0], 0, default_bundle_root(), False)
    asked = [StepShape(((600, 0),), 0, 0, 0, 0, 1), *(StepShape((), 1, n, n, n, 1) for n in (601, 602, 603))]
    took_us = [scale * deployed.table_cost.step_ns([shape]) / 1e3 for shape in asked]
    ends_us = list(accumulate(took_us))
    steps = [
        replace(
            BLANK,
            start_s=(ends_us[max(0, index - 2)] if index > 1 else 0.0) / 1e6,
            prefill_requests=len(shape.prefills),
            prefill_tokens=sum(tokens for tokens, _ in shape.prefills),
            decode_requests=shape.decode_requests,
            sampled=1,
            gpu_us=us,
            gpu_start_s=(end - us) / 1e6,
            updated_s=end / 1e6,
            chunks=(Chunk(0, 600, 0),) if shape.prefills else (),
            joined=(Decode(0, 601),) if index == 1 else (),
            padded_tokens=shape.tokens,
        )
        for index, (shape, us, end) in enumerate(zip(asked, took_us, ends_us, strict=True))
    ]
    base = 100.0
    finished = [Finished("a", 600, 4, 1e9, base, base, base + ends_us[0] / 1e6, base + ends_us[-1] / 1e6)]
    meta = {
        "model": MODEL, "layers": 6, "mode": "decode-graphs", "vllm_version": "0.26.0", "num_requests": 1,
        "dataset_path": "one.jsonl", "dataset_hash": sha256_of(traces / "one.jsonl"),
        "engine_kwargs": {"max_model_len": 8192, "kv_cache_dtype": "auto", "gpu_memory_utilization": 0.9,
                          "max_num_batched_tokens": 2048, "max_num_seqs": 16},
    }  # fmt: skip
    write_recording(path, cluster, meta, engine or ENGINE, finished, steps, 0.1)
    return path


ENGINE = {"own_num_gpu_blocks": 100, "async_scheduling": True, "memory_gib": {"available_kv_cache_memory": 20.0}}


def test_a_recording_of_prices_has_no_error(tmp_path: Path) -> None:
    found = validate(recording(tmp_path, 1.0))
    by = {(one.metric, one.statistic): one for one in found.comparison.figures}
    for one in (by["ttft", "mean"], by["tpot", "mean"], by["itl", "p50"], by["itl", "p99"], by["makespan", "total"]):
        assert abs(one.difference_percent) < 0.05, "stamps are whole microseconds"
    assert {kind: one.steps for kind, one in found.step.items()} == {"first": 1, "decode": 3, "all": 4}
    assert max(abs(one.total) for one in (*found.step.values(), *found.device.values())) < 0.05


def test_the_host_of_the_recording_itself(tmp_path: Path) -> None:
    """It counts in place of what the cluster file states; a log without the host's parts leaves the GPU's file's."""
    path = recording(tmp_path, 1.0)
    found = validate(path, with_own_host=True)
    launch = load_hardware("H200").host
    assert launch is not None and found.step["first"].total > 0.0
    text = (path / "config.json").read_text().replace('"host_overhead_us": 0', '"host_file": "host.yaml"')
    (path / "config.json").write_text(text)
    (path / "host.yaml").write_text(yaml.safe_dump({"host": _block(launch)}))
    assert validate(path).step == found.step
    (path / "host.yaml").write_text(
        yaml.safe_dump({"host": _block(launch) | {"launch": {"fixed_us": 0, "per_layer_us": 0}}})
    )
    assert validate(path).step["first"].total < found.step["first"].total


def _block(host: Host) -> dict[str, Any]:
    return {name: one for name, one in asdict(host).items() if one is not None}


def test_an_error_is_found_and_written(tmp_path: Path) -> None:
    """An engine that took 1.25 times the price: everything is 20 % short."""
    path = recording(tmp_path, 1.25)
    result = CliRunner().invoke(
        command, [str(path), "--json", str(tmp_path / "v.json"), "--steps", str(tmp_path / "s.csv")]
    )
    assert result.exit_code == 0, result.output
    (found,) = json.loads((tmp_path / "v.json").read_text())
    # Stamps are whole microseconds, 0.1 % of a step of 1 ms.
    for metric in ("ttft", "tpot", "itl", "latency"):
        assert found["figures"][metric]["mean"]["difference_percent"] == pytest.approx(-20.0, abs=0.1)
    for times in (found["device_time_of_steps"], found["time_of_steps"]):
        assert times["decode"]["median"] == pytest.approx(20.0, abs=0.1)
        assert times["first"]["total"] == pytest.approx(-20.0, abs=0.1)
    lines = (tmp_path / "s.csv").read_text().splitlines()
    assert len(lines) == 5 and lines[1].startswith("one-1.25,0,first,600,")
    assert "-20.0 %" in result.output and "KV blocks: 100 recorded" in result.output
    assert "…" not in result.output and "requests, ms" in result.output, "80 columns hold every cell"


def test_another_trace_is_refused(tmp_path: Path) -> None:
    path = recording(tmp_path, 1.0)
    (tmp_path / "traces" / "one.jsonl").write_text('{"input_toks": 600, "output_toks": 5, "arrival_time_ns": 0}\n')
    with pytest.raises(ConfigError, match="not the trace that was played"):
        validate(path)
    with pytest.raises(ConfigError, match="is not in"):
        validate(path, tmp_path)


def test_blocks_of_an_engine(tmp_path: Path) -> None:
    path = recording(tmp_path, 1.0)
    instance = load_cluster(path / "config.json").instances[0]
    spec, gpu = instance_model(instance), load_hardware("H200")
    meta = json.loads((path / "vllm" / "meta.json").read_text())
    found = block_counts(spec, gpu, meta, ENGINE)
    assert found is not None
    # 64 tokens x 6 layers x (1,152 bytes of latent and 132 of index keys) per block, from 20 GiB.
    assert found.given == (20 << 30) // (64 * 6 * (1152 + 132))
    budget = memory_budget(
        spec, gpu, instance.parallel, max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=16
    )
    assert found.predicted == budget.num_gpu_blocks
    assert sum(two for name, (_, two) in found.terms_gib.items() if name != "requested" and two) == pytest.approx(
        gpu.memory_total_gib * 0.9
    )
    eager = {"engine_kwargs": meta["engine_kwargs"] | {"enforce_eager": True}}
    without_graphs = block_counts(spec, gpu, eager, ENGINE)
    assert without_graphs is not None and without_graphs.predicted > found.predicted
    assert without_graphs.terms_gib["cuda_graphs"][1] == 0.0
    assert block_counts(spec, gpu, {"engine_kwargs": {"num_gpu_blocks_override": 9}}, {"memory_gib": {}}) is None
    with pytest.raises(ConfigError, match="lack 'own_num_gpu_blocks'"):
        block_counts(spec, gpu, meta, {"memory_gib": {}})
