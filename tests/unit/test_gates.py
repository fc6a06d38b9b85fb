import json
from pathlib import Path

import numpy as np
import pytest

from profiler.core.errors import ConfigError
from profiler.core.types import MoeDims
from serving.expert_placement import ExpertPlacement, linear, round_robin
from serving.gates import create_gate, known_gates
from serving.gates.grouped_topk import select
from serving.routing import (
    busiest_rank,
    imbalance_of,
    popularity,
    rank_load,
    reach_probability,
    read_bias,
    read_counts,
    read_picks,
    simulate,
)

MOE = MoeDims(16, 4, 64, 1, 64, n_group=4, topk_group=2, has_bias=True)
PICKS = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 5, 10, 15]]
OPTIONS = {"histogram": {"counts": list(range(16))}, "recorded": {"picks": PICKS}}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


@pytest.mark.parametrize("name", known_gates())
def test_every_gate_picks_topk_different_experts_and_repeats_itself(name: str) -> None:
    draw = create_gate(name, MOE, OPTIONS.get(name))
    picks = draw(500, rng())
    assert picks.shape == (500, 4) and picks.dtype == np.int32
    assert picks.min() >= 0 and picks.max() < 16
    assert all(len(set(row)) == 4 for row in picks.tolist())
    assert (create_gate(name, MOE, OPTIONS.get(name))(500, rng()) == picks).all()
    assert draw(0, rng()).shape == (0, 4)


def test_the_rule_by_hand() -> None:
    """Groups score their two best: 0.9 + 0.1, 0.6 + 0.6, 0.5 + 0.5 and 0.8 + 0.7; so groups 1 and 3 stay."""
    scores = np.array([[0.9, 0.1, 0.1, 0.1, 0.6, 0.6, 0.1, 0.1, 0.5, 0.5, 0.1, 0.1, 0.8, 0.7, 0.1, 0.1]], np.float32)
    logits = np.log(scores / (1 - scores))
    assert sorted(select(logits, MOE, None)[0].tolist()) == [4, 5, 12, 13]
    bias = np.zeros(16, np.float32)
    bias[1] = 0.9  # group 0 now scores 0.9 + 1.0 and replaces group 1
    assert sorted(select(logits, MOE, bias)[0].tolist()) == [0, 1, 12, 13]


def test_without_a_bias_a_group_scores_its_best_member() -> None:
    plain = MoeDims(16, 4, 64, 1, 64, n_group=4, topk_group=2, has_bias=False)
    scores = np.full((1, 16), 0.01, np.float32)
    scores[0, [0, 4, 5, 8, 9, 12]] = (0.9, 0.6, 0.6, 0.5, 0.5, 0.8)
    picked = set(select(np.log(scores / (1 - scores)), plain, None)[0].tolist())
    assert picked <= {0, 1, 2, 3, 12, 13, 14, 15} and {0, 12} <= picked


def test_softmax_scores_choose_as_sigmoid_ones_do_without_groups() -> None:
    logits = rng().standard_normal((200, 16)).astype(np.float32)
    one, two = (MoeDims(16, 4, 64, 1, 64, scoring=scoring) for scoring in ("sigmoid", "softmax"))
    assert (np.sort(select(logits, one, None)) == np.sort(select(logits, two, None))).all()


def test_popularity_gates_are_skewed_as_they_say() -> None:
    counts = popularity(create_gate("zipf", MOE, {"exponent": 2.0}), 16)
    assert max(counts) / sum(counts) > 0.2
    one = MoeDims(16, 1, 64, 1, 64)
    drawn = popularity(create_gate("histogram", one, {"counts": [0.0] * 14 + [1.0, 3.0]}), 16)
    assert sum(drawn[:14]) == 0
    assert drawn[15] / sum(drawn) == pytest.approx(0.75, abs=0.02)
    heavy = simulate(create_gate("power_law", MOE, {"alpha": 1.0}), linear(16, 4), 2048, draws=5)
    light = simulate(create_gate("power_law", MOE, {"alpha": 100.0}), linear(16, 4), 2048, draws=5)
    assert heavy.imbalance > light.imbalance + 0.05
    assert light.imbalance < 1.06


