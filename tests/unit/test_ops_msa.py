"""MSA against Python references: block scores, forced blocks, the picked attention, pages, and refusals."""

import itertools

import pytest
import torch

from profiler.ops.gqa import gqa_prefill
from profiler.ops.msa import msa_attend, msa_block_scores, msa_select

BLOCK = 8


def _scores(index_q: torch.Tensor, index_k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    blocks = -(-index_k.shape[0] // BLOCK)
    out = torch.full((*index_q.shape[:2], blocks), float("-inf"), dtype=torch.float64)
    for t, g, p in itertools.product(range(index_q.shape[0]), range(index_q.shape[1]), range(index_k.shape[0])):
        if p <= int(positions[t]):
            dot = index_q[t, g].double() @ index_k[p].double()
            out[t, g, p // BLOCK] = torch.maximum(out[t, g, p // BLOCK], dot)
    return out


def test_block_scores_are_the_largest_visible_dot() -> None:
    index_q, index_k, positions = torch.randn(5, 2, 16), torch.randn(43, 16), torch.tensor([0, 7, 8, 30, 42])
    scores = msa_block_scores(index_q, index_k, positions, block_tokens=BLOCK)
    assert scores.shape == (5, 2, 6) and scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), _scores(index_q, index_k, positions), rtol=1e-6, atol=1e-6)


def test_selection_forces_initial_and_local_blocks_inside_topk() -> None:
    scores = torch.tensor([[[0.0, 5.0, 4.0, 4.0, -9.0, 99.0]]])
    at = torch.tensor([4 * BLOCK + 3])  # block 4 is the row's own
    assert msa_select(scores, at, 3, block_tokens=BLOCK).tolist() == [[[4, 1, 2]]]
    assert msa_select(scores, at, 3, block_tokens=BLOCK, init_blocks=1).tolist() == [[[0, 4, 1]]]
    assert msa_select(scores, at, 3, block_tokens=BLOCK, local_blocks=2).tolist() == [[[3, 4, 1]]]
    assert msa_select(scores, at, 3, block_tokens=BLOCK, local_blocks=0).tolist() == [[[1, 2, 3]]]
    assert msa_select(scores, torch.tensor([9]), 3, block_tokens=BLOCK).tolist() == [[[1, 0, -1]]]
    assert msa_select(scores, torch.tensor([-1]), 3, block_tokens=BLOCK).tolist() == [[[-1, -1, -1]]]


def test_the_cap_is_topk_blocks_with_the_local_one_inside() -> None:
    # MiniMax-M3: 16 blocks of 128 tokens, the local one among them, so a row reads 15 x 128 + (p mod 128) + 1 keys.
    for position in (2047, 2048, 5000, 8191):
        picked = msa_select(torch.randn(1, 1, 64), torch.tensor([position]))[0, 0].tolist()
        assert len(set(picked)) == 16 and position // 128 in picked
        read = sum(min(128, position - 128 * block + 1) for block in picked)
        assert read == 15 * 128 + position % 128 + 1 <= 2048


@pytest.mark.parametrize("heads", [2, 8])
def test_attention_over_picked_blocks(heads: int) -> None:
    rows, groups, length = 6, 2, 45
    q, k, v = torch.randn(rows, heads, 16), torch.randn(length, groups, 16), torch.randn(length, groups, 16)
    positions = torch.tensor([3, 8, 20, 31, 44, 44])
    scores = msa_block_scores(torch.randn(rows, groups, 16), torch.randn(length, 16), positions, block_tokens=BLOCK)
    picked = msa_select(scores, positions, 3, block_tokens=BLOCK)
    out = msa_attend(q, k, v, picked, positions, 0.3, block_tokens=BLOCK)
    for row, head in itertools.product(range(rows), range(heads)):
        group = head // (heads // groups)
        blocks = picked[row, group].tolist()
        seen = [p for p in range(int(positions[row]) + 1) if p // BLOCK in blocks]
        weights = (k[seen, group].double() @ q[row, head].double() * 0.3).softmax(-1)
        expected = weights @ v[seen, group].double()
        torch.testing.assert_close(out[row, head].double(), expected, rtol=1e-4, atol=1e-5)


def test_below_the_cap_it_is_dense_attention() -> None:
    length = 40
    q, k, v = torch.randn(length, 4, 16), torch.randn(length, 2, 16), torch.randn(length, 2, 16)
    positions = torch.arange(length)
    scores = msa_block_scores(torch.randn(length, 2, 16), torch.randn(length, 16), positions, block_tokens=BLOCK)
    picked = msa_select(scores, positions, 5, block_tokens=BLOCK)
    out = msa_attend(q, k, v, picked, positions, 0.2, block_tokens=BLOCK)
    torch.testing.assert_close(out, gqa_prefill(q, k, v, 0.2), rtol=1e-4, atol=1e-5)


def test_pages_of_one_block_equal_contiguous_keys() -> None:
    length, groups = 3 * BLOCK + 5, 2
    tables = torch.tensor([6, 2, 9, 4, 0, 7, 3, 8], dtype=torch.int32)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    positions = torch.tensor([length - 1, length - 4])
    index_q, q = torch.randn(2, groups, 16), torch.randn(2, 4, 16)
    cache = [torch.full((10 * BLOCK, *shape), float("nan")) for shape in ((16,), (groups, 16), (groups, 16))]
    natural = []
    for row in range(2):
        own = [torch.randn(length, *part.shape[1:]) for part in cache]
        natural.append(own)
        for p in range(length):
            page = int(tables[int(offsets[row]) + p // BLOCK])
            for part, values in zip(cache, own, strict=True):
                part[page * BLOCK + p % BLOCK] = values[p]
    index_k, k, v = cache
    paged = {"pages": tables, "row_page_offset": offsets}
    scores = msa_block_scores(index_q, index_k, positions, block_tokens=BLOCK, blocks=4, **paged)
    picked = msa_select(scores, positions, 2, block_tokens=BLOCK)
    out = msa_attend(q, k, v, picked, positions, 0.5, block_tokens=BLOCK, **paged)
    for row in range(2):
        at, one = positions[row : row + 1], slice(row, row + 1)
        alone = msa_block_scores(index_q[one], natural[row][0], at, block_tokens=BLOCK)
        torch.testing.assert_close(scores[one], alone)
        own_k, own_v = natural[row][1], natural[row][2]
        expected = msa_attend(q[one], own_k, own_v, picked[one], at, 0.5, block_tokens=BLOCK)
        torch.testing.assert_close(out[one], expected)


def test_rows_without_a_block_give_zeros_and_unwritten_keys_do_not_leak() -> None:
    q, k = torch.randn(2, 2, 8), torch.full((16, 1, 8), float("nan"))
    k[8:] = torch.randn(8, 1, 8)
    picked = torch.tensor([[[-1, -1]], [[1, -1]]], dtype=torch.int32)
    out = msa_attend(q, k, k, picked, torch.tensor([-1, 15]), 1.0, block_tokens=BLOCK)
    assert not out[0].any() and out[1].isfinite().all()


def test_refusals_name_the_argument() -> None:
    index_q, index_k, positions = torch.randn(2, 2, 8), torch.randn(9, 8), torch.tensor([3, 8])
    with pytest.raises(ValueError, match="index_k: expected shape"):
        msa_block_scores(index_q, torch.randn(9, 7), positions)
    with pytest.raises(ValueError, match=r"positions: values 3 \.\. 9 lie outside"):
        msa_block_scores(index_q, index_k, torch.tensor([3, 9]), block_tokens=BLOCK)
    with pytest.raises(ValueError, match="blocks: paged keys need"):
        msa_block_scores(index_q, index_k, positions, pages=torch.zeros(2).int(), row_page_offset=torch.zeros(2).int())
    with pytest.raises(ValueError, match="both must be given"):
        msa_block_scores(index_q, index_k, positions, pages=torch.zeros(2).int())
    with pytest.raises(ValueError, match=r"16 \+ 1 forced blocks exceed topk 16"):
        msa_select(torch.randn(2, 2, 40), positions, init_blocks=16)
    q, k = torch.randn(2, 4, 8), torch.randn(9, 2, 8)
    picked = torch.zeros(2, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="a row picks a block after its own"):
        msa_attend(q, k, k, picked + 1, positions, 1.0, block_tokens=BLOCK)
    with pytest.raises(ValueError, match="3 KV groups do not divide 4"):
        msa_attend(q, torch.randn(9, 3, 8), torch.randn(9, 3, 8), picked, positions, 1.0)
    with pytest.raises(ValueError, match="selection: expected shape"):
        msa_attend(q, k, k, picked[:, :1], positions, 1.0, block_tokens=BLOCK)
    with pytest.raises(ValueError, match=r"pages: values 0 \.\. 7 lie outside 0 \.\. 0"):
        msa_attend(
            q,
            k,
            k,
            picked,
            positions,
            1.0,
            block_tokens=BLOCK,
            pages=torch.tensor([0, 7], dtype=torch.int32),
            row_page_offset=torch.tensor([0, 1], dtype=torch.int32),
        )
