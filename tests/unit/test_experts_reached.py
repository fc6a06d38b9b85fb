"""The tables of experts that passes reached, from a file of samples."""

import sys
from pathlib import Path

import pytest
from profiling import SMALL, small_root

from profiler.core.even_load import activated_experts
from profiler.core.registry import load_model
from profiler.core.shots import MoeBatch, Shot
from profiler.engines.base import EngineInfo, KernelSample, ShotResult
from profiler.samples import Run, append_result, start_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "perf"))

from experts_reached import counted, of_contexts, of_tokens

# (shot, experts reached): 60 + 10 us for each.
PASSES = [
    (Shot((), ((6, 0),)), 12.0),
    (Shot((), ((6, 600),)), 13.0),
    (Shot((), ((6, 5_000),)), 14.0),
    (Shot((), ((6, 9_000),)), 13.5),
    (Shot((), ((1, 9),) * 6), 12.5),
    (Shot((), ((5, 0), (1, 9))), 13.0),
    (Shot((), ((4, 0), (1, 9))), None),
    (Shot((), ((1, 9),) * 3), 9.0),
    *((Shot((), ((1, 9 + n),) * 9), 15.0) for n in range(5)),
]


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "samples.csv.gz"
    kinds = tuple(kind.name for kind in load_model(SMALL, small_root(tmp_path)).layers[:4])
    info = EngineInfo("reference", {}, {}, {"layout": "bf16", "caches": []}, "bf16", kinds, True, {})
    shots = (*(shot for shot, _ in PASSES), Shot((), moe=MoeBatch(1, 6)), Shot((), ((6, 4),)))
    start_run(path, Run(SMALL, "", "CPU", 1, "2026-01-01T00:00:00Z", "profile", {"repeats": 1}, {}, info, shots, ()))
    for index, (_, reached) in enumerate(PASSES):
        sample = KernelSample(index, 0, "moe", "experts", 60.0 + 10.0 * (reached or 0.0), 1)
        append_result(path, ShotResult(index, (sample,), reached_experts=reached))
    append_result(path, ShotResult(len(PASSES), (KernelSample(len(PASSES), 0, "moe", "experts", 5.0, 1),)))
    append_result(path, ShotResult(len(PASSES) + 1, (), "out of memory", 9.0))
    return path


def test_passes_are_told_by_context_and_their_times_by_experts(samples: Path, tmp_path: Path) -> None:
    spec = load_model(SMALL, small_root(tmp_path))
    assert spec.moe is not None
    found = list(counted(samples, spec))
    assert len(found) == len(PASSES) - 1
    assert all(one.us == 60.0 + 10.0 * one.reached for one in found)
    off = [f"{100 * (n / activated_experts(spec.moe, 1, 6) - 1):+.1f}" for n in (12.0, 13.0, 13.5, 13.75, 14.0)]
    heads, *lines = [line.split("\t") for line in of_contexts(found)]
    nine = f"{100 * (15.0 / activated_experts(spec.moe, 1, 9) - 1):+.1f}"
    assert heads[0] == "of 5 to 130 tokens"
    assert [line for line in lines if line[0] != "decodes"] == [
        ["prompts, context 0", "1", off[0], off[0], off[0]],
        ["prompts, context 512 to 4095", "1", off[1], off[1], off[1]],
        ["prompts, context 4096 and more", "2", off[3], off[2], off[4]],
        ["others", "1", off[1], off[1], off[1]],
    ]
    assert [line[1] for line in lines if line[0] == "decodes"] == ["6"]
    assert nine in next(line for line in lines if line[0] == "decodes")
    heads, *lines = [line.split("\t") for line in of_tokens(found)]
    expected = [f"{activated_experts(spec.moe, 1, n):.1f}" for n in (6, 9)]
    # The prompt without a context is not among those of six tokens; nine reached as many every time.
    assert lines == [
        ["6", "5", expected[0], "13.0", "190.0", "10.0", "1.00"],
        ["9", "5", expected[1], "15.0", "210.0", "", ""],
    ]
