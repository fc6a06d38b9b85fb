"""Which components of a model belong to a category, from its family's catalog."""

from typing import Final

from profiler.core.shots import Regime
from profiler.core.stack import fold
from profiler.core.types import Category, Component, ModelSpec

ATTENTION_LIKE: Final[tuple[Category, ...]] = ("attention", "indexer", "sparse_attention")


def components_of(spec: ModelSpec, category: Category) -> tuple[Component, ...]:
    """Components of the whole stack in catalog order, each once. "skew" has those of every attention-like category."""
    within = ATTENTION_LIKE if category == "skew" else (category,)
    found = (component for component, count in fold(spec).components if component.category in within and count)
    return tuple(dict.fromkeys(found))


def names_of(spec: ModelSpec, category: Category) -> tuple[str, ...]:
    return tuple(dict.fromkeys(component.name for component in components_of(spec, category)))


def categories_of(spec: ModelSpec) -> dict[str, Category]:
    """The table that each component has its rows in."""
    return {component.name: component.category for component, _ in fold(spec).components}


def has_dense_regime(spec: ModelSpec) -> bool:
    """True when short prefills replace the sparse kernel by a dense one, so that a shot must say which it wants."""
    return any(component.when == "prefill_dense" for component, _ in fold(spec).components)


def sparse_regime(spec: ModelSpec) -> Regime:
    return "sparse" if has_dense_regime(spec) else "auto"
