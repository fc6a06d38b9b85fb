"""Benchmark of the sparse operators on one CUDA device: python tests/perf/bench_ops.py [--tune] [--only TEXT] [--out F]

Every variant is first compared with float64 on a sample of its rows (outputs start as NaN), then timed with CUDA
events: medians over repeats, the L2 cache overwritten before each. The roofline of a shape is the larger of its
operations over the rate of a large bf16 product and its bytes (every input once, every output once) over the rate of a
large copy, both measured at the start; FP8 products are set against twice the bf16 rate. `reference` is a public figure
for the same shape on an H200: vLLM 0.26's kernels, or AIConfigurator's tables (see docs/reference/ops.md).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from profiler.ops.formats import SparseKVFormat, dequantize_mla_rows, quantize_fp8, quantize_mla_rows
from profiler.ops.indexer import index_scores_naive, quantize_queries, select_topk_causal_naive
from profiler.ops.mla import attend_picked_naive
from profiler.ops.msa import msa_attend, msa_block_scores, msa_select

FLUSH_BYTES = 1 << 28
SAMPLE_ROWS = 8


@dataclass(frozen=True)
class Ceilings:
    """Measured rates: a device copy (bytes read plus written) and a bf16 product of 8192 x 8192 x 8192."""

    gbps: float
    bf16_tflops: float


@dataclass(frozen=True)
class Variant:
    """One way to run a case. check returns the relative error against float64 of the last result."""

    name: str
    run: Callable[[], Any]
    check: Callable[[], float] | None = None
    tolerance: float = 1e-2
    tuning: bool = False


@dataclass(frozen=True)
class Case:
    name: str
    shape: str
    flops: float
    bytes: float
    variants: tuple[Variant, ...]
    fp8: bool = False
    reference_ms: float | None = None


@dataclass(frozen=True)
class Result:
    case: str
    shape: str
    variant: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    tflops: float
    gbps: float
    roofline_ms: float
    roofline_share: float
    reference_ms: float | None
    error: float | None
    note: str


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _time(run: Callable[[], Any], repeats: int, flush: torch.Tensor) -> list[float]:
    """Milliseconds of each repeat, after three warm-up runs."""
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        flush.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(stop) for start, stop in events)


def _ceilings(flush: torch.Tensor) -> Ceilings:
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = statistics.median(_time(lambda: target.copy_(source), 10, flush))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = statistics.median(_time(lambda: a @ b, 10, flush))
    return Ceilings(2 * (1 << 32) / copy / 1e6, 2 * 8192**3 / product / 1e9)


class Last:
    """Keeps the last result of a variant for its check."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.value: Any = None

    def __call__(self) -> None:
        self.value = self.call()


def _variant(
    name: str, call: Callable[[], Any], check: Callable[[Any], float], tolerance: float = 1e-2, tuning: bool = False
) -> Variant:
    last = Last(call)
    return Variant(name, last, lambda: check(last.value), tolerance, tuning)


def _causal_picks(queries: int, topk: int) -> torch.Tensor:
    """Random picks of a prefill from position 0, ascending, -1 padded: query t picks among 0 .. t."""
    scores = torch.rand(queries, queries, device="cuda")
    row = torch.arange(queries, device="cuda")
    scores.masked_fill_(row > row[:, None], -1.0)
    best = scores.topk(min(topk, queries), dim=-1)
    picks = torch.where(best.values < 0, queries, best.indices).sort(-1).values
    return torch.where(picks == queries, -1, picks).int()


def _rows_of(count: int) -> torch.Tensor:
    return torch.linspace(0, count - 1, SAMPLE_ROWS, device="cuda").long()


def sparse_prefill() -> Iterator[Case]:
    from profiler.ops.triton.mla import attend_picked_kernel

    queries, topk, bf16 = 8192, 2048, SparseKVFormat.BF16
    for heads, reference in ((128, 6.3), (64, 3.2)):
        q = torch.randn(queries, heads, 576, device="cuda").bfloat16()
        rows = torch.randn(queries, 576, device="cuda").bfloat16()
        indices = _causal_picks(queries, topk)
        sample = _rows_of(queries)
        expected = attend_picked_naive(q[sample].double(), rows.double(), indices[sample], 512, 0.06, bf16)

        def check(out: torch.Tensor, sample: torch.Tensor = sample, expected: torch.Tensor = expected) -> float:
            return _error(out[sample], expected)

        def call(
            q: torch.Tensor = q, rows: torch.Tensor = rows, indices: torch.Tensor = indices, **launch: Any
        ) -> torch.Tensor:
            return attend_picked_kernel(q, rows, indices, 512, 0.06, bf16, **launch)

        variants = [_variant("default", call, check)]
        for block, stages in ((64, 2), (32, 2), (32, 3), (64, 3)):
            launch = {"block": block, "stages": stages, "warps": 8}
            tuned = lambda launch=launch, call=call: call(**launch)  # noqa: E731
            variants.append(_variant(f"triton b{block} s{stages}", tuned, check, tuning=(block, stages) != (64, 2)))
        flops = float((indices >= 0).sum()) * heads * (576 + 512) * 2
        size = queries * (1152 + heads * (1152 + 1024) + 4 * topk)
        name = f"q {queries}, {heads} heads, top-k {topk}, causal"
        yield Case("sparse MLA prefill bf16", name, flops, size, tuple(variants), reference_ms=reference)


