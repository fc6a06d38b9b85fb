"""Models of the same kernels, whose tables serve one another.

DeepSeek-V3.2 differs from V3.2-Exp in its name, GLM-5.2-FP8 from GLM-5-FP8 in the number of layers that compute a
selection and in the longest context. Every kernel that they launch has the same shapes, and tables are of kernels.
"""

from dataclasses import replace
from pathlib import Path

from profiler.core.bundle import variants
from profiler.core.load import read_mapping
from profiler.core.registry import family, known_models, load_model
from profiler.core.types import Component, ModelSpec


def same_kernels(spec: ModelSpec, owner: ModelSpec) -> bool:
    """True when the owner runs every component of `spec`, and with the same shapes.

    They may differ in name, notes, longest context, number and order of layers, and draft layers. Kinds of layers that
    the owner does not have are no obstacle where their components are among those of other layers.
    """
    alike = replace(
        owner,
        name=spec.name,
        notes=spec.notes,
        max_position=spec.max_position,
        layers=spec.layers,
        mtp_layers=spec.mtp_layers,
    )
    return alike == spec and _components(spec) <= _components(owner)


def tables_model(root: Path, hardware: str, spec: ModelSpec) -> str:
    """The model whose bundles on a GPU price `spec`: its own name where there are any, or where nothing else serves.

    Otherwise the first by name of the shipped models of the same kernels, those first that were measured.
    """
    if variants(root, hardware, spec.name) or not (root / hardware).is_dir():
        return spec.name
    there = {f"{path.parent.name}/{path.name}" for path in (root / hardware).glob("*/*") if path.is_dir()}
    owners = [name for name in known_models() if name in there and variants(root, hardware, name)]
    serving = [name for name in owners if same_kernels(spec, load_model(name))]
    return min(serving, key=lambda name: (not _measured(root, hardware, name), name), default=spec.name)


def longest_of(owner: str) -> int | None:
    """The longest context of a shipped model, which its tables end at; None for any other."""
    return load_model(owner).max_position if owner in known_models() else None


def _components(spec: ModelSpec) -> set[Component]:
    one = family(spec.family)
    layers = [component for kind in spec.kinds for component in one.layer_components(spec, kind)]
    return {*layers, *one.prologue_components(spec), *one.head_components(spec)}


def _measured(root: Path, hardware: str, model: str) -> bool:
    metas = [root / hardware / model / variant / "meta.yaml" for variant in variants(root, hardware, model)]
    return any(read_mapping(path).get("provenance") == "measured" for path in metas if path.is_file())
