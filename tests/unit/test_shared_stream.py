"""Shared experts beside the routed ones: what the second stream adds to a step, and when."""

from pathlib import Path

import pytest

from profiler.core.hardware import load_hardware
from profiler.core.paths import default_bundle_root
from serving.config import load_cluster
from serving.core.shape import StepShape
from serving.cost import TableCost
from serving.deployment import deploy

CLUSTER = """
instances:
- model: deepseek-ai/DeepSeek-V3.2-Exp
  layers: 6
  hardware: H200
  engine: {max_model_len: 8192, max_num_batched_tokens: 2048, max_num_seqs: 512, num_gpu_blocks: 5000,
    cudagraph_mode: FULL_DECODE_ONLY, shared_experts_stream: SHARED}
"""


def cost(folder: Path, shared: str) -> TableCost:
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER.replace("SHARED", shared))
    return deploy(load_cluster(path).instances[0], 0, default_bundle_root(), False).table_cost


def decodes(count: int) -> StepShape:
    return StepShape((), count, count * 100, 100, count * 100, count)


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
