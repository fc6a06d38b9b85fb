"""From a model and its limits to the list of shots that an engine runs."""

import importlib
import math
import pkgutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol, cast

from profiler.core.errors import ConfigError, unknown
from profiler.core.shard import geometry
from profiler.core.shots import Fill, Key, Shot
from profiler.core.types import Category, ModelSpec, Parallel
from profiler.kernels._axes import CONTAINS, Limits
from profiler.kernels._components import components_of
from profiler.kernels._work import Work


class CategoryModule(Protocol):
    """What a module of profiler/kernels offers."""

    CATEGORY: Category
    UNITS: Mapping[str, str]
    DRIVERS: tuple[str, ...]

    def kv_cap_tokens(self, spec: ModelSpec) -> int | None: ...

    def shots(self, spec: ModelSpec, limits: Limits) -> list[Shot]: ...

    def work(self, spec: ModelSpec, name: str, key: tuple[int, ...], weights: str) -> Work | None: ...


_PACKAGE: Final = "profiler.kernels"


def category_modules() -> dict[str, CategoryModule]:
    """Every category by its name, found by listing the folder."""
    package = importlib.import_module(_PACKAGE)
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))
    modules = (cast(CategoryModule, importlib.import_module(f"{_PACKAGE}.{name}")) for name in names)
    return {module.CATEGORY: module for module in modules}


def choose_categories(
    spec: ModelSpec, asked: Sequence[str] | None, tp: int, skip_skew: bool = False
) -> tuple[Category, ...]:
    """The categories to measure: those asked for, or all that the model has at this degree.

    Raises ConfigError for an unknown category, one that the model has no component of, and experts at tp above 1.
    """
    modules = category_modules()
    present = [c for c in modules if components_of(spec, cast(Category, c))]
    if asked is None:
        left_out = {"moe"} if tp != 1 else set()
        left_out |= {"skew"} if skip_skew else set()
        return tuple(cast(Category, c) for c in present if c not in left_out)
    for name in asked:
        if name not in modules:
            raise unknown("category", name, modules)
        if name not in present:
            raise ConfigError(f"{spec.name} runs no kernels of category {name!r}; it has {', '.join(present)}")
        if name == "moe" and tp != 1:
            raise ConfigError(
                f"category 'moe' is measured with whole experts, at --tp 1 only, not at {tp}; experts divided over "
                f"{tp} ranks come with the passes of --categories dense"
            )
    return tuple(cast(Category, c) for c in modules if c in asked)


def plan(spec: ModelSpec, limits: Limits, categories: Iterable[Category]) -> dict[Category, list[Shot]]:
    """Shots per category, each shot for that category alone. `spec` is the whole model.

    Sparse attention shares its batches with the indexer; without that one it has fewer of them, since it reads no more
    keys beyond its cap.
    """
    modules = category_modules()
    found = {category: modules[category].shots(spec, limits) for category in categories}
    if "sparse_attention" in found and "indexer" not in found:
        cap = modules["sparse_attention"].kv_cap_tokens(spec)
        found["sparse_attention"] = few_beyond(found["sparse_attention"], cap) if cap else found["sparse_attention"]
    return found


def few_beyond(shots: Iterable[Shot], cap: int) -> list[Shot]:
    """Shots of one table of batches with only a few points beyond `cap` keys on each line along them: one key more, the
    first of 8 caps, the first of 32, the last."""
    lines: dict[tuple[int, int], dict[int, Shot]] = {}
    for shot in shots:
        chunk, context, requests, keys, _ = (int(value) for value in shot.fills[0].key)
        lines.setdefault((chunk, requests), {})[context if chunk else keys] = shot
    kept: list[Shot] = []
    for line in lines.values():
        beyond = sorted(at for at in line if at > cap)
        wanted = {min((at for at in beyond if at >= least), default=0) for least in (8 * cap, 32 * cap)}
        wanted |= {cap + 1, *beyond[-1:]}
        kept += [shot for at, shot in line.items() if at <= cap or at in wanted]
    return kept


def shared_categories(spec: ModelSpec, tps: Iterable[int]) -> tuple[Category, ...]:
    """Categories whose kernels do the same work on a rank at every one of these degrees, so that one is enough.

    That is the indexer of DSA, whose heads tensor parallelism does not divide.
    """
    if spec.indexer is None or any(rank_spec(spec, tp).indexer != spec.indexer for tp in tps):
        return ()
    return ("indexer",)


