"""The layer stack of a checkpoint: where its text fields are, what each layer runs, shrinking and folding."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.registry import family
from profiler.core.types import Component, ModelSpec, SelectionBranch, StackCost


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping that holds the language model's fields: `text_config` of a nested file, else the file itself.

    Raises ConfigError when `text_config` is there but is no mapping.
    """
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise ConfigError(f"text_config must be a mapping, found {type(nested).__name__}")
    return nested


def token_selection(num_layers: int, pattern: str | None, frequency: int, offset: int) -> tuple[SelectionBranch, ...]:
    """Per layer "full" (token indexer of its own) or "shared" (reuses the last full layer's pick).

    The engine's rule (vLLM 0.31, models/deepseek_v32/attention.py): with a pattern, a layer is shared where its
    letter is S, and full beyond the pattern's end; without one, where max(layer - offset + 1, 0) is no multiple of
    `frequency`. Raises ConfigError for other letters, a non-positive frequency, or a first layer that would share.
    """
    if pattern is not None:
        if bad := sorted(set(pattern) - {"F", "S"}):
            raise ConfigError(f"index_topk_pattern has letters {', '.join(bad)}; legal are F (full) and S (shared)")
        shared = [layer < len(pattern) and pattern[layer] == "S" for layer in range(num_layers)]
    else:
        if frequency < 1:
            raise ConfigError(f"index_topk_freq is {frequency}; it must be at least 1")
        shared = [max(layer - offset + 1, 0) % frequency != 0 for layer in range(num_layers)]
    if shared and shared[0]:
        raise ConfigError("layer 0 would reuse a selection that no earlier layer makes")
    return tuple("shared" if s else "full" for s in shared)


def flags(values: Any, num_layers: int, key: str) -> tuple[bool, ...]:
    """A per-layer list of 0 and 1 as booleans. Raises ConfigError for another length or another value."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigError(f"{key} must be a list with one entry per layer, found {values!r}")
    if len(values) != num_layers:
        raise ConfigError(f"{key} has {len(values)} entries for {num_layers} layers")
    if bad := [v for v in values if not isinstance(v, int) or v not in (0, 1)]:
        raise ConfigError(f"{key} has the entry {bad[0]!r}; legal are 0 and 1")
    return tuple(bool(v) for v in values)


def stages(num_layers: int, pp: int) -> tuple[range, ...]:
    """Layers of each pipeline stage, as vLLM splits them: the remainder goes to the stages before the last one.

    Raises ConfigError when there are more stages than layers.
    """
    if not 1 <= pp <= num_layers:
        raise ConfigError(f"pp {pp} needs between 1 and {num_layers} stages, one layer at least in each")
    sizes = [num_layers // pp] * pp
    for back in range(2, num_layers % pp + 2):
        sizes[-back] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def shrunk_layers(spec: ModelSpec) -> int:
    """The fewest leading layers that contain every layer kind of the model."""
    return max(spec.layers.index(kind) for kind in spec.kinds) + 1


def shrink(spec: ModelSpec, config: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """A raw config cut to the fewest leading layers that reach every block type.

    Returns the layer count and a deep copy of `config` (nested stays nested) in which `num_hidden_layers` and every
    per-layer list or pattern of the text fields has that length.
    """
    layers = shrunk_layers(spec)
    return layers, cut(spec, config, layers)


def cut(spec: ModelSpec, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """A deep copy of a raw config with the first `layers` layers alone, its per-layer lists of that length."""
    result = copy.deepcopy(dict(config))
    text = result["text_config"] if result.get("text_config") is not None else result
    _cut_lists(text, spec.num_layers, layers)
    text["num_hidden_layers"] = layers
    return result


def _cut_lists(fields: dict[str, Any], old: int, new: int) -> None:
    for key, value in fields.items():
        if key == "quantization_config":
            continue
        if isinstance(value, dict):
            _cut_lists(value, old, new)
        elif isinstance(value, list if key != "index_topk_pattern" else str) and len(value) == old:
            fields[key] = value[:new]


def fold(spec: ModelSpec) -> StackCost:
    """Every component of one forward pass with its count: prologue and head once, each layer kind times its layers.

    Components keep the order in which the forward pass first reaches them.
    """
    module = family(spec.family)
    counts: Counter[Component] = Counter(module.prologue_components(spec))
    for kind in spec.kinds:
        for component in module.layer_components(spec, kind):
            counts[component] += spec.count(kind)
    counts.update(module.head_components(spec))
    return StackCost(tuple(counts.items()))
