"""The step log of a recorded engine, and whether a play of a trace is free of one-off stalls.

Batches are kept in a short form: the prefill chunks of a step by request, and of its decode requests only those that
are new or gone since the step before. `batches` gives the whole batches back.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

STANDS_OUT_RATIO = 2.0
STANDS_OUT_MS = 20.0


class Chunk(NamedTuple):
    """Prefill tokens of one request (its row in the trace) in one step, behind `context` tokens in its cache."""

    request: int
    tokens: int
    context: int


class Decode(NamedTuple):
    """A decode token of one request. keys: those that it sees, itself included."""

    request: int
    keys: int


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduler iteration with work. None marks a time that was not measured.

    start_s: when it was scheduled, after the start of the play. wall_us: until the next one was scheduled, or the end
    of its own outputs where that is earlier. gpu_us: device time from the first work of the step to its sampled tokens.
    prefill_tokens, prefill_requests: chunks of prompts; decode_kv_tokens: keys visible to the decode tokens in all;
    sampled: requests that emit a token.
    running, waiting, kv_usage, preemptions: of the scheduler after it decided; kv_usage is a fraction.
    graph, padded_tokens: the CUDA graph mode that the engine ran it in, and the tokens that it computed.

    Time of the host's thread for this step: add_us takes in the requests that came since the step before; schedule_us;
    launch_us runs the model without waiting for it, of which input_wait_us waits for the inputs of the step before to
    be copied and forward_launch_us launches the layers; sample_us, of which bookkeep_us takes the sampled tokens (and,
    without asynchronous scheduling, waits for them); wait_us for the tokens of this step, after everything launched
    before; update_us by the scheduler; output_us to the requests' outputs; log_us for this log. updated_s: when its
    update ended, on the clock of start_s, which is when its tokens are known.
    Time of the device: gpu_start_s on the clock of start_s; prepare_us before the layers, forward_us in them,
    sample_gpu_us behind them.
    chunks, joined, left: the batch in its short form.
    """

    start_s: float
    wall_us: float
    gpu_us: float | None
    prefill_requests: int
    prefill_tokens: int
    prefill_context_tokens: int
    decode_requests: int
    decode_kv_tokens: int
    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    sampled: int = 0
    graph: str = ""
    padded_tokens: int | None = None
    add_us: float | None = None
    schedule_us: float | None = None
    launch_us: float | None = None
    input_wait_us: float | None = None
    forward_launch_us: float | None = None
    sample_us: float | None = None
    bookkeep_us: float | None = None
    wait_us: float | None = None
    update_us: float | None = None
    output_us: float | None = None
    log_us: float | None = None
    updated_s: float | None = None
    gpu_start_s: float | None = None
    prepare_us: float | None = None
    forward_us: float | None = None
    sample_gpu_us: float | None = None
    chunks: tuple[Chunk, ...] = ()
    joined: tuple[Decode, ...] = ()
    left: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_requests


def changes(before: dict[int, int], now: Sequence[Decode]) -> tuple[tuple[Decode, ...], tuple[int, ...]]:
    """(decode requests of `now` that do not simply go on from `before`, requests that are in it no more).

    before: keys of each request that decoded in the step before; it becomes that of `now`.
    """
    joined = tuple(one for one in now if before.get(one.request, -1) + 1 != one.keys)
    left = tuple(sorted(before.keys() - {one.request for one in now}))
    before.clear()
    before.update(now)
    return joined, left


def batches(steps: Iterable[Step]) -> Iterator[tuple[tuple[Chunk, ...], tuple[Decode, ...]]]:
    """The whole batch of every step: its prefill chunks, and its decode requests in the order in which they joined."""
    keys: dict[int, int] = {}
    for step in steps:
        for request in step.left:
            del keys[request]
        for request in keys:
            keys[request] += 1
        for request, seen in step.joined:
            keys[request] = seen
        yield step.chunks, tuple(Decode(*one) for one in keys.items())


def stand_outs(steps: Sequence[Step]) -> list[int]:
    """Steps that stall: more than 20 ms of the host and twice the median of the steps of their kind and size.

    Just-in-time compilation shows so; a trace is played until there is none. Kind: with or without prefill; size: the
    power of two of the tokens. A step alone of its kind is compared with all steps of no fewer tokens.
    """
    busy = [busy_us(step) for step in steps]
    groups: dict[tuple[bool, int], list[float]] = {}
    for step, time_us in zip(steps, busy, strict=True):
        groups.setdefault(_kind(step), []).append(time_us)
    found = []
    for index, step in enumerate(steps):
        if busy[index] <= STANDS_OUT_MS * 1e3:
            continue
        peers = groups[_kind(step)]
        if len(peers) < 3:
            others = [place for place, other in enumerate(steps) if other.tokens >= step.tokens and place != index]
            peers = [busy[place] for place in others] or peers
        if busy[index] > STANDS_OUT_RATIO * median(peers):
            found.append(index)
    return found


def busy_us(step: Step) -> float:
    """Time for which the step kept the host's thread, without its waits for the device; all of wall_us where the log
    has no parts."""
    if step.launch_us is None:
        return step.wall_us
    parts = (step.add_us, step.schedule_us, step.launch_us, step.sample_us, step.update_us, step.output_us)
    waits = (step.input_wait_us, step.bookkeep_us)
    return sum(part or 0.0 for part in parts) - sum(part or 0.0 for part in waits)


def _kind(step: Step) -> tuple[bool, int]:
    return step.prefill_tokens > 0, step.tokens.bit_length()
