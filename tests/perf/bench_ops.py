"""Benchmark of the sparse operators on one CUDA device: python tests/perf/bench_ops.py [--only TEXT] [--out FILE]

Every variant is first compared with float64 on a sample of its rows (outputs start as NaN), then captured in a CUDA
graph and timed with events: medians over replays, the L2 cache overwritten before each. The roofline of a shape is the
larger of its operations over the rate of a large bf16 product and its bytes (every input once, every output once) over
the rate of a large copy, both measured at the start; the share of the second alone stands beside it. FP8 products are
set against twice the bf16 rate. `reference` is a public figure for the same shape on an H200: vLLM 0.26's kernels, or
AIConfigurator's tables (see docs/reference/ops.md).
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
sys.path.insert(0, str(Path(__file__).resolve().parent))

from ops_cases import Setup, decode, prefill, relative_error, sample_rows, selection

from profiler.ops.formats import quantize_fp8
from profiler.ops.indexer import index_scores_naive, quantize_queries
from profiler.ops.msa import msa_attend, msa_block_scores, msa_select

FLUSH_BYTES = 1 << 28


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
    hbm_share: float
    reference_ms: float | None
    error: float | None
    note: str


def _captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of the run's kernels without the host's launches; the run itself where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as failure:
        print(f"  not captured, timed with its launches: {failure}".splitlines()[0], file=sys.stderr)
        return run
    return lambda: graph.replay()


def timed(run: Callable[[], Any], repeats: int, flush: torch.Tensor, captured: bool = True) -> list[float]:
    """Milliseconds of each replay of a captured run, after three warm-up runs, sorted."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    if captured:
        run = _captured(run)
    run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        flush.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(stop) for start, stop in events)


def measured_ceilings(flush: torch.Tensor) -> Ceilings:
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # A copy in a graph goes through the copy engine, at two thirds of what a kernel copies.
    copy = statistics.median(timed(lambda: target.copy_(source), 10, flush, captured=False))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = statistics.median(timed(lambda: a @ b, 10, flush))
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


def _case(setup: Setup, reference_ms: float | None = None) -> Case:
    variants = [_variant("default", setup.call, setup.check, setup.tolerance)]
    if setup.library is not None:
        variants.append(Variant("torch", setup.library))
    return Case(setup.name, setup.shape, setup.flops, setup.bytes, tuple(variants), reference_ms=reference_ms)


def sparse_prefill() -> Iterator[Case]:
    for heads, reference in ((128, 6.3), (64, 3.2)):
        yield _case(prefill(heads), reference)


def sparse_decode() -> Iterator[Case]:
    for packed in (False, True):
        for heads in (128, 64, 16):
            yield _case(decode(packed, heads))


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
            sample = sample_rows(queries)
            expected = index_scores_naive(q[sample], weights[sample], keys, scales)
            seen = torch.arange(keys_count, device="cuda") <= positions[sample, None]

            def check(
                out: torch.Tensor,
                sample: torch.Tensor = sample,
                expected: torch.Tensor = expected,
                seen: torch.Tensor = seen,
            ) -> float:
                return relative_error(out[sample][seen], expected[seen])

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
            sample = sample_rows(batch)[:2]
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
                return relative_error(out[sample], expected)

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


def top_k() -> Iterator[Case]:
    yield _case(selection(8192, 8192, causal=True))
    yield _case(selection(8192, 8192, causal=True, ties=True))
    for rows, width in ((8192, 65536), (64, 8192), (64, 65536), (64, 131072)):
        yield _case(selection(rows, width))


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
        sample = sample_rows(rows)
        blocks = length // block
        seen_blocks = float((positions // block + 1).sum())
        wide_scores = msa_block_scores(index_q[sample], index_k, positions[sample], backend="naive")
        finite = wide_scores > float("-inf")

        def check_scores(out: torch.Tensor, sample: Any = sample, wide: Any = wide_scores, keep: Any = finite) -> float:
            return relative_error(out[sample][keep], wide[keep])

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
            return relative_error(out[sample], wide)

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
    top_k,
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
        times = timed(variant.run, repeats, flush)
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
        hbm_share=case.bytes / ceilings.gbps / 1e6 / median,
        reference_ms=case.reference_ms,
        error=error,
        note=note,
    )


def line(result: Result) -> str:
    reference = "" if result.reference_ms is None else f"{result.median_ms / result.reference_ms:5.2f}x ref"
    error = "" if result.error is None else f"err {result.error:.1e}"
    return (
        f"  {result.variant:22s} {result.median_ms:9.4f} ms [{result.p10_ms:.4f} {result.p90_ms:.4f}] "
        f"{result.tflops:7.1f} TF/s {result.gbps:7.0f} GB/s  {result.roofline_share:6.1%} of roofline, "
        f"{result.hbm_share:6.1%} of HBM  "
        f"{reference:10s} {error} {result.note}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="also time other launches of index scores and MSA")
    parser.add_argument("--tune", action="store_true", help="instead, search launches of attention and selection")
    parser.add_argument("--budget-s", type=float, default=120.0, help="time that --tune may take")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    if options.tune:
        from tune_ops import tune

        return tune(options.budget_s, options.only, options.repeats, options.out)
    torch.manual_seed(0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    ceilings = measured_ceilings(flush)
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
                if variant.tuning and not options.variants:
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
