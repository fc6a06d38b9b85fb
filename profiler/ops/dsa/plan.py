"""What a step asks of DSA: its configuration, the rows of each request, and the plan built from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from profiler.ops.checks import check_positive

MAIN: Final = "main"
# Spans of at most so many rows (decode and speculative verification) are scored on the pages, all in one launch.
SHORT_SPAN_ROWS: Final = 8
KeyStoreKind = Literal["buffer", "paged_fp8", "paged_bf16"]


@dataclass(frozen=True, slots=True)
class DSAConfig:
    """DSA of one model.

    kv_cache: name of the MLA cache whose plan places the rows. full_layers score and select on their own;
    shared_layers reuse the pick of the full layer before them (IndexShare). key_store: "buffer" grows one buffer per
    request; the paged kinds keep the keys on the pages of the MLA cache and can be captured in a CUDA graph.
    power_of_two_scales: UE8M0 scales for FP8 keys. max_request_pages bounds a request in a captured graph.
    """

    kv_cache: str
    full_layers: tuple[int, ...]
    shared_layers: tuple[int, ...] = ()
    topk: int = 2048
    index_dim: int = 128
    key_store: KeyStoreKind = "buffer"
    power_of_two_scales: bool = False
    max_request_pages: int | None = None

    def __post_init__(self) -> None:
        check_positive("topk", self.topk)
        check_positive("index_dim", self.index_dim)
        if self.key_store not in ("buffer", "paged_fp8", "paged_bf16"):
            raise ValueError(f"key_store: expected 'buffer', 'paged_fp8' or 'paged_bf16', found {self.key_store!r}")
        both = set(self.full_layers) & set(self.shared_layers)
        if both:
            raise ValueError(f"shared_layers: layers {sorted(both)} are also full layers")
        early = [layer for layer in self.shared_layers if not any(full < layer for full in self.full_layers)]
        if early:
            raise ValueError(f"shared_layers: no full layer comes before layers {early}")
        if self.max_request_pages is not None:
            check_positive("max_request_pages", self.max_request_pages)


@dataclass(frozen=True, slots=True)
class EngineResourceInfo:
    """What the engine tells a resource at start: the MLA cache's page length and pages, and the device."""

    page_size: int
    device: torch.device | str
    num_pages: int | None = None


@dataclass(frozen=True, slots=True)
class DSASpec:
    """A DSA resource as a model declares it."""

    name: str
    config: DSAConfig


@dataclass(frozen=True, slots=True)
class KVRows:
    """Where the KV plan put a request: its length before the step, its pages, its first token's offset in them."""

    request_id: str
    length: int
    pages: Sequence[int]
    page_start: int = 0


@dataclass(frozen=True, slots=True)
class StepContext:
    """The KV plans of a step: cache name -> label -> rows."""

    kv: Mapping[str, Mapping[str, Sequence[KVRows]]]


@dataclass(frozen=True, slots=True)
class DSAStep:
    """Rows of a step: label -> (request id, new tokens) in row order.

    padded_rows: label -> rows of the captured graph that will run the step. Such a label is padded with rows that see
    nothing, and lives in buffers whose addresses do not change from step to step.
    """

    rows: Mapping[str, Sequence[tuple[str, int]]]
    padded_rows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DSASpan:
    """One request's rows of a step: q_len rows from row q_start on, the first at position ctx_start.

    pages are its MLA cache pages, page_start the offset of its first token in them.
    """

    request_id: str
    q_start: int
    q_len: int
    ctx_start: int
    pages: Sequence[int]
    page_start: int = 0

    @property
    def length(self) -> int:
        """Keys visible to the last row."""
        return self.ctx_start + self.q_len


@dataclass(slots=True)
class DSAPlan:
    """A label's rows in one step. Changes only in last_selection, the last full layer's pick of this forward.

    needs_selection: some row sees more than topk keys, or the plan is for a captured graph. pages holds the page tables
    of the requests back to back on the device; the table of row r starts at row_page_offset[r], and the request's first
    token sits row_start[r] slots into it. positions (rows,) is -1 for padding rows; slots (rows,) is the cache slot of
    each row's own token, -1 for padding rows. short_rows lists the rows of spans of at most SHORT_SPAN_ROWS rows, None
    when there are none. width is the number of score columns. Device tensors are int32; slots and short_rows are int64.
    """

    spans: list[DSASpan]
    needs_selection: bool
    last_selection: torch.Tensor | None = None
    pages: torch.Tensor | None = None
    row_page_offset: torch.Tensor | None = None
    row_start: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    short_rows: torch.Tensor | None = None
    rows: int = 0
    width: int = 0
    max_page: int = -1
    fixed_shape: bool = False


def build_spans(
    rows: Sequence[tuple[str, int]], placed: Sequence[KVRows], page_size: int, num_pages: int | None
) -> list[DSASpan]:
    """Spans of one label, in row order.

    Raises ValueError for a request that the KV plan does not place, a request listed twice, a span without rows, a page
    that does not exist, or pages that do not reach the last token.
    """
    by_request = {kv.request_id: kv for kv in placed}
    spans: list[DSASpan] = []
    start = 0
    seen: set[str] = set()
    for request_id, q_len in rows:
        kv = by_request.get(request_id)
        if kv is None:
            raise ValueError(f"rows: request {request_id!r} has no rows in the KV plan, which has {sorted(by_request)}")
        if request_id in seen:
            raise ValueError(f"rows: request {request_id!r} is listed twice")
        seen.add(request_id)
        if q_len <= 0 or kv.length < 0:
            raise ValueError(f"rows: request {request_id!r} has {q_len} new tokens behind {kv.length}")
        if not 0 <= kv.page_start < page_size:
            raise ValueError(f"page_start: {kv.page_start} of {request_id!r} lies outside a page of {page_size} tokens")
        pages = tuple(kv.pages)
        missing = [page for page in pages if page < 0 or (num_pages is not None and page >= num_pages)]
        if missing:
            raise ValueError(f"pages: request {request_id!r} names pages {missing}, the cache has {num_pages}")
        needed = -(-(kv.page_start + kv.length + q_len) // page_size)
        if len(pages) < needed:
            raise ValueError(
                f"pages: request {request_id!r} needs {needed} pages of {page_size} for {kv.length + q_len} tokens "
                f"from offset {kv.page_start}, it has {len(pages)}"
            )
        spans.append(DSASpan(request_id, start, q_len, kv.length, pages, kv.page_start))
        start += q_len
    return spans


def host_rows(
    spans: Sequence[DSASpan], page_size: int, row_pages: int | None = None
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """(pages, row_page_offset, row_start, positions, slots) as lists.

    row_pages fixes the room of each table, as captured graphs need; otherwise tables follow one another closely.
    """
    pages: list[int] = []
    offsets: list[int] = []
    starts: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for span in spans:
        base = len(pages)
        pages.extend(span.pages)
        if row_pages is not None:
            pages.extend([0] * (row_pages - len(span.pages)))
        for position in range(span.ctx_start, span.length):
            at = span.page_start + position
            offsets.append(base)
            starts.append(span.page_start)
            positions.append(position)
            slots.append(span.pages[at // page_size] * page_size + at % page_size)
    return pages, offsets, starts, positions, slots
