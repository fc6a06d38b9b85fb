"""The state of a replay at regular ticks: requests running and waiting, KV use, and throughput since the tick before.

Ticks count from the first arrival. A tick shows the engines after everything that happened up to it. Throughput is as
an engine's own log counts it: the prompt tokens of the requests whose first token came since the tick before, and the
tokens emitted since then, per second.
"""

import csv
from collections.abc import Sequence
from typing import IO, Final

from profiler.core.errors import ConfigError
from profiler.core.units import NS_PER_S
from serving.result import Result
from serving.watch import WatchedGroup

COLUMNS: Final = (
    "time_s", "instance_id", "running", "waiting", "kv_usage", "prompt_tokens_per_s", "output_tokens_per_s",
)  # fmt: skip
MAX_TICKS: Final = 1_000_000


class Sampler:
    """Watches a replay (serving.watch.Watch). tick_ns: time between two ticks, at least 1."""

    def __init__(self, tick_ns: int) -> None:
        self.tick_ns = tick_ns
        self.origin_ns = 0
        self.ticks: list[list[tuple[int, int, float]]] = []
        self._groups: Sequence[WatchedGroup] = ()
        self._next_ns = -1

    def open(self, groups: Sequence[WatchedGroup]) -> None:
        self._groups = groups

    def advance(self, now_ns: int) -> None:
        """Called before what happens at `now_ns`. Raises ConfigError when the run has more ticks than MAX_TICKS."""
        if self._next_ns < 0:
            self.origin_ns, self._next_ns = now_ns, now_ns + self.tick_ns
        elif self._next_ns < now_ns:
            count = -(-(now_ns - self._next_ns) // self.tick_ns)
            if len(self.ticks) + count > MAX_TICKS:
                raise ConfigError(
                    f"--timeseries: over {MAX_TICKS:,} ticks of {self.tick_ns / NS_PER_S:g} s; take a longer --tick"
                )
            self.ticks += [self._state()] * count
            self._next_ns += count * self.tick_ns

    def close(self) -> None:
        """The replay has ended: one more tick shows the last state."""
        if self._next_ns >= 0:
            self.ticks.append(self._state())

    def _state(self) -> list[tuple[int, int, float]]:
        return [(one.running, one.waiting, one.kv_usage) for group in self._groups for one in group.engines]


def write_series(sampler: Sampler, result: Result, stream: IO[str]) -> None:
    """One CSV row per tick for the cluster (instance_id `all`, KV use averaged over the engines), then one for each
    engine where there are several. The result must have been made with keep_itl."""
    engines = len(sampler.ticks[0]) if sampler.ticks else 0
    prompt, output = _tokens(sampler, result, engines)
    per_s = NS_PER_S / sampler.tick_ns
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for tick, states in enumerate(sampler.ticks):
        time_s = f"{(sampler.origin_ns + (tick + 1) * sampler.tick_ns) / NS_PER_S:.9g}"
        kv_usage = sum(state[2] for state in states) / engines
        counts = sum(state[0] for state in states), sum(state[1] for state in states)
        rates = [f"{sum(own[tick] for own in tokens) * per_s:.2f}" for tokens in (prompt, output)]
        writer.writerow((time_s, "all", *counts, f"{kv_usage:.6f}", *rates))
        for engine, (running, waiting, usage) in enumerate(states if engines > 1 else ()):
            rates = [f"{tokens[engine][tick] * per_s:.2f}" for tokens in (prompt, output)]
            writer.writerow((time_s, engine, running, waiting, f"{usage:.6f}", *rates))


def _tokens(sampler: Sampler, result: Result, engines: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompt and output tokens per engine and tick, which counts what came after the tick before, up to itself."""
    import numpy as np

    ticks = len(sampler.ticks)
    prompt, output = np.zeros((engines, ticks), dtype=np.int64), np.zeros((engines, ticks), dtype=np.int64)
    for asked, got in zip(result.trace.requests, result.records, strict=True):
        if got.first_token_ns is None:
            continue
        gaps = np.asarray(result.itl_ns.get(got.index, ()), dtype=np.int64)
        times = got.first_token_ns - sampler.origin_ns + np.concatenate(([0], np.cumsum(gaps)))
        at = -(-times // sampler.tick_ns) - 1
        prompt[got.engine_index, at[0]] += asked.prompt_tokens
        output[got.engine_index] += np.bincount(at, minlength=ticks)
    return prompt.tolist(), output.tolist()
