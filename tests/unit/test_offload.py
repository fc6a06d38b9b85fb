"""KV blocks in host memory, from the cluster file to the summary."""

import priced
import pytest
import yaml

import serving
from profiler.core.errors import ConfigError
from serving.config import load_cluster
from serving.metrics import summary
from serving.terminal import run_lines
from serving.traces import PrefixHashes, Trace, TraceRequest

BLOCK_BYTES = 61 * 64 * 1284


def cluster_file(folder, offload=None, role="both", parallel=None, **engine):
    own = {"max_model_len": 4096, "max_num_batched_tokens": 2048, "max_num_seqs": 16, "num_gpu_blocks": 80}
    own |= {"host_overhead_us": 0} | engine  # a slow thread would hide what loads cost
    if offload is not None:
        own["kv_offload"] = offload
    one = {"model": priced.MODEL, "hardware": "H200", "role": role, "engine": own}
    one["parallel"] = parallel or {"dp": 8, "ep": 8}
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"router": "round_robin", "instances": [one]}))
    return path


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundles")
    priced.bundle(root)
    return root


def rounds(times=3):
    """Sixteen conversations of 2,048 tokens, two per engine, whose prompts come again in every round."""
    rows = []
    for number in range(16 * times):
        family = number % 16
        prefix = PrefixHashes(tuple(family * 100 + i for i in range(32)), 64, 2048)
        rows.append(TraceRequest(str(number), number * 500_000_000, 2_100, 4, prefix=prefix))
    return Trace("mooncake", tuple(rows))


def test_a_small_cache_with_a_host_behind_it(tmp_path, bundles):
    def run(offload=None, **engine):
        return summary(serving.replay(cluster_file(tmp_path, offload, **engine), rounds(), bundle_root=bundles))

    host = {"host_gib": 2.0, "bandwidth_gbps": 50.0, "latency_us": 20.0}
    # One prompt of 33 blocks fills the cache of an engine, so a round finds little of the one before there.
    without, behind = run(num_gpu_blocks=36), run(host, num_gpu_blocks=36)
    tier = behind["instances"][0]["kv_offload"]
    assert without["instances"][0]["kv_offload"] is None
    assert tier["host_blocks_per_rank"] == int(2.0 * 2**30 / BLOCK_BYTES)
    assert tier["block_ns"] == round(BLOCK_BYTES / 50.0)
    assert tier["asked_blocks"] == 48 * 32
    assert tier["gpu_hit_blocks"] + tier["host_hit_blocks"] == 32 * 32, "all but the first round"
    assert tier["host_hit_rate"] > 0.6
    assert behind["prefix_hit_tokens"] == 32 * 2_048 > without["prefix_hit_tokens"]
    assert behind["ttft_ns"]["mean"] < without["ttft_ns"]["mean"]
    assert any(label == "  host memory" for label, _ in run_lines(behind))
    slow = run(host | {"bandwidth_gbps": 1.0}, num_gpu_blocks=36)
    loads = slow["instances"][0]["kv_offload"]
    assert loads["host_hit_blocks"] == tier["host_hit_blocks"]
    more_ns = (loads["block_ns"] - tier["block_ns"]) * tier["host_hit_blocks"] / 48
    assert slow["ttft_ns"]["mean"] - behind["ttft_ns"]["mean"] == pytest.approx(more_ns, rel=1e-6)
    small = run(host | {"host_gib": 0.1}, num_gpu_blocks=36)
    assert small["instances"][0]["kv_offload"]["evicted_blocks"] > 0
    assert small["prefix_hit_tokens"] < behind["prefix_hit_tokens"]


FULL = {"host_gib": 2.0, "bandwidth_gbps": 50.0, "latency_us": 20.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offload": {"host_gib": 2.0, "bandwidth_gbps": 50.0}}, r"kv_offload\.latency_us: is required"),
        ({"offload": FULL | {"host_gib": 0.0}}, r"kv_offload\.host_gib"),
        ({"offload": FULL | {"host_gb": 1.0}}, "unknown key 'host_gb'; did you mean 'host_gib'"),
        ({"offload": FULL, "enable_prefix_caching": False}, "kv_offload needs enable_prefix_caching"),
        ({"offload": FULL, "parallel": {"pp": 2, "dp": 8, "ep": 8}}, "kv_offload with a role, pp above 1"),
        ({"offload": FULL, "speculative": {"tokens": 1, "acceptance": [0.5]}}, "kv_offload with a role, pp above 1"),
    ],
)
def test_bad_settings_name_file_and_key(tmp_path, changes, message):
    path = cluster_file(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)


def test_a_host_that_holds_no_block_is_refused(tmp_path, bundles):
    with pytest.raises(ConfigError, match="holds no block of 5,012,736 bytes"):
        path = cluster_file(tmp_path, FULL | {"host_gib": 0.001})
        serving.replay(path, rounds(1), bundle_root=bundles)
