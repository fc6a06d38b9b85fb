"""Durations of single steps from tables with the contract `replay`: local, explicit, and nothing beyond.

Such tables are of DeepSeek-V3.2's native module on one GPU with all experts (profiler/contract.py). A caller names each
step's batch and gets its device time; there is no scheduler, no KV capacity, no other parallel degree and no collective
here, and `python -m serving` refuses these tables.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from profiler.core.bundle import Bundle
from profiler.core.errors import ConfigError, ContractError
from profiler.core.grid import Curve, Grid, Outside, batch_rows, curve, decode_grid, fixed_us, prefill_grid
from profiler.core.grid_moe import moe_grid, natural_experts
from profiler.core.stack import fold
from profiler.core.types import Component, ModelSpec
from profiler.families.deepseek_v32_tail import TAIL


@dataclass(frozen=True, slots=True)
class LocalStep:
    """One forward pass. prefills: (chunk, context) tokens of each; decode_keys: keys of each, the new one included."""

    prefills: tuple[tuple[int, int], ...] = ()
    decode_keys: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalDuration:
    """us: device time of the step, launch gaps excluded. parts: microseconds of each component, all its calls."""

    us: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Tables:
    calls: Mapping[Component, int]
    curves: Mapping[str, Curve]
    prefill: Grid
    decode: Grid
    fixed_us: float
    experts: Mapping[str, Grid]
    num_experts: int
    topk: int


def local_durations(
    bundle: Bundle, spec: ModelSpec, steps: Iterable[LocalStep], allow_extrapolation: bool = False
) -> list[LocalDuration]:
    """The duration of each step of `spec`, the model of the bundle with all its layers.

    Dense components by the tokens of the step, the head by its requests, experts at the even load, the tail of each
    prefill by (chunk, context) with its launch counted once, that of the decode requests by their number and mean keys.
    Raises ContractError for a bundle with another contract, CoverageError for a step outside its tables, ConfigError
    for an empty step or another model.
    """
    if bundle.meta["contract"] != "replay":
        raise ContractError(
            f"{bundle.path}: its contract is {bundle.meta['contract']!r}; local replay reads tables with contract "
            "'replay' alone. Price this bundle with: python -m serving"
        )
    if bundle.meta["model"] != spec.name:
        raise ConfigError(f"{bundle.path}: tables of {bundle.meta['model']}, not of {spec.name}")
    tables = _tables(bundle, replace(spec, family="deepseek_v32_tail"), allow_extrapolation)
    return [_duration(tables, step) for step in steps]


def _tables(bundle: Bundle, spec: ModelSpec, allow: bool) -> _Tables:
    def beyond(name: str) -> Outside:
        return Outside(name, f"{bundle.meta['command']}", allow)

    calls = dict(fold(spec).components)
    curves = {
        one.name: curve(bundle.table(1, one.category), one.name, beyond(one.name))
        for one in calls
        if one.category in ("dense", "per_sequence")
    }
    rows = batch_rows(bundle.table(1, "attention"), TAIL)
    prefill = prefill_grid(rows, beyond(TAIL))
    moe = spec.moe
    experts = {
        one.name: moe_grid(bundle.table(1, "moe"), one.name, 1, moe.num_experts, beyond(one.name))
        for one in calls
        if one.category == "moe" and moe is not None
    }
    return _Tables(
        calls=calls,
        curves=curves,
        prefill=prefill,
        decode=decode_grid(rows, beyond(TAIL)),
        fixed_us=fixed_us(prefill),
        experts=experts,
        num_experts=moe.num_experts if moe else 0,
        topk=moe.topk if moe else 0,
    )


def _duration(tables: _Tables, step: LocalStep) -> LocalDuration:
    requests = len(step.prefills) + len(step.decode_keys)
    if not requests or min((chunk for chunk, _ in step.prefills), default=1) < 1:
        raise ConfigError(f"{step}: a step has at least one request, and every chunk a token")
    tokens = sum(chunk for chunk, _ in step.prefills) + len(step.decode_keys)
    parts: dict[str, float] = {}
    for one, calls in tables.calls.items():
        if one.category == "dense":
            us = tables.curves[one.name].at(tokens)
        elif one.category == "per_sequence":
            us = tables.curves[one.name].at(requests)
        elif one.category == "moe":
            pairs = tokens * tables.topk
            us = tables.experts[one.name].at(pairs, natural_experts(tables.num_experts, pairs))
        else:
            us = _tail(tables, step)
        parts[one.name] = parts.get(one.name, 0.0) + us * calls
    return LocalDuration(sum(parts.values()), parts)


def _tail(tables: _Tables, step: LocalStep) -> float:
    """Both kinds of rows run kernels of their own; several prefills share the launches of one."""
    us = 0.0
    if step.prefills:
        each = [tables.prefill.at(chunk, context) for chunk, context in step.prefills]
        fixed = tables.fixed_us if len(each) > 1 else 0.0
        us += fixed + sum(max(0.0, one - fixed) for one in each)
    if step.decode_keys:
        requests = len(step.decode_keys)
        us += tables.decode.at(requests, sum(step.decode_keys) / requests)
    return us
