"""Compiling ahead: which worker runs what, for which degrees, and who waits for whom."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from profiler.core.errors import ConfigError
from profiler.engines.vllm_support import jit

V32 = "deepseek-ai/DeepSeek-V3.2-Exp"


@pytest.mark.parametrize("workers", [1, 2, 5, 9, 40])
def test_workers_together_run_every_gemm_once(workers: int) -> None:
    shapes, tokens = [(8, 16), (32, 16), (8, 64)], [1, 16, 64, 4096]
    shares = [jit.share_of(shapes, tokens, i, workers) for i in range(workers)]
    run = sorted(one for share in shares for one in share)
    assert run == sorted((n, k, m) for n, k in shapes for m in tokens)
    # The first worker builds what the smallest batches need, the others come to them last.
    assert shares[0][0][2] == 1
    for share in shares[1:]:
        assert [m for _, _, m in share] == sorted((m for _, _, m in share), reverse=True)


def test_shapes_of_several_degrees_come_once_and_the_first_degree_is_whole() -> None:
    one, two, eight = jit.shapes_by_degree(V32, (1, 2, 8))
    assert len(one) == 9 and len(two) == 7 and (2112, 7168) in one and (2112, 7168) not in two
    assert len({*one, *two, *eight}) == len(one) + len(two) + len(eight)
    assert jit.shapes_by_degree(V32, (2,)) != [two]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_product_of_glm_5_is_one_that_is_compiled(tp: int) -> None:
    """The engine's block-scaled kernel takes rows in multiples of 64 and columns in multiples of 128."""
    (shapes,) = jit.shapes_by_degree("zai-org/GLM-5-FP8", (tp,))
    assert {(2624, 6144), (4096, 2048), (448 * 64 // tp, 512), (6144, 2048 // tp)} <= set(shapes)
    assert all(n % 64 == 0 and k % 128 == 0 for n, k in shapes)


@pytest.mark.parametrize("model", ["MiniMaxAI/MiniMax-M3", "zai-org/GLM-5"])
def test_a_model_without_such_gemms_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="none of the block-scaled fp8 GEMMs"):
        jit.shapes_by_degree(model, (1,))


class Worker:
    def __init__(self, code: int) -> None:
        self.code = code

    def wait(self) -> int:
        return self.code


@pytest.mark.parametrize("code", [0, 1])
def test_the_first_degree_is_told_before_the_others_begin(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "first"
    calls: list[tuple[int, int, bool]] = []

    def start(shapes: Any, tokens: Any, workers: int) -> list[Worker]:
        calls.append((len(shapes), max(tokens), told.exists()))
        return [Worker(0)] * (workers - 1) + [Worker(code)]

    monkeypatch.setattr(jit, "start_workers", start)
    assert jit.compile_ahead(V32, (1, 4, 8), 3, 8192, told) is (code == 0)
    assert calls == [(9, 8192, False), (13, 8192, True)]
    calls.clear()
    jit.compile_ahead(V32, (1, 4, 8), 3, 16384, None)
    assert calls == [(22, 16384, True)]


def test_the_module_starts_itself_as_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(jit.subprocess, "Popen", started.append)
    jit.start_workers([(8, 16)], [1, 2], 2)
    assert started == [
        [sys.executable, "-m", "profiler.engines.vllm_support.jit", f"--share={i}/2", "--gemm=8x16", "--tokens=1,2"]
        for i in range(2)
    ]


def test_an_engine_waits_for_the_file_that_ends_its_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jit.wait_for_others()
    assert capsys.readouterr().err == ""
    done = tmp_path / "done"
    monkeypatch.setenv(jit.SHOTS_AFTER_VARIABLE, str(done))
    threading.Timer(0.3, done.touch).start()
    started = time.monotonic()
    jit.wait_for_others()
    assert time.monotonic() - started >= 0.3 and done.exists()
    assert "for compile workers" in capsys.readouterr().err


def test_every_batch_of_the_full_grid_is_compiled_ahead() -> None:
    from profiler.core.registry import load_model
    from profiler.kernels._axes import Limits
    from profiler.sweep import choose_categories, plan

    spec = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
    for most in (16_384, 8_192):
        shots = plan(spec, Limits("full", 1, (1,), 163_840, most, 256), choose_categories(spec, None, 1))
        sizes = {shot.new_tokens for found in shots.values() for shot in found if shot.moe is None}
        assert sizes <= set(jit.step_sizes(most))
        assert max(jit.step_sizes(most)) == most
