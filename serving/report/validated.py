"""The error bars of a report: differences between replays and recorded runs, in percent.

They stand in docs/validation.md; a test holds these equal to the page.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Validated:
    """One recorded run; errors_percent: (simulated - recorded) / recorded of the trace as it was sent."""

    run: str
    heading: str
    errors_percent: dict[str, float]


RUNS: Final = (
    Validated(
        "Llama-3.1-8B on RTX PRO 6000, vLLM 0.19.0",
        "### Llama-3.1-8B, one GPU",
        {"TTFT mean": 0.6, "TTFT p50": -2.0, "TTFT p99": 1.3, "TPOT mean": 0.9, "TPOT p99": 1.3, "latency mean": 0.8},
    ),
    Validated(
        "Qwen3-30B-A3B on 2 x RTX PRO 6000, vLLM 0.19.0",
        "### Qwen3-30B-A3B-Instruct-2507, data parallel 2, expert parallel 2",
        {"TTFT mean": -1.4, "TTFT p50": -3.7, "TTFT p99": 5.2, "TPOT mean": 0.9, "TPOT p99": 1.3, "latency mean": 0.9},
    ),
)


def error_band_percent(name: str) -> float:
    """The largest difference of a figure over the runs, without its sign."""
    return max(abs(run.errors_percent[name]) for run in RUNS)
