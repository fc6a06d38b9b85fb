"""The error bars of a report: differences between replays and recorded runs, in percent.

They stand in docs/validation.md; a test holds these equal to the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from profiler.core.registry import known_models, load_model
from profiler.core.siblings import same_kernels

_FIGURES: Final = ("TTFT mean", "TTFT p50", "TTFT p99", "TPOT mean", "TPOT p99", "latency mean")
_H200: Final = "### Without the recording's host"


@dataclass(frozen=True, slots=True)
class Validated:
    """One recorded run; errors_percent: (simulated - recorded) / recorded of the trace as it was sent.

    label: the name of its row in the table of several runs below `heading`; "" where the table is of this run alone.
    """

    run: str
    model: str
    hardware: str
    heading: str
    label: str
    errors_percent: dict[str, float]


def _h200(model: str, label: str, errors: tuple[float, ...]) -> Validated:
    figures = dict(zip(_FIGURES, errors, strict=True))
    return Validated(f"{label}; H200, vLLM 0.26.0", model, "H200", _H200, label, figures)


RUNS: Final = (
    _h200(
        "deepseek-ai/DeepSeek-V3.2-Exp",
        "DeepSeek-V3.2-Exp, six layers: chat, vLLM's default",
        (-22.0, -27.7, -38.2, -18.0, -29.3, -16.4),
    ),
    _h200(
        "deepseek-ai/DeepSeek-V3.2-Exp",
        "DeepSeek-V3.2-Exp, six layers: mixed, vLLM's default",
        (-8.9, 4.0, -12.5, -9.0, -13.4, -7.3),
    ),
    _h200(
        "deepseek-ai/DeepSeek-V3.2-Exp", "DeepSeek-V3.2-Exp, six layers: heldout", (-8.3, -8.3, -0.6, -8.6, -18.3, -7.4)
    ),
    _h200("zai-org/GLM-5-FP8", "GLM-5-FP8, six layers: chat, vLLM's default", (-1.9, -1.3, -42.4, 2.6, 6.9, 2.3)),
    _h200("zai-org/GLM-5-FP8", "GLM-5-FP8, six layers: mixed, vLLM's default", (-3.2, 17.9, -9.4, -2.6, -18.3, -2.0)),
    _h200("zai-org/GLM-5-FP8", "GLM-5-FP8, six layers: heldout", (-17.1, -23.3, -3.1, -13.4, -23.3, -12.7)),
    _h200("zai-org/GLM-5.2", "GLM-5.2, seven layers: chat, vLLM's default", (6.9, -1.2, -12.5, 3.3, 4.0, 3.4)),
    _h200("zai-org/GLM-5.2", "GLM-5.2, seven layers: mixed, vLLM's default", (-9.4, -5.9, -13.4, -7.2, -8.4, -6.3)),
    _h200("zai-org/GLM-5.2", "GLM-5.2, seven layers: heldout", (-6.5, -4.4, -7.1, -4.2, -2.4, -4.2)),
    _h200("MiniMaxAI/MiniMax-M3", "MiniMax-M3, eight layers: chat", (10.9, 5.9, -8.8, 6.3, 7.3, 6.4)),
    _h200("MiniMaxAI/MiniMax-M3", "MiniMax-M3, eight layers: mixed", (1.9, 1.6, -1.1, 2.3, -1.9, 2.3)),
    _h200("MiniMaxAI/MiniMax-M3", "MiniMax-M3, eight layers: heldout", (3.2, 3.6, 0.1, 4.9, 2.6, 5.0)),
    Validated(
        "Llama-3.1-8B on RTX PRO 6000, vLLM 0.19.0",
        "meta-llama/Llama-3.1-8B",
        "RTXPRO6000",
        "### Llama-3.1-8B, one GPU",
        "",
        {"TTFT mean": 0.6, "TTFT p50": -2.0, "TTFT p99": 1.3, "TPOT mean": 0.9, "TPOT p99": 1.3, "latency mean": 0.8},
    ),
    Validated(
        "Qwen3-30B-A3B on 2 x RTX PRO 6000, vLLM 0.19.0",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "RTXPRO6000",
        "### Qwen3-30B-A3B-Instruct-2507, data parallel 2, expert parallel 2",
        "",
        {"TTFT mean": -1.4, "TTFT p50": -3.7, "TTFT p99": 5.2, "TPOT mean": 0.9, "TPOT p99": 1.3, "latency mean": 0.9},
    ),
)


def runs_of(model: str, hardware: str) -> tuple[Validated, ...]:
    """The recorded runs of a model's layers on a GPU, or of one with the same kernels; none where nobody made one."""
    return tuple(run for run in RUNS if run.hardware == hardware and _alike(model, run.model))


def _alike(model: str, recorded: str) -> bool:
    known = known_models()
    return model == recorded or (
        model in known and recorded in known and same_kernels(load_model(model), load_model(recorded))
    )


def error_band_percent(name: str, runs: Sequence[Validated] = RUNS) -> float:
    """The largest difference of a figure over the runs, without its sign."""
    return max(abs(run.errors_percent[name]) for run in runs)