def merge(shots: Iterable[Shot], before_others: Collection[Shot] = ()) -> list[Shot]:
    """Shots with equal batches become one that fills all their tables; cheap ones first, expert shots last.

    For engines that run the whole stack: one forward pass then serves several categories. before_others: batches
    (`batch_of`) that come before every other forward pass.
    """
    fills: dict[Shot, list[Fill]] = {}
    for shot in shots:
        fills.setdefault(replace(shot, fills=()), []).extend(shot.fills)
    merged = [replace(batch, fills=tuple(dict.fromkeys(found))) for batch, found in fills.items()]
    later = {shot: batch_of(shot, True) not in before_others for shot in merged}
    return sorted(
        merged, key=lambda s: (s.moe is not None, later[s], s.moe.ep if s.moe else 0, s.new_tokens, s.kv_tokens)
    )


def contained(spec: ModelSpec, limits: Limits, categories: Iterable[Category]) -> frozenset[Shot]:
    """Batches (`batch_of`) of the grid that the one of `limits` contains, at the same limits; none where there is none.

    Whole tables come from these alone.
    """
    if limits.grid not in CONTAINS:
        return frozenset()
    coarser = plan(spec, replace(limits, grid=CONTAINS[limits.grid]), categories)
    return frozenset(batch_of(shot, True) for shots in coarser.values() for shot in shots)


def batch_of(shot: Shot, whole_forward: bool) -> Shot:
    """What decides that two shots run the same: the batch alone where one pass serves every table."""
    return replace(shot, fills=()) if whole_forward else shot


def kv_blocks_tokens(shot: Shot, block_tokens: int) -> int:
    """KV tokens that a shot occupies when every request holds whole blocks."""
    return sum(math.ceil((new + context) / block_tokens) * block_tokens for new, context in shot.requests)


def split_by_memory(shots: Iterable[Shot], kv_tokens: int | None, block_tokens: int) -> tuple[list[Shot], list[Shot]]:
    """(shots whose KV fits into `kv_tokens`, the others). None means no limit."""
    kept: list[Shot] = []
    left_out: list[Shot] = []
    for shot in shots:
        fits = kv_tokens is None or kv_blocks_tokens(shot, block_tokens) <= kv_tokens
        (kept if fits else left_out).append(shot)
    return kept, left_out


def split_by_prefills(shots: Iterable[Shot], most: int | None) -> tuple[list[Shot], list[Shot]]:
    """(shots with at most `most` prefills in their step, the others). None means no limit."""
    kept: list[Shot] = []
    left_out: list[Shot] = []
    for shot in shots:
        prefills = sum(new > 1 or not context for new, context in shot.requests)
        (kept if most is None or prefills <= most else left_out).append(shot)
    return kept, left_out


def work_of(spec: ModelSpec, category: Category, name: str, key: Key, weights: str) -> Work | None:
    """Least work of one cell; `spec` has per-rank widths. None for cells whose key is not all numbers."""
    numbers = tuple(value for value in key if isinstance(value, int))
    return category_modules()[category].work(spec, name, numbers, weights) if len(numbers) == len(key) else None


def rank_spec(spec: ModelSpec, tp: int, expert_ranks: int = 1) -> ModelSpec:
    """The model with the widths of one of tp ranks, the shared experts as a single one.

    expert_ranks: ranks that share each routed expert: 1 under expert parallelism, else all of the group
    (profiler.core.shard.moe_tensor_parallel). Raises ConfigError naming what tp does not divide
    (profiler.core.shard.geometry).
    """
    widths = geometry(spec, Parallel(tp=tp, ep=tp if spec.moe else 1))
    gqa, indexer, moe = spec.gqa, spec.indexer, spec.moe
    if gqa is not None:
        gqa = replace(gqa, num_kv_heads=widths.kv_heads)
    if indexer is not None:
        indexer = replace(indexer, num_heads=widths.index_heads)
    if moe is not None:
        moe = replace(
            moe,
            num_shared_experts=1,
            shared_intermediate=widths.shared_intermediate,
            intermediate=moe.intermediate // expert_ranks,
        )
    return replace(
        spec,
        num_heads=widths.heads,
        intermediate=widths.intermediate,
        vocab=widths.vocab,
        gqa=gqa,
        indexer=indexer,
        moe=moe,
    )
