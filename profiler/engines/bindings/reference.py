"""The reference engine times every component on its own: its module is the category and its kernel the component."""

from collections.abc import Mapping, Sequence

from profiler.core.types import Category, ModelSpec
from profiler.engines.base import EngineInfo, Rule

FUSED: Mapping[str, str] = {}

_CATEGORIES: tuple[Category, ...] = ("dense", "per_sequence", "attention", "indexer", "sparse_attention", "moe")


def matches(info: EngineInfo) -> bool:
    return info.name == "reference"


def rules(spec: ModelSpec) -> Sequence[Rule]:
    """One rule per category; the name "" stands for the kernel's own name."""
    return [Rule(f"^{category}$", "", category, "") for category in _CATEGORIES]