def sparse_decode() -> Iterator[Case]:
    from profiler.ops.triton.mla import attend_picked_kernel

    batch, context, topk = 64, 8192, 2048
    latents = torch.randn(batch * context, 576, device="cuda").bfloat16()
    packed_rows = quantize_mla_rows(latents)
    own = torch.rand(batch, context, device="cuda").topk(topk, dim=-1).indices.sort(-1).values
    indices = (own + torch.arange(batch, device="cuda")[:, None] * context).int()
    sample = _rows_of(batch)
    formats = ((SparseKVFormat.BF16, latents, 1152), (SparseKVFormat.FP8_PACKED, packed_rows, 656))
    for kv_format, rows, row_bytes in formats:
        for heads in (128, 64, 16):
            q = torch.randn(batch, heads, 576, device="cuda").bfloat16()
            used = indices[sample]
            wide = rows if kv_format is SparseKVFormat.BF16 else dequantize_mla_rows(rows, torch.bfloat16)
            expected = attend_picked_naive(q[sample].double(), wide, used, 512, 0.06, SparseKVFormat.BF16)
            del wide

            def check(out: torch.Tensor, expected: torch.Tensor = expected) -> float:
                return _error(out[sample], expected)

            def call(
                q: torch.Tensor = q, rows: torch.Tensor = rows, kv_format: SparseKVFormat = kv_format, **launch: Any
            ) -> torch.Tensor:
                return attend_picked_kernel(q, rows, indices, 512, 0.06, kv_format, **launch)

            variants = [_variant("default", call, check)]
            options: list[dict[str, Any]] = [{"splits": 1}, {"splits": 2}, {"splits": 4}]
            if heads == 16:
                options += [{"block": b, "stages": s, "warps": w} for b, s, w in ((64, 3, 4), (32, 4, 4), (128, 2, 8))]
            else:
                options += [{"block": b, "stages": s} for b, s in ((64, 2), (32, 2), (32, 3))]
            for launch in options:
                text = " ".join(f"{k}{v}" for k, v in launch.items())
                tuned = lambda launch=launch, call=call: call(**launch)  # noqa: E731
                variants.append(_variant(text, tuned, check, tuning=True))
            flops = batch * topk * heads * (576 + 512) * 2.0
            size = batch * (topk * (row_bytes + 4) + heads * (1152 + 1024))
            name = f"batch {batch}, {heads} heads, top-k {topk}"
            yield Case(f"sparse MLA decode {kv_format.value}", name, flops, size, tuple(variants))


