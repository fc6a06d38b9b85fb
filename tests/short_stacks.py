"""The first layers of a model on one H200, decode steps in CUDA graphs, priced by the shipped tables."""

from pathlib import Path

from profiler.core.paths import default_bundle_root
from serving.config import load_cluster
from serving.core.shape import StepShape
from serving.cost import TableCost
from serving.deployment import deploy

CLUSTER = """
instances:
- model: {model}
  layers: {layers}
  hardware: H200
  parallel: {{tp: {tp}}}
  engine: {{max_model_len: 8192, max_num_batched_tokens: 2048, max_num_seqs: 512, num_gpu_blocks: 5000,
    cudagraph_mode: FULL_DECODE_ONLY, shared_experts_stream: {shared}}}
"""


def cost(folder: Path, model: str, *, layers: int, shared: str, tp: int = 1) -> TableCost:
    """shared: the second stream for shared experts, "true" or "false". Leaves cluster.yaml in `folder`."""
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER.format(model=model, layers=layers, tp=tp, shared=shared))
    return deploy(load_cluster(path).instances[0], 0, default_bundle_root(), False).table_cost


def decodes(count: int) -> StepShape:
    """One token each, 100 keys."""
    return StepShape((), count, count * 100, 100, count * 100, count)
