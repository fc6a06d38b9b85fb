"""DSA of one node's layers over its MLA cache: store index keys, select, attend."""

from collections.abc import Sequence
from typing import Any

import torch

from profiler.ops.checks import FLOATS, FP8, Backend, check_positive, check_tensor, is_checked
from profiler.ops.dsa.keys import IndexKeyStore
from profiler.ops.dsa.paged_keys import PagedIndexKeyStore
from profiler.ops.dsa.plan import (
    MAIN,
    SHORT_SPAN_ROWS,
    DSAConfig,
    DSAPlan,
    DSASpan,
    DSASpec,
    DSAStep,
    EngineResourceInfo,
    StepContext,
    build_spans,
    host_rows,
)
from profiler.ops.formats import SparseKVFormat
from profiler.ops.indexer import index_topk, select_topk_causal
from profiler.ops.mla import sparse_mla
from profiler.ops.paging import position_slots


class DSAManager:
    """DSA over the MLA cache config.kv_cache, page_size tokens a page.

    A forward of a full layer calls store_keys, select and attend; a shared layer calls shared_selection and attend. The
    calls of a step follow one `plan`. With the paged key store (num_pages is needed) a label that is planned with
    padded_rows runs in fixed shapes: capture its calls in a CUDA graph once, then plan and replay.
    """

    def __init__(
        self,
        config: DSAConfig,
        page_size: int,
        device: torch.device | str,
        *,
        num_pages: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        check_positive("page_size", page_size)
        self.config, self.page_size, self.num_pages = config, page_size, num_pages
        self.device, self.backend = torch.device(device), backend
        self.buffer_keys: IndexKeyStore | None = None
        self.paged_keys: PagedIndexKeyStore | None = None
        if config.key_store == "buffer":
            self.buffer_keys = IndexKeyStore()
        else:
            if num_pages is None:
                raise ValueError("num_pages: the paged key store needs the number of pages of the MLA cache")
            self.paged_keys = PagedIndexKeyStore(
                config.full_layers,
                num_pages,
                page_size,
                self.device,
                kind="fp8" if config.key_store == "paged_fp8" else "bf16",
                index_dim=config.index_dim,
                power_of_two=config.power_of_two_scales,
            )
        self._plans: dict[str, DSAPlan] = {}
        self._fixed: dict[str, dict[str, torch.Tensor]] = {}

    @classmethod
    def build(cls, spec: DSASpec, info: EngineResourceInfo) -> "DSAManager":
        """The manager of a declared resource."""
        return cls(spec.config, info.page_size, info.device, num_pages=info.num_pages)

    def depends_on(self) -> set[str]:
        """Names of the resources whose plans must be made first."""
        return {self.config.kv_cache}

    def plan(self, step: DSAStep, ctx: StepContext) -> dict[str, DSAPlan]:
        """The rows of each label of the step, as the KV plan placed them.

        A request's rows follow those of the one before it, and its first sits at its length before the step.
        Raises ValueError for rows that the KV plan does not hold, pages that do not exist or do not reach, and padded
        rows that the batch does not fit. Replaces the plans of the step before.
        """
        if self.config.kv_cache not in ctx.kv:
            raise ValueError(f"ctx: no plan of cache {self.config.kv_cache!r}, there are {sorted(ctx.kv)}")
        placed = ctx.kv[self.config.kv_cache]
        extra = set(step.padded_rows) - set(step.rows)
        if extra:
            raise ValueError(f"padded_rows: labels {sorted(extra)} have no rows in this step")
        spans = {
            label: build_spans(rows, placed.get(label, ()), self.page_size, self.num_pages)
            for label, rows in step.rows.items()
        }
        self._plans = {
            label: self._fixed_plan(label, found, step.padded_rows[label])
            if label in step.padded_rows
            else self._eager_plan(found)
            for label, found in spans.items()
        }
        return self._plans

    def _tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _eager_plan(self, spans: list[DSASpan]) -> DSAPlan:
        pages, offsets, starts, positions, slots = host_rows(spans, self.page_size)
        short = [row for span in spans if _is_short(span) for row in range(span.q_start, span.q_start + span.q_len)]
        return DSAPlan(
            spans=spans,
            needs_selection=any(span.length > self.config.topk for span in spans),
            pages=self._tensor(pages),
            row_page_offset=self._tensor(offsets),
            row_start=self._tensor(starts),
            positions=self._tensor(positions),
            slots=self._tensor(slots, torch.int64),
            short_rows=self._tensor(short, torch.int64) if short else None,
            rows=len(positions),
            width=max((span.length for span in spans), default=0),
            max_page=max(pages, default=-1),
        )

    def _fixed_plan(self, label: str, spans: list[DSASpan], rows: int) -> DSAPlan:
        room = self.config.max_request_pages
        if self.paged_keys is None or room is None:
            raise ValueError("padded_rows: fixed shapes need a paged key_store and max_request_pages in the DSAConfig")
        check_positive("padded_rows", rows)
        used = sum(span.q_len for span in spans)
        if used > rows:
            raise ValueError(f"padded_rows: {rows} rows cannot hold the {used} of this step")
        longest = max((len(span.pages) for span in spans), default=0)
        if longest > room:
            raise ValueError(f"pages: a request has {longest} pages, max_request_pages is {room}")
        pages, offsets, starts, positions, slots = host_rows(spans, self.page_size, room)
        padding = rows - used
        values = {
            "pages": pages + [0] * (rows * room - len(pages)),
            "row_page_offset": offsets + [0] * padding,
            "row_start": starts + [0] * padding,
            "positions": positions + [-1] * padding,
            "slots": slots + [-1] * padding,
        }
        key = f"{label}/{rows}"
        if key not in self._fixed:
            self._fixed[key] = {
                name: self._tensor(value, torch.int64 if name == "slots" else torch.int32)
                for name, value in values.items()
            }
        else:
            for name, value in values.items():
                kept = self._fixed[key][name]
                kept.copy_(torch.tensor(value, dtype=kept.dtype), non_blocking=False)
        return DSAPlan(
            spans=spans,
            needs_selection=True,
            rows=rows,
            width=room * self.page_size,
            max_page=max(pages, default=-1),
            fixed_shape=True,
            **self._fixed[key],
        )

    def _plan(self, label: str) -> DSAPlan:
        if label not in self._plans:
            raise ValueError(f"label: no rows are planned for {label!r} in this step, there are {sorted(self._plans)}")
        return self._plans[label]

    def _check_full(self, layer_idx: int) -> None:
        if layer_idx not in self.config.full_layers:
            raise ValueError(f"layer_idx: {layer_idx} has no indexer, full layers are {list(self.config.full_layers)}")

    def needs_selection(self, label: str = MAIN) -> bool:
        """Whether the step's rows attend a pick rather than every key."""
        return self._plan(label).needs_selection

    def store_keys(self, layer_idx: int, keys: torch.Tensor, label: str = MAIN) -> None:
        """Store the step's index keys (T, D) of one full layer, each request's at its positions.

        Raises ValueError, before anything is written, on rows that do not match the plan or a gap in a request's keys.
        """
        self._check_full(layer_idx)
        plan = self._plan(label)
        check_tensor("keys", keys, (plan.rows, self.config.index_dim), FLOATS, self.device)
        if self.paged_keys is not None:
            self.paged_keys.write(layer_idx, keys, _need(plan.slots), backend=self.backend)
            return
        store = _need(self.buffer_keys)
        pieces = [(span, keys[span.q_start : span.q_start + span.q_len]) for span in plan.spans]
        for span, piece in pieces:
            store.check_append(span.request_id, layer_idx, piece, span.ctx_start)
        for span, piece in pieces:
            store.append(span.request_id, layer_idx, piece, span.ctx_start)

    def select(self, layer_idx: int, q: torch.Tensor, weights: torch.Tensor, label: str = MAIN) -> torch.Tensor:
        """Each row's topk best positions of its request over this layer's keys, (T, topk) int32, -1 padded.

        q (T, H, D), weights (T, H). When no row sees more than topk keys, every key is picked without scoring. Shared
        layers reuse the result in this forward. Raises ValueError on rows that do not match the plan, and when fewer
        keys are stored than a row sees.
        """
        self._check_full(layer_idx)
        plan = self._plan(label)
        check_tensor("q", q, (plan.rows, "H", self.config.index_dim), (*FLOATS, FP8), self.device)
        check_tensor("weights", weights, q.shape[:2], FLOATS, self.device)
        positions = _need(plan.positions)
        if not plan.needs_selection:
            column = torch.arange(self.config.topk, dtype=torch.int32, device=self.device)
            picked = torch.where(column <= positions[:, None], column, -1)
        elif self.buffer_keys is not None:
            picked = self._select_buffered(layer_idx, plan, q, weights)
        elif plan.fixed_shape or all(_is_short(span) for span in plan.spans):
            picked = self._select_paged(layer_idx, plan, q, weights, None)
        else:
            picked = self._select_mixed(layer_idx, plan, q, weights)
        plan.last_selection = picked
        return picked

    def _select_buffered(self, layer_idx: int, plan: DSAPlan, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        store, positions = _need(self.buffer_keys), _need(plan.positions)
        histories = [store.history(span.request_id, layer_idx, span.length) for span in plan.spans]
        picked = torch.empty(plan.rows, self.config.topk, dtype=torch.int32, device=self.device)
        for span, keys in zip(plan.spans, histories, strict=True):
            rows = slice(span.q_start, span.q_start + span.q_len)
            picked[rows] = index_topk(
                q[rows], weights[rows], keys, positions[rows], self.config.topk, checked=False, backend=self.backend
            )
        return picked

    def _select_paged(
        self, layer_idx: int, plan: DSAPlan, q: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows of short spans, all in one launch; `rows` picks them out of a mixed step."""
        offsets, starts, positions = _need(plan.row_page_offset), _need(plan.row_start), _need(plan.positions)
        if rows is not None:
            q, weights = q[rows], weights[rows]
            offsets, starts, positions = offsets[rows], starts[rows], positions[rows]
        scores = _need(self.paged_keys).scores(
            layer_idx, q, weights, _need(plan.pages), offsets, starts, positions, plan.width, backend=self.backend
        )
        return select_topk_causal(scores, positions, self.config.topk, checked=False, backend=self.backend)

    def _select_mixed(self, layer_idx: int, plan: DSAPlan, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Prefill rows request by request over their gathered keys, decode rows together on the pages."""
        store = _need(self.paged_keys)
        pages, offsets, positions = _need(plan.pages), _need(plan.row_page_offset), _need(plan.positions)
        picked = torch.empty(plan.rows, self.config.topk, dtype=torch.int32, device=self.device)
        if plan.short_rows is not None:
            picked[plan.short_rows] = self._select_paged(layer_idx, plan, q, weights, plan.short_rows)
        for span in plan.spans:
            if _is_short(span):
                continue
            rows = slice(span.q_start, span.q_start + span.q_len)
            at = torch.arange(span.page_start, span.page_start + span.length, device=self.device)
            slots = pages[offsets[span.q_start] + at // self.page_size] * self.page_size + at % self.page_size
            keys, scales = store.gather(layer_idx, slots)
            picked[rows] = index_topk(
                q[rows],
                weights[rows],
                keys,
                positions[rows],
                self.config.topk,
                key_scales=scales,
                checked=False,
                backend=self.backend,
            )
        return picked

    def shared_selection(self, layer_idx: int, label: str = MAIN) -> torch.Tensor:
        """The pick of the last full layer of this forward, for a shared layer (IndexShare).

        Raises ValueError for a layer that is not shared, or when no full layer has selected since the plan.
        """
        if layer_idx not in self.config.shared_layers:
            shared = list(self.config.shared_layers)
            raise ValueError(f"layer_idx: {layer_idx} does not reuse a selection, shared layers are {shared}")
        picked = self._plan(label).last_selection
        if picked is None:
            raise ValueError(f"layer_idx: no full layer has selected for {label!r} before shared layer {layer_idx}")
        return picked

    def attend(
        self,
        selection: torch.Tensor,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        latent_layer: torch.Tensor,
        sm_scale: float,
        label: str = MAIN,
        *,
        kv_format: SparseKVFormat = SparseKVFormat.BF16,
        sink: torch.Tensor | None = None,
        checked: bool | None = None,
    ) -> torch.Tensor:
        """Absorbed MLA of each row over its picked latents, (T, H, kv_lora_rank); zeros for padding rows.

        selection (T, K) int32 request-local positions, -1 for none; q_nope (T, H, kv_lora_rank), q_pe (T, H, rope);
        latent_layer the cache's layer view (pages, page_size, row), this step's latents already written; its rows are
        bf16 (or wider) latents, raw FP8 or packed bytes as kv_format says. Raises ValueError on rows that do not match
        the plan or a page that the view does not have, and in the checked mode on a position that its row cannot see.
        """
        plan = self._plan(label)
        check_tensor("selection", selection, (plan.rows, "K"), (torch.int32,), self.device)
        check_tensor("q_nope", q_nope, (plan.rows, "H", "R"), FLOATS, self.device)
        check_tensor("latent_layer", latent_layer, ("pages", self.page_size, "row"), (), self.device)
        if plan.max_page >= latent_layer.shape[0]:
            raise ValueError(f"latent_layer: page {plan.max_page} is planned, the view has {latent_layer.shape[0]}")
        if is_checked(checked, selection) and bool((selection > _need(plan.positions)[:, None]).any()):
            raise ValueError("selection: a row picks a position after its own")
        slots = position_slots(
            selection,
            _need(plan.pages),
            _need(plan.row_page_offset),
            _need(plan.row_start),
            self.page_size,
            backend=self.backend,
        )
        return sparse_mla(
            q_nope,
            q_pe,
            latent_layer.flatten(0, 1),
            slots,
            sm_scale,
            kv_format=kv_format,
            sink=sink,
            checked=False,
            backend=self.backend,
        )

    def reset_request(self, rid: str, free: bool = False) -> None:
        """Clear a dummy request of a graph capture; `free` also gives its buffers back.

        Keys on pages belong to the pages, so the paged store has nothing to clear.
        """
        if self.buffer_keys is not None:
            if free:
                self.buffer_keys.evict(rid)
            else:
                self.buffer_keys.reset(rid)

    def remove_request(self, rid: str) -> None:
        """Forget a request; one that never reached this resource is fine."""
        if self.buffer_keys is not None:
            self.buffer_keys.evict(rid)


def _is_short(span: DSASpan) -> bool:
    return span.q_len <= SHORT_SPAN_ROWS


def _need(value: Any) -> Any:
    assert value is not None
    return value