def index_prefill() -> Iterator[Case]:
    from profiler.ops.triton.indexer import index_scores_dense

    shapes = (
        (32, 1024, 1024, 0.010168),
        (32, 8192, 8192, 0.289705),
        (32, 1024, 132096, 1.217612),
        (32, 8192, 73728, 5.418863),
        (64, 8192, 8192, None),
    )
    for heads, queries, keys_count, reference in shapes:
        for fp8 in (True, False) if keys_count == 8192 else (True,):
            q = torch.randn(queries, heads, 128, device="cuda").bfloat16()
            weights = torch.randn(queries, heads, device="cuda")
            keys = torch.randn(keys_count, 128, device="cuda").bfloat16()
            scales = None
            if fp8:
                q, weights = quantize_queries(q, weights)
                keys, wide = quantize_fp8(keys, 128)
                scales = wide[:, 0].contiguous()
            positions = torch.arange(keys_count - queries, keys_count, device="cuda")
            sample = _rows_of(queries)
            expected = index_scores_naive(q[sample], weights[sample], keys, scales)
            seen = torch.arange(keys_count, device="cuda") <= positions[sample, None]

            def check(
                out: torch.Tensor,
                sample: torch.Tensor = sample,
                expected: torch.Tensor = expected,
                seen: torch.Tensor = seen,
            ) -> float:
                return _error(out[sample][seen], expected[seen])

            args = (q, weights, keys, scales, positions)
            call = lambda args=args, **launch: index_scores_dense(*args, **launch)  # noqa: E731
            variants = [_variant("default", call, check)]
            for pairs, block, warps, stages in (
                (128, 64, 4, 3),
                (128, 128, 4, 3),
                (256, 128, 8, 3),
                (256, 64, 4, 2),
                (256, 64, 4, 4),
            ):
                launch = {"pairs": pairs, "block": block, "warps": warps, "stages": stages}
                text = f"p{pairs} b{block} w{warps} s{stages}"
                tuned = lambda call=call, launch=launch: call(**launch)  # noqa: E731
                variants.append(_variant(text, tuned, check, tuning=True))
            pairs_seen = float((positions + 1).sum())
            width = 1 if fp8 else 2
            size = (queries * heads + keys_count) * 128 * width + 4 * pairs_seen
            kind = "fp8" if fp8 else "bf16"
            shape = f"q {queries}, keys {keys_count}, {heads} heads, causal"
            yield Case(
                f"index scores {kind}",
                shape,
                pairs_seen * heads * 256,
                size,
                tuple(variants),
                fp8=fp8,
                reference_ms=reference if fp8 else None,
            )


def index_decode() -> Iterator[Case]:
    from profiler.ops.dsa import PagedIndexKeyStore
    from profiler.ops.triton.indexer import index_scores_paged

    batch, heads, page = 64, 64, 64
    for context in (8192, 65536):
        kinds: tuple[Literal["fp8", "bf16"], ...] = ("fp8", "bf16")
        for kind in kinds:
            per_request = context // page
            store = PagedIndexKeyStore((0,), batch * per_request, page, "cuda", kind=kind)
            buffer = store.layer(0)
            keys = torch.randn(page * per_request, 128, device="cuda").bfloat16()
            table = torch.randperm(batch * per_request, device="cuda").view(batch, per_request)
            for row in range(batch):
                slots = (table[row][:, None] * page + torch.arange(page, device="cuda")).flatten()
                store.write(0, keys.roll(row, 0), slots)
            pages = table.flatten().int()
            offsets = torch.arange(0, batch * per_request, per_request, device="cuda").int()
            starts = torch.zeros(batch, dtype=torch.int32, device="cuda")
            positions = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
            q, weights = torch.randn(batch, heads, 128, device="cuda").bfloat16(), torch.randn(batch, heads).cuda()
            if kind == "fp8":
                q, weights = quantize_queries(q, weights)
            sample = _rows_of(batch)[:2]
            expected = torch.cat(
                [
                    store.scores(
                        0,
                        q[r : r + 1],
                        weights[r : r + 1],
                        pages,
                        offsets[r : r + 1],
                        starts[:1],
                        positions[:1],
                        context,
                        backend="naive",
                    )
                    for r in sample.tolist()
                ]
            )

            def check(out: torch.Tensor, sample: torch.Tensor = sample, expected: torch.Tensor = expected) -> float:
                return _error(out[sample], expected)

            args = (q, weights, buffer, page, pages, offsets, starts, positions, context)
            call = lambda args=args, **launch: index_scores_paged(*args, **launch)  # noqa: E731
            variants = [_variant("default", call, check)]
            for block, warps, stages in ((64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 8, 4), (256, 8, 3)):
                launch = {"block": block, "warps": warps, "stages": stages}
                tuned = lambda call=call, launch=launch: call(**launch)  # noqa: E731
                variants.append(_variant(f"b{block} w{warps} s{stages}", tuned, check, tuning=True))
            size = batch * context * (store.bytes_per_token_layer + 4)
            flops = batch * context * heads * 256.0
            shape = f"batch {batch}, context {context}, {heads} heads"
            yield Case(f"index scores paged {kind}", shape, flops, size, tuple(variants), fp8=kind == "fp8")


