"""Instances that run the first layers of a model alone, as recordings of a cut stack are replayed."""

import json
from pathlib import Path

import priced
import pytest

from profiler.core.errors import ConfigError
from profiler.core.registry import load_model
from serving.config import load_cluster
from serving.core.shape import StepShape
from serving.deployment import deploy, instance_model
from serving.recording.vllm_driver import EngineArguments, cluster_file

ARGUMENTS = EngineArguments(
    max_model_len=8192, max_num_batched_tokens=4096, max_num_seqs=64, kv_cache_dtype="auto", utilization=0.9,
    num_gpu_blocks=None, block_tokens=None, mode="eager", capture_sizes=None, prefix_caching=True,
    async_scheduling=False, single_stream=False, seed=0,
)  # fmt: skip
SHAPES = (
    StepShape(((1024, 2048),), 0, 0, 0, 0, 1),
    StepShape((), 8, 8 * 2048, 2048, 8 * 2048, 8),
)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bundles")
    spec = load_model(priced.MODEL)
    priced.bundle(root, {"moe": priced.tables(spec, ep=1)["moe"]})
    return root


def recorded_cluster(folder: Path, layers: int, **engine: object) -> Path:
    """The cluster file that `record` writes beside a recording of `layers` layers."""
    facts = {
        "num_gpu_blocks": 500, "max_num_seqs": 64, "max_num_batched_tokens": 4096, "cudagraph_mode": "NONE",
        "capture_sizes": [], "async_scheduling": False,
    }  # fmt: skip
    content = cluster_file(priced.MODEL, "H200", layers, ARGUMENTS, facts)
    content["instances"][0]["engine"] |= engine
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return path


def prices(bundles: Path, folder: Path, layers: int) -> list[int]:
    (instance,) = load_cluster(recorded_cluster(folder, layers)).instances
    deployed = deploy(instance, 0, bundles, False)
    assert (deployed.deployment.layers, deployed.deployment.num_gpu_blocks) == (layers, 500)
    return [deployed.cost.step_ns([shape]) for shape in SHAPES]  # type: ignore[union-attr]


def test_a_recordings_cluster_file_prices_its_layers_alone(bundles: Path, tmp_path: Path) -> None:
    """DeepSeek-V3.2: three dense layers, then layers with experts, all of one price; embedding and head once."""
    one, two, four, five, whole = (prices(bundles, tmp_path, layers) for layers in (1, 2, 4, 5, 61))
    for step in range(len(SHAPES)):
        dense, sparse = two[step] - one[step], five[step] - four[step]
        assert 0 < dense != sparse > 0
        assert four[step] == pytest.approx(one[step] + 2 * dense + sparse, abs=4)
        assert whole[step] == pytest.approx(four[step] + 57 * sparse, abs=60)


def test_the_cache_holds_the_layers_alone(bundles: Path, tmp_path: Path) -> None:
    """Bytes per token grow with the layers, so a given memory holds so many more blocks."""
    blocks = []
    for layers in (4, 8):
        path = recorded_cluster(tmp_path, layers, num_gpu_blocks=None, available_kv_gib=4.0)
        (instance,) = load_cluster(path).instances
        blocks.append(deploy(instance, 0, bundles, False).deployment.num_gpu_blocks)
    # bf16: 576 latent values of 2 B and 132 B of index keys, per token and layer
    assert blocks == [4 * 2**30 // (64 * (1152 + 132) * layers) for layers in (4, 8)]


def test_the_layers_are_the_first_of_the_model(tmp_path: Path) -> None:
    (instance,) = load_cluster(recorded_cluster(tmp_path, 5)).instances
    assert instance_model(instance).layers == load_model(priced.MODEL).layers[:5]


@pytest.mark.parametrize(("layers", "message"), [(62, "layers is 62; .* has 61"), (0, r"instances\[0\].layers")])
def test_impossible_layers_are_refused(tmp_path: Path, layers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        (instance,) = load_cluster(recorded_cluster(tmp_path, layers)).instances
        instance_model(instance)
