"""Figures of a trace, gathered in one pass."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from profiler.core.units import NS_PER_S
from serving.content import Keys
from serving.core.runlog import percentile
from serving.traces import TraceRequest

SELECTION_TOKENS: Final = 2048
_PERCENTS: Final = (50, 90, 95, 99)


def summarise(requests: Iterable[TraceRequest], block_tokens: int | None = None) -> dict[str, Any]:
    """Totals, rates, percentiles and the most that a prefix cache could save.

    block_tokens: of the prefix cache; None for the trace's own hash blocks, 64 where it has token ids instead.
    Rates are over the time between the first and the last arrival. share_within_topk counts requests of at most 2,048
    tokens, of which sparse attention over 2,048 selected tokens reads all. The hits are those of a cache without limit
    to which requests come in file order: a block hits when it and all blocks before it were in a request above; its
    tokens are cut to the prompt (a server computes at least one of them again).
    """
    prompts, outputs, totals = Counter[int](), Counter[int](), Counter[int]()
    arrivals = _Arrivals()
    prefixes = _Prefixes(block_tokens)
    sessions: set[str] = set()
    calls = 0
    for request in requests:
        prompts[request.prompt_tokens] += 1
        outputs[request.output_tokens] += 1
        totals[request.prompt_tokens + request.output_tokens] += 1
        if request.session_id is not None:
            sessions.add(request.session_id)
        calls += request.call_index is not None
        if not request.call_index:
            arrivals.add(request.arrival_ns)
        prefixes.add(request)
    return {
        "requests": prompts.total(),
        "sessions": len(sessions),
        "session_calls": calls,
        "arrivals": arrivals.figures(_sum(prompts), _sum(outputs), prompts.total(), calls),
        "prompt_tokens": _figures(prompts),
        "output_tokens": _figures(outputs),
        "total_tokens": _figures(totals),
        "share_within_topk": {
            "topk_tokens": SELECTION_TOKENS,
            "prompt": _share(prompts, SELECTION_TOKENS),
            "prompt_and_output": _share(totals, SELECTION_TOKENS),
        },
        "prefix_hits": prefixes.figures(_sum(prompts)),
    }


def _sum(counts: Counter[int]) -> int:
    return sum(value * times for value, times in counts.items())


def _share(counts: Counter[int], most: int) -> float:
    return sum(times for value, times in counts.items() if value <= most) / counts.total()


def _figures(counts: Counter[int]) -> dict[str, Any]:
    total = _sum(counts)
    return {
        "sum": total,
        "mean": total / counts.total(),
        "min": min(counts),
        **{f"p{percent}": percentile(counts, percent) for percent in _PERCENTS},
        "max": max(counts),
    }


class _Arrivals:
    """Arrivals one by one: first, last, and the moments of the gaps."""

    def __init__(self) -> None:
        self.count = 0
        self.first_ns = self.last_ns = 0
        self.gap_squares = 0
        self.same = self.most_at_once = 0

    def add(self, arrival_ns: int) -> None:
        if not self.count:
            self.first_ns = self.last_ns = arrival_ns
        gap = arrival_ns - self.last_ns
        self.gap_squares += gap * gap
        self.same = self.same + 1 if not gap else 1
        self.most_at_once = max(self.most_at_once, self.same)
        self.last_ns = arrival_ns
        self.count += 1

    def figures(self, prompt_tokens: int, output_tokens: int, requests: int, calls: int) -> dict[str, Any]:
        span_ns = self.last_ns - self.first_ns
        span_s = span_ns / NS_PER_S

        def rate(amount: int) -> float | None:
            return amount / span_s if span_ns else None

        spread = None
        if span_ns:
            mean = span_ns / (self.count - 1)
            spread = math.sqrt(max(0.0, self.gap_squares / (self.count - 1) - mean * mean)) / mean
        return {
            "first_ns": self.first_ns,
            "last_ns": self.last_ns,
            "span_s": span_s,
            "arrivals_per_s": rate(self.count - 1),
            "requests_per_s": rate(requests) if not calls else None,
            "prompt_tokens_per_s": rate(prompt_tokens) if not calls else None,
            "output_tokens_per_s": rate(output_tokens) if not calls else None,
            "gap_coefficient_of_variation": spread,
            "most_at_one_time": self.most_at_once,
        }


class _Prefixes:
    """What an unlimited prefix cache would have held of each prompt."""

    def __init__(self, block_tokens: int | None) -> None:
        self.block_tokens = block_tokens
        self.keys: Keys | None = None
        self.seen: set[int] = set()
        self.told = self.blocks = self.hit_blocks = self.hit_tokens = 0

    def add(self, request: TraceRequest) -> None:
        if request.prefix is None and request.prompt_ids is None:
            return
        if self.keys is None:
            own = request.prefix.block_tokens if request.prefix else 64
            self.block_tokens = self.block_tokens or own
            self.keys = Keys(self.block_tokens)
        assert self.block_tokens is not None
        self.told += 1
        keys = self.keys.of_prompt(request)
        hits = next((place for place, key in enumerate(keys) if key not in self.seen), len(keys))
        self.blocks += len(keys)
        self.hit_blocks += hits
        self.hit_tokens += min(hits * self.block_tokens, request.prompt_tokens)
        self.seen.update(keys)
        self.seen.update(self.keys.of(request))

    def figures(self, prompt_tokens: int) -> dict[str, Any] | None:
        if not self.told:
            return None
        return {
            "block_tokens": self.block_tokens,
            "requests_with_content": self.told,
            "blocks": self.blocks,
            "unique_blocks": len(self.seen),
            "hit_blocks": self.hit_blocks,
            "hit_tokens": self.hit_tokens,
            "share_of_prompt_tokens": self.hit_tokens / prompt_tokens,
        }
