"""From positions of a request to slots of a paged cache."""

import torch

from profiler.ops.checks import Backend, check_positive, check_tensor, use_triton


def position_slots(
    selection: torch.Tensor,
    pages: torch.Tensor,
    row_page_offset: torch.Tensor,
    row_start: torch.Tensor,
    page_size: int,
    *,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Cache slots (T, K) int32 of request-local positions (T, K) int32; negative positions stay -1.

    pages (P,) int32 holds page tables back to back; row r's starts at row_page_offset[r] and its request's first token
    lies row_start[r] slots into it (both (T,) int32). Raises ValueError on other shapes or dtypes.
    """
    check_tensor("selection", selection, ("T", "K"), (torch.int32,))
    rows = selection.shape[0]
    check_tensor("pages", pages, ("P",), (torch.int32,), selection.device)
    check_tensor("row_page_offset", row_page_offset, (rows,), (torch.int32,), selection.device)
    check_tensor("row_start", row_start, (rows,), (torch.int32,), selection.device)
    check_positive("page_size", page_size)
    if use_triton(backend, selection):
        from profiler.ops.triton.paging import position_slots_kernel

        return position_slots_kernel(selection, pages, row_page_offset, row_start, page_size)
    none = selection < 0
    at = selection + row_start[:, None]
    table = (row_page_offset[:, None] + at // page_size).masked_fill(none, 0)
    return (pages[table.long()] * page_size + at % page_size).masked_fill(none, -1)
