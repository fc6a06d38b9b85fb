"""Confidence intervals of a mean over few seeds."""

import math
from collections.abc import Sequence
from typing import Final

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom (any table of statistics); beyond, the normal's.
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def mean_and_halfwidth(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and half the width of its 95 % interval (Student's t); None for one value."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, None
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    quantile = _T[count - 2] if count - 2 < len(_T) else 1.96
    return mean, quantile * spread / math.sqrt(count)
