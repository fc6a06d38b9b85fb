"""The tables of a bundle that a run of one split needs."""

from pathlib import Path

from profiler.core.bundle import Bundle, read_bundle
from profiler.core.shard import moe_tensor_parallel
from profiler.core.types import ModelSpec, Parallel


def read_degrees(path: Path, spec: ModelSpec, parallel: Parallel) -> Bundle:
    """The tables of the run's tp, of tp 1, where whole experts are measured, and of the degree by which a split without
    expert parallelism divides experts; all tables where the bundle has none of tp, so that the refusal that follows
    names every degree that there is.

    Raises as read_bundle.
    """
    divided = moe_tensor_parallel(parallel) if spec.moe else 1
    bundle = read_bundle(path, tps={1, parallel.tp, divided})
    return bundle if parallel.tp in bundle.tps else read_bundle(path)
