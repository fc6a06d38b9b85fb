"""Attention-like kernels: their price for the requests of one rank's batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from profiler.core.grid import Grid
from profiler.core.grid_mixed import MixedGrid
from profiler.core.launch import Captured, JointLaunch, Passes, Prefill, Tiles
from profiler.core.unequal import Beside, Skew, Together, beyond_fixed_us
from serving.core.shape import StepShape

PrefillWhen = Literal["always", "dense", "sparse", "selection", "never"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel with its own tables and `count` calls per step.

    A step launches the kernel once for all its prefills, so the fixed part counts once, and the rest adds up, each
    request by itself or, with `together`, as its share of a longer chunk or by the tiles of all. Decode requests are
    priced at their number and their mean keys. mixed: the kernel runs prefill and decode rows in one launch that was
    measured as such; then the longest prefill is priced together with the decode rows. skew: correction for decode rows
    of unequal lengths (profiler.core.unequal has both forms). fixed_us: see profiler.core.grid.fixed_us. cap_tokens:
    most keys that it reads of each request, 0 for all. prefill_when: the steps in which it takes prefill rows. beside:
    what prefills add to decodes where other kernels run them than alone; a single new token is then one more decode.
    launch: decodes and prefills of one launch, and the least that these take. captured: for engines that capture whole
    decode steps; in steps of at most as many tokens decodes are split as alone, and no such least time holds.
    """

    name: str
    count: int
    prefill: Grid | None
    decode: Grid | None
    mixed: MixedGrid | None
    skew: Skew | None
    together: Together | Tiles | Passes | None
    fixed_us: float
    cap_tokens: int
    prefill_when: PrefillWhen
    provenance: str
    beside: Beside | None = None
    launch: JointLaunch | None = None
    captured: Captured | None = None
    _skewed: dict[int, tuple[float, int | None]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def us(self, shape: StepShape, prefills: Sequence[Prefill]) -> float:
        """Microseconds of one call. `prefills` are the requests whose prefill rows this kernel runs."""
        decodes = shape.decode_requests if self.decode is not None else 0
        if not decodes:
            return self._prefills(prefills) if prefills else 0.0
        if self.beside is not None and prefills:
            return self._beside(self.beside, shape, prefills)
        cap = self.cap_tokens
        longest: float = shape.decode_kv_max_tokens
        if cap:
            keys = shape.decode_kv_capped_sum_tokens / decodes
            longest = min(longest, cap)
        else:
            keys = shape.decode_kv_sum_tokens / decodes
        if not prefills:
            if self.captured is not None and not shape.prefills:
                assert self.decode is not None
                keys = self.captured.keys_of(self.decode, decodes, keys)
                longest = self.captured.keys_of(self.decode, decodes, longest)
            return self._decode(decodes, keys, longest)
        if self.mixed is None:
            alone = self._decode(decodes, keys, longest)
            own = self._prefills(prefills)
            if self.launch is None:
                return alone + own
            added = self.launch.added_us(alone, own)
            if self.captured is not None and shape.tokens <= self.captured.tokens:
                return added
            return max(added, self.launch.us(alone, decodes, keys, longest, prefills))
        first = max(prefills, key=causal_work)
        rest = list(prefills)
        rest.remove(first)
        return self._mixed(first, decodes, keys, longest) + self._beyond_fixed(rest)

    def decodes_us(self, requests: int, keys_sum: int, longest: int, capped_sum: int) -> float:
        """What `us` says of a batch of decodes alone, in one function for the many ranks of a group."""
        grid, cap, skew = self.decode, self.cap_tokens, self.skew
        if grid is None or not requests:
            return 0.0
        keys = (capped_sum if cap else keys_sum) / requests
        most: float = min(longest, cap) if cap else longest
        if self.captured is not None:
            keys, most = (self.captured.keys_of(grid, requests, one) for one in (keys, most))
        mean = grid.at(requests, keys)
        if skew is None or most <= keys:
            return mean
        known = self._skewed.get(requests)
        if known is None:
            known = self._skewed[requests] = skew.decode(requests), skew.beside(requests)
        alpha, few = known
        if not alpha:
            return mean
        if few is None:
            return mean + alpha * (grid.at(requests, most) - mean)
        return mean + alpha * max(0.0, grid.at(few, most) - mean)

    def _beside(self, beside: Beside, shape: StepShape, prefills: Sequence[Prefill]) -> float:
        cap = self.cap_tokens
        single = [min(context + 1, cap) if cap else context + 1 for chunk, context in prefills if chunk == 1]
        own = shape.decode_kv_max_tokens
        longest = max(min(own, cap) if cap else own, *single, 0)
        keys = (shape.decode_kv_capped_sum_tokens if cap else shape.decode_kv_sum_tokens) + sum(single)
        requests = shape.decode_requests + len(single)
        decodes = self._decode(requests, keys / requests, longest)
        rest = [prefill for prefill in prefills if prefill[0] > 1]
        return decodes + beside.us(rest) if rest else decodes

    def _prefills(self, prefills: Sequence[Prefill]) -> float:
        assert self.prefill is not None
        if len(prefills) == 1:
            return self.prefill.at(*prefills[0])
        return self.fixed_us + self._beyond_fixed(prefills)

    def _beyond_fixed(self, prefills: Sequence[Prefill]) -> float:
        assert self.prefill is not None
        return beyond_fixed_us(self.prefill, self.fixed_us, self.together, prefills)

    def _decode(self, requests: int, keys: float, longest: float) -> float:
        assert self.decode is not None
        if self.skew is None or longest <= keys:
            return self.decode.at(requests, keys)
        return self.skew.decode_us(self.decode, requests, keys, longest)

    def _mixed(self, prefill: Prefill, requests: int, keys: float, longest: float) -> float:
        assert self.mixed is not None
        chunk, context = prefill
        mean = self.mixed.at(chunk, context, requests, keys)
        if self.skew is None or longest <= keys:
            return mean
        alpha = self.skew.mixed(chunk, requests)
        return mean + alpha * (self.mixed.at(chunk, context, requests, longest) - mean) if alpha else mean


def causal_work(prefill: Prefill) -> int:
    """Twice the query-key pairs of a prefill: 2 (chunk x context + chunk^2 / 2)."""
    chunk, context = prefill
    return chunk * (2 * context + chunk)
