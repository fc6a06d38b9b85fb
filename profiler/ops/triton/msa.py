# mypy: ignore-errors
# Kernels are a language of their own: Triton's parameters and decorators carry no Python types.
"""MSA in Triton: block scores and attention over picked blocks, over keys in position order or pages of one block each.

Scores of prefill rows: (query, group) pairs are the rows of a product with one block of keys, whose largest value along
a row is the block's score. Scores of paged rows: one program per row and stripe of blocks. Attention: one program per
query and KV group, whose query heads are the rows; a block is read in tiles, and programs of a few queries may share
the picks between them (splits), to be merged afterwards.
"""

import torch
import triton
import triton.language as tl

from profiler.ops.triton.merge import LOG2E, merge_parts

_TARGET_PROGRAMS = 132 * 4
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _scores_kernel(
    q,
    k,
    positions,
    out,
    rows,
    count,
    blocks,
    split_blocks,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS query rows against split_blocks blocks of keys in position order."""
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    pair = tl.arange(0, ROWS * GROUPS_PADDED)
    row = tile * ROWS + pair // GROUPS_PADDED
    group = pair % GROUPS_PADDED
    feature = tl.arange(0, DIM_PADDED)
    real = (row < rows) & (group < GROUPS)
    pair_at = row.to(tl.int64) * GROUPS + group
    query = tl.load(
        q + pair_at[:, None] * DIM + feature[None, :], mask=real[:, None] & (feature < DIM)[None, :], other=0.0
    ).to(COMPUTE)
    position = tl.load(positions + row, mask=real, other=-1).to(tl.int32)
    last = tl.max(position, axis=0)
    low = tl.program_id(0) * split_blocks
    high = tl.minimum(low + split_blocks, blocks)
    offset = tl.arange(0, BLOCK)
    out_at = out + pair_at * blocks
    for block in tl.range(low, high):
        token = block * BLOCK + offset
        # Blocks that no row of the program sees load nothing and come out as -inf.
        key = tl.load(
            k + token.to(tl.int64)[:, None] * DIM + feature[None, :],
            mask=((token < count) & (token <= last))[:, None] & (feature < DIM)[None, :],
            other=0.0,
        ).to(COMPUTE)
        product = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        product = tl.where(token[None, :] <= position[:, None], product, float("-inf"))
        tl.store(out_at + block, tl.max(product, axis=1), mask=real)


@triton.jit
def _paged_scores_kernel(
    q,
    k,
    positions,
    pages,
    row_page_offset,
    out,
    blocks,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row against every SPLITS-th block. Keys are the rows of the product, groups its columns."""
    row = tl.program_id(0)
    group = tl.arange(0, GROUPS_PADDED)
    feature = tl.arange(0, DIM_PADDED)
    query = tl.load(
        q + (row * GROUPS + group)[None, :] * DIM + feature[:, None],
        mask=(group < GROUPS)[None, :] & (feature < DIM)[:, None],
        other=0.0,
    ).to(COMPUTE)
    position = tl.load(positions + row).to(tl.int32)
    table = pages + tl.load(row_page_offset + row)
    offset = tl.arange(0, BLOCK)
    out_at = out + (row.to(tl.int64) * GROUPS + group) * blocks
    for block in tl.range(tl.program_id(1), blocks, tl.num_programs(1)):
        seen = block * BLOCK + offset <= position
        page = tl.load(table + block, mask=block * BLOCK <= position, other=0).to(tl.int64)
        key = tl.load(
            k + (page * BLOCK + offset)[:, None] * DIM + feature[None, :],
            mask=seen[:, None] & (feature < DIM)[None, :],
            other=0.0,
        ).to(COMPUTE)
        product = tl.dot(key, query, input_precision=PRECISION)
        product = tl.where(seen[:, None], product, float("-inf"))
        tl.store(out_at + block, tl.max(product, axis=0), mask=group < GROUPS)


@triton.jit
def _attend_kernel(
    q,
    k,
    v,
    selection,
    positions,
    pages,
    row_page_offset,
    out,
    tops,
    totals,
    scale_log2,
    groups,
    PICKS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGED: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The PER_GROUP query heads of one group against its picked blocks, TILE keys at a time."""
    group = tl.program_id(0) % groups
    row = tl.program_id(0) // groups
    head = tl.arange(0, HEADS)
    feature = tl.arange(0, DIM_PADDED)
    feature_in = feature < DIM
    real = head < PER_GROUP
    first = (row.to(tl.int64) * groups + group) * PER_GROUP
    mask = real[:, None] & feature_in[None, :]
    query = tl.load(q + (first + head)[:, None] * DIM + feature[None, :], mask=mask, other=0.0).to(COMPUTE)
    position = tl.load(positions + row).to(tl.int32)
    pick_at = selection + (row.to(tl.int64) * groups + group) * PICKS
    TILES: tl.constexpr = BLOCK // TILE
    share = tl.cdiv(PICKS, SPLITS)
    low = tl.program_id(1) * share
    high = tl.minimum(low + share, PICKS)
    step = tl.arange(0, TILE)
    top = tl.full((HEADS,), _LOWEST, tl.float32)
    lanes = tl.zeros((HEADS, TILE), tl.float32)
    acc = tl.zeros((HEADS, DIM_PADDED), tl.float32)
    if PAGED:
        table = pages + tl.load(row_page_offset + row)
    for turn in tl.range(low * TILES, high * TILES):
        block = tl.load(pick_at + turn // TILES)
        inner = (turn % TILES) * TILE + step
        kept = (block >= 0) & (block * BLOCK + inner <= position)
        if PAGED:
            source = tl.load(table + block, mask=block >= 0, other=0).to(tl.int64) * BLOCK
        else:
            source = block.to(tl.int64) * BLOCK
        at = ((source + inner) * groups + group)[:, None] * DIM + feature[None, :]
        loaded = kept[:, None] & feature_in[None, :]
        key = tl.load(k + at, mask=loaded, other=0.0).to(COMPUTE)
        value = tl.load(v + at, mask=loaded, other=0.0).to(COMPUTE)
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        logits = tl.where(kept[None, :], logits * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        lanes = lanes * shrink[:, None] + weights
        acc = tl.dot(weights.to(COMPUTE), value, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    total = tl.sum(lanes, axis=1)
    if SPLITS == 1:
        share_of = 1.0 / tl.where(total == 0.0, 1.0, total)
        result = (acc * share_of[:, None]).to(out.dtype.element_ty)
        tl.store(out + (first + head)[:, None] * DIM + feature[None, :], result, mask=mask)
    else:
        part = ((row.to(tl.int64) * SPLITS + tl.program_id(1)) * groups + group) * PER_GROUP + head
        tl.store(out + part[:, None] * DIM + feature[None, :], acc, mask=mask)
        tl.store(tops + part, top, mask=real)
        tl.store(totals + part, total, mask=real)


def _compute_type(*tensors: torch.Tensor) -> tuple[object, str]:
    kinds = {tensor.dtype for tensor in tensors}
    if kinds == {torch.bfloat16}:
        return tl.bfloat16, "tf32"
    return (tl.float16, "tf32") if kinds == {torch.float16} else (tl.float32, "tf32x3")


def block_scores(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    positions: torch.Tensor,
    block_tokens: int,
    blocks: int,
    pages: torch.Tensor | None,
    row_page_offset: torch.Tensor | None,
    *,
    pairs: int = 128,
    warps: int = 8,
    stages: int = 3,
) -> torch.Tensor:
    """Block scores (T, G, NB) fp32; see `profiler.ops.msa.msa_block_scores`. block_tokens is a power of two >= 16."""
    rows, groups, dim = index_q.shape
    out = torch.empty(rows, groups, blocks, dtype=torch.float32, device=index_q.device)
    if rows == 0:
        return out
    compute, precision = _compute_type(index_q, index_k)
    if compute == tl.float32:
        pairs, stages = min(pairs, 32), 1
    common = {
        "GROUPS": groups,
        "DIM": dim,
        "DIM_PADDED": max(16, triton.next_power_of_2(dim)),
        "BLOCK": block_tokens,
        "COMPUTE": compute,
        "PRECISION": precision,
        "num_stages": stages,
    }
    q, k = index_q.contiguous(), index_k.contiguous()
    if pages is not None:
        splits = max(1, min(blocks, triton.cdiv(_TARGET_PROGRAMS, rows)))
        _paged_scores_kernel[(rows, splits)](
            q,
            k,
            positions,
            pages,
            row_page_offset,
            out,
            blocks,
            GROUPS_PADDED=max(8, triton.next_power_of_2(groups)),
            num_warps=4,
            **common,
        )
        return out
    padded = triton.next_power_of_2(groups)
    tile_rows = max(16 // padded, min(pairs // padded, triton.next_power_of_2(rows)), 1)
    tiles = triton.cdiv(rows, tile_rows)
    splits = max(1, min(triton.cdiv(blocks, 4), triton.cdiv(_TARGET_PROGRAMS, tiles)))
    split_blocks = triton.cdiv(blocks, splits)
    _scores_kernel[(triton.cdiv(blocks, split_blocks), tiles)](
        q,
        k,
        positions,
        out,
        rows,
        index_k.shape[0],
        blocks,
        split_blocks,
        GROUPS_PADDED=padded,
        ROWS=tile_rows,
        num_warps=warps if tile_rows * padded >= 128 else 4,
        **common,
    )
    return out


def attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    block_tokens: int,
    pages: torch.Tensor | None,
    row_page_offset: torch.Tensor | None,
    *,
    tile: int | None = None,
    splits: int | None = None,
    warps: int = 4,
    stages: int = 3,
) -> torch.Tensor:
    """Attention over picked blocks (T, H, D); see `profiler.ops.msa.msa_attend`. block_tokens is a power of two >= 16.

    tile (keys at a time), splits, warps and stages override the launch for tests and benchmarks.
    """
    rows, heads, dim = q.shape
    groups, picks = selection.shape[1:]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if rows == 0 or heads == 0:
        return out
    if picks == 0:
        return out.zero_()
    compute, precision = _compute_type(q, k, v)
    per_group = heads // groups
    if compute == tl.float32:
        tile, stages = tile or 32, 1
    tile = min(block_tokens, tile or 64)
    if splits is None:
        splits = max(1, min(picks, _TARGET_PROGRAMS // (rows * groups)))
    # A share that does not divide the picks may leave the last splits empty; they merge as zeros.
    parts, tops, totals = out, out, out
    if splits > 1:
        parts = torch.empty(rows, splits, heads, dim, dtype=torch.float32, device=q.device)
        tops = torch.empty(rows, splits, heads, dtype=torch.float32, device=q.device)
        totals = torch.empty_like(tops)
    scale_log2 = scale * LOG2E
    _attend_kernel[(groups * rows, splits)](
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        selection.contiguous(),
        positions,
        selection if pages is None else pages,
        selection if row_page_offset is None else row_page_offset,
        parts,
        tops,
        totals,
        scale_log2,
        groups,
        PICKS=picks,
        PER_GROUP=per_group,
        HEADS=max(16, triton.next_power_of_2(per_group)),
        DIM=dim,
        DIM_PADDED=max(16, triton.next_power_of_2(dim)),
        BLOCK=block_tokens,
        TILE=tile,
        SPLITS=splits,
        PAGED=pages is not None,
        COMPUTE=compute,
        PRECISION=precision,
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        merge_parts(parts, tops, totals, out, scale, None)
    return out
