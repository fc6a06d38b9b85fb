"""Steps as Chakra execution traces, one file per GPU, which network simulators such as ASTRA-Sim read.

`<prefix>.<gpu>.et` holds a GPU's operations of one or several steps in the order in which they run, each depending on
the one before: COMP_NODE for a kernel, with its duration, and COMM_COLL_NODE for a collective, with its kind, its size
and, where not all GPUs take part, the name of its group. `<prefix>.groups.json` lists the groups (ASTRA-Sim's
communicator group file). Collectives carry no time: the network simulator finds it. Padding, dummy batches of idle
ranks and the step's overheads are nodes like any other. Between pipeline stages go COMM_SEND_NODE and COMM_RECV_NODE,
with tags that count from 0; the receiver's all-gather of what came in slices is a collective like any other.

GPU number (dp_rank x pp + stage) x tp + tp_rank. comm_size is in ASTRA-Sim's sense: what a rank puts in (its part of an
all-gather; the whole tensor of a reduce-scatter, an all-reduce or an all-to-all). Durations are whole microseconds in
this format; each rounds the running sum, so that a trace's total is right to one microsecond.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from profiler.core.errors import ConfigError, ContractError
from profiler.core.load import atomic_write
from profiler.core.types import ModelSpec, Parallel
from serving.chakra_operations import Operation, Step, Transfer, by_stage
from serving.cost.communication import Call, Communication
from serving.cost.pipeline import PipelineCost
from serving.cost.step import TableCost

_SCHEMA = "1.0.2-chakra.1.0.0"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. nodes: per file, without its metadata. compute_us: per file, the sum of its kernels."""

    files: tuple[Path, ...]
    groups: Path
    nodes: tuple[int, ...]
    compute_us: tuple[float, ...]


class Names(NamedTuple):
    """The communicator groups of a GPU: its engine's ranks of a stage, its like in all engines, and all ranks of the
    stage; empty where that is every GPU."""

    engine: str = ""
    across: str = ""
    stage: str = ""


def communicators(parallel: Parallel, across: bool) -> tuple[dict[str, list[int]], list[Names]]:
    """The groups by name, and the names of each GPU's. across: experts are exchanged among one rank of each engine."""
    tp, pp, dp = parallel.tp, parallel.pp, parallel.dp
    if dp == 1 and pp == 1:
        return {}, [Names()] * tp
    groups: dict[str, list[int]] = {}

    def named(engines: range, stage: int, ranks: range) -> str:
        groups[str(len(groups) + 1)] = [(engine * pp + stage) * tp + t for engine in engines for t in ranks]
        return str(len(groups))

    own = {(e, s): named(range(e, e + 1), s, range(tp)) for e in range(dp) for s in range(pp)}
    alike = {(s, t): named(range(dp), s, range(t, t + 1)) for s in range(pp) for t in range(tp if across else 0)}
    whole = {s: own[0, s] if dp == 1 else named(range(dp), s, range(tp)) if pp > 1 else "" for s in range(pp)}
    return groups, [
        Names(own[e, s], alike.get((s, t), ""), whole[s]) for e in range(dp) for s in range(pp) for t in range(tp)
    ]