def test_round_robin_loads_differ_by_one_at_most() -> None:
    load = rank_load(create_gate("balanced", MOE)(37, rng()), linear(16, 16))
    assert max(load.pairs) - min(load.pairs) <= 1 and sum(load.pairs) == 37 * 4


def test_loads_by_hand() -> None:
    load = rank_load(np.array(PICKS), linear(16, 4))
    assert load.tokens == (2, 2, 1, 1)
    assert load.pairs == (5, 5, 1, 1)
    assert load.distinct == (4, 4, 1, 1)
    load = rank_load(np.array(PICKS), round_robin(16, 4))
    assert load.pairs == (3, 3, 3, 3)
    assert load.tokens == (3, 3, 3, 3)


def test_replicas_take_their_expert_in_turn() -> None:
    placement = ExpertPlacement(2, ((0, 1), (0, 1)))
    load = rank_load(np.zeros((10, 1), np.int32), placement)
    assert load.pairs == (5, 5) and load.distinct == (1, 1)
    assert imbalance_of([3.0, 1.0], placement) == 1.0
    assert imbalance_of([3.0, 1.0], linear(2, 2)) == 1.5


def test_recorded_batches_are_runs_of_the_recording() -> None:
    draw = create_gate("recorded", MOE, {"picks": PICKS})
    picks = draw(7, rng(5)).tolist()
    start = PICKS.index(picks[0])
    assert picks == [PICKS[(start + i) % 3] for i in range(7)]


def test_the_busiest_rank_is_known_between_its_points() -> None:
    draw = create_gate("grouped_topk", MOE)
    found = busiest_rank(draw, MOE, linear(16, 4), 1024)
    assert found.tokens[0] == 1 and found.tokens[-1] == 1024
    factors = [found.factors(n)[0] for n in (1, 2, 3, 64, 1024, 5000)]
    assert factors == sorted(factors, reverse=True)
    assert found.factors(3)[0] == pytest.approx(
        found.pairs[1] + (found.pairs[2] - found.pairs[1]) * 0.5849625, rel=1e-6
    )
    assert factors[-1] == found.pairs[-1]
    assert found == busiest_rank(draw, MOE, linear(16, 4), 1024)


def test_quantiles_are_in_order() -> None:
    load = simulate(create_gate("uniform", MOE), linear(16, 4), 32, draws=50)
    assert load.mean_pairs <= load.busiest_pairs.mean
    assert list(load.busiest_pairs.quantiles) == sorted(load.busiest_pairs.quantiles)
    assert load.ranks_per_token == pytest.approx(4 * load.reach)


