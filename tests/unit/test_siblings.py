"""Which models' tables serve which others: profiler.core.siblings."""

from pathlib import Path

import pytest

from profiler.core.paths import default_bundle_root
from profiler.core.registry import load_model
from profiler.core.siblings import same_kernels, tables_model

V32, V32_EXP = "deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2-Exp"


def _bundle(root: Path, model: str, provenance: str = "measured", variant: str = "fp8") -> None:
    folder = root / "H200" / model / variant
    folder.mkdir(parents=True)
    (folder / "meta.yaml").write_text(f"provenance: {provenance}\n")


@pytest.mark.parametrize(
    ("model", "owner"),
    [
        (V32, V32_EXP),
        (V32_EXP, V32),
        ("zai-org/GLM-5.2-FP8", "zai-org/GLM-5-FP8"),
        ("zai-org/GLM-5.2", "zai-org/GLM-5"),
        ("zai-org/GLM-5", "zai-org/GLM-5.2"),
    ],
)
def test_names_of_the_same_kernels(model: str, owner: str) -> None:
    assert same_kernels(load_model(model), load_model(owner))


@pytest.mark.parametrize(
    ("model", "owner"),
    [
        ("zai-org/GLM-5.2", "zai-org/GLM-5-FP8"),  # other weights
        ("zai-org/GLM-5-FP8", V32),  # other widths
        ("deepseek-ai/DeepSeek-V3", V32),  # no indexer
        (V32, "deepseek-ai/DeepSeek-V3"),
        ("Qwen/Qwen3-32B", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_models_of_other_kernels(model: str, owner: str) -> None:
    assert not same_kernels(load_model(model), load_model(owner))


def test_an_owner_lacking_a_component_serves_nobody_that_has_it() -> None:
    from dataclasses import replace

    glm52 = load_model("zai-org/GLM-5.2")
    shared = replace(glm52, layers=tuple(kind for kind in glm52.layers if kind.selection == "shared"))
    assert same_kernels(shared, glm52)
    assert not same_kernels(glm52, shared)


def test_own_tables_come_first_then_measured_ones(tmp_path: Path) -> None:
    spec = load_model(V32)
    assert tables_model(tmp_path, "H200", spec) == V32
    _bundle(tmp_path, "zai-org/GLM-5-FP8")
    assert tables_model(tmp_path, "H200", spec) == V32
    _bundle(tmp_path, V32_EXP, "projected")
    assert tables_model(tmp_path, "H200", spec) == V32_EXP
    assert tables_model(tmp_path, "B200", spec) == V32
    _bundle(tmp_path, V32, "imported", "fp8-aic")
    assert tables_model(tmp_path, "H200", spec) == V32


def test_of_two_owners_the_measured_one_serves(tmp_path: Path) -> None:
    from dataclasses import replace

    spec = replace(load_model(V32), name="org/Name")
    _bundle(tmp_path, V32, "imported")
    assert tables_model(tmp_path, "H200", spec) == V32
    _bundle(tmp_path, V32_EXP)
    assert tables_model(tmp_path, "H200", spec) == V32_EXP


def test_folders_without_a_stored_model_are_left_alone(tmp_path: Path) -> None:
    _bundle(tmp_path, "someone/Something")
    assert tables_model(tmp_path, "H200", load_model(V32)) == V32


def test_the_shipped_tables_of_v32_exp_serve_v32() -> None:
    assert tables_model(default_bundle_root(), "H200", load_model(V32)) == V32_EXP
