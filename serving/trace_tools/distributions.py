"""Distributions of lengths and durations, as texts of the command line.

512                          always
uniform:100:900              integers of a range, both ends included
lognormal:MEAN:SIGMA         mean of the distribution itself and sigma of its logarithm
lognormal:MEAN:SIGMA:MIN:MAX the same, drawn again until it lies in the range
"""

import math
import random
from collections.abc import Callable
from typing import Final

from profiler.core.errors import ConfigError

Draw = Callable[[random.Random], int]
_FORMS: Final = "N, uniform:MIN:MAX, lognormal:MEAN:SIGMA or lognormal:MEAN:SIGMA:MIN:MAX"
_MOST_DRAWS: Final = 10_000
_MOST_TOKENS: Final = 10**9
_MOST_SIGMA: Final = 10


def distribution(text: str, flag: str, least: int = 1) -> Draw:
    """Raises ConfigError naming `flag` for a text that is none of the forms or can give less than `least`."""
    name, *values = text.split(":")
    try:
        if not values:
            return _fixed(int(name), least)
        numbers = [float(value) for value in values]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("numbers must be finite")
        if name == "uniform" and len(numbers) == 2:
            return _uniform(int(values[0]), int(values[1]), least)
        if name == "lognormal" and len(numbers) in (2, 4):
            bounds = (int(values[2]), int(values[3])) if len(values) == 4 else (least, 2**62)
            return _lognormal(numbers[0], numbers[1], *bounds, least)
        raise ValueError("no such form")
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is not a distribution ({error}); one of {_FORMS} is needed") from None


def _fixed(value: int, least: int) -> Draw:
    if value < least:
        raise ValueError(f"at least {least} is needed")
    return lambda draw: value


def _uniform(low: int, high: int, least: int) -> Draw:
    if not least <= low <= high:
        raise ValueError(f"{least} <= MIN <= MAX is needed")
    return lambda draw: draw.randint(low, high)


def _lognormal(mean: float, sigma: float, low: int, high: int, least: int) -> Draw:
    if not (0 < mean <= _MOST_TOKENS and 0 < sigma <= _MOST_SIGMA):
        raise ValueError(f"MEAN must be above 0 and at most {_MOST_TOKENS}, SIGMA above 0 and at most {_MOST_SIGMA}")
    if not least <= low <= high:
        raise ValueError(f"{least} <= MIN <= MAX is needed")
    mu = math.log(mean) - sigma * sigma / 2

    def drawn(draw: random.Random) -> int:
        for _ in range(_MOST_DRAWS):
            value = draw.lognormvariate(mu, sigma)
            if low - 0.5 <= value <= high + 0.5 and low <= round(value) <= high:
                return round(value)
        raise ConfigError(f"lognormal of mean {mean} and sigma {sigma} does not reach {low} to {high}")

    return drawn
