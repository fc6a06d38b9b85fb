"""Which components of a model belong to a category, from its family's catalog."""

from profiler.core.shots import Regime
from profiler.core.stack import fold
from profiler.core.types import Category, Component, ModelSpec


def components_of(spec: ModelSpec, category: Category) -> tuple[Component, ...]:
    """Components of the whole stack in catalog order, each once."""
    found = (component for component, count in fold(spec).components if component.category == category and count)
    return tuple(dict.fromkeys(found))


def names_of(spec: ModelSpec, category: Category) -> tuple[str, ...]:
    return tuple(dict.fromkeys(component.name for component in components_of(spec, category)))


def has_dense_regime(spec: ModelSpec) -> bool:
    """True when short prefills replace the sparse kernel by a dense one, so that a shot must say which it wants."""
    return any(component.when == "prefill_dense" for component, _ in fold(spec).components)


def sparse_regime(spec: ModelSpec) -> Regime:
    return "sparse" if has_dense_regime(spec) else "auto"
