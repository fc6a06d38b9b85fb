"""Model configurations by name, read by the family (one module of profiler/families) that knows their model type."""

import importlib
import json
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from profiler.core.errors import ConfigError, nearest, unknown
from profiler.core.load import atomic_write, read_json
from profiler.core.paths import model_config_root
from profiler.core.types import Component, LayerKind, ModelSpec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


class Family(Protocol):
    """What a module of profiler/families offers.

    MODEL_TYPES and ARCHITECTURES are the HF `model_type` and `architectures` values that it reads.
    """

    MODEL_TYPES: tuple[str, ...]
    ARCHITECTURES: tuple[str, ...]

    def read(self, name: str, config: Mapping[str, Any]) -> ModelSpec:
        """The normalised model. Raises ConfigError naming the key that is missing or contradicts another."""
        ...

    def layer_components(self, spec: ModelSpec, kind: LayerKind) -> tuple[Component, ...]:
        """Priced parts of one layer of this kind, repeated where a part runs twice."""
        ...

    def prologue_components(self, spec: ModelSpec) -> tuple[Component, ...]:
        """Priced parts before the first layer."""
        ...

    def head_components(self, spec: ModelSpec) -> tuple[Component, ...]:
        """Priced parts after the last layer."""
        ...


def family_names() -> tuple[str, ...]:
    """Names of the family modules, sorted. Modules with a leading underscore are helpers."""
    package = importlib.import_module("profiler.families")
    return tuple(sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")))


def family(name: str) -> Family:
    """The family module called `name`. Raises ConfigError listing the known ones."""
    if name not in family_names():
        raise unknown("model family", name, family_names())
    return cast(Family, importlib.import_module(f"profiler.families.{name}"))


def family_of(config: Mapping[str, Any], source: str) -> str:
    """Name of the family that reads a raw config, by `model_type`, else by `architectures`.

    `source` names the config in the error raised when no family, or none unambiguously, claims it.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if model_type is not None and not isinstance(model_type, str):
        raise ConfigError(f"{source}: model_type must be a string, found {model_type!r}")
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise ConfigError(f"{source}: architectures must be a list of names, found {architectures!r}")
    modules = {name: family(name) for name in family_names()}
    by_type = [name for name, module in modules.items() if model_type in module.MODEL_TYPES]
    by_class = [name for name, module in modules.items() if set(architectures) & set(module.ARCHITECTURES)]
    for claims in (by_type, by_class):
        if len(claims) == 1:
            return claims[0]
        if claims:
            raise ConfigError(
                f"{source}: model_type {model_type!r} is claimed by several families: {', '.join(claims)}"
            )
    known = sorted(t for module in modules.values() for t in module.MODEL_TYPES)
    hint = nearest(str(model_type), known)
    raise ConfigError(
        f"{source}: no model family reads model_type {model_type!r}, architectures {architectures!r}; "
        f"known model types: {', '.join(known)}" + (f"; nearest: {hint!r}" if hint else "")
    )


def known_models(root: Path | None = None) -> tuple[str, ...]:
    """`org/name` of every stored configuration, sorted."""
    base = root or model_config_root()
    return tuple(sorted(p.relative_to(base).with_suffix("").as_posix() for p in base.glob("*/*.json")))


def load_model_config(name: str, root: Path | None = None) -> dict[str, Any]:
    """The raw HF config of a model, nested where the checkpoint's file is nested.

    `name` is `org/name` below `root` (default: the shipped configurations), or the path of a `.json` file. A model
    without a stored file is fetched from its hub repository when huggingface_hub is installed, and then kept in
    `root`. Raises ConfigError: unknown name (listing the known ones), malformed file, failed download.
    """
    base = root or model_config_root()
    path = Path(name) if name.endswith(".json") else base / f"{name}.json"
    if not name.endswith(".json"):
        folded = {known.casefold(): known for known in known_models(base)}
        if name.casefold() in folded:
            path = base / f"{folded[name.casefold()]}.json"
        else:
            return _fetch(name, base)
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a model configuration is a JSON object, found {type(value).__name__}")
    return value


def load_model(name: str, root: Path | None = None) -> ModelSpec:
    """The model called `name` (see load_model_config), read by its family.

    Raises ConfigError when the file is missing or malformed, no family reads it, or its values contradict.
    """
    config = load_model_config(name, root)
    folded = {known.casefold(): known for known in known_models(root)}
    return read_model(folded.get(name.casefold(), name), config)


def read_model(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """A raw config, such as a shrunk one, read by its family. Errors as load_model."""
    chosen = family_of(config, name)
    spec = family(chosen).read(name, config)
    classes = config.get("architectures") or []
    others = [n for n in family_names() if set(classes) & set(family(n).ARCHITECTURES)]
    if others and chosen not in others:
        raise ConfigError(
            f"{name}: model_type {config.get('model_type')!r} belongs to the family {chosen}, architectures "
            f"{classes!r} to {', '.join(others)}; one of them is wrong"
        )
    return replace(spec, family=chosen)


def _fetch(name: str, base: Path) -> dict[str, Any]:
    missing = unknown("model", name, known_models(base))
    where = base / f"{name}.json"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{missing} A model name has the form org/name.")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ConfigError(
            f"{missing} To add it, put its config.json at {where}, or install huggingface_hub to have it fetched."
        ) from None
    try:
        downloaded = Path(hf_hub_download(name, "config.json", etag_timeout=5))
    except Exception as error:  # the hub client raises many types, from its own to those of the HTTP library
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{missing} Fetching it failed ({reason}). To add it, put its config.json at {where}."
        ) from None
    value = read_json(downloaded)
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: its config.json is not a JSON object")
    family_of(value, name)
    with atomic_write(where) as stream:
        json.dump(value, stream, indent=2, sort_keys=True)
        stream.write("\n")
    return value
