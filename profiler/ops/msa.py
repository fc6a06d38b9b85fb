"""Block-sparse attention (MSA): score blocks of keys, pick the best of them per KV group, attend the picked blocks.

A block is block_tokens consecutive positions. Keys lie in position order, or on pages of one block each: then
pages (P,) holds page tables back to back, row r's starts at row_page_offset[r], and block b of that row is the cache
rows pages[row_page_offset[r] + b] x block_tokens onwards.
"""

import torch

from profiler.ops.checks import (
    FLOATS,
    INTEGERS,
    Backend,
    check_positive,
    check_range,
    check_tensor,
    is_checked,
    use_triton,
)

BLOCK_TOKENS = 128
TOPK_BLOCKS = 16
# Elements that a naive call gathers per piece of rows.
NAIVE_PIECE_ELEMENTS = 1 << 24
# Ranks of forced blocks in the choice: initial blocks before local ones, both before any score.
_INIT_SCORE, _LOCAL_SCORE = 1e30, 1e29


def _check_paging(
    pages: torch.Tensor | None, row_page_offset: torch.Tensor | None, rows: int, device: torch.device
) -> bool:
    if (pages is None) != (row_page_offset is None):
        raise ValueError("pages, row_page_offset: both must be given, or neither")
    if pages is None or row_page_offset is None:
        return False
    check_tensor("pages", pages, ("P",), (torch.int32,), device)
    check_tensor("row_page_offset", row_page_offset, (rows,), (torch.int32,), device)
    return True


def _token_rows(
    blocks: torch.Tensor, block_tokens: int, pages: torch.Tensor | None, row_page_offset: torch.Tensor | None
) -> torch.Tensor:
    """Cache rows (T, ..., n x block_tokens) int64 of blocks (T, ..., n) that are all >= 0."""
    if pages is not None and row_page_offset is not None:
        shape = (-1, *[1] * (blocks.dim() - 1))
        blocks = pages[(row_page_offset.view(shape) + blocks).long()]
    offset = torch.arange(block_tokens, device=blocks.device)
    return (blocks.long()[..., None] * block_tokens + offset).flatten(-2)


