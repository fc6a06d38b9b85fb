"""Replays against recordings of GLM-5.2 in bf16 on one H200: a model on which no rule of the replay was chosen, with
layers that take the selection of the layer before.

As test_recordings_h200.py, with the host's times of each recording (docs/validation.md).
"""

from pathlib import Path

import pytest
from recorded_runs import check_blocks, check_decode_steps, check_errors, check_preemptions, of

from serving.recording.validate import Validation

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "H200" / "GLM-5.2-7L"
# Bounds in per cent: mean TTFT, mean TPOT, median error of a step's device time, and of all their times summed.
BOUNDS = {
    "graphs-chat": (4.5, 3.5, 3.0, 2.0),
    "graphs-mixed": (11.5, 7.0, 3.0, 3.5),
    "graphs-saturated": (4.5, 2.5, 3.0, 2.5),
    "graphs-prefixes": (3.0, 2.0, 3.0, 2.0),
    "graphs-long": (6.5, 5.5, 3.0, 4.0),
    "graphs-heldout": (6.5, 5.0, 3.0, 3.0),
    "single-stream-mixed": (9.0, 6.0, 3.0, 2.5),
    "engine-chat": (3.5, 2.0, 3.0, 2.0),
    "engine-mixed": (15.0, 9.0, 3.0, 3.5),
    # Launched kernel by kernel, or with the host between any two steps: as noisy as the host.
    "eager-chat": (15.5, 4.5, 13.0, 2.0),
    "sync-mixed": (9.0, 3.5, 4.0, 2.0),
}


@pytest.fixture(scope="module")
def validated() -> dict[str, Validation]:
    return {}


@pytest.mark.parametrize("name", BOUNDS)
def test_errors_stay_as_small_as_they_are(name: str, validated: dict[str, Validation]) -> None:
    found = of(RECORDED / name, validated)
    check_errors(found, BOUNDS[name])
    check_blocks(found, 1.5)


def test_decode_steps_of_any_number_of_requests_take_as_long_as_priced(validated: dict[str, Validation]) -> None:
    check_decode_steps([of(RECORDED / name, validated) for name in BOUNDS if name.startswith("graphs")], 3.0)


def test_a_full_cache_preempts_as_often(validated: dict[str, Validation]) -> None:
    check_preemptions(of(RECORDED / "graphs-saturated", validated), 19)
