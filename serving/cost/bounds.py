"""Least times of a step's lines: rooflines of kernels on one rank, and collectives at the peak of their links."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from profiler.core.even_load import activated_experts, local_pairs
from profiler.core.hardware import Hardware
from profiler.core.modules import fold_for
from profiler.core.shard import moe_tensor_parallel
from profiler.core.types import Component, ModelSpec, Parallel
from profiler.kernels._work import Work
from profiler.module_work import Part, parts_of_row
from profiler.sweep import rank_spec
from serving.backends import Sends
from serving.collectives import Collectives, Tier
from serving.core.shape import StepShape
from serving.cost.build import spread
from serving.cost.communication import Communication
from serving.cost.pipeline import stage_sends
from serving.cost.step import TableCost

# Which cache a kernel reads. Dense prefill of latents is counted in two bytes already.
_READS: Final = {
    **dict.fromkeys(("attention", "sparse_mla", "sparse_gqa"), "main"),
    **dict.fromkeys(("index_scores", "block_scores"), "index"),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Rooflines of one model on one split. meta: of the bundle that priced the step."""

    spec: ModelSpec
    parallel: Parallel
    hardware: Hardware
    meta: Any
    sends: Sends = "gather"
    reach: float = 1.0

    def by_component(self, cost: TableCost, shapes: Sequence[StepShape | None], rank: int) -> dict[str, float]:
        """Least microseconds of one call of each component, for the step that `rank` is the slowest rank of.

        Kernels: products at the dense peak of their operands' format or bytes at the memory's peak, whichever is
        longer, padding included. Components whose work is not known are left out.
        """
        tokens, shape = cost.computed_tokens(shapes), shapes[rank]
        group, own = sum(tokens), tokens[rank]
        dense_tokens, launches = cost.launches(shape) if shape else (0, [])
        rows = {kernel.name: list(prefills) for kernel, prefills in launches}
        found: dict[str, float] = {}
        for one, _ in fold_for(self.spec, self.meta).components:
            keys = self._keys(one, own, dense_tokens, group, shape, rows)
            parts = [part for key in keys for part in self._parts(one, key)]
            if parts:
                found[one.name] = sum(part.us(self.hardware) for part in parts)
        return found | self._collectives(own, group, shape)

    def _keys(
        self,
        one: Component,
        tokens: int,
        dense_tokens: int,
        group: int,
        shape: StepShape | None,
        rows: dict[str, list[tuple[int, int]]],
    ) -> list[tuple[float, ...]]:
        """The cells whose work adds up to one call."""
        if one.category == "dense":
            return [(tokens - dense_tokens if one.when == "prefill_sparse" else tokens,)]
        if one.category == "per_sequence":
            return [(shape.sampled_sequences if shape else 0,)]
        if one.category == "moe":
            moe, ep = self.spec.moe, self.parallel.ep
            assert moe is not None
            return [(ep, group, activated_experts(moe, ep, group), local_pairs(moe, ep, group))]
        if shape is None or one.name not in rows:
            return []
        keys: list[tuple[float, ...]] = [(chunk, context, 0, 0, 0) for chunk, context in rows[one.name]]
        if shape.decode_requests and one.when in ("always", "decode"):
            keys.append((0, 0, shape.decode_requests, shape.decode_kv_sum_tokens / shape.decode_requests, 1))
        return keys

    def _parts(self, one: Component, key: tuple[float, ...]) -> tuple[Part, ...]:
        rank = rank_spec(self.spec, self.parallel.tp, moe_tensor_parallel(self.parallel))
        whole = tuple(int(value) if float(value).is_integer() else round(value) for value in key)
        parts = parts_of_row(rank, one.category, one.name, whole, str(self.meta["weights"]))
        return tuple(replace(part, work=self._as_stored(part)) for part in parts)

    def _as_stored(self, part: Part) -> Work:
        """The work with cached elements of as many bytes as the bundle's caches have; tables count one."""
        if (cache := _READS.get(part.name)) is None:
            return part.work
        name, elements = _elements(self.spec, cache)
        stored = {one["name"]: one["bytes_per_token_layer"] for one in self.meta["kv"]["caches"]}
        return replace(part.work, activation_bytes=part.work.activation_bytes * stored.get(name, elements) / elements)

    def stage_sends(self, tokens: int, stage: int) -> dict[str, float]:
        """Least microseconds of one call of each transfer behind a pipeline stage, for the tokens of a rank."""
        ideal = self._ideal()
        if ideal.inter is None and self.parallel.gpus > ideal.gpus_per_node:
            return {}
        sent = stage_sends(self.spec, self.parallel, ideal)[stage].lines(tokens)
        return {entry.component: entry.us / entry.calls for entry in sent}

    def _ideal(self) -> Collectives:
        """The links at their peaks."""
        links = self.hardware.links
        inter = links.get("inter_node")
        peaks = [
            Tier(link.bandwidth_gbps, link.bandwidth_gbps, 0.0, 0.0, 0.0)
            for link in (links["intra_node"], inter)
            if link
        ]
        return Collectives(peaks[0], peaks[1] if inter else None, self.hardware.gpus_per_node)

    def _collectives(self, tokens: int, group: int, shape: StepShape | None) -> dict[str, float]:
        """The bytes of each collective at the peak of its link, without any latency."""
        ideal = self._ideal()
        between = spread(ideal, self.parallel)
        comm = Communication(self.spec, self.parallel, ideal, self.sends, self.reach, between_experts=between)
        lines = comm.tensor_lines(tokens) + comm.expert_lines(group)
        lines += comm.head_lines(shape.sampled_sequences if shape else 0)
        return {entry.component: entry.us / entry.calls for entry in lines}


def _elements(spec: ModelSpec, cache: str) -> tuple[str, int]:
    """(name in meta.yaml, elements of a token and layer) of the main or the index cache, all heads."""
    if cache == "index":
        return "index_keys", spec.indexer.head_dim if spec.indexer else 1
    if spec.mla is not None:
        return "mla_latent", spec.mla.latent_dim
    return "gqa_kv", 2 * spec.gqa.num_kv_heads * spec.gqa.head_dim if spec.gqa else 1


def calls_by_part(spec: ModelSpec, meta: Any) -> dict[str, dict[str, int]]:
    """Calls of each component per part of the model: OUTSIDE, then each layer kind with its number of layers."""
    outside = {one.name: n for one, n in fold_for(replace(spec, layers=()), meta).components}
    parts = {OUTSIDE: outside}
    for kind in spec.kinds:
        alone = fold_for(replace(spec, layers=(kind,)), meta).components
        own = {one.name: (n - outside.get(one.name, 0)) * spec.count(kind) for one, n in alone}
        parts[f"{spec.count(kind)} x {kind.name}"] = {name: calls for name, calls in own.items() if calls}
    return parts


OUTSIDE = "outside the layers"
