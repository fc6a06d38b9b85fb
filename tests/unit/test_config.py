"""Cluster files, ours and the peer's."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from profiler.core.errors import CapacityError, ConfigError, ContractError, CoverageError
from profiler.core.hardware import load_hardware
from profiler.core.paths import data_root
from profiler.core.types import Parallel
from serving.api import replay
from serving.config import UNLIMITED, EngineSettings, Overrides, load_cluster
from serving.traces import Trace

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
OURS = {"instances": [{"model": "meta-llama/Llama-3.1-8B", "hardware": "H200"}]}


def ours(folder, suffix=".yaml", **changes):
    content = copy.deepcopy(OURS)
    content["instances"][0].update(changes)
    return write(folder, content, suffix)


def write(folder, content, suffix=".json"):
    path = folder / f"cluster{suffix}"
    path.write_text(json.dumps(content) if suffix == ".json" else yaml.safe_dump(content))
    return path


def peer(count=1, **changes):
    instance = {
        "model_name": "meta-llama/Llama-3.1-8B",
        "hardware": "RTXPRO6000",
        "npu_mem": {"mem_size": 96, "mem_bw": 1597, "mem_latency": 0, "mem_util": 0.9},
        "num_npus": 1,
        "tp_size": 1,
        "pd_type": None,
    }
    node = {
        "num_instances": count,
        "cpu_mem": {"mem_size": 512, "mem_bw": 256, "mem_latency": 0},
        "instances": [instance | changes for _ in range(count)],
    }
    return {"num_nodes": 1, "link_bw": 16, "link_latency": 20000, "nodes": [node]}


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_what_a_file_leaves_out_is_left_to_the_engine(tmp_path, suffix):
    cluster = load_cluster(ours(tmp_path, suffix))
    (instance,) = cluster.instances
    engine = instance.engine
    assert (cluster.router, instance.parallel, instance.variant) == ("least_loaded", Parallel(), None)
    assert (engine.max_num_batched_tokens, engine.max_num_seqs, engine.max_model_len_tokens) == (None, None, None)
    assert engine.prefix_caching and engine.chunked_prefill
    assert (instance.memory, instance.links) == (None, None)


def test_values_of_the_file_and_replicas(tmp_path):
    path = ours(
        tmp_path,
        replicas=2,
        variant="fp8",
        parallel={"tp": 2, "dp": 4, "ep": 8},
        engine={"max_model_len": 100, "long_prefill_token_threshold": 7, "num_gpu_blocks": 9, "block_size": 64},
    )
    first, second = load_cluster(path).instances
    assert first == second
    assert first.parallel == Parallel(tp=2, pp=1, dp=4, ep=8)
    assert (first.variant, first.engine.num_gpu_blocks, first.engine.block_tokens) == ("fp8", 9, 64)
    assert (first.engine.max_model_len_tokens, first.engine.long_prefill_threshold_tokens) == (100, 7)


def test_the_command_line_wins_over_our_files(tmp_path):
    path = ours(tmp_path, engine={"max_num_seqs": 9})
    cluster = load_cluster(path, Overrides(max_num_seqs=3, prefix_caching=False, router="round_robin"))
    assert (cluster.instances[0].engine.max_num_seqs, cluster.instances[0].engine.prefix_caching) == (3, False)
    assert cluster.router == "round_robin"


BAD = [
    ({"engine": {"max_num_seq": 4}}, r"instances\[0\]\.engine: unknown key 'max_num_seq'; did you mean 'max_num_seqs'"),
    ({"modle": "x"}, r"instances\[0\]: unknown key 'modle'; did you mean 'model'"),
    ({"engine": {"max_num_seqs": "4"}}, r"engine\.max_num_seqs: .*found '4'"),
    ({"engine": {"max_num_seqs": 4.0}}, r"engine\.max_num_seqs: .*found 4\.0"),
    ({"engine": {"max_num_seqs": 0}}, r"engine\.max_num_seqs: .*found 0"),
    ({"engine": {"gpu_memory_utilization": 1.5}}, r"gpu_memory_utilization: .*found 1\.5"),
    ({"engine": {"enable_prefix_caching": "yes"}}, r"enable_prefix_caching: .*found 'yes'"),
    ({"engine": {"policy": "fcsf"}}, "unknown policy 'fcsf'; did you mean 'fcfs'"),
    ({"engine": {"num_gpu_blocks": 9, "available_kv_gib": 2.0}}, "not both"),
    ({"parallel": {"tp": 0}}, r"parallel\.tp"),
    ({"parallel": {"pp": 2}, "engine": {"async_scheduling": True}}, "async_scheduling with pp 2"),
    ({"model": 5}, r"instances\[0\]\.model"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_faults_name_file_and_key(tmp_path, changes, message):
    path = ours(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {"policy": "fcsf"}}, r"instances\[1\]\.engine\.policy: unknown policy 'fcsf'"),
        ({"engine": {"all2all_backend": "ppl"}}, r"instances\[1\]\.engine\.all2all_backend: .* did you mean 'pplx'"),
        ({"engine": {"host_file": "absent.yaml"}}, r"instances\[1\]\.engine: .*absent\.yaml: no such file"),
        (
            {"engine": {"cudagraph_capture_sizes": [2, 1]}},
            r"instances\[1\]\.engine\.cudagraph_capture_sizes must ascend",
        ),
        ({"engine": {"speculative": {"tokens": 1}}}, r"instances\[1\]\.engine: speculative: give one of"),
        ({"parallel": {"pp": 2}, "engine": {"async_scheduling": True}}, r"instances\[1\]: async_scheduling with pp 2"),
    ],
)
def test_faults_of_one_instance_of_several_name_it_as_the_file_counts(tmp_path, changes, message):
    """The first stands for two replicas; the second is still instances[1]."""
    one = OURS["instances"][0]
    path = write(tmp_path, {"instances": [one | {"replicas": 2}, one | changes]})
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}: instances[1]")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "zai-org/GLM-5.9"}, ConfigError, "unknown model 'zai-org/GLM-5.9'"),
        ({"parallel": {"tp": 3}}, ConfigError, "64 attention heads do not divide by tp 3"),
        ({"parallel": {"tp": 16, "ep": 16}}, CoverageError, "no tables of tp 16, only of tp 1, 2, 4, 8"),
        ({"engine": {"max_model_len": 2**30}}, ConfigError, "max_model_len is 1073741824; zai-org/GLM-5 takes at most"),
        ({"engine": {"kv_cache_dtype": "fp8"}}, ContractError, "measured on a bf16 KV cache"),
        ({"parallel": {"tp": 8, "ep": 8}}, CapacityError, "does not fit"),
    ],
)
def test_what_cannot_be_deployed_names_its_instance_and_keeps_its_exit_code(tmp_path, changes, error, message):
    one = {"model": "zai-org/GLM-5", "hardware": "H200", "parallel": {"tp": 8, "dp": 2, "ep": 16}}
    one |= {"engine": {"max_model_len": 8192}}
    path = write(tmp_path, {"instances": [one, one | changes]})
    with pytest.raises(error, match=message) as caught:
        replay(path, Trace("jsonl", ()))
    assert str(caught.value).startswith(f"{path}: instances[1]: ")


def test_flags_that_are_wrong_are_named_in_place_of_keys(tmp_path):
    for flags, named in ((Overrides(policy="fcsf"), "--scheduling-policy"), (Overrides(router="rr"), "--router")):
        with pytest.raises(ConfigError, match=f"^{named}: unknown"):
            load_cluster(ours(tmp_path), flags)


def test_files_of_neither_kind(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_cluster(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match=r"'instances' .* or 'nodes'"):
        load_cluster(write(tmp_path, {"instance": []}))
    with pytest.raises(ConfigError, match="top level must be a mapping"):
        load_cluster(write(tmp_path, [1]))
    with pytest.raises(ConfigError, match=r"instances: .*at least 1 item"):
        load_cluster(write(tmp_path, {"instances": []}))
    with pytest.raises(ConfigError, match=r"instances\[0\]\.hardware: is required"):
        load_cluster(write(tmp_path, {"instances": [{"model": "a/b"}]}))
    with pytest.raises(ConfigError, match="unknown router 'last'"):
        load_cluster(write(tmp_path, OURS | {"router": "last"}))


def test_the_peers_file_keeps_its_names_units_and_defaults(tmp_path):
    cluster = load_cluster(write(tmp_path, peer()))
    (instance,) = cluster.instances
    engine = instance.engine
    assert (instance.model, instance.hardware) == ("meta-llama/Llama-3.1-8B", "RTXPRO6000")
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_tokens) == (128, 2048, None)
    assert (instance.memory.mem_size_gib, instance.memory.mem_util) == (96, 0.9)
    assert instance.links.bandwidth_gbps == pytest.approx(16 * 2**30 / 1e9)
    assert instance.links.latency_us == 20


def test_the_peers_instance_keys_win_over_the_command_line(tmp_path):
    flags = Overrides(max_num_seqs=3, max_num_batched_tokens=64)
    (instance,) = load_cluster(write(tmp_path, peer(max_num_seqs=0, dtype="bfloat16")), flags).instances
    assert (instance.engine.max_num_seqs, instance.engine.max_num_batched_tokens) == (UNLIMITED, 64)
    assert instance.variant == "bf16"


def test_the_peers_dp_group_is_one_instance(tmp_path):
    model = "Qwen/Qwen3-30B-A3B-Instruct-2507"
    (grouped,) = load_cluster(write(tmp_path, peer(2, model_name=model, dp_group="A", ep_size=2))).instances
    assert grouped.parallel == Parallel(tp=1, pp=1, dp=2, ep=2)
    assert len(load_cluster(write(tmp_path, peer(2))).instances) == 2
    assert load_cluster(write(tmp_path, peer(model_name=model, tp_size=2, num_npus=2))).instances[0].parallel.ep == 2


PEER_BAD = [
    ({"pd_type": "prefill"}, "pd_type = 'prefill' is not simulated"),
    ({"placement": {"default": {"weights": "cpu"}}}, "placement = .* is not simulated"),
    ({"enable_attn_offloading": True}, "enable_attn_offloading"),
    ({"reserve_full_isl": False}, "reserve_full_isl"),
    ({"num_npus": 4, "tp_size": 2}, "num_npus is 4, but tp_size x pp_size is 2"),
    ({"npu_memory": 1}, "unknown key 'npu_memory'; did you mean 'npu_mem'"),
    ({"kv_cache_dtype": "fp8"}, "needs dtype"),
    ({"npu_mem": {"mem_size": -1}}, r"npu_mem\.mem_size"),
]


@pytest.mark.parametrize(("changes", "message"), PEER_BAD, ids=[message[:40] for _, message in PEER_BAD])
def test_faults_in_the_peers_file_name_the_instance(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(write(tmp_path, peer(**changes)))
    assert "nodes[0].instances[0]" in str(caught.value)


def test_what_cannot_be_deployed_of_the_peers_file_names_the_instance(tmp_path):
    path = write(tmp_path, peer(model_name="meta-llama/Llama-3.1-9B"))
    with pytest.raises(ConfigError, match=r"nodes\[0\]\.instances\[0\]\.model_name: unknown model .*Llama-3\.1-8B"):
        load_cluster(path)
    path = write(tmp_path, peer(npu_mem={"mem_size": 8, "mem_util": 0.9}))
    with pytest.raises(CoverageError, match=r"^.*\.json: nodes\[0\]\.instances\[0\]: no bundle"):
        replay(path, Trace("jsonl", ()))


def test_counts_and_groups_of_the_peers_file_must_agree(tmp_path):
    with pytest.raises(ConfigError, match="num_nodes is 2"):
        load_cluster(write(tmp_path, peer() | {"num_nodes": 2}))
    content = peer(2, dp_group="A")
    content["nodes"][0]["instances"][1]["tp_size"] = 2
    content["nodes"][0]["instances"][1]["num_npus"] = 2
    with pytest.raises(ConfigError, match="dp_group A: members disagree on parallel"):
        load_cluster(write(tmp_path, content))
    content["nodes"][0]["num_instances"] = 3
    with pytest.raises(ConfigError, match="num_instances is 3"):
        load_cluster(write(tmp_path, content))


@pytest.mark.parametrize(
    ("model", "parallel"), [("Llama-3.1-8B", Parallel()), ("Qwen3-30B-A3B-Instruct-2507", Parallel(dp=2, ep=2))]
)
def test_recorded_cluster_files_load_as_they_are(model, parallel):
    path = SHARED / "recorded" / "RTXPRO6000" / model / "config.json"
    if not path.exists():
        pytest.skip("recorded runs are absent")
    (instance,) = load_cluster(path).instances
    assert instance.parallel == parallel


def test_shipped_cluster_files_load():
    paths = sorted((data_root() / "configs" / "cluster").iterdir())
    assert paths
    for path in paths:
        assert load_cluster(path).instances


def test_a_host_of_its_own(tmp_path: Path) -> None:
    """Its path counts from the cluster file; two statements of the host's time contradict."""
    engine = {"host_file": "hosts/here.yaml"}
    (tmp_path / "hosts").mkdir()
    host = load_hardware("H200").host
    assert host is not None
    block = {name: one for name, one in asdict(host).items() if one is not None}
    (tmp_path / "hosts" / "here.yaml").write_text(yaml.safe_dump({"host": block}))
    path = tmp_path / "cluster.yaml"

    def written(more: dict[str, Any]) -> Path:
        instance = {"model": "zai-org/GLM-5", "hardware": "H200", "engine": engine | more}
        path.write_text(yaml.safe_dump({"instances": [instance]}))
        return path

    assert load_cluster(written({})).instances[0].engine.host == host
    with pytest.raises(ConfigError, match=r"cluster\.yaml: instances\[0\]\.engine: host_file and host_over"):
        load_cluster(written({"host_overhead_us": 0}))
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_cluster(written({"host_file": "absent.yaml"}))


def test_graph_modes_and_capture_sizes(tmp_path: Path) -> None:
    def engine(text: str) -> EngineSettings:
        path = tmp_path / "cluster.yaml"
        path.write_text(f"instances:\n  - {{model: m, hardware: H200, engine: {{{text}}}}}\n")
        return load_cluster(path).instances[0].engine

    default = engine("")
    assert (default.eager, default.graph_mode, default.capture_sizes) == (False, "FULL_AND_PIECEWISE", None)
    assert engine("cudagraph_mode: NONE").eager
    decode = engine("cudagraph_mode: FULL_DECODE_ONLY, cudagraph_capture_sizes: [1, 2, 4]")
    assert (decode.eager, decode.graph_mode, decode.capture_sizes) == (False, "FULL_DECODE_ONLY", (1, 2, 4))
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes must ascend"):
        engine("cudagraph_capture_sizes: [4, 2]")
    with pytest.raises(ConfigError, match="cudagraph_mode"):
        engine("cudagraph_mode: SOME")
