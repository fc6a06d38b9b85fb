"""Steps that wait for KV blocks from host memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.host_tier import HostMemory
from serving.core.shape import StepShape
from serving.cost.lines import Line, line
from serving.cost.step import TableCost


@dataclass(frozen=True, slots=True)
class OffloadCost:
    """The cost of a step behind the loads of its slowest rank; ranks load at the same time, each over its own link."""

    cost: TableCost
    host: HostMemory

    @property
    def extrapolated(self) -> Counter[str]:
        """Lookups per kernel that went beyond its table, with permission."""
        return self.cost.extrapolated

    def step_ns(self, shapes: Sequence[StepShape | None]) -> int:
        """Nanoseconds of one step."""
        return self._load_ns(shapes) + self.cost.step_ns(shapes)

    def explain(self, shapes: Sequence[StepShape | None]) -> list[Line]:
        """The price list of the step. Its sum is step_ns."""
        load_ns = self._load_ns(shapes)
        own = [line("load from host", 1, load_ns / 1e3, "stated")] if load_ns else []
        return own + self.cost.explain(shapes)

    def _load_ns(self, shapes: Sequence[StepShape | None]) -> int:
        blocks = max((shape.loaded_blocks for shape in shapes if shape), default=0)
        return self.host.latency_ns + blocks * self.host.block_ns if blocks else 0
