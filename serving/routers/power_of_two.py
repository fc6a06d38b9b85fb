"""The less loaded of two engines drawn at random, without looking at the others (power of two choices).

Loads are the scores of the least_loaded router; of equal ones the engine drawn first wins. The two are different
engines, drawn uniformly from a generator of its own that starts from the seed of the run.
"""

import random
from collections.abc import Sequence

from serving.core.engine import Engine
from serving.core.loop import Router
from serving.core.request import Request
from serving.routers.least_loaded import score


def create(seed: int = 0) -> Router:
    draw = random.Random(seed)

    def route(engines: Sequence[Engine], request: Request) -> int:
        if len(engines) == 1:
            return 0
        first, second = draw.sample(range(len(engines)), 2)
        return second if score(engines[second]) < score(engines[first]) else first

    return route
