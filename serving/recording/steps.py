"""The step log of a recorded engine, and whether a play of a trace is free of one-off stalls."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

STANDS_OUT_RATIO = 3.0
STANDS_OUT_MS = 50.0


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduler iteration with work.

    start_s: when it was scheduled, after the start of the play. wall_us: until the next one was scheduled, or its own
    end. gpu_us: device time from the first kernel of the step to its sampled tokens; None where it was not measured.
    prefill_tokens, prefill_requests: chunks of prompts; decode_kv_tokens: keys visible to the decode tokens in all.
    running, waiting, kv_usage, preemptions: of the scheduler after it decided; kv_usage is a fraction.
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

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_requests


def stand_outs(steps: Sequence[Step]) -> list[int]:
    """Steps that stall: more than 50 ms and three times the median of the steps of their kind and size.

    Just-in-time compilation shows so; a trace is played until there is none. Kind: with or without prefill; size: the
    power of two of the tokens. A step alone of its kind is compared with all steps of no fewer tokens.
    """
    groups: dict[tuple[bool, int], list[float]] = {}
    for step in steps:
        groups.setdefault(_kind(step), []).append(step.wall_us)
    found = []
    for index, step in enumerate(steps):
        peers = groups[_kind(step)]
        if len(peers) < 3:
            peers = [other.wall_us for other in steps if other.tokens >= step.tokens and other is not step] or peers
        usual = median(peers)
        if step.wall_us > STANDS_OUT_MS * 1e3 and step.wall_us > STANDS_OUT_RATIO * usual:
            found.append(index)
    return found


def _kind(step: Step) -> tuple[bool, int]:
    return step.prefill_tokens > 0, step.tokens.bit_length()
