"""Rows that pad a step and pick the same experts: what they cost, and which models have them."""

from pathlib import Path

import pytest
from short_stacks import cost, decodes

from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.core.shape import StepShape
from serving.cost import TableCost
from serving.cost.padded import own_rows


def experts_us(cost: TableCost, count: int) -> float:
    return sum(line.us for line in cost.explain([decodes(count)]) if line.component == "experts")


def test_padding_costs_one_token_more(tmp_path: Path) -> None:
    """9 to 15 requests run in a graph of 16; 17 in one of 24. Up to 8 tokens every pair reads an expert of its own."""
    one = cost(tmp_path, "MiniMaxAI/MiniMax-M3", layers=8, shared="false")
    at = {count: experts_us(one, count) for count in (5, 8, 9, 14, 15, 16, 17)}
    assert at[9] < at[14] < at[15] == at[16]
    assert at[5] == at[8]
    assert one.padded_experts is not None
    for count in (9, 14):
        assert at[count] == pytest.approx(sum(line.us for line in one.padded_experts.by_tokens.lines(count + 1)))


def test_a_step_is_the_sum_of_its_lines(tmp_path: Path) -> None:
    one = cost(tmp_path, "MiniMaxAI/MiniMax-M3", layers=8, shared="false")
    chunk = StepShape(((600, 0),), 3, 300, 100, 300, 4)
    for shapes in ([decodes(11)], [chunk], [decodes(11), None], [decodes(11), decodes(3)], [chunk, decodes(3)]):
        assert one.step_ns(shapes) == round(1e3 * sum(line.us for line in one.explain(shapes)))


def test_padding_of_other_models_picks_as_tokens_do(tmp_path: Path) -> None:
    one = cost(tmp_path, "zai-org/GLM-5-FP8", layers=8, shared="false")
    assert one.padded_experts is None and experts_us(one, 9) == experts_us(one, 16)


@pytest.mark.parametrize(
    ("model", "parallel", "engine", "expected"),
    [
        ("MiniMaxAI/MiniMax-M3", Parallel(), "vllm", 8),
        ("MiniMaxAI/MiniMax-M3", Parallel(tp=4), "vllm", 8),
        ("MiniMaxAI/MiniMax-M3", Parallel(dp=8, ep=8), "vllm", 0),
        ("MiniMaxAI/MiniMax-M3", Parallel(), "reference", None),
        ("deepseek-ai/DeepSeek-V3.2-Exp", Parallel(), "vllm", None),
    ],
)
def test_which_models_have_such_rows(model: str, parallel: Parallel, engine: str, expected: int | None) -> None:
    assert own_rows(load_model(model), parallel, engine) == expected
