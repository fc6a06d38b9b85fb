"""Which steps to export as Chakra traces: one given by its batches, or a window of a replay."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from profiler.core.errors import ConfigError
from profiler.core.hardware import known_hardware, load_hardware
from profiler.core.types import Parallel
from serving.api import replay
from serving.backends import sends
from serving.chakra import Exported, export
from serving.chakra_operations import Step
from serving.collectives import Collectives, from_fitted_link, from_hardware
from serving.config import Cluster, Instance
from serving.core.shape import StepCost
from serving.cost.communication import Communication
from serving.cost.pipeline import PipelineCost
from serving.deployment import Deployed, deploy, instance_model
from serving.explained import rank_of, ranks_of
from serving.routing import own_reach


class _Enough(Exception):
    """The window is complete."""


@dataclass(slots=True)
class _Window:
    """A cost that keeps the steps numbered from `first` on and ends the replay after `count` of them."""

    cost: StepCost
    first: int
    count: int
    seen: int = 0
    steps: list[Step] = field(default_factory=list)

    def step_ns(self, shapes: Step) -> int:
        if self.seen >= self.first:
            self.steps.append(tuple(shapes))
            if len(self.steps) == self.count:
                raise _Enough
        self.seen += 1
        return self.cost.step_ns(shapes)


def window(
    cluster: Cluster, trace: Path, bundle_root: Path, first: int, count: int, allow_projected: bool = False
) -> list[Step]:
    """Steps `first` to `first + count - 1` of a replay, fewer where it ends before.

    Raises ConfigError for a cluster of several groups that step by themselves, or a replay that ends before `first`.
    """
    windows: list[_Window] = []

    def wrap(cost: StepCost) -> StepCost:
        windows.append(_Window(cost, first, count))
        if len(windows) > 1:
            raise ConfigError("the cluster has several groups that step by themselves; export needs a cluster of one")
        return windows[-1]

    with suppress(_Enough):
        replay(cluster, trace, bundle_root=bundle_root, allow_projected=allow_projected, wrap_cost=wrap)
    if not windows[0].steps:
        raise ConfigError(f"the replay ends after {windows[0].seen} steps; there is no step {first}")
    return windows[0].steps


def single(instance: Instance, batches: Sequence[str]) -> list[Step]:
    """The step whose ranks have these batches, as serving.explained reads them."""
    spec = instance_model(instance)
    return [ranks_of([rank_of(text, spec) for text in batches], _group(instance).dp)]


def export_steps(
    instance: Instance, steps: Sequence[Step], prefix: Path, bundle_root: Path, allow_projected: bool = False
) -> Exported:
    """Write the traces of the steps of one instance. Raises what serving.chakra.export and deploy raise."""
    spec, parallel = instance_model(instance), _group(instance)
    deployed: Deployed = deploy(instance, 0, bundle_root, False, allow_projected)
    sent = sends(instance.engine.all2all_backend)
    reach = own_reach(spec.moe, parallel.ep) if spec.moe and sent == "per_rank" else 1.0
    comm = Communication(spec, parallel, _links(instance), sent, reach)
    cost = deployed.cost if isinstance(deployed.cost, PipelineCost) else deployed.table_cost
    return export(prefix, cost, spec, parallel, deployed.meta, comm, steps)


def _group(instance: Instance) -> Parallel:
    lockstep = instance_model(instance).moe is not None and instance.parallel.dp > 1
    return instance.parallel if lockstep else replace(instance.parallel, dp=1)


def _links(instance: Instance) -> Collectives:
    if instance.links:
        return from_fitted_link(instance.links)
    if instance.hardware not in known_hardware():
        raise ConfigError(f"no hardware file of {instance.hardware}")
    return from_hardware(load_hardware(instance.hardware))
