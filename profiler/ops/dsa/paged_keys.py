"""Index keys on the pages of the MLA cache: same page table, allocator and eviction, and shapes that never change."""

from collections.abc import Sequence
from typing import Literal

import torch

from profiler.ops.checks import FLOATS, FP8, Backend, check_positive, check_range, check_tensor, is_checked, use_triton
from profiler.ops.formats import INDEX_DIM, INDEX_ROW_BYTES, quantize_fp8, split_index_pages

# Elements that a naive scoring call gathers per piece of rows.
NAIVE_PIECE_ELEMENTS = 1 << 24


class PagedIndexKeyStore:
    """Index keys of every layer with an indexer, one buffer per layer over the pages of the MLA cache.

    kind "fp8": uint8 (num_pages + 1, page_size x 132), per page all codes and then all scales, as the engine keeps its
    index cache (132 bytes per token). kind "bf16": (num_pages + 1, page_size, D). The last page takes what padding rows
    write and is never read.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_pages: int,
        page_size: int,
        device: torch.device | str,
        *,
        kind: Literal["fp8", "bf16"] = "fp8",
        index_dim: int = INDEX_DIM,
        power_of_two: bool = False,
    ) -> None:
        check_positive("num_pages", num_pages)
        check_positive("page_size", page_size)
        if kind not in ("fp8", "bf16"):
            raise ValueError(f"kind: expected 'fp8' or 'bf16', found {kind!r}")
        if kind == "fp8" and index_dim != INDEX_DIM:
            raise ValueError(f"index_dim: FP8 index rows hold {INDEX_DIM} features, found {index_dim}")
        self.num_pages, self.page_size, self.index_dim = num_pages, page_size, index_dim
        self.kind, self.power_of_two = kind, power_of_two
        packed = kind == "fp8"
        width = (page_size * INDEX_ROW_BYTES,) if packed else (page_size, index_dim)
        dtype = torch.uint8 if packed else torch.bfloat16
        self._layers = {layer: torch.zeros(num_pages + 1, *width, dtype=dtype, device=device) for layer in layers}

    @property
    def bytes_per_token_layer(self) -> int:
        return INDEX_ROW_BYTES if self.kind == "fp8" else 2 * self.index_dim

    def layer(self, layer_idx: int) -> torch.Tensor:
        """The buffer of one layer. Raises ValueError for a layer without index keys."""
        if layer_idx not in self._layers:
            raise ValueError(f"layer_idx: layer {layer_idx} has no index keys, layers {sorted(self._layers)} have")
        return self._layers[layer_idx]

    def write(
        self,
        layer_idx: int,
        keys: torch.Tensor,
        slots: torch.Tensor,
        *,
        checked: bool | None = None,
        backend: Backend = "auto",
    ) -> None:
        """Store keys (T, D) at cache slots (T,) int64 (page x page_size + offset); a row with slot -1 is dropped.

        Raises ValueError on other shapes or dtypes, and in the checked mode on a slot that does not exist.
        """
        buffer = self.layer(layer_idx)
        check_tensor("keys", keys, ("T", self.index_dim), FLOATS, buffer.device)
        check_tensor("slots", slots, (keys.shape[0],), (torch.int64,), buffer.device)
        if is_checked(checked, keys):
            check_range("slots", slots, -1, self.num_pages * self.page_size)
        if self.kind == "fp8" and use_triton(backend, keys):
            from profiler.ops.triton.indexer import write_index_pages

            write_index_pages(keys, slots, buffer, self.page_size, self.power_of_two)
            return
        where = torch.where(slots < 0, self.num_pages * self.page_size, slots)
        page, offset = where // self.page_size, where % self.page_size
        if self.kind == "bf16":
            buffer[page, offset] = keys.to(torch.bfloat16)
            return
        codes, scales = split_index_pages(buffer, self.page_size)
        new_codes, new_scales = quantize_fp8(keys, INDEX_DIM, power_of_two=self.power_of_two)
        codes.view(torch.uint8)[page, offset] = new_codes.view(torch.uint8)
        scales[page, offset] = new_scales[:, 0]

    def gather(self, layer_idx: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys at cache slots (...): bf16 (..., D) and None, or E4M3 codes (..., D) and fp32 scales (...)."""
        buffer = self.layer(layer_idx)
        page, offset = slots.long() // self.page_size, slots.long() % self.page_size
        if self.kind == "bf16":
            return buffer[page, offset], None
        codes, scales = split_index_pages(buffer, self.page_size)
        return codes.view(torch.uint8)[page, offset].view(FP8), scales[page, offset]

    def scores(
        self,
        layer_idx: int,
        q: torch.Tensor,
        weights: torch.Tensor,
        pages: torch.Tensor,
        row_page_offset: torch.Tensor,
        row_start: torch.Tensor,
        positions: torch.Tensor,
        width: int,
        *,
        backend: Backend = "auto",
    ) -> torch.Tensor:
        """Index scores of each row over its own request's keys, (T, width) fp32.

        Columns past a row's position mean nothing.
        q (T, H, D) and weights (T, H) as in `index_scores`; pages, row_page_offset, row_start and positions as in a
        `DSAPlan`. Shapes are fixed and nothing syncs, so the call can be captured.
        """
        buffer = self.layer(layer_idx)
        check_tensor("q", q, ("T", "H", self.index_dim), (*FLOATS, FP8), buffer.device)
        rows = q.shape[0]
        check_tensor("weights", weights, q.shape[:2], FLOATS, buffer.device)
        for name, tensor in (("row_page_offset", row_page_offset), ("row_start", row_start), ("positions", positions)):
            check_tensor(name, tensor, (rows,), (torch.int32,), buffer.device)
        check_tensor("pages", pages, ("P",), (torch.int32,), buffer.device)
        check_positive("width", width)
        if use_triton(backend, q):
            from profiler.ops.triton.indexer import index_scores_paged

            return index_scores_paged(
                q, weights, buffer, self.page_size, pages, row_page_offset, row_start, positions, width
            )
        scores = torch.empty(rows, width, dtype=torch.float32, device=q.device)
        column = torch.arange(width, device=q.device)
        step = max(1, NAIVE_PIECE_ELEMENTS // (width * self.index_dim))
        for start in range(0, rows, step):
            piece = slice(start, start + step)
            hidden = column > positions[piece, None]
            slot = column + row_start[piece, None]
            table = (row_page_offset[piece, None] + slot // self.page_size).masked_fill(hidden, 0)
            cached = pages[table.long()] * self.page_size + slot % self.page_size
            keys, key_scales = self.gather(layer_idx, cached)
            wide = keys.double() if key_scales is None else keys.double() * key_scales.double()[..., None]
            products = torch.bmm(q[piece].double(), wide.transpose(1, 2)).relu_()
            summed = torch.bmm(weights[piece].double()[:, None, :], products)[:, 0]
            scores[piece] = summed.masked_fill(hidden, float("-inf"))
        return scores
