"""Two bundles of one model against each other: the ratio of every kernel at every shape that both answer for.

Shapes are the rows of the first bundle; the second is read there, on its own grid and never beyond it. A bundle with
one row per attention module is compared with one of kernels by summing the kernels of the module, as a step runs them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from profiler.core.bundle import Bundle, Table
from profiler.core.errors import ConfigError, CoverageError
from profiler.core.grid import Curve, Grid, Outside, batch_rows, curve
from profiler.core.grid_moe import moe_grid
from profiler.core.modules import granularity, module_kinds, module_parts
from profiler.core.registry import load_model
from profiler.core.siblings import same_kernels
from profiler.core.types import Category, ModelSpec
from profiler.kernels._placement import decode_lookup, prefill_lookup, ran_of
from profiler.timing import percentile

_ATTENTION_LIKE: tuple[Category, ...] = ("attention", "indexer", "sparse_attention")
_ONE_COORDINATE: tuple[Category, ...] = ("dense", "per_sequence")

Key = tuple[int, ...]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ratio:
    """One shape of one kernel. key: the table's key columns after the name. ratio = second / first."""

    tp: int
    category: Category
    kernel: str
    key: tuple[float, ...]
    first_us: float
    second_us: float

    @property
    def ratio(self) -> float:
        return self.second_us / self.first_us

    @property
    def phase(self) -> str:
        if self.category not in _ATTENTION_LIKE:
            return "all"
        return "prefill" if self.key[0] and not self.key[2] else "decode" if not self.key[0] else "mixed"


@dataclass(frozen=True, slots=True)
class Summary:
    """Ratios of one kernel and phase: percentiles over shapes, and of the summed times."""

    tp: int
    category: Category
    kernel: str
    phase: str
    shapes: int
    p10: float
    p50: float
    p90: float
    of_sums: float


@dataclass
class Lookup:
    """Microseconds of any kernel of one bundle at one tensor-parallel degree; None where the bundle has no answer."""

    bundle: Bundle
    spec: ModelSpec
    tp: int
    _curves: dict[tuple[Category, str], Curve | None] = field(default_factory=dict)
    _grids: dict[tuple[Category, str], tuple[Grid | None, Grid | None]] = field(default_factory=dict)
    _experts: dict[tuple[str, int], Grid | None] = field(default_factory=dict)

    def at(self, category: Category, name: str, key: Sequence[float]) -> float | None:
        """key: the key columns of the category after the name."""
        if category == "attention" and granularity(self.bundle.meta) == "kernel" and name in module_kinds(self.spec):
            return self._module(name, tuple(int(part) for part in key))
        if category in _ONE_COORDINATE:
            return self._curve(category, name, key[0])
        if category in _ATTENTION_LIKE:
            return self._batch(category, name, key)
        return self._moe(name, key) if category == "moe" else None

    def _curve(self, category: Category, name: str, x: float) -> float | None:
        if (category, name) not in self._curves:
            self._curves[category, name] = self._made(category, lambda table, out: curve(table, name, out), name)
        return _answer(lambda one: one.at(x), self._curves[category, name])

    def _batch(self, category: Category, name: str, key: Sequence[float]) -> float | None:
        chunk, context, requests, kv, query = key
        if (chunk and requests) or query > 1:
            return None
        if (category, name) not in self._grids:
            rows = self._made(category, lambda table, out: batch_rows(table, name), name) or []
            out = Outside(name, "-")
            ran = ran_of(self.bundle.meta, self.spec, self.tp)
            self._grids[category, name] = (
                _made_or_none(lambda: prefill_lookup(rows, name, self.spec, ran, out)),
                _made_or_none(lambda: decode_lookup(rows, name, ran, out)),
            )
        prefill, decode = self._grids[category, name]
        if chunk:
            return _answer(lambda grid: grid.at(chunk, context), prefill)
        return _answer(lambda grid: grid.at(requests, kv), decode)

    def _moe(self, name: str, key: Sequence[float]) -> float | None:
        ep, _, experts, pairs = key
        moe = self.spec.moe
        if moe is None:
            return None
        if (name, int(ep)) not in self._experts:
            local = moe.num_experts // int(ep)
            self._experts[name, int(ep)] = self._made(
                "moe", lambda table, out: moe_grid(table, name, int(ep), local, out), name
            )
        return _answer(lambda grid: grid.at(pairs, experts), self._experts[name, int(ep)])

    def _made(self, category: Category, make: Callable[[Table, Outside], _T], name: str) -> _T | None:
        table = self.bundle.tables.get((self.tp, category))
        return None if table is None else _made_or_none(lambda: make(table, Outside(name, "-")))

    def _module(self, name: str, key: Key) -> float | None:
        """The sum of a module's kernels in a step of this one batch."""
        parts = self.module_parts(name, key)
        return None if None in parts.values() else sum(us for us in parts.values() if us is not None)

    def module_parts(self, name: str, key: Key) -> dict[str, float | None]:
        """Microseconds of each kernel of a module; None for one that the bundle does not answer for."""
        chunk, context, requests, _, query = key
        dense, selects = self._dense_prefill(chunk, context)
        found: dict[str, float | None] = {}
        for one in module_parts(self.spec, module_kinds(self.spec)[name]):
            if one.when == "decode" and chunk:
                continue
            if dense:
                skipped = one.when == "prefill_sparse" or one.category == "sparse_attention"
                skipped |= one.category == "indexer" and not selects
            else:
                skipped = one.when == "prefill_dense"
            if skipped:
                continue
            own: Sequence[float] = key if one.category in _ATTENTION_LIKE else (chunk + requests * query,)
            found[one.name] = self.at(one.category, one.name, own)
        return found

    def _dense_prefill(self, chunk: int, context: int) -> tuple[bool, bool]:
        """(every key is attended instead of a selection, the selection is made all the same), as the engine did."""
        seen = ((self.bundle.meta.get("grid") or {}).get(f"tp{self.tp}/attention") or {}).get("dense_prefill")
        if not seen or self.spec.indexer is None:
            return False, True
        dense = chunk > int(seen["longer_than_tokens"]) and chunk + context <= self.spec.indexer.attended_cap_tokens
        return dense, bool(seen["selects"])