def msa_block_scores(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    positions: torch.Tensor,
    *,
    block_tokens: int = BLOCK_TOKENS,
    blocks: int | None = None,
    pages: torch.Tensor | None = None,
    row_page_offset: torch.Tensor | None = None,
    checked: bool | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Largest index_q . index_k over the visible positions of every block, (T, G, NB) fp32, -inf where none is visible.

    index_q (T, G, D), one query head per KV group; index_k (S, D), one key head; positions (T,): a row sees positions
    0 .. its own. NB is the number of blocks of S positions, or `blocks`, which paged keys need. No scale, no softmax.
    Raises ValueError on other shapes or dtypes, and in the checked mode on a position without a key.
    """
    check_tensor("index_q", index_q, ("T", "G", "D"), FLOATS)
    rows, groups, width = index_q.shape
    check_tensor("index_k", index_k, ("S", width), FLOATS, index_q.device)
    check_tensor("positions", positions, (rows,), INTEGERS, index_q.device)
    check_positive("block_tokens", block_tokens)
    paged = _check_paging(pages, row_page_offset, rows, index_q.device)
    if blocks is None:
        if paged:
            raise ValueError("blocks: paged keys need the number of blocks to score")
        blocks = -(-index_k.shape[0] // block_tokens)
    check_positive("blocks", blocks)
    if is_checked(checked, index_q):
        check_range("positions", positions, -1, blocks * block_tokens if paged else index_k.shape[0])
    if use_triton(backend, index_q):
        from profiler.ops.triton.msa import block_scores

        return block_scores(index_q, index_k, positions, block_tokens, blocks, pages, row_page_offset)
    span = blocks * block_tokens
    scores = torch.empty(rows, groups, blocks, dtype=torch.float32, device=index_q.device)
    column = torch.arange(span, device=index_q.device)
    shared = None if paged else torch.zeros(span, width, dtype=torch.float64, device=index_q.device)
    if shared is not None:
        kept = min(span, index_k.shape[0])
        shared[:kept] = index_k[:kept].double()
    step = max(1, NAIVE_PIECE_ELEMENTS // (span * (width if paged else groups)))
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        hidden = column > positions[piece, None]
        if shared is None and pages is not None and row_page_offset is not None:
            # Only tables of visible blocks are read; the others stand in as block 0.
            visible = torch.arange(blocks, device=index_q.device) * block_tokens <= positions[piece, None]
            number = torch.arange(blocks, device=index_q.device) * visible
            at = _token_rows(number, block_tokens, pages, row_page_offset[piece])
            products = torch.bmm(index_q[piece].double(), index_k[at].double().transpose(1, 2))
        else:
            assert shared is not None
            products = torch.matmul(index_q[piece].double(), shared.t())
        products = products.masked_fill_(hidden[:, None, :], float("-inf"))
        scores[piece] = products.unflatten(-1, (blocks, block_tokens)).amax(-1)
    return scores


def msa_select(
    scores: torch.Tensor,
    positions: torch.Tensor,
    topk: int = TOPK_BLOCKS,
    *,
    block_tokens: int = BLOCK_TOKENS,
    init_blocks: int = 0,
    local_blocks: int = 1,
    checked: bool | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """The topk best visible blocks of each row and group, (T, G, topk) int32, -1 padded.

    scores (T, G, NB) fp32, positions (T,): block position // block_tokens is the last that a row sees. The first
    init_blocks and the last local_blocks visible blocks are always picked, inside the topk. Ties go to the earlier
    block. The naive path lists forced blocks first, then the best score first; the Triton path lists the same blocks in
    ascending order. Raises ValueError on other shapes, or more forced blocks than topk.
    """
    check_tensor("scores", scores, ("T", "G", "NB"), (torch.float32,))
    check_tensor("positions", positions, (scores.shape[0],), INTEGERS, scores.device)
    check_positive("topk", topk)
    check_positive("block_tokens", block_tokens)
    if init_blocks < 0 or local_blocks < 0 or init_blocks + local_blocks > topk:
        raise ValueError(f"init_blocks, local_blocks: {init_blocks} + {local_blocks} forced blocks exceed topk {topk}")
    count = scores.shape[2]
    if is_checked(checked, scores):
        check_range("positions", positions, -1, count * block_tokens)
    if use_triton(backend, scores):
        from profiler.ops.triton.select import select_blocks

        return select_blocks(scores, positions, topk, block_tokens, init_blocks, local_blocks)
    last = torch.div(positions, block_tokens, rounding_mode="floor")[:, None, None]
    column = torch.arange(count, device=scores.device)
    ranked = scores.masked_fill((column <= last) & (column > last - local_blocks), _LOCAL_SCORE)
    ranked = ranked.masked_fill((column <= last) & (column < init_blocks), _INIT_SCORE)
    ranked = ranked.masked_fill(column > last, float("-inf"))
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :topk]
    order = order.masked_fill(column[: order.shape[-1]] > last, -1)
    picked = torch.full((*scores.shape[:2], topk), -1, dtype=torch.int32, device=scores.device)
    picked[..., : order.shape[-1]] = order
    return picked


def msa_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    *,
    block_tokens: int = BLOCK_TOKENS,
    pages: torch.Tensor | None = None,
    row_page_offset: torch.Tensor | None = None,
    checked: bool | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Grouped-query attention over the picked blocks, (T, H, D) in the dtype of q; zeros for a row without a block.

    q (T, H, D), k and v (N, G, D) cache rows, selection (T, G, n) int32 blocks with -1 for none, shared by the H / G
    query heads of a group; positions (T,): inside a block only positions up to the row's own are read, so that a row
    reads at most n x block_tokens keys. Raises ValueError on other shapes or dtypes, and in the checked mode on a block
    after the row's own or outside the cache.
    """
    check_tensor("q", q, ("T", "H", "D"), FLOATS)
    rows, heads, width = q.shape
    check_tensor("k", k, ("N", "G", width), (q.dtype,), q.device)
    check_tensor("v", v, k.shape, (q.dtype,), q.device)
    groups = k.shape[1]
    if groups == 0 or heads % groups:
        raise ValueError(f"k: {groups} KV groups do not divide {heads} query heads")
    check_tensor("selection", selection, (rows, groups, "n"), (torch.int32,), q.device)
    check_tensor("positions", positions, (rows,), INTEGERS, q.device)
    check_positive("block_tokens", block_tokens)
    paged = _check_paging(pages, row_page_offset, rows, q.device)
    if is_checked(checked, q):
        last = torch.div(positions, block_tokens, rounding_mode="floor")
        if bool((selection > last[:, None, None]).any()):
            raise ValueError("selection: a row picks a block after its own")
        if not paged:
            check_range("positions", positions, -1, k.shape[0])
        elif pages is not None:
            check_range("pages", pages, 0, k.shape[0] // block_tokens)
    if use_triton(backend, q):
        from profiler.ops.triton.msa import attend_blocks

        return attend_blocks(q, k, v, selection, positions, scale, block_tokens, pages, row_page_offset)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    span = selection.shape[2] * block_tokens
    out = torch.empty_like(q)
    group = torch.arange(groups, device=q.device)[None, :, None]
    offset = torch.arange(block_tokens, device=q.device)
    step = max(1, NAIVE_PIECE_ELEMENTS // max(1, span * groups * width))
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        blocks = selection[piece].long()
        position = (blocks[..., None] * block_tokens + offset).flatten(-2)
        valid = (position >= 0) & (position <= positions[piece, None, None])
        table = None if row_page_offset is None else row_page_offset[piece]
        at = _token_rows(blocks.clamp(min=0), block_tokens, pages, table).masked_fill(~valid, 0)
        # A masked key reads row 0, which may be unwritten memory: zero it, since 0 x NaN would be NaN.
        keys = k[at, group].to(wide).masked_fill_(~valid[..., None], 0.0)
        values = v[at, group].to(wide).masked_fill_(~valid[..., None], 0.0)
        query = q[piece].to(wide).unflatten(1, (groups, heads // groups))
        logits = torch.matmul(query, keys.transpose(-1, -2)) * scale
        logits = logits.masked_fill_(~valid[:, :, None, :], float("-inf"))
        top = logits.amax(-1, keepdim=True)
        weights = torch.exp(logits - top.masked_fill(top == float("-inf"), 0.0))
        total = weights.sum(-1, keepdim=True)
        mixed = torch.matmul(weights, values) / total.masked_fill(total == 0, 1.0)
        out[piece] = mixed.flatten(1, 2).to(q.dtype)
    return out
