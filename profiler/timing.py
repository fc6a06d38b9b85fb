"""Timers and the statistics that tables keep."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

# Larger than the last-level cache of the CPUs and GPUs that run here, so that a timed call finds its weights cold, as
# it does inside a forward pass.
CPU_FLUSH_BYTES: Final = 64 << 20
CUDA_FLUSH_BYTES: Final = 256 << 20

Timer = Callable[[Callable[[], object], int, int], list[float]]


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between the closest ranks. Raises ValueError when there are no values."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100.0
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50.0)


def spread_rel(values: Sequence[float]) -> float:
    """(p90 - p10) / median; nan for fewer than two values, which have no spread, and for a median of zero."""
    middle = median(values)
    if len(values) < 2 or middle == 0.0:
        return math.nan
    return (percentile(values, 90.0) - percentile(values, 10.0)) / middle


def cpu_timer(flush_bytes: int = CPU_FLUSH_BYTES) -> Timer:
    """A timer of calls that finish before they return: wall-clock microseconds of each of `repeats` calls.

    The returned function takes (call, warmup, repeats). Between calls a buffer of `flush_bytes` is overwritten.
    """
    import numpy as np

    buffer = np.zeros(flush_bytes, dtype=np.uint8)

    def run(call: Callable[[], object], warmup: int, repeats: int) -> list[float]:
        for _ in range(warmup):
            call()
        times = []
        for _ in range(repeats):
            buffer.fill(0)
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1_000.0)
        return times

    return run


def cuda_timer(device: Any, flush_bytes: int = CUDA_FLUSH_BYTES) -> Timer:
    """A timer of CUDA work by events: device microseconds of each of `repeats` calls, the cache flushed before each.

    The flush keeps the device busy while the host enqueues the call, so launch gaps of short calls stay out of it.
    """
    import torch

    buffer = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def run(call: Callable[[], object], warmup: int, repeats: int) -> list[float]:
        for _ in range(warmup):
            call()
        torch.cuda.synchronize(device)
        pairs = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            buffer.zero_()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) * 1_000.0 for start, end in pairs]

    return run
