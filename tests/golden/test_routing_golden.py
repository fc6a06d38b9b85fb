"""Reach probabilities and the busiest rank against exact values, published examples and independent simulations."""

from fractions import Fraction
from math import sqrt

import pytest

from profiler.core.registry import load_model
from profiler.core.types import MoeDims
from serving.expert_placement import eplb, linear
from serving.gates import create_gate
from serving.routing import expected_distinct, expected_pairs, reach_probability, simulate

V32, GLM5, M3 = "deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5", "MiniMaxAI/MiniMax-M3"
DEGREES = (2, 4, 8, 16, 32, 64)

# Independent groups, computed from binomials by hand of the definition; the real rule from 200,000 tokens with
# independent scores in another program. Both to four digits.
CLOSED = {
    V32: (0.9629, 0.7321, 0.4536, 0.3337, 0.2061, 0.1150),
    GLM5: (0.9965, 0.9036, 0.6618, 0.4077, 0.2271, 0.1199),
    M3: (0.9404, 0.6886, 0.4178, 0.2300, 0.1206, 0.0618),
}
TRUE_RULE = {
    V32: (0.9839, 0.7814, 0.4957, 0.3579, 0.2141, 0.1170),
    GLM5: (0.9964, 0.9037, 0.6620, 0.4076, 0.2271, 0.1199),
    M3: (0.9400, 0.6886, 0.4178, 0.2300, 0.1206, 0.0618),
}
TOKENS = 20_000


def moe_of(model: str) -> MoeDims:
    moe = load_model(model).moe
    assert moe is not None
    return moe


def test_exact_fractions_at_eight_ranks() -> None:
    assert reach_probability(moe_of(V32), 8) == Fraction(697366471, 1537314680)
    assert reach_probability(moe_of(M3), 8) == Fraction(31837, 76200)
    assert float(reach_probability(moe_of(V32), 8)) == pytest.approx(0.453626, abs=5e-7)
    assert float(reach_probability(moe_of(GLM5), 8)) == pytest.approx(0.661832, abs=5e-7)
    assert float(reach_probability(moe_of(M3), 8)) == pytest.approx(0.417808, abs=5e-7)


@pytest.mark.parametrize("model", CLOSED)
def test_closed_form_at_other_degrees(model: str) -> None:
    found = [float(reach_probability(moe_of(model), ranks)) for ranks in DEGREES]
    assert found == pytest.approx(CLOSED[model], abs=6e-5)


def sampled(model: str, gate: str, ranks: int) -> tuple[float, float]:
    """Reach probability of one large batch, and a generous standard error of it."""
    moe = moe_of(model)
    load = simulate(create_gate(gate, moe), linear(moe.num_experts, ranks), TOKENS, draws=1, seed=7)
    # The share of ranks reached lies in [0, 1]; per token its deviation is at most that of a yes or no.
    return load.reach, sqrt(load.reach * (1 - load.reach) / TOKENS)


@pytest.mark.parametrize("ranks", DEGREES)
@pytest.mark.parametrize("model", TRUE_RULE)
def test_true_rule_against_an_independent_simulation(model: str, ranks: int) -> None:
    reach, error = sampled(model, "grouped_topk", ranks)
    assert reach == pytest.approx(TRUE_RULE[model][DEGREES.index(ranks)], abs=4 * error + 1e-4)


@pytest.mark.parametrize("model", CLOSED)
@pytest.mark.parametrize("ranks", (4, 8, 32))
def test_random_groups_meet_the_closed_form(model: str, ranks: int) -> None:
    reach, error = sampled(model, "random_groups", ranks)
    assert reach == pytest.approx(float(reach_probability(moe_of(model), ranks)), abs=4 * error)


def test_the_true_rule_of_v32_is_not_the_closed_form() -> None:
    """0.4956 against 0.4536: 9.3 % more copies, far beyond the sampling error."""
    reach, error = sampled(V32, "grouped_topk", 8)
    assert reach - float(reach_probability(moe_of(V32), 8)) > 10 * error
    assert reach * 8 == pytest.approx(3.965, abs=0.02)


@pytest.mark.parametrize("model", CLOSED)
@pytest.mark.parametrize("tokens", (8, 256))
def test_pairs_and_distinct_experts_have_their_expectations(model: str, tokens: int) -> None:
    moe = moe_of(model)
    load = simulate(create_gate("grouped_topk", moe), linear(moe.num_experts, 8), tokens, draws=400, seed=3)
    assert load.mean_pairs == expected_pairs(moe, 8, tokens)
    assert load.mean_distinct == pytest.approx(expected_distinct(moe, 8, tokens), rel=0.01)


def test_published_example_of_the_load_balancer() -> None:
    """The example of DeepSeek's EPLB repository: 12 experts in 4 groups, 4 redundant, 8 ranks on 2 nodes."""
    loads = (
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    )
    expected = (
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    )
    for load, wanted in zip(loads, expected, strict=True):
        placed = eplb(load, 8, redundant=4, groups=4, nodes=2)
        assert [expert for slots in placed.slots for expert in slots] == wanted
