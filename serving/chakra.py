"""Steps as Chakra execution traces, one file per GPU, which network simulators such as ASTRA-Sim read.

`<prefix>.<gpu>.et` holds a GPU's operations of one or several steps in the order in which they run, each depending on
the one before: COMP_NODE for a kernel, with its duration, and COMM_COLL_NODE for a collective, with its kind, its size
and, where not all GPUs take part, the name of its group. `<prefix>.groups.json` lists the groups (ASTRA-Sim's
communicator group file). Collectives carry no time: the network simulator finds it. Padding, dummy batches of idle
ranks and the step's overheads are nodes like any other.

GPU number dp_rank x tp + tp_rank. comm_size is in ASTRA-Sim's sense: what a rank puts in (its part of an all-gather;
the whole tensor of a reduce-scatter, an all-reduce or an all-to-all). Durations are whole microseconds in this format;
each rounds the running sum, so that a trace's total is right to one microsecond.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from profiler.core.errors import ConfigError, ContractError
from profiler.core.load import atomic_write
from profiler.core.modules import fold_for
from profiler.core.types import LayerKind, ModelSpec, Parallel
from serving.core.shape import StepShape
from serving.cost.communication import Call, Communication
from serving.cost.lines import Line
from serving.cost.step import TableCost

_SCHEMA = "1.0.2-chakra.1.0.0"
# Where collectives stand within a layer, by the component that they follow or come before.
_AFTER_ATTENTION = ("o_proj", "dsa_module", "dsa_shared_module", "mla_module", "msa_module")


class Operation(NamedTuple):
    """One node: a kernel of `us` microseconds, or a collective."""

    name: str
    us: float = 0.0
    collective: Call | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. nodes: per file, without its metadata. compute_us: per file, the sum of its kernels."""

    files: tuple[Path, ...]
    groups: Path
    nodes: tuple[int, ...]
    compute_us: tuple[float, ...]


def operations(
    cost: TableCost, spec: ModelSpec, meta: Any, comm: Communication, shapes: Sequence[StepShape | None], rank: int
) -> list[Operation]:
    """Operations of one data-parallel rank in a step, in order. meta: of the bundle that prices it."""
    tokens, shape = cost.computed_tokens(shapes), shapes[rank]
    lines = [*cost.rank_lines(shape, tokens[rank]), *cost.by_group_tokens.lines(sum(tokens))]
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


def export(
    prefix: Path,
    cost: TableCost,
    spec: ModelSpec,
    parallel: Parallel,
    meta: Any,
    comm: Communication,
    steps: Sequence[Sequence[StepShape | None]],
) -> Exported:
    """Write the traces of `steps`, one after another, and read them back. parallel: of one lockstep group.

    Raises ConfigError without the package mlc-chakra or without a step, and ContractError when a file that was read
    back is not what was meant.
    """
    schema, lib = _package()
    if not steps:
        raise ConfigError("no step to export")
    shared = parallel.dp == 1  # one tensor-parallel group is all GPUs
    groups = {str(dp + 1): [dp * parallel.tp + t for t in range(parallel.tp)] for dp in range(parallel.dp)}
    if any(call.across for call in comm.expert_calls(1)):
        across = {str(parallel.dp + t + 1): list(range(t, parallel.gpus, parallel.tp)) for t in range(parallel.tp)}
        groups |= across
    files, nodes, computed = [], [], []
    for dp in range(parallel.dp):
        found = [one for shapes in steps for one in operations(cost, spec, meta, comm, shapes, dp)]
        for t in range(parallel.tp):
            path = prefix.with_name(f"{prefix.name}.{dp * parallel.tp + t}.et")
            own = ("", "") if shared else (str(dp + 1), str(parallel.dp + t + 1))
            _write(path, found, own, parallel, schema, lib)
            files.append(path)
            nodes.append(len(found))
            computed.append(sum(one.us for one in found))
    listing = prefix.with_name(f"{prefix.name}.groups.json")
    with atomic_write(listing) as stream:
        json.dump({} if shared else groups, stream)
        stream.write("\n")
    done = Exported(tuple(files), listing, tuple(nodes), tuple(computed))
    validate(done, parallel)
    return done


