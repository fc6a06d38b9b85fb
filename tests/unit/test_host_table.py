"""The host's time per step, from step logs made of known parts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from profiler.core.errors import ConfigError
from profiler.core.hardware import HostLaunch, HostPart, load_hardware
from profiler.core.paths import hardware_root
from serving.commands.host import command
from serving.recording.files import steps_text
from serving.recording.host_table import (
    Linear,
    Log,
    host_block,
    layer_launch,
    linear,
    log_of,
    own_host,
    read_log,
    rows,
    told_apart,
)
from serving.recording.steps import Step

META = {"model": "some model", "layers": 6, "mode": "decode-graphs", "vllm_version": "0.26.0"}
BLANK = Step(0.0, 9_000.0, 8_000.0, 0, 0, 0, 0, 0, 1, 0, 0.0, 0)


def step(decodes: int, prefills: int = 0, graph: str = "FULL", layers: int = 6, noise_us: float = 0.0) -> Step:
    """schedule 50 + 3 n, prepare 400 + 2 n, sample 60 + 1 n, update 20 + 4 n; 90 to replay, 700 + 2,900 per layer."""
    n = decodes + prefills
    launch = 90.0 if graph == "FULL" else 700.0 + 2_900.0 * layers
    return replace(
        BLANK,
        decode_requests=decodes,
        prefill_requests=prefills,
        graph=graph,
        schedule_us=50.0 + 3.0 * n + noise_us,
        launch_us=400.0 + 2.0 * n + launch + 1_234.5,
        input_wait_us=1_234.5,
        forward_launch_us=launch,
        sample_us=60.0 + n + 5.0,
        bookkeep_us=5.0,
        update_us=20.0 + 4.0 * n,
        output_us=10.0,
        wait_us=500.0,
        gpu_start_s=1.0,
        updated_s=1.0 + (8_000.0 + 15.0 + 20.0 + 4.0 * n) / 1e6,
    )


def mixed_log() -> Log:
    """Prefills prepare 900 + 300 per prefill, and are launched in 40 us more per layer beside decodes."""

    def with_prefills(decodes: int, prefills: int) -> Step:
        one = step(decodes, prefills, "NONE")
        launch = (one.forward_launch_us or 0.0) + (240.0 if decodes else 0.0)
        return replace(
            one, forward_launch_us=launch, launch_us=900.0 + 300.0 * prefills + launch + (one.input_wait_us or 0.0)
        )

    more = [with_prefills(d, p) for d, p in ((0, 1), (0, 3), (4, 1), (20, 2), (9, 3)) for _ in range(6)]
    decodes = [one for one in log().steps if not one.prefill_requests]
    return replace(log(), steps=(*decodes, *more))


def log(layers: int = 6, asynchronous: bool = True) -> Log:
    steps = [step(n) for n in (1, 2, 5, 9, 33, 64) for _ in range(7)]
    steps += [step(n, 1, "NONE", layers) for n in (0, 4, 20) for _ in range(6)]
    return Log(Path("r"), layers, asynchronous, tuple(steps))


def test_known_parts_are_found() -> None:
    block = host_block([log(6), log(4)])
    assert block["schedule"] == {"fixed_us": 50.0, "per_request_us": 3.0}
    assert block["prepare"] == {"fixed_us": 400.0, "per_request_us": 2.0}
    assert block["sample"] == {"fixed_us": 60.0, "per_request_us": 1.0}
    assert block["tokens"] == {"fixed_us": 15.0, "per_request_us": 0.0}
    assert block["bookkeep"] == {"fixed_us": 5.0, "per_request_us": 0.0}
    assert block["update"] == {"fixed_us": 20.0, "per_request_us": 4.0}
    assert block["output"] == {"fixed_us": 10.0, "per_request_us": 0.0}
    assert block["replay"] == {"fixed_us": 90.0, "per_request_us": 0.0}
    assert block["launch"] == {"fixed_us": 700.0, "per_layer_us": 2_900.0}


def test_what_is_printed_is_what_a_hardware_file_takes(tmp_path: Path) -> None:
    """The block of recordings behind a file without one."""
    text = (hardware_root() / "H100.yaml").read_text()
    compiled = replace(log(), mode="engine", steps=tuple(step(4, 1, "PIECEWISE") for _ in range(6)))
    block = host_block([log(6), log(4), compiled])
    (tmp_path / "H100.yaml").write_text(text + yaml.safe_dump({"host": block}))
    host = load_hardware("H100", tmp_path).host
    assert host is not None and (host.launch.fixed_us, host.launch.per_layer_us) == (700.0, 2_900.0)
    assert host.piecewise is not None and "3 recordings" in host.source


def test_steps_that_came_late_say_nothing_of_the_delivery() -> None:
    late = tuple(replace(one, wait_us=10.0) for one in log().steps)
    assert "tokens" not in host_block([replace(log(), steps=late)])


def test_a_wait_for_the_thread_itself_is_no_delivery() -> None:
    """Tokens that lay ready while the thread launched the next step, and waited 60 us for something else."""
    late = tuple(replace(one, wait_us=60.0, updated_s=(one.updated_s or 0.0) + 0.02) for one in log().steps)
    assert "tokens" not in host_block([replace(log(), steps=late)])


def test_steps_with_prefills_have_parts_of_their_own() -> None:
    block = host_block([mixed_log()])
    assert block["prepare"] == {"fixed_us": 400.0, "per_request_us": 2.0}
    assert block["prepare_prefill"] == {"fixed_us": 900.0, "per_request_us": 300.0}
    assert block["launch"] == {"fixed_us": 0.0, "per_layer_us": round(2_900.0 + 700.0 / 6, 1)}
    assert block["launch_mixed"] == {"fixed_us": 0.0, "per_layer_us": round(2_940.0 + 700.0 / 6, 1)}


def test_the_host_of_one_recording() -> None:
    """Without asynchronous scheduling its books wait for the tokens, so these are as elsewhere."""
    whole = own_host(mixed_log(), None)
    assert whole.schedule == HostPart(50.0, 3.0) and whole.prepare_prefill == HostPart(900.0, 300.0)
    elsewhere = replace(whole, bookkeep=HostPart(77.0, 7.0), schedule=HostPart(1.0, 1.0), replay=HostPart(2.0, 2.0))
    # Of an engine that launches everything, one by one and without asynchronous scheduling.
    eager = replace(mixed_log(), asynchronous=False, steps=tuple(s for s in mixed_log().steps if s.graph == "NONE"))
    found = own_host(eager, elsewhere)
    assert (found.bookkeep, found.schedule, found.replay) == (HostPart(0.0, 0.0), whole.schedule, HostPart(2.0, 2.0))
    # Delivery 15 us, as long as the update begins behind the device's end.
    assert found.tokens == HostPart(15.0, 0.0)
    with pytest.raises(ConfigError, match="its log does not tell prepare, replay of the host"):
        own_host(eager, None)


def test_no_part_is_negative() -> None:
    """A fit through points that fall, or that would begin below nothing."""
    falling = [replace(step(n), schedule_us=100.0 - n) for n in (1, 9) for _ in range(5)]
    steep = [replace(step(n), schedule_us=10.0 * (n - 1)) for n in (1, 9) for _ in range(5)]
    for steps in (falling, steep):
        found = linear([replace(log(), steps=tuple(steps))], lambda one: one.schedule_us, lambda one, step: True)
        assert found is not None and found.fixed_us >= 0.0 and found.per_request_us >= 0.0


def test_one_number_of_layers_counts_all_of_a_launch_as_theirs() -> None:
    assert layer_launch([log(6)], lambda one, step: step.graph == "NONE") == pytest.approx((0.0, 2_900.0 + 700.0 / 6))


def test_a_stall_moves_nothing() -> None:
    steps = [*log().steps, step(5, noise_us=1e6), step(33, noise_us=1e6)]
    found = linear([replace(log(), steps=tuple(steps))], lambda one: one.schedule_us, lambda one, step: True)
    assert found is not None
    assert (found.fixed_us, found.per_request_us) == pytest.approx((50.0, 3.0))
    assert Linear(1.0, 2.0) != found


def test_a_thread_that_is_slow_now_and_then_counts_as_its_mean() -> None:
    steps = [step(n, noise_us=noise) for n in (1, 9) for noise in (0.0, 0.0, 0.0, 0.0, 40.0)]
    found = linear([replace(log(), steps=tuple(steps))], lambda one: one.schedule_us, lambda one, step: True)
    assert found is not None and found.fixed_us + found.per_request_us == pytest.approx(53.0 + 8.0)


def test_rows_are_by_kind_graph_and_power_of_two() -> None:
    found = rows([log()])
    assert [(row.kind, row.graph, row.least_requests, row.steps) for row in found] == [
        ("decode", "FULL", 1, 7), ("decode", "FULL", 2, 7), ("decode", "FULL", 4, 7), ("decode", "FULL", 8, 7),
        ("decode", "FULL", 32, 7), ("decode", "FULL", 64, 7),
        ("prefill", "NONE", 1, 6), ("mixed", "NONE", 4, 6), ("mixed", "NONE", 16, 6),
    ]  # fmt: skip
    assert found[4].median_us["schedule"] == 149.0 and found[4].median_us["gpu_forward"] is None


def test_too_little_is_refused_or_left_out() -> None:
    with pytest.raises(ConfigError, match="asynchronous scheduling"):
        host_block([log(asynchronous=False)])
    few = Log(Path("r"), 6, True, (step(1), step(2)))
    assert host_block([few]).keys() == {"source"}


def test_the_command_prints_each_form(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "meta.json").write_text(json.dumps(META))
    (tmp_path / "engine.json").write_text(json.dumps({"async_scheduling": True}))
    (tmp_path / "steps.csv.gz").write_bytes(gzip.compress(steps_text(log().steps).encode()))
    assert read_log(tmp_path) == replace(log(), path=tmp_path, engine="some model, vLLM 0.26.0, unknown GPU")
    outputs = {
        form: CliRunner().invoke(command, [str(tmp_path), "--format", form]) for form in ("table", "csv", "yaml")
    }
    assert all(one.exit_code == 0 for one in outputs.values())
    assert (
        outputs["csv"].output.splitlines()[1].startswith("decode,FULL,1,6,1,7,53.0,402.0,90.0,61.0,5.0,15.0,24.0,10.0,")
    )
    assert "schedule: {fixed_us: 50.0, per_request_us: 3.0}" in outputs["yaml"].output
    assert "forward_launch" in outputs["table"].output and "…" not in outputs["table"].output
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(ConfigError, match="lack 'model'"):
        read_log(tmp_path)


def test_a_wrong_number_of_layers_is_refused() -> None:
    for layers in ("eight", 0, True, 6.5):
        with pytest.raises(ConfigError, match="layers must be a positive whole number"):
            log_of(Path("r"), META | {"layers": layers}, {"async_scheduling": True}, ())


def test_layers_of_other_stacks_are_counted_by_their_components() -> None:
    """Of one stack alone; a block of two has no such number."""
    one = replace(log(), components=26.0)
    assert host_block([one])["launch_components"] == 26.0
    assert "launch_components" not in host_block([one, replace(log(4), components=25.0)])
    assert "launch_components" not in host_block([log()])


def test_work_is_told_from_waiting_for_the_device() -> None:
    """Preparing takes 900 + 300 per prefill; of steps scheduled ahead 250 + 10 per request are left behind the wait."""

    def after(before: Step, one: Step, ahead_us: float) -> Step:
        """Scheduled so long before the device ends `before`; 0 is a device that is idle by then."""
        ends_us = (before.gpu_start_s or 0.0) * 1e6 + (before.gpu_us or 0.0)
        begins_us = ends_us - ahead_us - (one.schedule_us or 0.0)
        n = one.decode_requests + one.prefill_requests
        if not ahead_us:
            return replace(one, start_s=begins_us / 1e6)
        launched_us = ahead_us + 250.0 + 10.0 * n + (one.forward_launch_us or 0.0)
        return replace(one, start_s=begins_us / 1e6, launch_us=launched_us, input_wait_us=0.0)

    whole = mixed_log()
    steps: list[Step] = []
    for ahead_us in (0.0, 40_000.0):
        for one in whole.steps:
            steps += [step(1), after(step(1), one, ahead_us) if one.prefill_requests else one]
    kept, behind = told_apart(steps)
    block = host_block([replace(whole, steps=kept, behind=behind)])
    assert block["prepare_behind"] == pytest.approx({"fixed_us": 250.0, "per_request_us": 10.0}, abs=0.01)
    assert block["prepare_prefill"] == {"fixed_us": 900.0, "per_request_us": 300.0}
    assert host_block([replace(whole, steps=tuple(steps))])["prepare_prefill"]["fixed_us"] > 9_000.0


def test_launches_of_another_stack_are_taken_by_components() -> None:
    """A log of half the components without prefills alone: its own launches beside decodes, half of the file's else."""
    file = own_host(replace(mixed_log(), components=26.0), None)
    steps = tuple(one for one in mixed_log().steps if one.decode_requests)
    own = own_host(replace(mixed_log(), steps=steps, components=13.0), file)
    assert file.launch_mixed is not None and own.launch_mixed is not None
    assert own.launch.per_layer_us == pytest.approx(file.launch.per_layer_us / 2)
    assert own.launch_mixed.per_layer_us == pytest.approx(file.launch_mixed.per_layer_us)
    assert own.launch_components == 13.0


