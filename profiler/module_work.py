"""Arithmetic, traffic and roofline of whole attention modules, and of single rows of any table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from profiler.core.hardware import Hardware
from profiler.core.modules import module_kinds, module_parts
from profiler.core.types import Category, Component, ModelSpec
from profiler.kernels._work import WEIGHT_BYTES, Work
from profiler.kernels.dense import UNQUANTIZED, matrix
from profiler.sweep import work_of

# Kernels that multiply fp8 operands whatever the checkpoint's format: index keys and queries are stored so.
_ALWAYS_FP8: Final = frozenset({"index_scores"})
# Stay in two bytes whatever the checkpoint's format: attention itself, and what is never quantised.
_TWO_BYTE: Final = frozenset({"lm_head", "sparse_mla", "sparse_gqa", "attention", "mla_dense_prefill", "block_scores"})

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel's work in a cell. fp8: its products run at the card's fp8 rate."""

    name: str
    work: Work
    fp8: bool

    def us(self, card: Hardware) -> float:
        """Roofline time: the slower of products at the dense peak and bytes at the memory's peak."""
        tflops = card.fp8_tflops if self.fp8 else card.bf16_tflops
        return max(self.work.flops / (tflops * 1e6), self.work.bytes / (card.hbm_gbps * 1e3))


def parts_of_row(rank: ModelSpec, category: Category, name: str, key: Key, weights: str) -> tuple[Part, ...]:
    """What a row of any table works on: the kernel itself, or the kernels of a module.

    rank: the model with per-rank widths (profiler.sweep.rank_spec). Kernels without a known amount of work are left
    out. key: the row's key columns after its name.
    """
    kinds = module_kinds(rank)
    if category == "attention" and name in kinds:
        return tuple(_module_parts(module_parts(rank, kinds[name]), rank, key, weights))
    found = work_of(rank, category, name, key, weights)
    return () if found is None else (Part(name, found, runs_fp8(rank, name, weights)),)


def _module_parts(components: Iterable[Component], rank: ModelSpec, key: Key, weights: str) -> Iterable[Part]:
    chunk, context, requests, keys, queries = key
    for one in components:
        if one.when == "prefill_dense" or (one.when == "decode" and chunk):
            continue
        own = (chunk + requests * queries,) if one.category == "dense" else (chunk, context, requests, keys, queries)
        if (found := work_of(rank, one.category, one.name, own, weights)) is not None:
            yield Part(one.name, found, runs_fp8(rank, one.name, weights))


def runs_fp8(rank: ModelSpec, name: str, weights: str) -> bool:
    """True where a kernel multiplies at the fp8 rate."""
    if name in _ALWAYS_FP8:
        return True
    if name in _TWO_BYTE or name in UNQUANTIZED or WEIGHT_BYTES[weights] > 1:
        return False
    return name == "experts" or matrix(rank, name) is not None


def roofline_us(parts: Iterable[Part], card: Hardware) -> float:
    """Sum of the parts' roofline times, since they run one after another."""
    return sum(part.us(card) for part in parts)


def module_flops(rank: ModelSpec, name: str, key: Key, weights: str) -> float:
    return sum(part.work.flops for part in parts_of_row(rank, "attention", name, key, weights))


def by_kernel(parts: Iterable[Part], card: Hardware) -> Mapping[str, float]:
    """Roofline microseconds of each part."""
    return {part.name: part.us(card) for part in parts}
