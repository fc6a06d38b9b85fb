"""What tables may be used for, and which module of the engine they are of.

`serving`: one row per kernel, priced by the simulator. `replay`: DeepSeek-V3.2's native module with its attention as
one number per layer (profiler/families/deepseek_v32_tail.py), four tables, measured at tp 1 and ep 1 as they are and
never emulated; only `profiler.durations` reads them.
"""

from dataclasses import replace
from typing import Final

from profiler.core.errors import ContractError, unknown
from profiler.core.types import Category, ModelSpec
from profiler.engines.base import EngineInfo

CONTRACTS: Final = ("serving", "replay")
EXECUTIONS: Final = ("auto", "native")
REPLAY_CATEGORIES: Final[tuple[Category, ...]] = ("attention", "dense", "moe", "per_sequence")

_NATIVE_ARCHITECTURE: Final = "DeepseekV32ForCausalLM"
_TAIL_FAMILY: Final = "deepseek_v32_tail"


def check_execution(spec: ModelSpec, contract: str, execution: str) -> None:
    """Raises ConfigError for an unknown word, ContractError for a model that has no native module."""
    if contract not in CONTRACTS:
        raise unknown("contract", contract, CONTRACTS)
    if execution not in EXECUTIONS:
        raise unknown("execution", execution, EXECUTIONS)
    native = contract == "replay" or execution == "native"
    if native and spec.architecture != _NATIVE_ARCHITECTURE:
        raise ContractError(
            f"{spec.name}: the native module is that of DeepSeek-V3.2 ({_NATIVE_ARCHITECTURE}) alone, this is "
            f"{spec.architecture}"
        )


def replay_spec(spec: ModelSpec, tps: tuple[int, ...], eps: tuple[int, ...]) -> ModelSpec:
    """The model with its attention tail as one component. Raises ContractError for another degree than 1."""
    if tps != (1,) or eps != (1,):
        raise ContractError(
            f"contract replay: tables of the native module are of tp 1 and ep 1, measured and not emulated; "
            f"tp {', '.join(map(str, tps))} and ep {', '.join(map(str, eps))} were asked for"
        )
    return replace(spec, family=_TAIL_FAMILY)


def execution_of(info: EngineInfo) -> str | None:
    """`native` where the engine ran that module, None for its usual one."""
    found = info.settings.get("execution")
    return None if found is None else str(found)


def variant_suffix(info: EngineInfo, contract: str) -> str:
    """What a variant's name says beyond weights and KV layout."""
    native = "-native" if execution_of(info) == "native" else ""
    return native + ("-replay" if contract == "replay" else "")
