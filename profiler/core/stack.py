"""The layer stack of a checkpoint: where its text fields are, what each layer runs, shrinking and folding."""

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

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


_LAYER_NUMBER: Final = re.compile(r"(^|\.)layers\.(\d+)(?=\.|$)")


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
    return take(spec, config, range(layers))


def one_of_each(spec: ModelSpec) -> tuple[int, ...]:
    """The first layer of every kind, ascending: the fewest layers that run all that the model runs."""
    return tuple(sorted(spec.layers.index(kind) for kind in spec.kinds))


def stack_of(
    spec: ModelSpec, config: Mapping[str, Any], like: Sequence[str] | None = None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The layers to profile, by their number in the model, and a raw config of these alone.

    One layer of each kind where a config can say that, else the fewest leading layers that have them all. like: the
    layer kinds (LayerKind.name, in order) of runs to be continued, which take the one or the other. Raises ConfigError
    when they are neither.
    """
    # Imported here, since the registry imports the families, and they import this module.
    from profiler.core.registry import read_model

    leading = tuple(range(shrunk_layers(spec)))
    found = []
    for layers in dict.fromkeys((one_of_each(spec), leading)):
        small = take(spec, config, layers)
        try:
            same = read_model(spec.name, small).layers == tuple(spec.layers[i] for i in layers)
        except ConfigError:
            same = False
        if same or layers == leading:
            found.append((layers, small))
    if like is None:
        return found[0]
    for layers, small in found:
        if tuple(spec.layers[i].name for i in layers) == tuple(like):
            return layers, small
    stacks = " or ".join(", ".join(spec.layers[i].name for i in layers) for layers, _ in found)
    raise ConfigError(f"{spec.name}: the earlier runs are of the layers {', '.join(like)}; this version runs {stacks}")


def take(spec: ModelSpec, config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """A deep copy of a raw config with `layers` of its layers alone, renumbered from 0, and what names layers adapted.

    That is `num_hidden_layers`, per-layer lists and patterns, and the modules that a quantisation leaves out. Where
    the layers are not the leading ones also the rules by layer number: `first_k_dense_replace`, and the rule of layers
    that share a selection, which becomes a pattern.
    """
    result = copy.deepcopy(dict(config))
    text = result["text_config"] if result.get("text_config") is not None else result
    _take_lists(text, spec.num_layers, layers)
    text["num_hidden_layers"] = len(layers)
    holders = [result] if text is result else [result, text]
    for quantization in (fields.get("quantization_config") for fields in holders):
        if isinstance(quantization, dict):
            for key, value in quantization.items():
                if isinstance(value, list) and all(isinstance(name, str) for name in value):
                    quantization[key] = _take_names(value, spec.num_layers, layers)
    if tuple(layers) == tuple(range(len(layers))):
        return result
    kinds = [spec.layers[i] for i in layers]
    if "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = next((i for i, kind in enumerate(kinds) if kind.mlp == "moe"), len(kinds))
    if any(kind.selection == "shared" for kind in kinds):
        text["index_topk_pattern"] = "".join("S" if kind.selection == "shared" else "F" for kind in kinds)
    return result


def _take_lists(fields: dict[str, Any], old: int, layers: Sequence[int]) -> None:
    for key, value in fields.items():
        if key == "quantization_config":
            continue
        if isinstance(value, dict):
            _take_lists(value, old, layers)
        elif isinstance(value, list) and key != "index_topk_pattern" and len(value) == old:
            fields[key] = [value[i] for i in layers]
        elif isinstance(value, str) and key == "index_topk_pattern" and len(value) == old:
            fields[key] = "".join(value[i] for i in layers)


def _take_names(names: Sequence[str], old: int, layers: Sequence[int]) -> list[str]:
    """Module names of the layers that stay, with their new numbers, and all that name no layer below `old`."""
    number = {layer: i for i, layer in enumerate(layers)}
    kept = []
    for name in names:
        found = _LAYER_NUMBER.search(name)
        layer = int(found[2]) if found else old
        if layer >= old:
            kept.append(name)
        elif found and layer in number:
            kept.append(f"{name[: found.start()]}{found[1]}layers.{number[layer]}{name[found.end() :]}")
    return kept


def component_calls(spec: ModelSpec, layers: int | None = None) -> int:
    """Components that the first `layers` layers run, by default all, each as often as it is run.

    What only some steps run counts too, so that this compares stacks rather than counts launches.
    """
    model = family(spec.family)
    return sum(len(model.layer_components(spec, kind)) for kind in spec.layers[:layers])


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