def _package() -> tuple[Any, Any]:
    try:
        from chakra.schema.protobuf import et_def_pb2
        from chakra.src.third_party.utils import protolib
    except ImportError:
        raise ConfigError(
            "exporting Chakra traces needs the package mlc-chakra: install the extra `chakra` of this project"
        ) from None
    return et_def_pb2, protolib


def _write(
    path: Path, found: Sequence[Operation], groups: tuple[str, str], parallel: Parallel, schema: Any, lib: Any
) -> None:
    """groups: names of the GPU's own engine and of its like in all engines, empty where one engine is all."""
    import io

    stream = io.BytesIO()
    lib.encodeMessage(stream, schema.GlobalMetadata(version=_SCHEMA))
    total_us = 0.0
    for number, one in enumerate(found):
        node = schema.Node(id=number, name=one.name)
        node.attr.append(schema.AttributeProto(name="is_cpu_op", bool_val=False))
        if number:
            node.data_deps.append(number - 1)
        if one.collective is None:
            node.type = schema.COMP_NODE
            node.duration_micros = round(total_us + one.us) - round(total_us)
            total_us += one.us
        else:
            node.type = schema.COMM_COLL_NODE
            _describe(node, one.collective, groups[one.collective.across], parallel, schema)
        lib.encodeMessage(stream, node)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.tmp")
    part.write_bytes(stream.getvalue())
    part.replace(path)


def _describe(node: Any, call: Call, group: str, parallel: Parallel, schema: Any) -> None:
    kinds = {
        "all_reduce": schema.ALL_REDUCE,
        "all_gather": schema.ALL_GATHER,
        "reduce_scatter": schema.REDUCE_SCATTER,
        "all_to_all": schema.ALL_TO_ALL,
    }
    size = call.total_bytes / call.ranks if call.operation == "all_gather" else call.total_bytes
    node.attr.append(schema.AttributeProto(name="comm_type", int64_val=kinds[call.operation]))
    node.attr.append(schema.AttributeProto(name="comm_size", int64_val=round(size)))
    if call.ranks != parallel.tp * parallel.dp and group:
        node.attr.append(schema.AttributeProto(name="pg_name", string_val=group))


def read_nodes(path: Path) -> list[Any]:
    """The nodes of a trace, by the package's own reader. Raises ConfigError for a file that it cannot read."""
    schema, lib = _package()
    if not path.is_file():
        raise ConfigError(f"{path}: No such file")
    from google.protobuf.message import DecodeError

    found: list[Any] = []
    try:
        with path.open("rb") as stream:
            if not lib.decodeMessage(stream, schema.GlobalMetadata()):
                raise ConfigError(f"{path}: no Chakra metadata")
            while lib.decodeMessage(stream, node := schema.Node()):
                found.append(node)
    except DecodeError as error:
        raise ContractError(f"{path}: node {len(found)} cannot be read: {error}") from None
    return found


def validate(done: Exported, parallel: Parallel) -> None:
    """Read every file back: nodes, order, total duration, and that the ranks of each group meet in their collectives.

    Raises ContractError naming the file.
    """
    meetings: dict[str, set[tuple[Any, ...]]] = {}
    for gpu, path in enumerate(done.files):
        nodes = read_nodes(path)
        if len(nodes) != done.nodes[gpu]:
            raise ContractError(f"{path}: {len(nodes)} nodes, {done.nodes[gpu]} were written")
        for number, node in enumerate(nodes):
            if node.id != number or list(node.data_deps) != ([number - 1] if number else []):
                raise ContractError(f"{path}: node {number} does not follow the node before it")
        total = sum(node.duration_micros for node in nodes)
        if abs(total - done.compute_us[gpu]) > 1.0:
            raise ContractError(f"{path}: kernels take {total} us, {done.compute_us[gpu]:.3f} were meant")
        mine: dict[str, list[tuple[Any, ...]]] = {"all": []}
        for node in nodes:
            values = {attr.name: attr for attr in node.attr}
            if "comm_type" in values:
                named = values["pg_name"].string_val if "pg_name" in values else "all"
                mine.setdefault(named, []).append((values["comm_type"].int64_val, values["comm_size"].int64_val))
        for name, sequence in mine.items():
            meetings.setdefault(name, set()).add(tuple(sequence))
    for name, sequences in meetings.items():
        if len(sequences) > 1:
            raise ContractError(f"{done.groups}: the ranks of group {name} call different collectives")
