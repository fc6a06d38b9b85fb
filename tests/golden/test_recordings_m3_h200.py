"""Replays against recordings of MiniMax-M3 on one H200, with the host's times of each (see docs/validation.md).

Bounds say what was reached. Decode steps are 1 to 2 % long at nearly every number of requests: the tables are of
another card, and of as many experts as independent tokens reach.
"""

from pathlib import Path
from statistics import median

import pytest
from recorded_runs import check_blocks, check_decode_steps, check_errors, check_preemptions, of

from serving.recording.validate import Validation

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "H200" / "MiniMax-M3-8L"
# Bounds in per cent: mean TTFT, mean TPOT, median error of a step's device time, and of all their times summed.
BOUNDS = {
    "graphs-chat": (6.0, 4.0, 3.0, 3.0),
    "graphs-mixed": (3.5, 2.5, 3.0, 2.0),
    "graphs-saturated": (3.0, 2.0, 3.0, 2.0),
    "graphs-prefixes": (11.0, 9.0, 3.0, 4.0),
    "graphs-long": (5.0, 4.5, 3.0, 2.5),
    "graphs-heldout": (4.0, 6.0, 3.0, 2.5),
    "single-stream-mixed": (3.5, 2.0, 3.0, 2.0),
    "piecewise-chat": (6.0, 5.0, 3.0, 3.0),
    "piecewise-mixed": (3.0, 2.0, 3.0, 2.0),
    # Launched kernel by kernel, or with the host between any two steps: as noisy as the host.
    "eager-chat": (6.0, 2.0, 8.0, 5.0),
    "eager-mixed": (3.0, 2.0, 5.0, 2.0),
    "sync-mixed": (3.0, 2.0, 5.0, 2.5),
}


@pytest.fixture(scope="module")
def validated() -> dict[str, Validation]:
    return {}


@pytest.mark.parametrize("name", BOUNDS)
def test_errors_stay_as_small_as_they_are(name: str, validated: dict[str, Validation]) -> None:
    found = of(RECORDED / name, validated)
    check_errors(found, BOUNDS[name])
    check_blocks(found, 2.0)


def test_decode_steps_of_few_requests_follow_the_padding(validated: dict[str, Validation]) -> None:
    """From 3 to 16 requests, whose steps take 3.9 to 8.4 ms, most of them padded."""
    errors: dict[int, list[float]] = {}
    for name in BOUNDS:
        if name.startswith("graphs"):
            for step in of(RECORDED / name, validated).steps:
                if step.kind in ("decode", "padded decode") and step.device_us and 3 <= step.tokens <= 16:
                    errors.setdefault(step.tokens, []).append(100 * (step.device_us[1] / step.device_us[0] - 1))
    assert len(errors) == 14
    assert all(abs(median(found)) <= 3.5 for found in errors.values())


def test_decode_steps_of_any_number_of_requests_take_as_long_as_priced(validated: dict[str, Validation]) -> None:
    check_decode_steps([of(RECORDED / name, validated) for name in BOUNDS if name.startswith("graphs")], 3.0)


def test_a_full_cache_preempts_as_often(validated: dict[str, Validation]) -> None:
    check_preemptions(of(RECORDED / "graphs-saturated", validated), 25)
