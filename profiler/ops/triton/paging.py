# mypy: ignore-errors
# Kernels are a language of their own: Triton's parameters and decorators carry no Python types.
"""Positions of a request to slots of a paged cache, in one launch."""

import torch
import triton
import triton.language as tl


@triton.jit
def _slots_kernel(selection, pages, row_page_offset, row_start, out, picks, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * picks + column
    position = tl.load(selection + at, mask=column < picks, other=-1)
    some = position >= 0
    slot = position + tl.load(row_start + row)
    page = tl.load(pages + tl.load(row_page_offset + row) + slot // PAGE, mask=some, other=0)
    tl.store(out + at, tl.where(some, page * PAGE + slot % PAGE, -1), mask=column < picks)


def position_slots_kernel(
    selection: torch.Tensor,
    pages: torch.Tensor,
    row_page_offset: torch.Tensor,
    row_start: torch.Tensor,
    page_tokens: int,
) -> torch.Tensor:
    """Slots (T, K) int32 of positions (T, K) int32; see `profiler.ops.paging.position_slots`."""
    rows, picks = selection.shape
    out = torch.empty_like(selection, memory_format=torch.contiguous_format)
    if out.numel():
        block = min(1024, triton.next_power_of_2(picks))
        _slots_kernel[(rows, triton.cdiv(picks, block))](
            selection.contiguous(), pages, row_page_offset, row_start, out, picks, PAGE=page_tokens, BLOCK=block
        )
    return out
