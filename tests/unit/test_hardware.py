from pathlib import Path

import pytest

from profiler.core.errors import ConfigError
from profiler.core.hardware import TIERS, HostLaunch, HostPart, canonical_name, known_hardware, load_hardware, load_host
from profiler.core.paths import hardware_root


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA_H200", "H200"),
        ("h200_sxm", "H200"),
        ("h200", "H200"),
        ("RTXPRO6000", "RTXPRO6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000"),
        ("rtx_pro_6000_server", "RTXPRO6000"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("b200_sxm", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("gb300", "GB300"),
        ("b300_sxm", "B300"),
        ("a100_sxm", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("mi355x", "MI355X"),
    ],
)
def test_aliases(text: str, name: str) -> None:
    assert canonical_name(text) == name
    assert load_hardware(text).name == name


def test_unknown_gpu_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'H200'.*B200.*RTXPRO6000") as caught:
        load_hardware("H20O")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", known_hardware())
def test_every_file_is_consistent(name: str) -> None:
    gpu = load_hardware(name)
    assert all(gpu.sources.values())
    assert set(gpu.links) == set(TIERS)
    assert all(link.source for link in gpu.links.values())
    if gpu.architecture == "sm80":
        assert gpu.fp8_tflops == gpu.bf16_tflops, "without fp8 tensor cores the products run in bf16"
    else:
        assert 1.9 <= gpu.fp8_tflops / gpu.bf16_tflops <= 2.1, "fp8 runs at twice the bf16 rate on these chips"
    # The FLOPs per byte at which products stop being bound by memory: 150 to 330 on every server GPU since Volta.
    assert 130 <= gpu.bf16_tflops * 1e3 / gpu.hbm_gbps <= 350
    assert 16 <= gpu.memory_total_gib <= 512 and 24 <= gpu.l2_mib <= 512 and 80 <= gpu.sm_count <= 512
    assert 0.5 <= gpu.bf16_tflops / gpu.sm_count <= 20, "dense TFLOP/s of one multiprocessor"
    assert gpu.links["intra_node"].bandwidth_gbps >= gpu.links["inter_node"].bandwidth_gbps
    assert gpu.links["intra_node"].latency_us <= gpu.links["inter_node"].latency_us


def test_memory_is_what_the_runtime_reports() -> None:
    """Totals of public engine logs; the driver's figure (143,771 MiB for the H200) is larger."""
    logged = {"H200": 139.81, "B200": 178.35, "GB200": 184.31, "RTXPRO6000": 94.97}
    assert {name: load_hardware(name).memory_total_gib for name in logged} == logged
    assert load_hardware("H200").memory_total_gib < 143_771 / 1024


def test_architectures() -> None:
    found = {name: load_hardware(name).architecture for name in known_hardware()}
    assert found == {
        "A100": "sm80",
        "B200": "sm100",
        "B300": "sm103",
        "GB200": "sm100",
        "GB300": "sm103",
        "H100": "sm90",
        "H200": "sm90",
        "MI300X": "gfx942",
        "MI355X": "gfx950",
        "RTX4090": "sm89",
        "RTXPRO6000": "sm120",
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hbm_gbps:", "hbm_gb:", "unknown key 'hbm_gb'; did you mean 'hbm_gbps'"),
        ("value: 4800", "value: -1", "hbm_gbps must be a positive number"),
        ("value: 4800", "value: .inf", "hbm_gbps must be a positive number"),
        ("value: 132", "value: 132.5", "sm_count must be an integer"),
        ("architecture: sm90", "architecture: hopper", "must look like 'sm90'"),
        ("name: H200", "name: H201", "it must be the file's"),
        ("latency_us: 4.4", "latency_ms: 4.4", "unknown key 'latency_ms'"),
        ("inter_node:", "internode:", "unknown key 'internode'"),
        ("architecture: sm90\n", "", "missing architecture"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (hardware_root() / "H200.yaml").read_text()
    assert old in text
    (tmp_path / "H200.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        load_hardware("H200", tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hbm_gbps: {value: 4800", "hbm_gbps: {value: 1, value: 4800", "key 'value' appears twice"),
        ("hbm_gbps: {value: 4800", "hbm_gbps: {value: " + "9" * 400, "hbm_gbps must be a positive number"),
        ('source: "NVIDIA H200 data sheet, 4.8 TB/s"', "source: null", "hbm_gbps.source must say where"),
        ("aliases: [NVIDIA H200", 'aliases: ["-"', "aliases must be a list of names"),
    ],
)
def test_files_that_say_less_than_they_should(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (hardware_root() / "H200.yaml").read_text()
    assert old in text
    (tmp_path / "H200.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        load_hardware("H200", tmp_path)


def test_an_alias_of_two_cards_is_refused(tmp_path: Path) -> None:
    text = (hardware_root() / "H200.yaml").read_text()
    (tmp_path / "H200.yaml").write_text(text)
    (tmp_path / "H300.yaml").write_text(text.replace("name: H200", "name: H300", 1))
    with pytest.raises(ConfigError, match="alias 'NVIDIA H200' is also one of H200"):
        load_hardware("NVIDIA H200", tmp_path)


def test_a_path_is_no_name() -> None:
    with pytest.raises(ConfigError, match="unknown GPU"):
        load_hardware("../H200")


HOST = """
host:
  schedule: {fixed_us: 50.0, per_request_us: 3}
  prepare: {fixed_us: 400, per_request_us: 0}
  replay: {fixed_us: 90, per_request_us: 0}
  sample: {fixed_us: 60, per_request_us: 1}
  bookkeep: {fixed_us: 0, per_request_us: 0}
  tokens: {fixed_us: 20, per_request_us: 0}
  update: {fixed_us: 20, per_request_us: 4}
  output: {fixed_us: 10, per_request_us: 0}
  launch: {fixed_us: 700, per_layer_us: 2900}
  source: a recording
"""


def with_host(tmp_path: Path, host: str) -> Path:
    text = (hardware_root() / "H100.yaml").read_text()
    assert "\nhost:" not in text
    (tmp_path / "H100.yaml").write_text(text + host)
    return tmp_path


def test_a_host(tmp_path: Path) -> None:
    assert load_hardware("H100").host is None
    host = load_hardware("H100", with_host(tmp_path, HOST)).host
    assert host is not None and host.piecewise is None and host.source == "a recording"
    assert (host.update.fixed_us, host.update.per_request_us, host.launch.per_layer_us) == (20.0, 4.0, 2900.0)
    more = HOST.replace("  source", "  piecewise: {fixed_us: 1, per_layer_us: 2}\n  source")
    host = load_hardware("H100", with_host(tmp_path, more)).host
    assert host is not None and host.piecewise is not None and host.piecewise.per_layer_us == 2.0
    assert host.prepare_prefill is None and host.launch_mixed is None
    more += "  prepare_prefill: {fixed_us: 3, per_request_us: 4}\n  launch_mixed: {fixed_us: 5, per_layer_us: 6}\n"
    host = load_hardware("H100", with_host(tmp_path, more)).host
    assert host is not None
    assert (host.prepare_prefill, host.launch_mixed) == (HostPart(3.0, 4.0), HostLaunch(5.0, 6.0))


def test_a_file_of_a_host_alone(tmp_path: Path) -> None:
    path = tmp_path / "own" / "host.yaml"
    path.parent.mkdir()
    path.write_text(HOST)
    assert load_host(path) == load_hardware("H100", with_host(tmp_path, HOST)).host
    path.write_text(HOST + "hosts: 1\n")
    with pytest.raises(ConfigError, match="the file: unknown key 'hosts'; did you mean 'host'"):
        load_host(path)


def test_the_shipped_host_knows_every_way_to_launch() -> None:
    """Attention between graphs takes less than all of a layer, and prefills beside decodes more than alone."""
    host = load_hardware("H200").host
    assert host is not None and host.launch_mixed is not None and host.piecewise is not None
    assert 0 < host.piecewise.per_layer_us < host.launch.per_layer_us < host.launch_mixed.per_layer_us


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  tokens: {fixed_us: 20, per_request_us: 0}\n", "", "host: missing tokens"),
        ("fixed_us: 700", "fixed_us: -1", "host.launch.fixed_us must be a number from 0"),
        ("per_layer_us: 2900", "per_request_us: 2900", "host.launch: unknown key 'per_request_us'"),
        ("{fixed_us: 400, per_request_us: 0}", "400", "host.prepare must be a mapping"),
        ("  source: a recording\n", "  source: ''\n", "host.source must say where"),
        ("  replay:", "  replays:", "host: unknown key 'replays'; did you mean 'replay'"),
    ],
)
def test_a_malformed_host_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in HOST
    with pytest.raises(ConfigError, match=message):
        load_hardware("H100", with_host(tmp_path, HOST.replace(old, new, 1)))