def export(
    prefix: Path,
    cost: TableCost | PipelineCost,
    spec: ModelSpec,
    parallel: Parallel,
    meta: Any,
    comm: Communication,
    steps: Sequence[Step],
) -> Exported:
    """Write the traces of `steps`, one after another, and read them back. parallel: of one lockstep group.

    Raises ConfigError without the package mlc-chakra or without a step, and ContractError when a file that was read
    back is not what was meant.
    """
    schema, lib = _package()
    if not steps:
        raise ConfigError("no step to export")
    groups, names = communicators(parallel, any(call.across for call in comm.expert_calls(1)))
    files: list[Path] = []
    nodes, computed = [], []
    for dp in range(parallel.dp):
        by_step = [by_stage(cost, spec, meta, comm, shapes, dp) for shapes in steps]
        for stage in range(parallel.pp):
            found = [one for stages in by_step for one in stages[stage]]
            for _ in range(parallel.tp):
                gpu = len(files)
                path = prefix.with_name(f"{prefix.name}.{gpu}.et")
                _write(path, found, gpu, names[gpu], parallel, schema, lib)
                files.append(path)
                nodes.append(len(found))
                computed.append(sum(one.us for one in found))
    listing = prefix.with_name(f"{prefix.name}.groups.json")
    with atomic_write(listing) as stream:
        json.dump(groups, stream)
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
    path: Path, found: Sequence[Operation], gpu: int, names: Names, parallel: Parallel, schema: Any, lib: Any
) -> None:
    import io

    stream = io.BytesIO()
    lib.encodeMessage(stream, schema.GlobalMetadata(version=_SCHEMA))
    total_us = 0.0
    tags: Counter[bool] = Counter()
    for number, one in enumerate(found):
        node = schema.Node(id=number, name=one.name)
        node.attr.append(schema.AttributeProto(name="is_cpu_op", bool_val=False))
        if number:
            node.data_deps.append(number - 1)
        if one.collective is not None:
            node.type = schema.COMM_COLL_NODE
            _describe(node, one.collective, names, parallel, schema)
        elif one.transfer is not None:
            node.type = schema.COMM_SEND_NODE if one.transfer.to_next else schema.COMM_RECV_NODE
            _address(node, one.transfer, gpu, tags[one.transfer.to_next], parallel.tp, schema)
            tags[one.transfer.to_next] += 1
        else:
            node.type = schema.COMP_NODE
            node.duration_micros = round(total_us + one.us) - round(total_us)
            total_us += one.us
        lib.encodeMessage(stream, node)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.tmp")
    part.write_bytes(stream.getvalue())
    part.replace(path)


def _address(node: Any, moved: Transfer, gpu: int, tag: int, tp: int, schema: Any) -> None:
    """The same rank of the next stage is tp GPUs further on."""
    source, target = (gpu, gpu + tp) if moved.to_next else (gpu - tp, gpu)
    node.attr.append(schema.AttributeProto(name="comm_size", int64_val=round(moved.sent_bytes)))
    for name, value in (("comm_src", source), ("comm_dst", target), ("comm_tag", tag)):
        node.attr.append(schema.AttributeProto(name=name, int32_val=value))


def _describe(node: Any, call: Call, names: Names, parallel: Parallel, schema: Any) -> None:
    kinds = {
        "all_reduce": schema.ALL_REDUCE,
        "all_gather": schema.ALL_GATHER,
        "reduce_scatter": schema.REDUCE_SCATTER,
        "all_to_all": schema.ALL_TO_ALL,
    }
    size = call.total_bytes / call.ranks if call.operation == "all_gather" else call.total_bytes
    node.attr.append(schema.AttributeProto(name="comm_type", int64_val=kinds[call.operation]))
    node.attr.append(schema.AttributeProto(name="comm_size", int64_val=round(size)))
    whole = call.ranks == parallel.tp * parallel.dp
    if group := names.stage if whole else names.across if call.across else names.engine:
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
    """Read every file back: nodes, order, total duration, that the ranks of each group meet in their collectives, and
    that what a GPU sends is what the other one receives.

    Raises ContractError naming the file.
    """
    schema, _ = _package()
    meetings: dict[str, set[tuple[Any, ...]]] = {}
    ends: dict[int, Counter[tuple[int, ...]]] = {schema.COMM_SEND_NODE: Counter(), schema.COMM_RECV_NODE: Counter()}
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
            if node.type in ends:
                addresses = [values[name].int32_val for name in ("comm_src", "comm_dst", "comm_tag")]
                ends[node.type][*addresses, values["comm_size"].int64_val] += 1
            if "comm_type" in values:
                named = values["pg_name"].string_val if "pg_name" in values else "all"
                mine.setdefault(named, []).append((values["comm_type"].int64_val, values["comm_size"].int64_val))
        for name, sequence in mine.items():
            meetings.setdefault(name, set()).add(tuple(sequence))
    for name, sequences in meetings.items():
        if len(sequences) > 1:
            raise ContractError(f"{done.groups}: the ranks of group {name} call different collectives")
    sent, received = ends.values()
    if alone := [*(sent - received), *(received - sent)]:
        source, target, tag, size = alone[0]
        raise ContractError(
            f"{done.groups}: {size} bytes with tag {tag} from GPU {source} to {target} have no other end"
        )