def selection() -> Iterator[Case]:
    from profiler.ops.triton.select import select_topk

    topk = 2048
    shapes = (
        (8192, 8192, True, None),
        (8192, 65536, False, None),
        (64, 8192, False, None),
        (64, 65536, False, None),
        (64, 131072, False, None),
    )
    for rows, width, causal, reference in shapes:
        for ties in (False, True) if rows == 8192 and causal else (False,):
            scores = torch.randn(rows, width, device="cuda")
            if ties:
                scores.relu_()
            last = torch.arange(rows, device="cuda") if causal else torch.full((rows,), width - 1, device="cuda")
            sample = _rows_of(rows)
            expected = select_topk_causal_naive(scores[sample], last[sample], topk)
            high = torch.iinfo(torch.int32).max
            expected = torch.where(expected < 0, high, expected).sort(-1).values

            def check(out: torch.Tensor, sample: torch.Tensor = sample, expected: torch.Tensor = expected) -> float:
                ordered = torch.where(out[sample] < 0, torch.iinfo(torch.int32).max, out[sample]).sort(-1).values
                return float((ordered != expected).double().mean())

            call = lambda scores=scores, last=last, **launch: select_topk(scores, last, topk, **launch)  # noqa: E731
            variants = [_variant("default", call, check, 0.0)]
            for block, warps in ((8192, 16), (8192, 32), (4096, 8), (4096, 4), (16384, 16)):
                launch = {"block": block, "warps": warps}
                tuned = lambda call=call, launch=launch: call(**launch)  # noqa: E731
                variants.append(_variant(f"b{block} w{warps}", tuned, check, 0.0, tuning=True))
            masked = scores
            if causal:
                masked = scores.masked_fill(torch.arange(width, device="cuda") > last[:, None], float("-inf"))
            library = lambda masked=masked: masked.topk(topk, dim=-1, sorted=False)  # noqa: E731
            variants.append(Variant("torch.topk", library))
            size = 4.0 * (float((last + 1).sum()) + rows * topk)
            shape = f"rows {rows}, width {width}{', causal' if causal else ''}{', half tied at zero' if ties else ''}"
            yield Case(f"top-{topk} selection", shape, 0.0, size, tuple(variants), reference_ms=reference)


