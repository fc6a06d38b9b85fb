import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.core.errors import ConfigError
from serving.expert_placement import eplb, linear, make_placement, round_robin
from serving.routing import imbalance_of


def test_linear_gives_the_first_ranks_one_more() -> None:
    assert [len(slots) for slots in linear(256, 3).slots] == [86, 85, 85]
    assert linear(256, 3).slots[1][0] == 86
    assert linear(8, 4).slots == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_round_robin() -> None:
    assert round_robin(5, 2).slots == ((0, 2, 4), (1, 3))


@given(
    load=st.lists(st.floats(0, 1e6), min_size=8, max_size=8),
    ranks=st.sampled_from([2, 4, 8]),
    extra=st.integers(0, 2),
    nodes=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2, 4]),
)
def test_redundant_placements_hold_every_expert_and_fill_every_rank(
    load: list[float], ranks: int, extra: int, nodes: int, groups: int
) -> None:
    placed = eplb(load, ranks, redundant=extra * ranks, groups=groups, nodes=nodes)
    assert {len(slots) for slots in placed.slots} == {8 // ranks + extra}
    assert all(placed.homes())
    assert placed.redundant == extra * ranks
    if groups % nodes == 0:
        size, per_node = 8 // groups, ranks // nodes
        for expert in range(8):  # a group's experts, replicas included, stay on one node
            group = range(expert // size * size, (expert // size + 1) * size)
            assert len({rank // per_node for member in group for rank in placed.homes()[member]}) == 1


def test_redundancy_relieves_the_busiest_rank() -> None:
    load = [100.0] + [1.0] * 15
    before = imbalance_of(load, linear(16, 4))
    after = imbalance_of(load, eplb(load, 4, redundant=8))
    assert before == pytest.approx(103 / (115 / 4))
    assert after == pytest.approx((3 * 100 / 9 + 3) / (115 / 4))  # 9 replicas over 4 ranks: 3 of them and 3 others
    assert imbalance_of(load, eplb(load, 4)) <= before


def test_equal_loads_stay_balanced() -> None:
    assert imbalance_of([1.0] * 256, eplb([1.0] * 256, 8, redundant=32)) <= 1.34


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(4, 5), "5 ranks for 4 experts: every rank needs one, so ep is at most 4"),
        (lambda: round_robin(4, 0), "ranks is 0"),
        (lambda: eplb([1.0] * 4, 3), "do not divide over 3 ranks; the next larger number of redundant ones is 2"),
        (lambda: eplb([1.0] * 4, 4, 1), "the next larger number of redundant ones is 4"),
        (lambda: eplb([1.0] * 4, 4, -4), "redundant is -4"),
        (lambda: eplb([1.0, float("nan")], 2), "load 1 is nan"),
        (lambda: eplb([1.0] * 4, 2, groups=3), "3 groups do not divide 4 experts"),
        (lambda: eplb([1.0] * 4, 2, nodes=4), "4 nodes do not divide 2 ranks"),
        (lambda: make_placement("linaer", 4, 2), "did you mean 'linear'"),
        (lambda: make_placement("linear", 4, 2, redundant=2), "placement linear has no redundant experts"),
        (lambda: make_placement("eplb", 4, 2, load=[1.0]), "1 loads for 4 experts"),
        (lambda: imbalance_of([0.0] * 4, linear(4, 2)), "load of all experts is 0"),
    ],
)
def test_bad_placements_are_refused(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
