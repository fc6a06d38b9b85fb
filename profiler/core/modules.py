"""Bundles of module granularity: the attention part of a layer is one row instead of one row per kernel.

`granularity: module` in a bundle's meta.yaml says so; without the key a bundle has one row per kernel. A module is what
runs between the two norms of a layer: projections in, cache writes, indexer, top-k, attention and the output
projection. It stands in the table `attention`, which has its whole context on the key axis, as one kernel per layer
kind. Norms, MLP, experts and head keep their own rows. A layer kind without a module of its own (grouped-query
attention over every key) keeps its kernels.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from profiler.core.errors import ConfigError
from profiler.core.registry import family
from profiler.core.stack import fold
from profiler.core.types import Component, LayerKind, ModelSpec, StackCost

GRANULARITIES: Final = ("kernel", "module")

_MODULES: Final = {
    ("mla", "full"): "dsa_module",
    ("mla", "shared"): "dsa_shared_module",
    ("mla", "none"): "mla_module",
    ("gqa", "block"): "msa_module",
}
# What a layer runs outside its attention module.
_OUTSIDE: Final = frozenset(
    {
        *("input_norm", "post_attention_norm", "layernorm"),
        *("gate_up_proj", "activation", "act_fn", "down_proj"),
        *("router_gate", "router_topk", "experts", "moe_combine"),
        *("shared_gate_up_proj", "shared_activation", "shared_act_fn", "shared_down_proj"),
    }
)


def granularity(meta: Mapping[str, Any]) -> str:
    """Granularity of a bundle. Raises ConfigError for a value that is none of GRANULARITIES."""
    found = meta.get("granularity", "kernel")
    if found not in GRANULARITIES:
        raise ConfigError(f"granularity is {found!r}, must be one of {', '.join(GRANULARITIES)}")
    return str(found)


def module_name(kind: LayerKind) -> str | None:
    """The module of a layer kind, None where its attention has no module of its own."""
    return _MODULES.get((kind.attention, kind.selection))


def module_kinds(spec: ModelSpec) -> dict[str, LayerKind]:
    """A layer kind of every module of the model, in the order of first appearance."""
    found: dict[str, LayerKind] = {}
    for kind in spec.kinds:
        if (name := module_name(kind)) is not None:
            found.setdefault(name, kind)
    return found


def module_parts(spec: ModelSpec, kind: LayerKind) -> tuple[Component, ...]:
    """The kernels that a layer's module stands for."""
    return tuple(c for c in family(spec.family).layer_components(spec, kind) if c.name not in _OUTSIDE)


def fold_modules(spec: ModelSpec) -> StackCost:
    """As profiler.core.stack.fold, with the attention of each layer as one component."""
    module = family(spec.family)
    counts: Counter[Component] = Counter(module.prologue_components(spec))
    for kind in spec.kinds:
        name = module_name(kind)
        layer = list(module.layer_components(spec, kind))
        if name is not None:
            first = next(i for i, one in enumerate(layer) if one.name not in _OUTSIDE)
            layer = [one for one in layer if one.name in _OUTSIDE]
            layer.insert(first, Component("attention", name))
        for component in layer:
            counts[component] += spec.count(kind)
    counts.update(module.head_components(spec))
    return StackCost(tuple(counts.items()))


def fold_for(spec: ModelSpec, meta: Mapping[str, Any]) -> StackCost:
    """The components that a bundle of this meta has rows for, each with its count in a forward pass."""
    return fold_modules(spec) if granularity(meta) == "module" else fold(spec)
