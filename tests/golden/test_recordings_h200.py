"""Replays against recordings of DeepSeek-V3.2 on one H200, with the host's times of each (see docs/validation.md).

The recordings are the golden values. Bounds of steps are the targets (3 % in the median) where these are met; the
others say what was reached, so that a change that makes the simulator worse shows.
"""

from pathlib import Path

import pytest
import recorded_runs

from serving.recording.validate import Validation

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "H200" / "DeepSeek-V3.2-Exp-6L"
# Bounds in per cent: mean TTFT, mean TPOT, median error of a step's device time, and of all their times summed.
GRAPHS = {
    "graphs-chat": (3.0, 2.0, 3.0, 2.0),
    "graphs-mixed": (7.5, 7.0, 3.0, 2.0),
    "graphs-saturated": (3.0, 2.0, 3.0, 2.0),
    "graphs-prefixes": (4.5, 3.5, 3.0, 2.0),
    "graphs-long": (6.5, 6.5, 3.0, 3.0),
    "single-stream-mixed": (3.5, 6.0, 3.0, 2.0),
}
# Steps with prefills in graphs of parts of layers as far as these reach: as vLLM runs by default, and of the kernels of
# the tables, whose launch takes time ahead of the layers that is priced with them.
BY_PARTS = {
    "engine-chat": (6.0, 4.5, 3.0, 2.0),
    "engine-mixed": (7.0, 6.0, 3.0, 2.0),
    "piecewise-chat": (11.0, 10.5, 3.0, 6.0),
    "piecewise-mixed": (11.0, 12.5, 3.0, 4.0),
}
# Launched kernel by kernel, or with the host between any two steps: as noisy as the host.
HOST = {
    "eager-chat": (6.0, 5.5, 12.5, 2.0),
    "eager-mixed": (3.0, 2.0, 4.5, 2.0),
    "sync-mixed": (3.0, 3.0, 6.0, 2.0),
}


@pytest.fixture(scope="module")
def validated() -> dict[Path, Validation]:
    return {}


def of(name: str, validated: dict[Path, Validation]) -> Validation:
    return recorded_runs.of(RECORDED / name, validated)


@pytest.mark.parametrize("name", [*GRAPHS, *BY_PARTS, *HOST])
def test_errors_stay_as_small_as_they_are(name: str, validated: dict[Path, Validation]) -> None:
    recorded_runs.check_errors(of(name, validated), (GRAPHS | BY_PARTS | HOST)[name])


@pytest.mark.parametrize("name", [*GRAPHS, *BY_PARTS, *HOST])
def test_blocks_are_the_engines(name: str, validated: dict[Path, Validation]) -> None:
    recorded_runs.check_blocks(of(name, validated), 2.0)


def test_decode_steps_of_any_number_of_requests_take_as_long_as_priced(validated: dict[Path, Validation]) -> None:
    recorded_runs.check_decode_steps([of(name, validated) for name in GRAPHS if name.startswith("graphs")], 3.0)


def test_a_full_cache_preempts_as_often(validated: dict[Path, Validation]) -> None:
    recorded_runs.check_preemptions(of("graphs-saturated", validated), 13)
