"""Gates: which experts the tokens of a batch pick. One file each: a module with `create(moe, options) -> Draw`.

A draw is called with a number of tokens and a numpy Generator and returns int32 global expert ids (tokens, topk), all
different within a row. Equal generators give equal picks. serving/routing.py is the entry; helpers start with `_`.
"""

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from profiler.core.errors import ConfigError, unknown
from profiler.core.types import MoeDims

Draw = Callable[[int, Any], Any]
Options = Mapping[str, Any]


# The gate of a cluster file without one: the expected load of every rank, so there is nothing to draw and no file.
EVEN = "even"


def known_gates() -> tuple[str, ...]:
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def create_gate(name: str, moe: MoeDims, options: Options | None = None) -> Draw:
    """The gate `name` for a model's experts.

    Raises ConfigError for an unknown gate, the one that draws nothing, an option that the gate does not have, or a
    value that breaks its rule.
    """
    if name == EVEN:
        raise ConfigError(f"gate {EVEN} draws nothing: every rank has the expected load. {_others()}")
    if name not in known_gates():
        raise unknown("gate", name, (EVEN, *known_gates()))
    check_dims(moe)
    module = importlib.import_module(f"{__name__}.{name}")
    given = dict(options or {})
    for key in given:
        if key not in module.OPTIONS:
            raise unknown(f"option of gate {name}", key, module.OPTIONS)
    draw: Draw = module.create(moe, given)
    return draw


def _others() -> str:
    return f"Those that draw: {', '.join(known_gates())}."


def check_dims(moe: MoeDims) -> None:
    """Raises ConfigError when no token could pick its experts."""
    if not 1 <= moe.topk <= moe.num_experts:
        raise ConfigError(f"topk is {moe.topk}; it must be between 1 and the {moe.num_experts} experts")
    if moe.n_group < 1 or moe.num_experts % moe.n_group:
        raise ConfigError(f"n_group {moe.n_group} does not divide {moe.num_experts} experts")
    if not 1 <= moe.topk_group <= moe.n_group:
        raise ConfigError(f"topk_group is {moe.topk_group}; it must be between 1 and n_group {moe.n_group}")
    selectable = moe.topk_group * moe.num_experts // moe.n_group
    if moe.topk > selectable:
        raise ConfigError(f"topk {moe.topk} exceeds the {selectable} experts of the {moe.topk_group} chosen groups")


def number(options: Options, key: str, default: float, least: float = 0.0) -> float:
    """A finite option of at least `least`. Raises ConfigError."""
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ConfigError(f"{key} is {value!r}; it must be a finite number of at least {least:g}")
    return float(value)
