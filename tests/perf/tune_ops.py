"""Search of launches for sparse attention and the selection on one CUDA device: bench_ops.py --tune --budget-s 120

Every candidate is first run on a small input of its shape class and checked, in worker processes side by side: that
fills Triton's cache, and one that does not compile, is wrong or does not come to an end is listed and left out. The
others are checked again and timed at full size, case by case, until the budget is spent. Prints a table per case,
fastest first; the winners belong into profiler/ops/triton/launches.py.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from bench_ops import FLUSH_BYTES, Ceilings, measured_ceilings, poisoned_outputs, timed
from ops_cases import Setup, decode, prefill, selection

from profiler.ops.triton.launches import HopperLaunch, SelectLaunch

WORKERS = 12
# Share of the budget after which a worker that has not answered is ended.
TRIAL_SHARE = 0.6


@dataclass(frozen=True)
class Candidate:
    case: str
    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One candidate: its time, or why it has none. A share is of the roofline, and of the HBM part of it."""

    case: str
    name: str
    median_ms: float | None
    roofline_share: float | None
    hbm_share: float | None
    error: float | None
    note: str


# Cases in the order of interest: at full size, and small with the same compiled kernels.
CASES: dict[str, tuple[Callable[[], Setup], Callable[[], Setup]]] = {
    "decode bf16 128 heads": (lambda: decode(False, 128), lambda: decode(False, 128, 16, 4096)),
    "decode bf16 64 heads": (lambda: decode(False, 64), lambda: decode(False, 64, 16, 4096)),
    "decode packed 128 heads": (lambda: decode(True, 128), lambda: decode(True, 128, 16, 4096)),
    "decode packed 64 heads": (lambda: decode(True, 64), lambda: decode(True, 64, 16, 4096)),
    "select 8192 x 65536": (lambda: selection(8192, 65536), lambda: selection(16, 65536)),
    "select 64 x 131072": (lambda: selection(64, 131072), lambda: selection(16, 131072)),
    "select 8192 x 8192 causal": (lambda: selection(8192, 8192, True), lambda: selection(16, 8192, True)),
    "select 64 x 65536": (lambda: selection(64, 65536), lambda: selection(16, 65536)),
    "select 64 x 8192": (lambda: selection(64, 8192), lambda: selection(16, 8192)),
    "prefill bf16 128 heads": (lambda: prefill(128), lambda: prefill(128, 16, 4096)),
    "decode bf16 16 heads": (lambda: decode(False, 16), lambda: decode(False, 16, 16, 4096)),
    "decode packed 16 heads": (lambda: decode(True, 16), lambda: decode(True, 16, 16, 4096)),
}


def _attention(case: str) -> list[Candidate]:
    heads = int(case.split()[-2])
    splits = {128: (1, 2), 64: (2, 4), 16: (2, 4)}[heads] if "decode" in case else (1,)
    found = []
    for count in splits:
        launches = {
            "turns": HopperLaunch("turns"),
            "roles ahead": HopperLaunch("roles"),
            "roles behind": HopperLaunch("roles", ahead=False),
        }
        if "bf16" in case:
            launches["roles ahead, held"] = HopperLaunch("roles", held=256)
            launches["roles behind, held"] = HopperLaunch("roles", ahead=False, held=256)
        for name, launch in launches.items():
            found.append(Candidate(case, f"{name} splits {count}", {"hopper": launch, "splits": count}))
    if heads == 16:
        for block, stages, warps, count in (
            (64, 2, 4, 4),
            (64, 3, 4, 2),
            (64, 3, 4, 4),
            (32, 3, 4, 4),
            (32, 4, 4, 4),
            (32, 3, 4, 8),
            (64, 3, 8, 4),
            (128, 2, 8, 2),
        ):
            options = {"block": block, "stages": stages, "warps": warps, "splits": count}
            found.append(Candidate(case, "triton " + " ".join(f"{k} {v}" for k, v in options.items()), options))
    return found


