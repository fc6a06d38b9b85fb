"""vLLM's block-sparse kernels on batches of every kind, with the buffer of selected blocks heads first.

Against a float32 twin: python -m pytest tests/gpu/test_vllm_msa_gpu.py -m gpu -s
As vLLM 0.26 allocates the buffer the same batch writes to an illegal address, which a process of its own shows.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from profiler.engines.vllm_support.msa import heads_first

pytestmark = [
    # Imports of vllm and compilers of torch warn.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm"),
]

BLOCK, DIM, PICKS = 128, 128, 16

BATCHES = {
    "one prefill": ((300, 0),),
    "one prefill behind a context": ((100, 5000),),
    "two prefills": ((200, 3000), (150, 0)),
    "four prefills": ((64, 9000), (64, 0), (130, 2500), (200, 100)),
    "decodes and a prefill": (*((1, 4000),) * 8, (200, 1000)),
    "decodes and two prefills": (*((1, 6000), (1, 20)) * 16, (200, 3000), (90, 0)),
    "equal decodes": ((1, 5000),) * 33,
    "unequal decodes": ((1, 12000), (1, 100), (1, 2500)) * 8,
}


@dataclass
class Case:
    """Tensors of one batch, decodes first, in blocks of their own; heads: index and key-value heads of the rank."""

    requests: tuple[tuple[int, int], ...]
    heads: int
    group: int

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        counts = [-(-(new + context) // BLOCK) for new, context in self.requests]
        tokens = sum(new for new, _ in self.requests)
        self.tokens, self.decodes = tokens, sum(new == 1 for new, _ in self.requests)
        self.index_query = _random(tokens, self.heads, DIM)
        self.index_keys = _random(sum(counts) + 1, BLOCK, DIM)
        self.query = _random(tokens, self.heads * self.group, DIM)
        self.cache = _random(sum(counts) + 1, self.heads, BLOCK, 2 * DIM)
        self.table = torch.zeros(len(counts), max(counts) + 2, dtype=torch.int32)
        first = 1
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.arange(first, first + count)
            first += count
        self.table = self.table.cuda()
        self.lengths = torch.tensor([sum(r) for r in self.requests], dtype=torch.int32, device="cuda")
        self.contexts = torch.tensor([c for _, c in self.requests], dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, *(new for new, _ in self.requests[self.decodes :])]).cumsum(0)
        self.starts = starts.to(device="cuda", dtype=torch.int32)
        self.longest_chunk = max((new for new, _ in self.requests[self.decodes :]), default=0)
        self.longest = max(map(sum, self.requests))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def run(case: Case, buffer: torch.Tensor) -> torch.Tensor:
    """What vLLM's attention of a sparse layer does with a batch (common/indexer.py, common/sparse_attention.py)."""
    from vllm.models.minimax_m3.common.ops import index_topk, sparse_attn

    nd, total, scale = case.decodes, case.tokens, DIM**-0.5
    out = torch.full_like(case.query, float("nan"))
    if nd:
        index_topk.minimax_m3_index_decode(
            case.index_query[:nd],
            case.index_keys,
            case.table[:nd],
            case.lengths[:nd],
            case.longest,
            PICKS,
            0,
            1,
            case.heads,
            1,
            1,
            out=buffer,
        )
    prefills = (case.starts, case.lengths[nd:], case.contexts[nd:])
    if nd < len(case.requests):
        scores = index_topk.minimax_m3_index_score(
            case.index_query[nd:],
            case.index_keys,
            case.table[nd:],
            *prefills,
            case.longest_chunk,
            case.longest,
            case.heads,
        )
        index_topk.minimax_m3_index_topk(
            scores, case.starts, case.contexts[nd:], case.longest_chunk, PICKS, 0, 1, out=buffer[:, nd:, :]
        )
    if nd:
        picked = buffer[:, :nd, :]
        sparse_attn.minimax_m3_sparse_attn_decode(
            case.query[:nd],
            case.cache,
            picked,
            case.table[:nd],
            case.lengths[:nd],
            case.heads,
            scale,
            out[:nd],
            1,
        )
    if nd < len(case.requests):
        picked = buffer[:, nd:total, :]
        sparse_attn.minimax_m3_sparse_attn(
            case.query[nd:],
            case.cache,
            picked,
            case.table[nd:],
            *prefills,
            case.longest_chunk,
            case.heads,
            scale,
            out[nd:],
        )
    torch.cuda.synchronize()
    return out


def twin(case: Case) -> torch.Tensor:
    """The same in float32: the best blocks by their best key, the query's own always, then attention over these."""
    out = torch.zeros_like(case.query, dtype=torch.float32)
    token = 0
    for row, (new, context) in enumerate(case.requests):
        positions = torch.arange(context, context + new, device="cuda")
        blocks = -(-(new + context) // BLOCK)
        pages = case.table[row, :blocks].long()
        key_positions = torch.arange(blocks * BLOCK, device="cuda")
        seen = key_positions <= positions[:, None]
        index_keys = case.index_keys[pages].reshape(-1, DIM).float()
        rows = slice(token, token + new)
        for head in range(case.heads):
            scores = case.index_query[rows, head].float() @ index_keys.T
            best = scores.masked_fill(~seen, float("-inf")).view(new, blocks, BLOCK).amax(2)
            best.scatter_(1, (positions // BLOCK)[:, None], 1e29)
            picked = torch.zeros(new, blocks, dtype=torch.bool, device="cuda")
            picked.scatter_(1, best.topk(min(PICKS, blocks)).indices, True)
            attended = seen & picked.repeat_interleave(BLOCK, 1)
            keys, values = case.cache[pages, head].reshape(-1, 2 * DIM).float().split(DIM, 1)
            for lane in range(head * case.group, (head + 1) * case.group):
                weights = case.query[rows, lane].float() @ keys.T * DIM**-0.5
                out[rows, lane] = weights.masked_fill(~attended, float("-inf")).softmax(1) @ values
        token += new
    return out


@pytest.mark.parametrize(("heads", "group"), [(4, 16), (1, 8)])
@pytest.mark.parametrize("name", BATCHES)
def test_every_kind_of_batch_gives_the_attention_of_its_own_picks(name: str, heads: int, group: int) -> None:
    case = Case(BATCHES[name], heads, group)
    allocated = torch.full((case.tokens + 4, heads, PICKS), -7, dtype=torch.int32, device="cuda")
    got, expected = run(case, heads_first(allocated)).float(), twin(case)
    assert not got.isnan().any()
    wrong = ((got - expected).abs() > 0.03).flatten(1).any(1).float().mean()
    # Two blocks whose scores differ by less than the rounding may change places.
    assert wrong < 0.02, f"{float(wrong):.1%} of the rows"


def crash() -> None:
    case = Case(BATCHES["decodes and a prefill"], 4, 16)
    run(case, torch.empty((case.tokens + 4, 4, PICKS), dtype=torch.int32, device="cuda"))


def test_as_allocated_decodes_beside_a_prefill_write_to_an_illegal_address() -> None:
    """Should this pass through, the engine has mended its buffer and the repair can go."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode != 0 and "illegal memory access" in result.stderr, result.stderr[-2000:]


if __name__ == "__main__":
    crash()
