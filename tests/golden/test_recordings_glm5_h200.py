"""Replays against recordings of GLM-5-FP8 on one H200: a model on which no rule of the replay was chosen.

As test_recordings_h200.py, with the host's times of each recording (docs/validation.md).
"""

from pathlib import Path

import pytest
from recorded_runs import check_blocks, check_decode_steps, check_errors, check_preemptions, of

from serving.recording.validate import Validation

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "H200" / "GLM-5-FP8-6L"
# Bounds in per cent: mean TTFT, mean TPOT, median error of a step's device time, and of all their times summed.
BOUNDS = {
    "graphs-chat": (3.0, 2.5, 3.0, 2.0),
    "graphs-mixed": (3.5, 2.0, 3.0, 2.0),
    "graphs-saturated": (3.0, 2.0, 3.0, 2.0),
    "graphs-prefixes": (3.0, 2.0, 3.0, 2.0),
    "graphs-long": (4.5, 3.5, 3.0, 2.5),
    "graphs-heldout": (4.0, 4.0, 3.0, 2.0),
    "single-stream-mixed": (3.5, 5.0, 3.0, 2.0),
    "engine-chat": (5.0, 2.0, 3.0, 2.0),
    "engine-mixed": (7.5, 6.0, 3.0, 2.0),
    # Launched kernel by kernel, or with the host between any two steps: as noisy as the host.
    "eager-chat": (6.0, 3.0, 11.5, 2.0),
    "eager-mixed": (3.0, 2.0, 11.0, 2.0),
    "sync-mixed": (3.0, 2.0, 7.0, 2.0),
}


@pytest.fixture(scope="module")
def validated() -> dict[str, Validation]:
    return {}


@pytest.mark.parametrize("name", BOUNDS)
def test_errors_stay_as_small_as_they_are(name: str, validated: dict[str, Validation]) -> None:
    found = of(RECORDED / name, validated)
    check_errors(found, BOUNDS[name])
    check_blocks(found, 1.0)


def test_decode_steps_of_any_number_of_requests_take_as_long_as_priced(validated: dict[str, Validation]) -> None:
    check_decode_steps([of(RECORDED / name, validated) for name in BOUNDS if name.startswith("graphs")], 3.0)


def test_a_full_cache_preempts_as_often(validated: dict[str, Validation]) -> None:
    check_preemptions(of(RECORDED / "graphs-saturated", validated), 12)