@pytest.mark.parametrize(
    ("gate", "options", "message"),
    [
        ("grouptopk", {}, "did you mean 'grouped_topk'"),
        ("uniform", {"exponent": 1}, "unknown option of gate uniform 'exponent'"),
        ("zipf", {"exponent": float("nan")}, "exponent is nan; it must be a finite number of at least 0"),
        ("zipf", {"exponent": -1}, "exponent is -1"),
        ("power_law", {"alpha": 0}, "alpha is 0"),
        ("histogram", {}, "needs counts, one number for each of the 16 experts"),
        ("histogram", {"counts": [1.0] * 15}, "15 counts for 16 experts"),
        ("histogram", {"counts": [1.0] * 15 + [float("nan")]}, "count 15 of the histogram is nan"),
        ("histogram", {"counts": [1.0] * 15 + [-1.0]}, "count 15 of the histogram is -1.0"),
        ("histogram", {"counts": [1.0] * 3 + [0.0] * 13}, "only 3 experts of the histogram have a count above 0"),
        ("recorded", {"picks": []}, "needs picks"),
        ("recorded", {"picks": [[0, 1, 2]]}, "a list of 4 expert ids is needed"),
        ("recorded", {"picks": [[0, 1, 2, 16]]}, "16 is no expert; ids are 0 to 15"),
        ("recorded", {"picks": [[0, 1, 2, 2]]}, "must differ"),
        ("grouped_topk", {"bias": 0.5}, "a bias is 16 numbers, one for each expert: a file"),
        ("grouped_topk", {"bias": [0.0] * 3}, "the bias has 3 numbers for 16 experts"),
        ("grouped_topk", {"bias": [0.0] * 15 + [float("nan")]}, "number 15 of the bias is nan; it must be finite"),
        ("even", {}, "gate even draws nothing: every rank has the expected load. Those that draw: balanced, "),
        ("evn", {}, "did you mean 'even'"),
    ],
)
def test_bad_gates_are_refused(gate: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        create_gate(gate, MOE, options)


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        (MoeDims(16, 17, 64, 1, 64), "topk is 17"),
        (MoeDims(16, 4, 64, 1, 64, n_group=3), "n_group 3 does not divide 16 experts"),
        (MoeDims(16, 4, 64, 1, 64, n_group=4, topk_group=5), "topk_group is 5"),
        (MoeDims(16, 5, 64, 1, 64, n_group=4, topk_group=1), "topk 5 exceeds the 4 experts of the 1 chosen groups"),
    ],
)
def test_dims_that_no_token_can_follow_are_refused(moe: MoeDims, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_gate("uniform", moe)


def test_closed_form_refuses_what_it_does_not_cover() -> None:
    with pytest.raises(ConfigError, match="3 ranks do not divide 16 experts"):
        reach_probability(MOE, 3)
    with pytest.raises(ConfigError, match="cut each other"):
        reach_probability(MoeDims(24, 4, 64, 1, 64, n_group=4, topk_group=2), 6)


def test_a_bias_moves_the_choice_and_needs_a_router_that_adds_one(tmp_path: Path) -> None:
    path = tmp_path / "bias.json"
    path.write_text(json.dumps([1.0] * 4 + [0.0] * 8 + [1.0] * 4))
    picks = create_gate("grouped_topk", MOE, {"bias": read_bias(path, MOE)})(50, rng())
    assert {int(expert) for expert in picks.reshape(-1)} <= {0, 1, 2, 3, 12, 13, 14, 15}
    with pytest.raises(ConfigError, match=r"bias.json: the router of this model adds no bias to its scores"):
        read_bias(path, MoeDims(16, 4, 64, 1, 64))


def test_files_of_counts_and_picks(tmp_path: Path) -> None:
    counts, picks = tmp_path / "counts.json", tmp_path / "picks.jsonl"
    counts.write_text(json.dumps(list(range(16))))
    picks.write_text("\n".join(map(json.dumps, PICKS)) + "\n")
    assert read_counts(counts, MOE) == [float(i) for i in range(16)]
    assert read_picks(picks, MOE) == PICKS
    counts.write_text("[1, NaN]")
    with pytest.raises(ConfigError, match=r"counts.json: the histogram has 2 counts"):
        read_counts(counts, MOE)
    picks.write_text("[0, 1, 2, 3]\n[0, 1\n")
    with pytest.raises(ConfigError, match=r"picks.jsonl:2: not JSON"):
        read_picks(picks, MOE)
    picks.write_text("[0, 1, 2, 3]\n\n[0, 1, 2, 99]\n")
    with pytest.raises(ConfigError, match=r"picks.jsonl:3: 99 is no expert"):
        read_picks(picks, MOE)
    with pytest.raises(ConfigError, match=r"gone.json: No such file"):
        read_counts(tmp_path / "gone.json", MOE)
    with pytest.raises(ConfigError, match="tokens and draws must be at least 1"):
        simulate(create_gate("uniform", MOE), linear(16, 4), 0)
