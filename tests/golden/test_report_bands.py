"""The error bars of a report against the recordings that they are of, replayed with the GPU file's host."""

from pathlib import Path

import pytest

from serving.recording.validate import validate
from serving.report.validated import RUNS, Validated

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "H200"
FOLDERS = {
    "DeepSeek-V3.2-Exp, six": "DeepSeek-V3.2-Exp-6L",
    "GLM-5-FP8, six": "GLM-5-FP8-6L",
    "GLM-5.2, seven": "GLM-5.2-7L",
    "MiniMax-M3": "MiniMax-M3-8L",
}
OURS = [run for run in RUNS if run.label]


def folder_of(run: Validated) -> Path:
    (folder,) = [RECORDED / name for start, name in FOLDERS.items() if run.label.startswith(start)]
    what = run.label.split(": ")[1]
    trace = what.split(",")[0]
    return folder / (f"engine-{trace}" if what.endswith("vLLM's default") else f"graphs-{trace}")


@pytest.mark.parametrize("run", OURS, ids=lambda run: run.label)
def test_error_bars_are_what_a_replay_gives(run: Validated) -> None:
    found = validate(folder_of(run))
    off = {
        f"{one.metric.upper() if one.metric != 'latency' else one.metric} {one.statistic}": one.difference_percent
        for one in found.comparison.figures
    }
    for name, percent in run.errors_percent.items():
        assert off[name] == pytest.approx(percent, abs=0.5), name
