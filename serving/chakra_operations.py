"""The operations of a step in the order in which a rank runs them: kernels, collectives, transfers between stages."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from profiler.core.modules import fold_for
from profiler.core.types import LayerKind, ModelSpec
from serving.backends import ACTIVATION_BYTES
from serving.core.shape import StepShape
from serving.cost.build import pipeline_stages
from serving.cost.communication import Call, Communication
from serving.cost.lines import Line
from serving.cost.pipeline import TENSORS, PipelineCost
from serving.cost.step import TableCost

Step = Sequence[StepShape | None]
# Where collectives stand within a layer, by the component that they follow or come before.
_AFTER_ATTENTION = ("o_proj", "dsa_module", "dsa_shared_module", "mla_module", "msa_module")


class Transfer(NamedTuple):
    """`sent_bytes` to the same rank of the next stage, or else from that of the stage before."""

    sent_bytes: float
    to_next: bool


class Operation(NamedTuple):
    """One node: a kernel of `us` microseconds, a collective, or one end of a transfer between stages."""

    name: str
    us: float = 0.0
    collective: Call | None = None
    transfer: Transfer | None = None


def by_stage(
    cost: TableCost | PipelineCost, spec: ModelSpec, meta: Any, comm: Communication, shapes: Step, rank: int
) -> list[list[Operation]]:
    """Operations of one data-parallel rank in a step, in order, by pipeline stage, of which every one but the first
    receives before and every one but the last sends behind. meta: of the bundle that prices the step."""
    if isinstance(cost, TableCost):
        return [operations(cost, spec, meta, comm, shapes, rank)]
    tokens, tp = cost.stages[0].computed_tokens(shapes)[rank], comm.parallel.tp
    found = []
    for stage, priced in zip(pipeline_stages(spec, comm.parallel), cost.stages, strict=True):
        own = replace(comm, spec=stage.spec, first=stage.first, last=stage.last)
        found.append(operations(priced, stage.spec, meta, own, shapes, rank))
        if not stage.first:
            found[-1] = [*_transfers(spec, tp, tokens, to_next=False), *found[-1]]
        if not stage.last:
            found[-1] += _transfers(spec, tp, tokens, to_next=True)
    return found


def _transfers(spec: ModelSpec, tp: int, tokens: int, *, to_next: bool) -> list[Operation]:
    tensor_bytes = tokens * spec.hidden * ACTIVATION_BYTES
    name = "send to next stage" if to_next else "receive from stage before"
    moved = [Operation(name, transfer=Transfer(tensor_bytes / tp, to_next))] * TENSORS
    if to_next or tp == 1:
        return moved
    call = Call("all_gather next stage", TENSORS, "all_gather", tensor_bytes, tp)
    return [*moved, *[Operation(call.name, collective=call)] * TENSORS]


def operations(
    cost: TableCost, spec: ModelSpec, meta: Any, comm: Communication, shapes: Sequence[StepShape | None], rank: int
) -> list[Operation]:
    """Operations of one data-parallel rank in a step, in order. meta: of the bundle that prices it."""
    tokens, shape = cost.computed_tokens(shapes), shapes[rank]
    lines = [*cost.rank_lines(shape, tokens[rank]), *cost.group_lines(shapes, tokens)]
    each = {entry.component: entry.us / entry.calls for entry in lines if entry.calls}
    calls = [
        *comm.tensor_calls(tokens[rank]),
        *comm.head_calls(shape.sampled_sequences if shape else 0),
        *comm.expert_calls(sum(tokens)),
    ]
    by_name = {call.name: call for call in calls}
    kernels = {name: us for name, us in each.items() if name not in by_name and us > 0}
    found = [*_outside(spec, meta, kernels, by_name)]
    head = next((i for i, one in enumerate(found) if one.name in ("final_norm", "final_layernorm", "lm_head")), None)
    before, after = (found, []) if head is None else (found[:head], found[head:])
    layers = [one for kind in spec.layers for one in _layer(spec, meta, kind, kernels, by_name)]
    return [*before, *layers, *after, *_overheads(cost, shapes)]


def _outside(spec: ModelSpec, meta: Any, kernels: dict[str, float], calls: dict[str, Call]) -> Iterator[Operation]:
    for one, times in fold_for(replace(spec, layers=()), meta).components:
        if one.name in kernels:
            yield from [Operation(one.name, kernels[one.name])] * times
        if one.name == "embedding" and (call := calls.get("all_reduce embedding")):
            yield Operation(call.name, collective=call)
        if one.name == "lm_head" and (call := calls.get("all_gather logits")):
            yield Operation(call.name, collective=call)


def _layer(
    spec: ModelSpec, meta: Any, kind: LayerKind, kernels: dict[str, float], calls: dict[str, Call]
) -> Iterator[Operation]:
    outside = Counter({one.name: n for one, n in fold_for(replace(spec, layers=()), meta).components})
    moe = kind.mlp == "moe"
    for one, times in fold_for(replace(spec, layers=(kind,)), meta).components:
        own = times - outside.get(one.name, 0)
        if not own:
            continue
        if one.name == "experts":
            yield from _collectives(calls, "all_gather experts", "dispatch experts")
        if one.name in kernels:
            yield from [Operation(one.name, kernels[one.name])] * own
        if one.name in _AFTER_ATTENTION:
            yield from _collectives(calls, "all_reduce attention")
        if one.name == "experts":
            yield from _collectives(calls, "reduce_scatter experts", "combine experts")
    sliced = "all_gather mlp slices" in calls
    yield from _collectives(calls, "all_gather mlp slices" if moe and sliced else "all_reduce mlp")


def _collectives(calls: dict[str, Call], *names: str) -> Iterator[Operation]:
    yield from (Operation(name, collective=calls[name]) for name in names if name in calls)


def _overheads(cost: TableCost, shapes: Sequence[StepShape | None]) -> Iterator[Operation]:
    entries: list[Line] = [line for line in cost.explain(shapes) if line.component in ("step overhead", "host")]
    yield from (Operation(line.component, line.us) for line in entries)
