"""Index scores and selection against float64 and Python references; ties, tails and refusals."""

import pytest
import torch

from profiler.ops.formats import quantize_fp8
from profiler.ops.indexer import index_scores, index_topk, quantize_queries, select_topk_causal


def _reference_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    products = torch.einsum("thd,sd->ths", q.double(), keys.double())
    return (products.clamp(min=0) * weights.double()[:, :, None]).sum(1)


def _reference_pick(scores: list[float], position: int, topk: int) -> list[int]:
    visible = range(min(position + 1, len(scores)))
    best = sorted(visible, key=lambda s: (-scores[s], s))[:topk]
    return best + [-1] * (topk - len(best))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_match_float64(dtype: torch.dtype) -> None:
    q, weights, keys = torch.randn(9, 4, 128).to(dtype), torch.randn(9, 4).to(dtype), torch.randn(77, 128).to(dtype)
    scores = index_scores(q, weights, keys)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), _reference_scores(q, weights, keys), rtol=1e-6, atol=1e-5)


def test_long_inputs_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, weights, keys = torch.randn(13, 2, 16), torch.randn(13, 2), torch.randn(40, 16)
    positions = torch.arange(27, 40)
    scores = index_scores(q, weights, keys)
    picked = index_topk(q, weights, keys, positions, 8)
    monkeypatch.setattr("profiler.ops.indexer.NAIVE_PIECE_ELEMENTS", 3 * 2 * 40)
    monkeypatch.setattr("profiler.ops.indexer.SCORE_PIECE_ELEMENTS", 4 * 40)
    assert torch.equal(index_scores(q, weights, keys), scores)
    assert torch.equal(index_topk(q, weights, keys, positions, 8), picked)


def test_fp8_keys_carry_a_scale_and_queries_fold_theirs_into_the_weight() -> None:
    q, weights, keys = torch.randn(6, 3, 128), torch.randn(6, 3), torch.randn(50, 128) * 7
    codes, scales = quantize_fp8(keys, 128)
    q_codes, folded = quantize_queries(q, weights)
    scores = index_scores(q_codes, folded, codes, key_scales=scales[:, 0])
    widened_q = q_codes.double() * (folded / weights)[..., None]
    expected = _reference_scores(widened_q, weights, codes.double() * scales)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-4)


def test_selection_breaks_ties_toward_the_earlier_key() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 9.0], [0.0, -0.0, 0.0, 0.0, 0.0, 9.0]])
    picked = select_topk_causal(scores, torch.tensor([4, 4]), 2)
    assert picked.dtype == torch.int32
    assert picked.tolist() == [[1, 2], [0, 1]]


def test_rows_with_fewer_keys_end_in_padding() -> None:
    scores = torch.randn(4, 5)
    picked = select_topk_causal(scores, torch.tensor([0, 2, 4, -1]), 7).tolist()
    for row, seen in zip(picked, (1, 3, 5, 0), strict=True):
        assert sorted(row[:seen]) == list(range(seen)) and row[seen:] == [-1] * (7 - seen)


def test_hidden_and_infinite_scores() -> None:
    inf = float("inf")
    scores = torch.tensor([[-inf, -inf, 1.0, 99.0], [2.0, -inf, -inf, 99.0]])
    assert select_topk_causal(scores, torch.tensor([2, 2]), 2).tolist() == [[2, 0], [0, 1]]


def test_index_topk_equals_a_python_reference() -> None:
    q, weights, keys = torch.randn(12, 2, 8), torch.randn(12, 2), torch.randn(30, 8)
    positions = torch.arange(18, 30)
    picked = index_topk(q, weights, keys, positions, 16).tolist()
    scores = index_scores(q, weights, keys).tolist()
    for row, position in enumerate(positions.tolist()):
        assert picked[row] == _reference_pick(scores[row], position, 16)


def test_no_keys_at_all() -> None:
    picked = index_topk(torch.randn(2, 1, 8), torch.randn(2, 1), torch.randn(0, 8), torch.tensor([-1, -1]), 3)
    assert picked.tolist() == [[-1] * 3] * 2


def test_refusals_name_the_argument() -> None:
    q, weights, keys, positions = torch.randn(3, 2, 8), torch.randn(3, 2), torch.randn(5, 8), torch.tensor([2, 3, 4])
    with pytest.raises(ValueError, match=r"keys: expected shape \(S, 8\), found \(5, 9\) float32"):
        index_topk(q, weights, torch.randn(5, 9), positions, 2)
    with pytest.raises(ValueError, match=r"weights: expected shape \(3, 2\)"):
        index_topk(q, weights[:2], keys, positions, 2)
    with pytest.raises(ValueError, match="positions: expected dtype int32 or int64"):
        index_topk(q, weights, keys, positions.float(), 2)
    with pytest.raises(ValueError, match=r"positions: values 2 .. 5 lie outside -1 .. 4"):
        index_topk(q, weights, keys, positions + torch.tensor([0, 0, 1]), 2)
    with pytest.raises(ValueError, match="topk: expected a positive integer, found 0"):
        index_topk(q, weights, keys, positions, 0)
    with pytest.raises(ValueError, match="scores: expected dtype float32"):
        select_topk_causal(torch.randn(1, 4).double(), torch.tensor([3]), 2)
    with pytest.raises(ValueError, match="backend"):
        index_topk(q, weights, keys, positions, 2, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key_scales"):
        index_scores(q, weights, keys, key_scales=torch.ones(4))