def compiled_log(mode: str, us: float, launched_us: float) -> Log:
    """Steps padded to 64 and 128 tokens in `us`, the first of each twice; beyond the graphs in `launched_us`."""
    by_parts = [
        replace(step(4, 1, "PIECEWISE"), padded_tokens=size, forward_launch_us=us * (2 if first else 1))
        for first in (True, False, False, False)
        for size in (64, 128)
    ]
    launched = [replace(step(4, 1, "NONE"), padded_tokens=300, forward_launch_us=launched_us) for _ in range(5)]
    return replace(log(), mode=mode, steps=(*by_parts, *launched))


def test_graphs_of_parts_are_those_of_a_compiled_engine_once_each_has_run() -> None:
    engine, piecewise = compiled_log("engine", 6_000.0, 30_000.0), compiled_log("piecewise", 12_000.0, 36_000.0)
    both = host_block([log(), piecewise, engine])
    assert both["piecewise"] == {"fixed_us": 0.0, "per_layer_us": 1_000.0}
    assert host_block([log(), piecewise])["piecewise"] == {"fixed_us": 0.0, "per_layer_us": 2_000.0}


def test_launches_are_those_of_layers_as_the_tables_have_them_where_there_are_some() -> None:
    engine, piecewise = compiled_log("engine", 6_000.0, 30_000.0), compiled_log("piecewise", 12_000.0, 36_000.0)
    plain = {"fixed_us": 0.0, "per_layer_us": round(2_900.0 + 700.0 / 6, 1)}
    assert host_block([log(), piecewise, engine])["launch_mixed"] == plain
    assert host_block([piecewise, engine])["launch_mixed"] == {"fixed_us": 0.0, "per_layer_us": 5_000.0}
    assert own_host(piecewise, own_host(mixed_log(), None)).launch_mixed == HostLaunch(0.0, 6_000.0)