def block_sparse() -> Iterator[Case]:
    from profiler.ops.triton.msa import attend_blocks, block_scores

    groups, heads, block, topk = 4, 64, 128, 16
    for rows, length, references in ((8192, 8192, (0.13, 0.05, 3.8)), (64, 65536, (None, None, None))):
        index_q = torch.randn(rows, groups, 128, device="cuda").bfloat16()
        index_k = torch.randn(length, 128, device="cuda").bfloat16()
        q = torch.randn(rows, heads, 128, device="cuda").bfloat16()
        k, v = (torch.randn(length, groups, 128, device="cuda").bfloat16() for _ in range(2))
        prefill = rows == length
        positions = torch.arange(rows, device="cuda") if prefill else torch.full((rows,), length - 1, device="cuda")
        sample = _rows_of(rows)
        blocks = length // block
        seen_blocks = float((positions // block + 1).sum())
        wide_scores = msa_block_scores(index_q[sample], index_k, positions[sample], backend="naive")
        finite = wide_scores > float("-inf")

        def check_scores(out: torch.Tensor, sample: Any = sample, wide: Any = wide_scores, keep: Any = finite) -> float:
            return _error(out[sample][keep], wide[keep])

        def score(
            index_q: Any = index_q, index_k: Any = index_k, at: Any = positions, n: int = blocks, **k: Any
        ) -> Any:
            return block_scores(index_q, index_k, at, block, n, None, None, **k)

        variants = [_variant("default", score, check_scores)]
        for pairs, warps, stages in ((128, 4, 3), (256, 8, 3), (128, 8, 2)):
            launch = {"pairs": pairs, "warps": warps, "stages": stages}
            tuned = lambda score=score, launch=launch: score(**launch)  # noqa: E731
            variants.append(_variant(f"p{pairs} w{warps} s{stages}", tuned, check_scores, tuning=True))
        shape = f"q {rows}, keys {length}, {groups} groups"
        size = float(rows * groups * (256 + 4 * blocks) + length * 256)
        yield Case(
            "MSA block scores",
            shape,
            seen_blocks * block * groups * 256,
            size,
            tuple(variants),
            reference_ms=references[0],
        )

        scores = score()
        scores.masked_fill_(torch.arange(blocks, device="cuda") > (positions // block)[:, None, None], float("-inf"))
        wide_picks = msa_select(scores[sample], positions[sample], backend="naive").sort(-1).values

        def check_picks(out: torch.Tensor, sample: Any = sample, wide: Any = wide_picks) -> float:
            return float((out[sample].sort(-1).values != wide).double().mean())

        choose = lambda scores=scores, at=positions: msa_select(scores, at)  # noqa: E731
        size = 4.0 * groups * (seen_blocks + rows * topk)
        variants = [_variant("default", choose, check_picks, 0.0)]
        yield Case("MSA selection", shape, 0.0, size, tuple(variants), reference_ms=references[1])

        picked = msa_select(scores, positions)
        few = (q[sample].double(), k.double(), v.double(), picked[sample], positions[sample])
        wide_out = msa_attend(*few, 0.09, backend="naive")

        def check_out(out: torch.Tensor, sample: Any = sample, wide: Any = wide_out) -> float:
            return _error(out[sample], wide)

        args = (q, k, v, picked, positions, 0.09, block, None, None)
        attend = lambda args=args, **launch: attend_blocks(*args, **launch)  # noqa: E731
        variants = [_variant("default", attend, check_out)]
        for tile, warps, stages in ((64, 4, 2), (128, 4, 2), (128, 8, 2), (32, 4, 4)):
            launch = {"tile": tile, "warps": warps, "stages": stages}
            tuned = lambda attend=attend, launch=launch: attend(**launch)  # noqa: E731
            variants.append(_variant(f"t{tile} w{warps} s{stages}", tuned, check_out, tuning=True))
        inner = torch.minimum(picked.long() * block + block, positions[:, None, None] + 1) - picked.long() * block
        read = float(torch.where(picked >= 0, inner, 0).sum())
        size = 4.0 * rows * heads * 128 + min(read, float(length * groups)) * 512
        yield Case(
            "MSA attention",
            f"{shape}, {heads} heads, {topk} blocks",
            read * (heads // groups) * 512,
            size,
            tuple(variants),
            reference_ms=references[2],
        )


GROUPS: tuple[Callable[[], Iterator[Case]], ...] = (
    sparse_prefill,
    sparse_decode,
    index_prefill,
    index_decode,
    selection,
    block_sparse,
)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """New tensors start as NaN, so that a check sees what a kernel leaves unwritten."""
    plain = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = plain(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(0x7F)

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = plain


def measure(case: Case, variant: Variant, ceilings: Ceilings, repeats: int, flush: torch.Tensor) -> Result:
    rate = ceilings.bf16_tflops * (2 if case.fp8 else 1)
    roofline = max(case.flops / rate / 1e9, case.bytes / ceilings.gbps / 1e6)
    nan = float("nan")
    try:
        with poisoned_outputs():
            variant.run()
            error = None if variant.check is None else variant.check()
        times = _time(variant.run, repeats, flush)
        note = "" if error is None or error <= variant.tolerance else "WRONG"
    except Exception as failure:
        # A launch that does not fit the card must not end the table; the message stands in its row.
        error, times = None, [nan]
        note = f"{type(failure).__name__}: {failure}".splitlines()[0][:90]
    median = statistics.median(times)
    return Result(
        case=case.name,
        shape=case.shape,
        variant=variant.name,
        median_ms=median,
        p10_ms=times[len(times) // 10],
        p90_ms=times[-1 - len(times) // 10],
        tflops=case.flops / median / 1e9,
        gbps=case.bytes / median / 1e6,
        roofline_ms=roofline,
        roofline_share=roofline / median,
        reference_ms=case.reference_ms,
        error=error,
        note=note,
    )


def line(result: Result) -> str:
    reference = "" if result.reference_ms is None else f"{result.median_ms / result.reference_ms:5.2f}x ref"
    error = "" if result.error is None else f"err {result.error:.1e}"
    return (
        f"  {result.variant:22s} {result.median_ms:9.4f} ms [{result.p10_ms:.4f} {result.p90_ms:.4f}] "
        f"{result.tflops:7.1f} TF/s {result.gbps:7.0f} GB/s  {result.roofline_share:6.1%} of roofline  "
        f"{reference:10s} {error} {result.note}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="also time other launch configurations")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    ceilings = _ceilings(flush)
    import triton

    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}: copy "
        f"{ceilings.gbps:.0f} GB/s, bf16 product {ceilings.bf16_tflops:.0f} TFLOP/s"
    )
    results: list[Result] = []
    for group in GROUPS:
        for case in group():
            if options.only not in case.name:
                continue
            print(f"{case.name}: {case.shape}", flush=True)
            for variant in case.variants:
                if variant.tuning and not options.tune:
                    continue
                results.append(measure(case, variant, ceilings, options.repeats, flush))
                print(line(results[-1]), flush=True)
        torch.cuda.empty_cache()
    if options.out:
        text = json.dumps({"ceilings": asdict(ceilings), "results": [asdict(r) for r in results]}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    wrong = [r for r in results if r.note == "WRONG"]
    broken = [r for r in results if r.note not in ("", "WRONG")]
    print(f"{len(results)} measured, {len(wrong)} wrong, {len(broken)} failed to run")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