def _selection(case: str) -> list[Candidate]:
    many = "8192 x" in case
    found = [
        Candidate(case, "one block, 8192 columns, 16 warps", {"block": 8192, "warps": 16}),
        Candidate(case, "one block, 8192 columns, 8 warps", {"block": 8192, "warps": 8}),
    ]
    # warps, block, stages, programs a multiprocessor, sample, registers.
    launches = (
        [
            (4, 1024, 2, 4, 2048, 128),
            (4, 2048, 2, 4, 2048, 128),
            (4, 1024, 3, 5, 2048, 96),
            (4, 1024, 2, 3, 4096, 168),
            (8, 2048, 1, 3, 4096, 80),
            (8, 2048, 2, 3, 4096, 80),
            (8, 2048, 3, 3, 2048, 80),
            (8, 4096, 2, 3, 2048, 80),
            (8, 2048, 2, 4, 2048, 64),
            (8, 2048, 2, 2, 4096, 128),
            (16, 4096, 2, 2, 4096, 64),
        ]
        if many
        else [
            (8, 4096, 3, 1, 4096, None),
            (16, 4096, 2, 1, 4096, None),
            (16, 4096, 3, 1, 4096, None),
            (16, 8192, 1, 1, 4096, None),
            (16, 8192, 2, 1, 4096, None),
            (16, 8192, 3, 1, 4096, None),
            (16, 8192, 2, 1, 2048, None),
            (32, 8192, 2, 1, 4096, None),
            (32, 16384, 2, 1, 2048, None),
        ]
    )
    for warps, block, stages, resident, sample, registers in launches:
        launch = SelectLaunch(warps, block, stages, 132 * resident, sample, registers)
        name = f"wide {warps} warps, {block} x {stages}, {resident} each, sample {sample}, {registers} registers"
        found.append(Candidate(case, name, {"wide": launch}))
    return found


def candidates(only: str) -> list[Candidate]:
    """Every candidate of the cases whose name contains `only`."""
    return [
        candidate
        for case in CASES
        if only in case
        for candidate in (_selection(case) if case.startswith("select") else _attention(case))
    ]


def _compiled_alike(candidate: Candidate) -> str:
    """Candidates of equal keys compile the same kernel, so that one worker tries them."""
    words = candidate.case.split()
    return f"{words[0]} {words[1] if words[0] == 'decode' else ''} {candidate.name}"


def _shares(found: list[Candidate]) -> list[list[int]]:
    """Indices of candidates for each worker."""
    keys = sorted({_compiled_alike(candidate) for candidate in found})
    shares: list[list[int]] = [[] for _ in range(min(WORKERS, len(keys)))]
    for index, candidate in enumerate(found):
        shares[keys.index(_compiled_alike(candidate)) % len(shares)].append(index)
    return shares


def _try(candidate: Candidate, setup: Setup) -> str:
    """Empty, or what is wrong with the candidate at this size."""
    try:
        with poisoned_outputs():
            error = setup.check(setup.call(**candidate.options))
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}".replace("\n", " ")[:200]
    return "" if error <= setup.tolerance else f"wrong by {error:.1e}"


def work(found: list[Candidate], share: list[int]) -> None:
    """A worker: one JSON line for each of its candidates before it is tried, and one after."""
    torch.manual_seed(1)
    setups: dict[str, Setup] = {}
    for index in share:
        print(json.dumps({"index": index, "note": "did not come to an end"}), flush=True)
        case = found[index].case
        if case not in setups:
            setups[case] = CASES[case][1]()
        note = _try(found[index], setups[case])
        print(json.dumps({"index": index, "note": note}), flush=True)
        if "CUDA error" in note:
            # Nothing runs in this process any more.
            return


