"""Shared experts beside the routed ones: what the second stream adds to a step, and when."""

from pathlib import Path

import pytest
import short_stacks
from short_stacks import decodes

from profiler.core.hardware import load_hardware
from profiler.core.paths import default_bundle_root
from profiler.core.stack import component_calls
from serving.config import load_cluster
from serving.core.shape import StepShape
from serving.cost import TableCost
from serving.cost.host import EXPERTS_SHARE
from serving.deployment import deploy, instance_model


def cost(folder: Path, shared: str) -> TableCost:
    return short_stacks.cost(folder, "deepseek-ai/DeepSeek-V3.2-Exp", layers=6, shared=shared)


@pytest.mark.parametrize("requests", [1, 250])
def test_steps_of_few_tokens_pay_for_the_stream(tmp_path: Path, requests: int) -> None:
    """Three of the six layers have experts; 250 requests are padded to 256 tokens."""
    us = load_hardware("H200").shared_stream_us
    assert us is not None
    shape = decodes(requests)
    with_stream, without = (cost(tmp_path, text).step_ns([shape]) for text in ("true", "false"))
    assert with_stream - without == round(3 * us * 1e3)
    lines = cost(tmp_path, "true").explain([shape])
    assert [(one.calls, one.provenance) for one in lines if one.component == "shared_stream"] == [(3, "hardware file")]


@pytest.mark.parametrize("tp", [1, 8])
def test_bf16_shared_experts_are_partly_hidden(tmp_path: Path, tp: int) -> None:
    """Five of the eight layers have experts, and every rank its part of the shared ones."""
    us = load_hardware("H200").shared_stream_bf16_us
    assert us is not None and us < 0
    times = []
    for shared in ("true", "false"):
        one = short_stacks.cost(tmp_path, "MiniMaxAI/MiniMax-M3", layers=8, shared=shared, tp=tp)
        times.append(one.step_ns([decodes(4)]))
    assert times[0] - times[1] == round(5 * us / tp * 1e3)


def test_a_step_of_prefills_beyond_it_does_not(tmp_path: Path) -> None:
    shape = StepShape(((600, 0),), 0, 0, 0, 0, 1)
    assert cost(tmp_path, "true").step_ns([shape]) == cost(tmp_path, "false").step_ns([shape])
    short = shape._replace(prefills=((200, 0),))
    assert cost(tmp_path, "true").step_ns([short]) > cost(tmp_path, "false").step_ns([short])


def test_the_inputs_are_what_a_waiting_device_has_done(tmp_path: Path) -> None:
    """The copies of the tables and what the GPU's file adds for the gaps between them."""
    cost(tmp_path, "true")
    instance = load_cluster(tmp_path / "cluster.yaml").instances[0]
    deployed = deploy(instance, 0, default_bundle_root(), False)
    group = deployed.groups[0]
    (inputs,) = [one for one in deployed.table_cost.explain([decodes(1)]) if one.component == "step_inputs"]
    assert group.inputs_ns == round(1e3 * (inputs.us + deployed.deployment.step_overhead_us))  # type: ignore[attr-defined]


def test_launches_of_other_stacks_are_scaled_by_their_components(tmp_path: Path) -> None:
    """The host file's own stack, three dense layers and three with experts, and one of the first four layers alone."""
    path = tmp_path / "cluster.yaml"
    host = load_hardware("H200").host
    assert host is not None and host.launch_components is not None
    prompt = StepShape(((600, 0),), 0, 0, 0, 0, 1)
    for layers in (6, 4):
        short_stacks.cost(tmp_path, "deepseek-ai/DeepSeek-V3.2-Exp", layers=layers, shared="true")
        instance = load_cluster(path).instances[0]
        group = deploy(instance, 0, default_bundle_root(), False).groups[0]
        times = group.host.times([prompt])  # type: ignore[attr-defined]
        calls = component_calls(instance_model(instance))
        expected_us = host.launch.fixed_us + host.launch.per_layer_us * calls / host.launch_components
        assert times.layers_ns == pytest.approx(
            1e3 * (expected_us - host.launch.per_layer_us * EXPERTS_SHARE), abs=2_000 * layers
        )
        share = component_calls(instance_model(instance), 3) / calls
        assert times.first_ns == pytest.approx(1e3 * expected_us * share, abs=2_000)
    assert calls / 4 < host.launch_components, "a dense layer has fewer"