def _made_or_none(make: Callable[[], _T]) -> _T | None:
    try:
        return make()
    except CoverageError:
        return None


def _answer(read: Callable[[_T], float], source: _T | None) -> float | None:
    if source is None:
        return None
    found = source
    return _made_or_none(lambda: read(found))


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def compare(first: Bundle, second: Bundle, spec: ModelSpec, tps: Sequence[int] | None = None) -> list[Ratio]:
    """Ratios at the shapes of `first` that `second` answers for, in table order; at equal tensor-parallel degrees.

    Where one bundle has modules and the other kernels, the modules' shapes are taken, whichever of the two has them.
    Raises ConfigError when the models differ or no degree is common, CoverageError when no shape is.
    """
    if first.meta["model"] != second.meta["model"] and not _one_serves_the_other(first, second):
        raise ConfigError(f"two models: {first.meta['model']} and {second.meta['model']}")
    common = [tp for tp in first.tps if tp in second.tps and (tps is None or tp in tps)]
    if not common:
        asked = "" if tps is None else f"--tp {_numbers(tps)}: "
        both = _numbers([tp for tp in first.tps if tp in second.tps])
        raise ConfigError(
            f"{asked}no degree of both; {first.path} has tp {_numbers(first.tps)}, {second.path} tp "
            f"{_numbers(second.tps)}, in common: {both or 'none'}"
        )
    swapped = granularity(first.meta) == "kernel" and granularity(second.meta) == "module"
    shapes, other = (second, first) if swapped else (first, second)
    found = [ratio for tp in common for ratio in _ratios(shapes, other, spec, tp)]
    if not found:
        raise CoverageError(f"{first.path} and {second.path} have no shape of a kernel in common")
    return [_turned(ratio) for ratio in found] if swapped else found


def _one_serves_the_other(first: Bundle, second: Bundle) -> bool:
    a, b = (load_model(str(bundle.meta["model"])) for bundle in (first, second))
    return same_kernels(a, b) or same_kernels(b, a)


def _ratios(shapes: Bundle, other: Bundle, spec: ModelSpec, tp: int) -> Iterator[Ratio]:
    lookup = Lookup(other, spec, tp)
    for (degree, category), table in sorted(shapes.tables.items()):
        if degree != tp or category == "skew":
            continue
        for row in table.rows():
            name, *key, time, _ = row
            values = tuple(float(part) for part in key)
            us = lookup.at(category, str(name), values)
            if us is not None and us > 0:
                yield Ratio(tp, category, str(name), values, float(time), us)


def _turned(ratio: Ratio) -> Ratio:
    return Ratio(ratio.tp, ratio.category, ratio.kernel, ratio.key, ratio.second_us, ratio.first_us)


def summarise(ratios: Sequence[Ratio]) -> list[Summary]:
    """One line per tp, kernel and phase, in the order of first appearance."""
    groups: dict[tuple[int, Category, str, str], list[Ratio]] = {}
    for one in ratios:
        groups.setdefault((one.tp, one.category, one.kernel, one.phase), []).append(one)
    return [
        Summary(
            *key,
            shapes=len(found),
            p10=percentile([one.ratio for one in found], 10),
            p50=percentile([one.ratio for one in found], 50),
            p90=percentile([one.ratio for one in found], 90),
            of_sums=math.fsum(one.second_us for one in found) / math.fsum(one.first_us for one in found),
        )
        for key, found in groups.items()
    ]
