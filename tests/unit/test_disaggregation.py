"""Prefill and decode instances in cluster files and in a replay of closed forms."""

import priced
import pytest
import yaml

import serving
from profiler.core.errors import ConfigError
from profiler.core.hardware import load_hardware
from profiler.core.registry import load_model
from serving.config import load_cluster
from serving.metrics import csv_text, summary
from serving.terminal import run_lines
from serving.traces import Trace, TraceRequest

H200 = load_hardware("H200")
ROWS = tuple(TraceRequest(str(i), i * 3_000_000, 200 + 97 * i % 1500, 1 + i % 9) for i in range(60))


def cluster_file(folder, roles=("prefill", "decode"), kv_transfer=None, **engine):
    content = {
        "instances": [
            {
                "model": priced.MODEL, "hardware": "H200", "parallel": {"dp": 8, "ep": 8}, "role": role,
                "engine": {"max_model_len": 4096, "max_num_batched_tokens": 2048, "max_num_seqs": 16,
                           "num_gpu_blocks": 400} | engine,
            }
            for role in roles
        ]
    }  # fmt: skip
    if kv_transfer is not None:
        content["kv_transfer"] = kv_transfer
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundles")
    priced.bundle(root)
    return root


@pytest.mark.parametrize(
    ("layout", "per_token", "per_block"),
    [("bf16", 78_324, 61 * 64 * 1284), ("fp8_ds_mla", 48_068, 61 * 64 * 788)],
)
def test_bytes_of_the_true_layout(tmp_path, layout, per_token, per_block):
    """DeepSeek-V3.2: 61 layers of latent and index keys, 1152 + 132 bytes in bf16, 656 + 132 in fp8_ds_mla."""
    main = per_token // 61 - 132
    caches = [
        {"name": "mla_latent", "bytes_per_token_layer": main},
        {"name": "index_keys", "bytes_per_token_layer": 132},
    ]
    priced.bundle(tmp_path / "b", kv={"layout": layout, "block_tokens": 64, "caches": caches})
    path = cluster_file(tmp_path, kv_cache_dtype=layout, enable_prefix_caching=False)
    result = serving.replay(path, Trace("jsonl", ROWS), bundle_root=tmp_path / "b")
    sent = summary(result)["kv_transfer"]
    assert sent["bytes_per_token_and_rank"] == per_token
    blocks = sum(-(-(row.prompt_tokens - 1) // 64) for row in ROWS)
    assert (sent["transfers"], sent["blocks_per_rank"]) == (60, blocks)
    assert sent["bytes_per_rank"] == blocks * per_block


def test_replay_with_roles(tmp_path, bundles):
    result = serving.replay(cluster_file(tmp_path), Trace("jsonl", ROWS), bundle_root=bundles)
    assert [one.outcome for one in result.records] == ["finished"] * 60
    assert [one.emitted_tokens for one in result.records] == [row.output_tokens for row in ROWS]
    assert {one.engine_index for one in result.records} <= set(range(8, 16)), "the engines of the decode instance"
    figures = summary(result)
    assert figures["kv_transfer"]["link_source"] == "hardware file"
    assert figures["kv_transfer"]["bandwidth_gbps"] == H200.links["inter_node"].bandwidth_gbps
    assert [one["role"] for one in figures["instances"]] == ["prefill", "decode"]
    text = dict(run_lines(figures))
    assert text["KV transfers"].startswith("60, ")
    assert text["instances 0-7"].startswith("prefill: ")
    again = serving.replay(cluster_file(tmp_path), Trace("jsonl", ROWS), bundle_root=bundles)
    assert csv_text(again) == csv_text(result)


def test_a_slow_link_costs_time_and_contends(tmp_path, bundles):
    def ttft_ms(**link):
        path = cluster_file(tmp_path, kv_transfer=link)
        figures = summary(serving.replay(path, Trace("jsonl", ROWS), bundle_root=bundles))
        assert figures["requests"]["finished"] == 60
        return figures["ttft_ns"]["mean"] / 1e6, figures["kv_transfer"]

    fast, sent = ttft_ms(bandwidth_gbps=400.0, latency_us=1.0)
    slow, slowly = ttft_ms(bandwidth_gbps=0.5, latency_us=1.0)
    assert sent["link_source"] == "kv_transfer"
    assert slow - fast > (slowly["mean_transfer_ns"] - sent["mean_transfer_ns"]) / 1e6 * 0.9
    assert slowly["mean_transfer_ns"] == pytest.approx(1e3 + slowly["bytes_per_rank"] / 60 / 0.5, rel=1e-6)
    assert slowly["mean_link_wait_ns"] > sent["mean_link_wait_ns"]
    _, mixed = ttft_ms(latency_us=3.0)
    assert (mixed["link_source"], mixed["latency_us"]) == ("hardware file, kv_transfer.latency_us", 3.0)


def test_more_prefill_engines_than_decode_engines_and_the_other_way(tmp_path, bundles):
    for roles in (("prefill", "prefill", "decode"), ("decode", "prefill", "decode")):
        result = serving.replay(cluster_file(tmp_path, roles), Trace("jsonl", ROWS), bundle_root=bundles)
        assert [one.outcome for one in result.records] == ["finished"] * 60
        engines = {i for at, role in enumerate(roles) if role == "decode" for i in range(8 * at, 8 * at + 8)}
        assert {one.engine_index for one in result.records} <= engines


def test_sessions_go_on_behind_the_decode_engine(tmp_path, bundles):
    rows = (
        TraceRequest("a", 0, 300, 5, session_id="s", call_index=0),
        TraceRequest("b", 0, 400, 3, session_id="s", call_index=1, tool_duration_ns=1_000_000),
    )
    result = serving.replay(cluster_file(tmp_path), Trace("jsonl", rows), bundle_root=bundles)
    first, second = result.records
    assert second.arrival_ns == first.finish_ns + 1_000_000
    assert second.outcome == "finished"


@pytest.mark.parametrize(
    ("roles", "link", "message"),
    [
        (("prefill", "prefill"), None, "have the roles prefill; either none has a role"),
        (("decode",), None, "have the roles decode"),
        (("prefill", "decode", "both"), None, "have the roles both, decode, prefill"),
        (("prefil", "decode"), None, r"instances\[0\]\.role"),
        (("both",), {"bandwidth_gbps": 50.0}, "kv_transfer: no instance has the role"),
        (("prefill", "decode"), {"bandwidth_gbps": 0.0}, r"kv_transfer\.bandwidth_gbps"),
        (("prefill", "decode"), {"bandwith_gbps": 5.0}, "did you mean 'bandwidth_gbps'"),
    ],
)
def test_bad_roles_and_links(tmp_path, roles, link, message):
    path = cluster_file(tmp_path, roles, link)
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)


def test_roles_with_stages_or_drafts_are_refused(tmp_path):
    for change in (
        {"parallel": {"pp": 2, "dp": 8, "ep": 8}},
        {"engine": {"speculative": {"tokens": 1, "acceptance": [1]}}},
    ):
        content = yaml.safe_load(cluster_file(tmp_path).read_text())
        content["instances"][1] |= change
        (tmp_path / "other.yaml").write_text(yaml.safe_dump(content))
        with pytest.raises(ConfigError, match=r"yaml: instances\[1\]: role decode with pp above 1"):
            load_cluster(tmp_path / "other.yaml")


def test_both_sides_must_store_the_same_cache(tmp_path, bundles):
    priced.bundle(tmp_path / "b")
    caches = [
        {"name": "mla_latent", "bytes_per_token_layer": 656},
        {"name": "index_keys", "bytes_per_token_layer": 132},
    ]
    kv = {"layout": "fp8_ds_mla", "block_tokens": 64, "caches": caches}
    priced.bundle(tmp_path / "b", variant="fp8-kvfp8_ds_mla", kv=kv)
    content = yaml.safe_load(cluster_file(tmp_path).read_text())
    content["instances"][1]["engine"]["kv_cache_dtype"] = "fp8"
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"the same cache: instances\[0\].*bf16.*instances\[1\].*fp8_ds_mla"):
        serving.replay(path, Trace("jsonl", ROWS[:1]), bundle_root=tmp_path / "b")


def test_model_of_these_tests():
    assert load_model(priced.MODEL).num_layers == 61
