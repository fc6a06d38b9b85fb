"""How many draft tokens a verification accepts: drawn from rates by position, the same whatever the order of the draws.

A draw depends on the seed, the request and how many tokens it has emitted, and on nothing else, so that two runs with
other batches see the same luck.
"""

from bisect import bisect_left
from dataclasses import dataclass

_MASK = (1 << 64) - 1


def uniform(seed: int, *numbers: int) -> float:
    """A number in [0, 1) from the SplitMix64 finaliser over the seed and the numbers."""
    state = 0
    for number in (seed, *numbers):
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """up_to_tokens: ascending context lengths; rates: for contexts up to each of them, per position i the share of
    verifications that accept the first i + 1 draft tokens, never rising from one position to the next.

    Contexts beyond the last row take the last row.
    """

    up_to_tokens: tuple[int, ...]
    rates: tuple[tuple[float, ...], ...]
    seed: int = 0

    def accepted(self, index: int, emitted_tokens: int, context_tokens: int) -> int:
        """Accepted draft tokens of request `index` at its verification behind `emitted_tokens` output tokens."""
        row = min(bisect_left(self.up_to_tokens, context_tokens), len(self.rates) - 1)
        drawn = uniform(self.seed, index, emitted_tokens)
        count = 0
        for rate in self.rates[row]:
            if drawn >= rate:
                break
            count += 1
        return count
