"""The real package, where it is installed (extra `aic`): every system's tables of the models that it measured."""

import importlib.util
import time
from pathlib import Path

import pytest

from profiler.aiconfigurator.convert import Request, convert
from profiler.aiconfigurator.source import systems_root
from profiler.core.bundle import read_bundle, write_bundle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)


@pytest.mark.parametrize(
    ("system", "model", "backend"),
    [
        ("h100_sxm", "zai-org/GLM-5-FP8", "vllm"),
        ("h200_sxm", "deepseek-ai/DeepSeek-V3.2", "vllm"),
        ("h200_sxm", "deepseek-ai/DeepSeek-V3", "vllm"),
        ("h200_sxm", "zai-org/GLM-5.2-FP8", "sglang"),
        ("h200_sxm", "MiniMaxAI/MiniMax-M3", "trtllm"),
        ("b200_sxm", "MiniMaxAI/MiniMax-M3", "vllm"),
        ("b300_sxm", "MiniMaxAI/MiniMax-M3", "sglang"),
        ("gb200", "zai-org/GLM-5", "vllm"),
        ("gb300", "deepseek-ai/DeepSeek-V3.2", "vllm"),
        ("rtx_pro_6000_server", "MiniMaxAI/MiniMax-M3", "vllm"),
    ],
)
def test_a_system_is_imported_in_under_half_a_minute(tmp_path: Path, system: str, model: str, backend: str) -> None:
    begin = time.perf_counter()
    found = convert(Request(system, model, backend), systems_root())
    bundle = read_bundle(write_bundle(tmp_path, found.meta, found.tables))
    assert time.perf_counter() - begin < 30
    assert bundle.tps == (1, 2, 4, 8)
    assert {category for tp, category in bundle.tables if tp == 1} == {"attention", "dense", "per_sequence", "moe"}
    assert found.changes and found.collectives
