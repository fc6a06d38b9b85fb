"""Replays against recordings of GLM-5-FP8, GLM-5.2 and MiniMax-M3 on one H200, with the host's times of each recording
(see docs/validation.md); as test_recordings_h200.py.

No rule of the replay was chosen on GLM-5-FP8 or GLM-5.2, which has layers that take the selection of the layer before.
Decode steps of MiniMax-M3 are 1 to 2 % long at nearly every number of requests: the tables are of another card, and of
as many experts as independent tokens reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from recorded_runs import check_blocks, check_decode_steps, check_errors, check_preemptions, decode_errors, of

from serving.recording.validate import Validation

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "H200"


@dataclass(frozen=True)
class Model:
    """bounds by recording, in per cent: mean TTFT, mean TPOT, median error of a step's device time, and of all their
    times summed; they say what was reached. blocks_percent: of the predicted number. preemptions: recorded when full.
    """

    blocks_percent: float
    preemptions: int
    bounds: Mapping[str, tuple[float, float, float, float]]


MODELS = {
    "GLM-5-FP8-6L": Model(
        blocks_percent=1.0,
        preemptions=12,
        bounds={
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
        },
    ),
    "GLM-5.2-7L": Model(
        blocks_percent=1.5,
        preemptions=19,
        bounds={
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
        },
    ),
    "MiniMax-M3-8L": Model(
        blocks_percent=2.0,
        preemptions=25,
        bounds={
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
        },
    ),
}


@pytest.fixture(scope="module")
def validated() -> dict[Path, Validation]:
    return {}


def graphs_of(model: str, validated: dict[Path, Validation]) -> list[Validation]:
    return [of(RECORDED / model / name, validated) for name in MODELS[model].bounds if name.startswith("graphs")]


@pytest.mark.parametrize(("model", "name"), [(model, name) for model, one in MODELS.items() for name in one.bounds])
def test_errors_stay_as_small_as_they_are(model: str, name: str, validated: dict[Path, Validation]) -> None:
    found = of(RECORDED / model / name, validated)
    check_errors(found, MODELS[model].bounds[name])
    check_blocks(found, MODELS[model].blocks_percent)


@pytest.mark.parametrize("model", MODELS)
def test_decode_steps_of_any_number_of_requests_take_as_long_as_priced(
    model: str, validated: dict[Path, Validation]
) -> None:
    check_decode_steps(graphs_of(model, validated), 3.0)


def test_decode_steps_of_few_requests_follow_the_padding(validated: dict[Path, Validation]) -> None:
    """MiniMax-M3's from 3 to 16 requests, whose steps take 3.9 to 8.4 ms, most of them padded."""
    errors: dict[int, list[float]] = {}
    for tokens, error in decode_errors(graphs_of("MiniMax-M3-8L", validated)):
        if 3 <= tokens <= 16:
            errors.setdefault(tokens, []).append(error)
    assert len(errors) == 14
    assert all(abs(median(found)) <= 3.5 for found in errors.values())


@pytest.mark.parametrize("model", MODELS)
def test_a_full_cache_preempts_as_often(model: str, validated: dict[Path, Validation]) -> None:
    check_preemptions(of(RECORDED / model / "graphs-saturated", validated), MODELS[model].preemptions)
