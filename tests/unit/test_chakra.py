"""Chakra traces: read back by the package's own reader, and adding up to the steps that were priced."""

from dataclasses import replace
from pathlib import Path

import priced
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from profiler.core.bundle import write_bundle
from profiler.core.errors import ConfigError, ContractError
from profiler.core.hardware import load_hardware
from profiler.core.paths import data_root
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.chakra import Exported, communicators, export, read_nodes, validate
from serving.chakra_operations import by_stage, operations
from serving.chakra_steps import export_steps, single, window
from serving.collectives import Collectives, from_hardware
from serving.config import EngineSettings, Instance, load_cluster
from serving.core.shape import StepShape
from serving.cost import build_cost
from serving.cost.build import build_pipeline
from serving.cost.communication import Call, Communication
from serving.cost.step import TableCost

pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="needs the extra `chakra`")

SPEC = load_model(priced.MODEL)
CLUSTER = data_root() / "configs" / "cluster" / "h200-8x-deepseek-v32-dp8-ep8.yaml"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = 0, 2, 7, 6


def cluster(tmp_path: Path, **engine: object) -> Path:
    content = yaml.safe_load(CLUSTER.read_text())
    content["instances"][0]["engine"].update(max_num_batched_tokens=4096, **engine)
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    priced.bundle(tmp_path / "bundles")
    return path


def step_cost(tmp_path: Path, step_us: float = 0.0) -> TableCost:
    return build_cost(
        bundle=priced.bundle(tmp_path),
        spec=SPEC,
        parallel=Parallel(dp=8, ep=8),
        hardware=load_hardware("H200"),
        max_num_batched_tokens=4096,
        step_us=step_us,
    )


def exported(tmp_path: Path, *batches: str, **engine: object) -> Exported:
    (instance,) = load_cluster(cluster(tmp_path, **engine)).instances
    return export_steps(instance, single(instance, batches), tmp_path / "out" / "step", tmp_path / "bundles")


def values(node: object) -> dict[str, object]:
    return {attr.name: getattr(attr, attr.WhichOneof("value")) for attr in node.attr}  # type: ignore[attr-defined]


def test_one_file_per_gpu_with_the_steps_kernels_and_collectives(tmp_path: Path) -> None:
    done = exported(tmp_path, "33x4096")
    assert [path.name for path in done.files] == [f"step.{gpu}.et" for gpu in range(8)]
    nodes = read_nodes(done.files[0])
    names = [node.name for node in nodes]
    assert names.count("sparse_mla") == 61 and names.count("experts") == 58 and names.count("lm_head") == 1
    assert names.index("embedding") < names.index("sparse_mla") < names.index("lm_head")
    gathers = [values(node) for node in nodes if node.name == "all_gather experts"]
    assert len(gathers) == 58
    # 33 requests are padded to 40; a rank puts its own rows in, a reduce-scatter takes those of all.
    assert {v["comm_size"] for v in gathers} == {40 * 7168 * (1 + 4 / 128)}
    scatters = [values(node) for node in nodes if node.name == "reduce_scatter experts"]
    assert {(v["comm_type"], v["comm_size"]) for v in scatters} == {(REDUCE_SCATTER, 320 * 7168 * 2)}
    assert {v["comm_type"] for v in gathers} == {ALL_GATHER}
    first = names.index("experts")
    assert names[first - 1] == "all_gather experts" and names[first + 1] == "reduce_scatter experts"


def test_durations_add_up_to_the_priced_step(tmp_path: Path) -> None:
    cost = step_cost(tmp_path, step_us=50.0)
    links = from_hardware(load_hardware("H200"))
    comm = Communication(SPEC, Parallel(dp=8, ep=8), links)
    shapes = [StepShape((), 40, 40 * 5000, 5000, 40 * 2048, 40), StepShape(((900, 100),), 0, 0, 0, 0, 1), *[None] * 6]
    totals = []
    for rank in range(8):
        found = operations(cost, SPEC, priced.meta(), comm, shapes, rank)
        kernels = sum(one.us for one in found)
        collectives = sum(
            links.price(one.collective.operation, one.collective.total_bytes, one.collective.ranks).us
            for one in found
            if one.collective
        )
        totals.append(kernels + collectives)
    assert max(totals) == pytest.approx(cost.step_ns(shapes) / 1e3, abs=0.1)
    ranks = cost.ranks_ns(shapes)
    assert totals.index(max(totals)) == ranks.index(max(ranks))


