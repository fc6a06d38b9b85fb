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
        (-22.8, -27.6, -38.2, -18.5, -30.1, -16.9),
    ),
    _h200(
        "deepseek-ai/DeepSeek-V3.2-Exp",
        "DeepSeek-V3.2-Exp, six layers: mixed, vLLM's default",
        (-9.0, 4.1, -26.6, -8.7, -14.3, -7.0),
    ),
    _h200(
        "deepseek-ai/DeepSeek-V3.2-Exp", "DeepSeek-V3.2-Exp, six layers: heldout", (-9.2, -8.4, -0.6, -9.4, -21.0, -8.1)
    ),
    _h200("zai-org/GLM-5-FP8", "GLM-5-FP8, six layers: chat, vLLM's default", (-1.9, -1.6, -42.4, 1.1, 6.0, 1.1)),
    _h200("zai-org/GLM-5-FP8", "GLM-5-FP8, six layers: mixed", (-3.1, -1.3, -2.4, 1.6, 14.2, 0.1)),
    _h200("zai-org/GLM-5-FP8", "GLM-5-FP8, six layers: heldout", (-16.8, -22.0, -3.1, -13.3, -23.3, -12.5)),
    _h200("MiniMaxAI/MiniMax-M3", "MiniMax-M3, eight layers: chat", (8.8, 3.4, -9.8, -0.1, 0.7, 0.1)),
    _h200("MiniMaxAI/MiniMax-M3", "MiniMax-M3, eight layers: mixed", (-2.4, -2.9, -4.2, -3.9, -4.3, -3.4)),
    _h200("MiniMaxAI/MiniMax-M3", "MiniMax-M3, eight layers: heldout", (-3.5, 1.6, -2.1, -3.9, -8.8, -3.7)),
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
