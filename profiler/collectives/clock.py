"""Timing of one operation on one rank: batches of back-to-back calls and single calls, microseconds.

Launched by the host (eager): all ranks wait for each other, then the host issues the calls of a batch as fast as it
can, so a short call lasts as long as its launch. In a graph: two graphs, of all and of a quarter of the calls, are
replayed behind a delay on the device and a barrier in the stream, so that neither the host nor the launch of the graph
is in their difference. Single calls are issued ahead in the same way: the device's time of one call after another
kernel, its start included.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from profiler.collectives.cases import Case
from profiler.collectives.operations import Operation, Ranks

# About 0.2 ms of a GPU: longer than a host needs to issue what follows.
_DELAY_CYCLES = 400_000


@dataclass(frozen=True, slots=True)
class Times:
    """Of one rank. long_us, short_us: of batches of `calls` and `short_calls`; short_us is empty for eager ones."""

    long_us: tuple[float, ...]
    short_us: tuple[float, ...]
    single_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Captured:
    """A CUDA graph of some calls; result holds the tensor of the last of them."""

    graph: Any
    result: Any


def capture(ranks: Ranks, op: Operation, calls: int, around: Any) -> Captured:
    """Captures `calls` calls. around: a context manager that an engine's kernels need about a capture, or None."""
    graph = ranks.torch.cuda.CUDAGraph()
    ranks.torch.cuda.synchronize()
    with around or contextlib.nullcontext(), ranks.torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            op.call()
    return Captured(graph, op.result())


def time_graph(
    case: Case, ranks: Ranks, op: Operation, batches: int, around: Callable[[], Any], barrier: Callable[[], object]
) -> Times:
    found = []
    for calls in (case.calls, case.short_calls, 1):
        captured = capture(ranks, op, calls, around())
        captured.graph.replay()
        found.append(_ahead(ranks, op.reset, captured.graph.replay, batches, barrier))
        captured.graph.reset()
    return Times(*found)


def time_eager(case: Case, ranks: Ranks, op: Operation, batches: int, barrier: Callable[[], object]) -> Times:
    if not ranks.cuda:
        return _time_host(case, op, batches, barrier)
    single = _ahead(ranks, op.reset, op.call, batches, barrier)
    events: list[tuple[Any, Any]] = []
    for _ in range(batches):
        op.reset()
        barrier()
        ranks.torch.cuda.synchronize()
        with _between(ranks, events):
            for _ in range(case.calls):
                op.call()
    return Times(_elapsed_us(ranks, events), (), single)


def _ahead(
    ranks: Ranks,
    reset: Callable[[], object],
    work: Callable[[], object],
    batches: int,
    barrier: Callable[[], object],
) -> tuple[float, ...]:
    """Device time of `work`, issued while the device is still busy with the delay before it."""
    events: list[tuple[Any, Any]] = []
    for _ in range(batches):
        reset()
        ranks.torch.cuda._sleep(_DELAY_CYCLES)
        barrier()
        with _between(ranks, events):
            work()
        ranks.torch.cuda.synchronize()
    return _elapsed_us(ranks, events)


@contextlib.contextmanager
def _between(ranks: Ranks, events: list[tuple[Any, Any]]) -> Iterator[None]:
    start, end = (ranks.torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    yield
    end.record()
    events.append((start, end))


def _elapsed_us(ranks: Ranks, events: list[tuple[Any, Any]]) -> tuple[float, ...]:
    ranks.torch.cuda.synchronize()
    return tuple(start.elapsed_time(end) * 1e3 for start, end in events)


def _time_host(case: Case, op: Operation, batches: int, barrier: Callable[[], object]) -> Times:
    found: list[list[float]] = []
    for calls in (case.calls, 1):
        found.append([])
        for _ in range(batches):
            op.reset()
            barrier()
            start = time.perf_counter_ns()
            for _ in range(calls):
                op.call()
            found[-1].append((time.perf_counter_ns() - start) / 1e3)
    return Times(tuple(found[0]), (), tuple(found[1]))