def test_dispatch_back_ends_become_all_to_alls(tmp_path: Path) -> None:
    done = exported(tmp_path, "32x4096", all2all_backend="deepep_low_latency")
    found = [values(node) for node in read_nodes(done.files[3]) if node.name == "combine experts"]
    assert {(v["comm_type"], v["comm_size"]) for v in found} == {(ALL_TO_ALL, 256 * 7168 * 2)}


def test_tensor_parallel_groups_are_named(tmp_path: Path) -> None:

    cost = step_cost(tmp_path)
    # The kernels of tp 1 stand in for those of tp 2: here the collectives and their groups matter.
    split = Parallel(tp=2, dp=4, ep=8)
    comm = Communication(SPEC, split, from_hardware(load_hardware("H200")))
    shapes = [StepShape((), 32, 32 * 5000, 5000, 32 * 2048, 32)] * 4
    done = export(tmp_path / "x", cost, SPEC, split, priced.meta(), comm, [shapes, shapes])
    assert done.groups.read_text() == '{"1": [0, 1], "2": [2, 3], "3": [4, 5], "4": [6, 7]}\n'
    nodes = read_nodes(done.files[5])
    named = {values(node).get("pg_name", "all") for node in nodes if node.name == "all_reduce attention"}
    assert named == {"3"}
    assert {values(node).get("pg_name", "all") for node in nodes if node.name == "all_gather experts"} == {"all"}
    assert sum(node.name == "all_reduce attention" for node in nodes) == 2 * 61
    assert sum(node.name == "all_reduce mlp" for node in nodes) == 2 * 3


def test_divided_experts_of_several_engines_meet_across_them(tmp_path: Path) -> None:

    cost = step_cost(tmp_path)
    split = Parallel(tp=2, dp=2)
    comm = Communication(SPEC, split, from_hardware(load_hardware("H200")))
    shapes = [StepShape((), 32, 32 * 5000, 5000, 32 * 2048, 32)] * 2
    done = export(tmp_path / "x", cost, SPEC, split, priced.meta(), comm, [shapes])
    assert done.groups.read_text() == '{"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]}\n'
    names = {
        gpu: {node.name: values(node).get("pg_name", "all") for node in read_nodes(done.files[gpu])} for gpu in (1, 2)
    }
    for gpu, engine, alike in ((1, "1", "4"), (2, "2", "3")):
        assert names[gpu]["all_reduce attention"] == names[gpu]["all_reduce mlp"] == engine
        assert names[gpu]["all_gather experts"] == names[gpu]["reduce_scatter experts"] == alike


SENDS, RECEIVES = 5, 6


def pipelined(tmp_path: Path, parallel: Parallel, *batches: str) -> Exported:
    tables = priced.tables(SPEC)
    write_bundle(tmp_path, priced.meta(), {(tp, kind): table for tp in (1, 2) for kind, table in tables.items()})
    engine = EngineSettings(4096, 2048, 16, 0, True, True, "fcfs", "auto", None, 0.9, 400, None)
    instance = Instance(priced.MODEL, "H200", None, parallel, engine)
    return export_steps(instance, single(instance, batches), tmp_path / "out" / "step", tmp_path)


