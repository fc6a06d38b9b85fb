"""Routing rules against a Python reference and facts about real configurations; the expert GEMM against a loop."""

import math

import pytest
import torch

from profiler.ops.layers import swiglu_clipped
from profiler.ops.moe import expert_gemm, grouped_topk


def _route(logits: list[float], topk: int, n_group: int, topk_group: int, bias: list[float] | None) -> dict[int, float]:
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [s + (bias[i] if bias else 0.0) for i, s in enumerate(scores)]
    size = len(logits) // n_group
    groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(n_group)]
    rank = [sum(best[:2]) if bias else best[0] for best in groups]
    kept = sorted(range(n_group), key=lambda g: -rank[g])[:topk_group]
    allowed = [e for e in range(len(logits)) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -choice[e])[:topk]
    total = sum(scores[e] for e in chosen)
    return {e: 2.5 * scores[e] / total for e in chosen}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (8, 4), (4, 1)])
def test_grouped_topk_follows_the_rule(with_bias: bool, n_group: int, topk_group: int) -> None:
    logits = torch.randn(50, 32)
    bias = torch.randn(32) * 0.5 if with_bias else None
    weights, ids = grouped_topk(logits, 4, n_group=n_group, topk_group=topk_group, bias=bias, routed_scaling=2.5)
    for row in range(50):
        bias_list = bias.tolist() if bias is not None else None
        expected = _route(logits[row].tolist(), 4, n_group, topk_group, bias_list)
        assert set(ids[row].tolist()) == set(expected)
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            assert weight == pytest.approx(expected[expert], rel=1e-5)


def test_one_group_is_plain_topk() -> None:
    logits, bias = torch.randn(64, 256), torch.randn(256)
    _, ids = grouped_topk(logits, 8, bias=bias)
    assert torch.equal(ids.long(), (logits.sigmoid() + bias).topk(8).indices)


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    weights, ids = grouped_topk(logits, 2, bias=torch.tensor([0.0, 0.0, 0.0, 9.0]), renormalize=False)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, logits[0, [3, 0]].sigmoid()[None])
    weights, ids = grouped_topk(logits, 2, scoring="softmax", renormalize=False)
    torch.testing.assert_close(weights, logits.softmax(-1)[:, :2])


def test_group_limited_routing_reaches_fewer_ranks() -> None:
    # 256 experts, 8 per token, 4 of 8 groups: with independent scores a token reaches a given one of 8 ranks with
    # probability 0.4956 (Monte Carlo over 200k tokens of the true rule); unrestricted routing gives exactly 0.661832.
    logits = torch.randn(20_000, 256, generator=torch.Generator().manual_seed(5))
    bias = torch.zeros(256)
    for groups, kept, expected in ((8, 4, 0.4956), (1, 1, 0.661832)):
        ids = grouped_topk(logits, 8, n_group=groups, topk_group=kept, bias=bias)[1]
        reached = (ids // 32 == 3).any(-1).double().mean().item()
        assert reached == pytest.approx(expected, abs=0.011)


def test_expert_gemm_equals_a_loop_over_pairs() -> None:
    count, hidden, inter, experts = 9, 16, 24, 6
    x, w13, w2 = torch.randn(count, hidden), torch.randn(4, 2 * inter, hidden), torch.randn(4, hidden, inter)
    ids = torch.stack([torch.randperm(experts)[:3] for _ in range(count)]).int()
    weights = torch.rand(count, 3)
    out = expert_gemm(x, ids, weights, w13, w2, first_expert=1)
    clipped = expert_gemm(x, ids, weights, w13, w2, first_expert=1, activation=swiglu_clipped)
    for row in range(count):
        expected = torch.zeros(hidden, dtype=torch.float64)
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            if 1 <= expert < 5:
                gate, up = (w13[expert - 1].double() @ x[row].double()).chunk(2)
                expected += weight * (w2[expert - 1].double() @ (gate / (1 + (-gate).exp()) * up))
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(out, clipped)
    assert not expert_gemm(x, ids * 0 + 5, weights, w13, w2, first_expert=1).any()


def test_refusals_name_the_argument() -> None:
    with pytest.raises(ValueError, match="n_group: 3 groups"):
        grouped_topk(torch.randn(1, 8), 2, n_group=3)
    with pytest.raises(ValueError, match="topk: 5 exceeds the 4 experts"):
        grouped_topk(torch.randn(1, 8), 5, n_group=4, topk_group=2)
    with pytest.raises(ValueError, match="scoring"):
        grouped_topk(torch.randn(1, 8), 1, scoring="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bias"):
        grouped_topk(torch.randn(1, 8), 1, bias=torch.zeros(7))
    x, ids, weights = torch.randn(2, 4), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    with pytest.raises(ValueError, match="w2: expected shape"):
        expert_gemm(x, ids, weights, torch.randn(3, 8, 4), torch.randn(3, 4, 5))
    with pytest.raises(ValueError, match="expert_ids: values -1"):
        expert_gemm(x, ids - 1, weights, torch.randn(3, 8, 4), torch.randn(3, 4, 4))
