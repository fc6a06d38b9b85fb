"""The step of one instance of a cluster file, explained."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from profiler.core.errors import ConfigError
from profiler.core.hardware import known_hardware, load_hardware
from profiler.core.shard import describe
from profiler.core.types import ModelSpec
from serving.backends import sends
from serving.config import Instance
from serving.core.shape import StepShape
from serving.cost.bounds import Bounds
from serving.cost.pipeline import PipelineCost
from serving.deployment import deploy, instance_model
from serving.explain import Explanation, explain, parse_rank
from serving.explain_stages import StagedExplanation, explain_stages
from serving.routing import own_reach


def explain_instance(
    instance: Instance,
    batches: Sequence[str],
    bundle_root: Path,
    allow_extrapolation: bool = False,
    allow_projected: bool = False,
) -> tuple[Explanation | StagedExplanation, str]:
    """The explanation, by stage where the instance has several, and a title.

    batches: one for all ranks, or one per rank with the rest idle.

    Raises ConfigError for a batch of another form or more batches than ranks, and what serving.deployment.deploy and
    the tables raise.
    """
    deployed = deploy(instance, 0, bundle_root, allow_extrapolation, allow_projected)
    one, spec = deployed.deployment, instance_model(instance)
    shapes = ranks_of([rank_of(text, spec) for text in batches], one.parallel.dp if one.lockstep else 1)
    parallel = one.parallel if one.lockstep else replace(one.parallel, dp=1)
    hardware = load_hardware(instance.hardware) if instance.hardware in known_hardware() else None
    bounds = None
    if hardware is not None:
        sent = sends(one.all2all_backend)
        reach = own_reach(spec.moe, parallel.ep) if spec.moe and sent == "per_rank" else 1.0
        bounds = Bounds(spec, parallel, hardware, deployed.meta, sent, reach)
    found: Explanation | StagedExplanation
    if isinstance(deployed.cost, PipelineCost):
        found = explain_stages(deployed.cost, shapes, bounds, deployed.meta, spec, parallel)
    else:
        found = explain(deployed.table_cost, shapes, bounds, deployed.meta, spec)
    tables = one.tables
    title = (
        f"{one.model} on {one.hardware}, {describe(one.parallel)}: {' | '.join(batches)} "
        f"({tables.provenance}, {tables.hardware}/{tables.variant_of(one.model)}, {tables.engine})"
    )
    return found, title


def rank_of(text: str, spec: ModelSpec) -> StepShape | None:
    """One rank's batch, None for an idle one. Raises ConfigError for another form and for a request that is longer than
    the model's context with the token that the step emits."""
    shape = parse_rank(text, spec.indexer.attended_cap_tokens if spec.indexer else None)
    if shape is not None:
        longest = max([shape.decode_kv_max_tokens, *(chunk + context for chunk, context in shape.prefills)])
        if longest >= spec.max_position:
            raise ConfigError(
                f"--batch {text!r}: a request of {longest:,} tokens; {spec.name} ends at {spec.max_position:,}, the "
                "token that the step emits included"
            )
    return shape


def ranks_of(shapes: Sequence[StepShape | None], ranks: int) -> list[StepShape | None]:
    """One shape per rank: a single one for all of them, or those given and idle ranks behind."""
    if len(shapes) > ranks:
        raise ConfigError(f"{len(shapes)} batches for {ranks} ranks that step together; give at most one for each")
    return list(shapes) * ranks if len(shapes) == 1 else [*shapes, *[None] * (ranks - len(shapes))]