@pytest.mark.parametrize("parallel", [Parallel(pp=2, dp=8, ep=8), Parallel(tp=2, pp=3, dp=4, ep=8)], ids=str)
def test_stages_send_and_receive(tmp_path: Path, parallel: Parallel) -> None:
    """12 requests, padded to 16, send two tensors of 7168 x 2 bytes a token, in slices over the ranks of an engine."""
    done = pipelined(tmp_path, parallel, "12x4000")
    assert len(done.files) == parallel.gpus
    names = []
    for gpu, path in enumerate(done.files):
        nodes = read_nodes(path)
        stage = gpu // parallel.tp % parallel.pp
        received, sent = ([values(node) for node in nodes if node.type == kind] for kind in (RECEIVES, SENDS))
        assert len(received) == (2 if stage else 0) and len(sent) == (2 if stage < parallel.pp - 1 else 0)
        assert [node.type for node in nodes[:2]] == [RECEIVES] * 2 or not stage
        assert {one["comm_size"] for one in (*received, *sent)} == {16 * 7168 * 2 // parallel.tp}
        assert {one["comm_src"] for one in received} <= {gpu - parallel.tp}
        assert {one["comm_dst"] for one in sent} <= {gpu + parallel.tp}
        assert [one["comm_tag"] for one in sent] == list(range(len(sent)))
        gathers = [node for node in nodes if node.name == "all_gather next stage"]
        assert len(gathers) == (2 if stage and parallel.tp > 1 else 0)
        names.append([node.name for node in nodes])
    firsts, lasts = (names[stage * parallel.tp] for stage in (0, parallel.pp - 1))
    assert "embedding" in firsts and "lm_head" not in firsts
    assert "embedding" not in lasts and "lm_head" in lasts
    assert sum(one.count("sparse_mla") for one in names) == 61 * parallel.tp * parallel.dp


def test_kernels_collectives_and_sends_of_all_stages_add_up_to_the_step(tmp_path: Path) -> None:
    parallel, links = Parallel(pp=3, dp=8, ep=8), from_hardware(load_hardware("H200"))
    cost = build_pipeline(
        bundle=priced.bundle(tmp_path),
        spec=SPEC,
        parallel=parallel,
        hardware=load_hardware("H200"),
        max_num_batched_tokens=4096,
        collectives=replace(links, gpus_per_node=64),
    )
    comm = Communication(SPEC, parallel, links)
    shapes = [StepShape((), 40, 40 * 5000, 5000, 40 * 2048, 40), *[None] * 7]
    stages = by_stage(cost, SPEC, priced.meta(), comm, shapes, 0)
    us = [
        sum(one.us for one in found)
        + sum(links_us(replace(links, gpus_per_node=64), one.collective) for one in found if one.collective)
        for found in stages
    ]
    assert us == [pytest.approx(compute / 1e3, abs=0.1) for compute, _ in cost.stages_ns(shapes)]


def links_us(links: Collectives, call: Call) -> float:
    return links.price(call.operation, call.total_bytes, call.ranks).us


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_every_gpu_is_in_its_groups_and_nobody_is_twice(tp: int, pp: int, dp: int, across: bool) -> None:
    groups, names = communicators(Parallel(tp=tp, pp=pp, dp=dp), across)
    assert len(names) == tp * pp * dp
    for kind, size in (("engine", tp), ("across", dp), ("stage", tp * dp)):
        used = {getattr(one, kind) for one in names} - {""}
        members = [gpu for name in used for gpu in groups[name]]
        assert all(len(groups[name]) == size for name in used)
        assert not used or sorted(members) == list(range(tp * pp * dp))
        assert all(gpu in groups[name] for gpu, one in enumerate(names) if (name := getattr(one, kind)))
    assert bool(groups) == (pp * dp > 1)


def test_what_is_sent_and_not_received_is_noticed(tmp_path: Path) -> None:
    """GPU 2, the first stage of another engine, in place of GPU 0."""
    parallel = Parallel(pp=2, dp=8, ep=8)
    done = pipelined(tmp_path, parallel, "12x4000")
    mixed = replace(done, files=(done.files[2], *done.files[1:]))
    with pytest.raises(ContractError, match="from GPU 2 to 3 have no other end"):
        validate(mixed, parallel)


def test_a_window_of_a_pipelines_replay_is_refused(tmp_path: Path) -> None:
    path = cluster(tmp_path)
    path.write_text(path.read_text().replace("pp: 1", "pp: 2"))
    trace = data_root() / "workloads" / "example_trace.jsonl"
    with pytest.raises(ConfigError, match=r"steps of pipelines .* cannot be taken out of a replay"):
        window(load_cluster(path), trace, tmp_path / "bundles", 0, 1)


def test_a_window_of_a_replay(tmp_path: Path) -> None:
    path = cluster(tmp_path)
    trace = data_root() / "workloads" / "example_trace.jsonl"
    steps = window(load_cluster(path), trace, tmp_path / "bundles", 5, 3)
    assert len(steps) == 3 and all(len(shapes) == 8 for shapes in steps)
    with pytest.raises(ConfigError, match="there is no step 1000000"):
        window(load_cluster(path), trace, tmp_path / "bundles", 1_000_000, 1)


def test_damage_is_noticed(tmp_path: Path) -> None:
    done = exported(tmp_path, "32x4096")
    whole = done.files[2].read_bytes()
    done.files[2].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ContractError, match=r"step.2.et: "):
        validate(done, Parallel(dp=8, ep=8))
    done.files[2].write_bytes(whole)
    other = exported(tmp_path / "other", "64x4096")
    mixed = Exported(
        (*done.files[:7], other.files[7]), done.groups, done.nodes, (*done.compute_us[:7], other.compute_us[7])
    )
    with pytest.raises(ContractError, match="the ranks of group all call different collectives"):
        validate(mixed, Parallel(dp=8, ep=8))
    with pytest.raises(ConfigError, match="No such file"):
        read_nodes(tmp_path / "gone.et")