def trials(found: list[Candidate], only: str, limit_s: float) -> list[str]:
    """What is wrong with each candidate, from workers that are ended after limit_s."""
    notes = ["not tried: its worker ended before"] * len(found)
    own = [sys.executable, str(Path(__file__).resolve()), "--only", only, "--share"]
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
        workers = []
        # Files and not pipes: a compiler may print a whole kernel, and a full pipe would hold its worker up.
        for number, share in enumerate(_shares(found)):
            log = Path(folder) / str(number)
            out, err = (files.enter_context(log.with_suffix(end).open("w")) for end in (".out", ".err"))
            workers.append((subprocess.Popen([*own, ",".join(map(str, share))], stdout=out, stderr=err), log))
        for worker, log in workers:
            try:
                worker.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            for text in log.with_suffix(".out").read_text().splitlines():
                if text.startswith('{"index"'):
                    line = json.loads(text)
                    notes[line["index"]] = line["note"]
            if worker.returncode not in (0, -9):
                print(f"a worker ended with {worker.returncode}: {log.with_suffix('.err').read_text()[-1500:]}")
    return notes


def _outcome(
    candidate: Candidate, setup: Setup, ceilings: Ceilings, repeats: int, flush: torch.Tensor, note: str
) -> Outcome:
    error, median = None, None
    if not note:
        try:
            with poisoned_outputs():
                error = setup.check(setup.call(**candidate.options))
            if error <= setup.tolerance:
                median = statistics.median(timed(lambda: setup.call(**candidate.options), repeats, flush))
            else:
                note = f"wrong by {error:.1e} at full size"
        except Exception as failure:
            note = f"{type(failure).__name__}: {failure}".replace("\n", " ")[:200]
    if median is None:
        return Outcome(candidate.case, candidate.name, None, None, None, error, note)
    hbm = setup.bytes / ceilings.gbps / 1e6 / median
    roofline = max(hbm, setup.flops / ceilings.bf16_tflops / 1e9 / median)
    return Outcome(candidate.case, candidate.name, median, roofline, hbm, error, note)


def _print_case(setup: Setup, outcomes: list[Outcome], library_ms: float | None) -> None:
    print(f"{setup.name}: {setup.shape}" + ("" if library_ms is None else f"; torch {library_ms:.4f} ms"))
    for outcome in sorted(outcomes, key=lambda o: (o.median_ms is None, o.median_ms)):
        if outcome.median_ms is None:
            print(f"  {'-':>10s}     {outcome.name}: {outcome.note}")
            continue
        against = "" if library_ms is None else f", {library_ms / outcome.median_ms:.2f} x torch"
        print(
            f"  {outcome.median_ms:10.4f} ms  {outcome.name}: {outcome.roofline_share:.1%} of roofline, "
            f"{outcome.hbm_share:.1%} of HBM{against}, err {outcome.error:.1e}"
        )
    sys.stdout.flush()


def tune(budget_s: float, only: str, repeats: int, out: Path | None) -> int:
    """Try, time and print the candidates. Returns 0; what fails is in the table."""
    begun = time.monotonic()
    found = candidates(only)
    notes = trials(found, only, TRIAL_SHARE * budget_s)
    print(f"{len(found)} candidates tried in {time.monotonic() - begun:.0f} s, {sum(map(bool, notes))} left out")
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    ceilings = measured_ceilings(flush)
    print(f"copy {ceilings.gbps:.0f} GB/s, bf16 product {ceilings.bf16_tflops:.0f} TFLOP/s")
    outcomes: list[Outcome] = []
    for case, (full, _) in CASES.items():
        own = [(candidate, note) for candidate, note in zip(found, notes, strict=True) if candidate.case == case]
        if not own:
            continue
        if time.monotonic() - begun > budget_s:
            print(f"{case}: not timed, the budget is spent")
            continue
        setup = full()
        library_ms = None if setup.library is None else statistics.median(timed(setup.library, repeats, flush))
        results = [_outcome(candidate, setup, ceilings, repeats, flush, note) for candidate, note in own]
        _print_case(setup, results, library_ms)
        outcomes += results
        del setup
        torch.cuda.empty_cache()
    if out:
        text = json.dumps({"ceilings": asdict(ceilings), "outcomes": [asdict(o) for o in outcomes]}, indent=1)
        out.write_text(text + "\n", encoding="utf-8")
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--share", required=True, help="numbers of the candidates to try, for a worker of --tune")
    options = parser.parse_args()
    work(candidates(options.only), [int(index) for index in options.share.split(",")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
