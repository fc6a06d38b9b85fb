"""Which of several bundles a run takes."""

from pathlib import Path

import priced
import pytest
import yaml

from profiler.core.errors import ConfigError
from profiler.core.paths import data_root
from serving.config import load_cluster
from serving.deployment import deploy

CLUSTER = data_root() / "configs" / "cluster" / "h200-8x-deepseek-v32-dp8-ep8.yaml"
PACKED = {
    "caches": [
        {"name": "mla_latent", "bytes_per_token_layer": 656},
        {"name": "index_keys", "bytes_per_token_layer": 132},
    ]
}


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    priced.bundle(tmp_path)
    kv = {"layout": "fp8_ds_mla", "block_tokens": 64, **PACKED}
    priced.bundle(tmp_path, variant="fp8-kvfp8_ds_mla", kv=kv)
    return tmp_path


def variant_of(bundles: Path, tmp_path: Path, **settings: object) -> str:
    content = yaml.safe_load(CLUSTER.read_text())
    content["instances"][0]["engine"].update(max_num_batched_tokens=4096, **settings)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    (instance,) = load_cluster(path).instances
    return deploy(instance, 0, bundles, False).deployment.tables.variant


def test_a_run_takes_the_tables_of_its_own_cache(bundles: Path, tmp_path: Path) -> None:
    assert variant_of(bundles, tmp_path) == "fp8"
    assert variant_of(bundles, tmp_path, kv_cache_dtype="fp8_ds_mla") == "fp8-kvfp8_ds_mla"


def test_several_bundles_of_which_none_is_the_runs_own_need_a_name(tmp_path: Path) -> None:
    for variant in ("fp8-one", "fp8-two"):
        priced.bundle(tmp_path, variant=variant)
    with pytest.raises(ConfigError, match="has the variants fp8-one, fp8-two: name one"):
        variant_of(tmp_path, tmp_path)
