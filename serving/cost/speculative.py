"""Steps of speculative decoding with a model's own multi-token prediction (MTP) layer.

A step verifies drafts with the model itself and then makes new ones: the first draft pass runs the MTP layer over every
token of the step, each further pass over one token per request. A pass of the MTP layer is

    the embedding, two norms of its inputs, eh_proj (their concatenation, 2 hidden to hidden),
    one layer of the model with caches of its own (attention, indexer, experts, their collectives),
    the final norm, the head and the sampler.

All of that but eh_proj has rows in the tables: the layer is that of the model's last kind, so its components' rows are
taken. eh_proj is computed: a bf16 product that every rank runs whole, at the peak of the tensor cores or of the memory.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.hardware import Hardware
from profiler.core.kv import mtp_kind
from profiler.core.types import ModelSpec
from serving.backends import ACTIVATION_BYTES
from serving.core.shape import StepShape
from serving.core.walk import VerifyAs
from serving.cost.build import Stage, build_cost
from serving.cost.lines import Line, line
from serving.cost.step import TableCost

_WEIGHT_BYTES = 2


@dataclass(frozen=True, slots=True)
class SpeculativeCost:
    """target: of the model. first, later: of the MTP layer over all tokens of a step, and over one per request.

    Keys of every later pass are counted as in the second, with all drafts accepted.
    """

    target: TableCost
    first: TableCost
    later: TableCost
    draft_tokens: int

    @property
    def extrapolated(self) -> Counter[str]:
        """Lookups per kernel that went beyond its table, with permission."""
        costs = {id(one): one for one in (self.target, self.first, self.later)}
        return sum((one.extrapolated for one in costs.values()), Counter())

    def step_ns(self, shapes: Sequence[StepShape | None]) -> int:
        """Nanoseconds of one step; None marks a rank that runs a dummy batch."""
        step = self.target.step_ns(shapes) + self.first.step_ns(_first(shapes))
        if self.draft_tokens > 1:
            step += (self.draft_tokens - 1) * self.later.step_ns(_later(shapes))
        return step

    def stages_ns(self, shapes: Sequence[StepShape | None]) -> list[tuple[int, int]]:
        """The same as a pipeline of one stage."""
        return [(self.step_ns(shapes), 0)]

    def explain(self, shapes: Sequence[StepShape | None]) -> list[Line]:
        """The step's price list: the model, the first draft pass, the others. Its sum is step_ns."""
        lines = list(self.target.explain(shapes))
        lines += [_named("draft 1", entry, 1) for entry in self.first.explain(_first(shapes))]
        more = self.draft_tokens - 1
        if more:
            lines += [_named("further drafts", entry, more) for entry in self.later.explain(_later(shapes))]
        return lines


def _first(shapes: Sequence[StepShape | None]) -> list[StepShape | None]:
    """What the first pass runs: every token of the step, and the head for the last one of each request."""
    return [
        shape and shape._replace(sampled_sequences=shape.drafted.decode_requests if shape.drafted else 0)
        for shape in shapes
    ]


def _later(shapes: Sequence[StepShape | None]) -> list[StepShape | None]:
    return [shape and shape.drafted for shape in shapes]


def _named(part: str, entry: Line, times: int) -> Line:
    return Line(f"{part}: {entry.component}", entry.calls * times, entry.us * times, entry.provenance)


def build_speculative(
    draft_tokens: int,
    verify_as: VerifyAs,
    *,
    spec: ModelSpec,
    hardware: Hardware | None,
    step_us: float = 0.0,
    step_source: str = "stated",
    host_us: float = 0.0,
    host_overlaps: bool = False,
    **rest: Any,
) -> SpeculativeCost:
    """The cost of one group whose steps verify and make `draft_tokens` drafts per request. rest: as build_cost.

    The step overhead and the host's time are those of the whole step. Raises ConfigError for a model without MTP
    layers or without a hardware file, CoverageError where verify_as "table" finds no rows.
    """
    if not spec.mtp_layers:
        raise ConfigError(f"{spec.name} has no multi-token prediction layers to draft with")
    if hardware is None:
        raise ConfigError("speculative decoding needs a hardware file, for the projection of the draft layer")
    query_tokens = 1 + draft_tokens if verify_as == "table" else 1
    common = {"spec": spec, "hardware": hardware, **rest}
    target = build_cost(
        **common,
        step_us=step_us,
        step_source=step_source,
        host_us=host_us,
        host_overlaps=host_overlaps,
        decode_query_tokens=query_tokens,
        dummy_tokens=1 + draft_tokens,
    )
    layer = Stage(replace(spec, layers=(mtp_kind(spec),)), True, True, norms=2)
    eh_proj = _eh_proj_lines(spec, hardware)
    first = build_cost(
        **common,
        stage=layer,
        decode_query_tokens=query_tokens,
        dummy_tokens=1 + draft_tokens,
        more_by_tokens=eh_proj,
    )
    return SpeculativeCost(target, first, build_cost(**common, stage=layer, more_by_tokens=eh_proj), draft_tokens)


def _eh_proj_lines(spec: ModelSpec, hardware: Hardware) -> Callable[[int], list[Line]]:
    hidden = spec.hidden

    def lines(tokens: int) -> list[Line]:
        if not tokens:
            return []
        flops = 2.0 * tokens * 2 * hidden * hidden
        moved = _WEIGHT_BYTES * 2 * hidden * hidden + ACTIVATION_BYTES * tokens * 3 * hidden
        us = max(flops / (hardware.bf16_tflops * 1e6), moved / (hardware.hbm_gbps * 1e3))
        return [line("eh_proj", 1, us, "computed")]

    return lines
