"""The shipped cluster files: legal, fitting, and at the largest data parallelism that is safe where they say so."""

from pathlib import Path

import pytest

from profiler.core.hardware import load_hardware
from profiler.core.paths import data_root, default_bundle_root
from profiler.core.registry import load_model
from profiler.core.shard import broken_rules, is_launchable
from serving.capacity import memory_budget
from serving.config import load_cluster
from serving.deployment import deploy
from serving.placement import plan

FILES = sorted((data_root() / "configs" / "cluster").glob("*-*x-*.yaml"))
NATURAL = [path for path in FILES if "largest data parallelism" in path.read_text() or "natural" in path.read_text()]


def gpus(path: Path) -> int:
    """Of a file's name: h200-8x-..., rtxpro6000-16x-..."""
    return int(path.stem.split("-")[1].removesuffix("x"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_cluster_file_is_legal_and_fits(path: Path) -> None:
    for instance in load_cluster(path).instances:
        spec, hardware, engine = load_model(instance.model), load_hardware(instance.hardware), instance.engine
        assert not broken_rules(spec, instance.parallel) and is_launchable(instance.parallel)
        assert instance.parallel.gpus == gpus(path)
        assert engine.max_model_len_tokens is not None
        budget = memory_budget(
            spec,
            hardware,
            instance.parallel,
            max_model_len=engine.max_model_len_tokens,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
        )
        assert budget.fits and budget.risk is None


@pytest.mark.parametrize("path", NATURAL, ids=lambda path: path.stem)
def test_natural_layouts_have_the_largest_safe_data_parallelism(path: Path) -> None:
    (instance,) = load_cluster(path).instances
    engine = instance.engine
    found = plan(
        load_model(instance.model),
        load_hardware(instance.hardware),
        gpus(path),
        pp=1,
        max_model_len=engine.max_model_len_tokens,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
    )
    assert found.largest_safe_dp is not None
    assert found.largest_safe_dp.parallel == instance.parallel


@pytest.mark.parametrize(
    "path", [path for path in FILES if "Its tables ship." in path.read_text()], ids=lambda p: p.stem
)
def test_files_that_say_that_tables_ship_can_be_deployed(path: Path) -> None:
    (instance,) = load_cluster(path).instances
    assert deploy(instance, 0, default_bundle_root(), False).deployment.tables.provenance == "measured"


def test_there_are_files_of_every_model_and_layout() -> None:
    assert len(FILES) >= 18 and len(NATURAL) >= 11
    assert {gpus(path) for path in FILES} == {8, 16}
