"""Starts one worker per GPU, waits for all and reads what they measured."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from profiler.collectives.cases import Case

# NVLink multicast stays off unless the caller's environment asks for it: it takes fabric resources of the whole host,
# and a program that is killed while it uses them can leave the GPUs unusable.
NO_MULTICAST: Final = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
# After one rank failed, or the time is over, the others wait in a collective for ever.
_GRACE_S = 5.0
_TAIL_LINES = 30

Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """Of one rank. cases: index to line of results. failure: why it ended early, with the end of its output; or empty.

    output: the end of what it printed.
    """

    facts: Mapping[str, Any]
    cases: Mapping[int, Mapping[str, Any]]
    failure: str
    output: str = ""


def launch(
    cases: Sequence[Case], ranks: int, cuda: bool, warmup: int, batches: int, timeout_s: int, report: Report
) -> list[Found]:
    """One entry per rank, with all that was measured before a failure. report: (done, total, label) as they go on."""
    with tempfile.TemporaryDirectory(prefix="sparsight-collectives-") as name:
        folder = Path(name)
        job = {
            "cases": [asdict(case) for case in cases],
            "ranks": ranks,
            "device": "cuda" if cuda else "cpu",
            "warmup": warmup,
            "batches": batches,
            "timeout_s": timeout_s,
            "rendezvous": f"file://{folder / 'rendezvous'}",
            "results": str(folder / "results-{rank}.jsonl"),
        }
        (folder / "job.json").write_text(json.dumps(job))
        with contextlib.ExitStack() as stack:
            started = [_start(folder, rank, stack) for rank in range(ranks)]
            try:
                failures = _wait(started, cases, folder, time.monotonic() + timeout_s, report)
            finally:
                for process in started:
                    if process.poll() is None:
                        process.kill()
                    process.wait()
        return [_read(folder, rank, failures.get(rank, "")) for rank in range(ranks)]


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """That of a worker."""
    # gloo, of which CPU groups are, looks for an address by the machine's name, which need not resolve.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if any(name == "lo" for _, name in socket.if_nameindex()) else {}
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package_parent, *filter(None, [inherited.get("PYTHONPATH")])])
    return {**NO_MULTICAST, **loopback, **inherited, "PYTHONPATH": path}


def _start(folder: Path, rank: int, stack: contextlib.ExitStack) -> "subprocess.Popen[bytes]":
    log = stack.enter_context((folder / f"log-{rank}.txt").open("wb"))
    command = [sys.executable, "-m", "profiler.collectives.worker", str(folder / "job.json"), str(rank)]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment(os.environ))


def _wait(
    started: "Sequence[subprocess.Popen[bytes]]", cases: Sequence[Case], folder: Path, deadline: float, report: Report
) -> dict[int, str]:
    """Why each rank that did not end well failed."""
    failures: dict[int, str] = {}
    stop_at = deadline
    while True:
        codes = [process.poll() for process in started]
        for rank, code in enumerate(codes):
            if code and rank not in failures:
                failures[rank] = f"ended with exit status {code}"
                stop_at = min(stop_at, time.monotonic() + _GRACE_S)
        if all(code is not None for code in codes):
            return failures
        if time.monotonic() > stop_at:
            why = "was stopped because another rank failed" if failures else "was not done when the time was over"
            return failures | {rank: why for rank, code in enumerate(codes) if code is None}
        done = sum('"case"' in line for line in _lines(folder, 0))
        label = f"{cases[done].backend} {cases[done].operation}" if 0 < done < len(cases) else "starting or ending"
        report(done, len(cases), label)
        time.sleep(0.2)


def _lines(folder: Path, rank: int) -> list[str]:
    """Whole lines only: a worker may have been killed in one."""
    path = folder / f"results-{rank}.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _read(folder: Path, rank: int, failure: str) -> Found:
    facts: dict[str, Any] = {}
    cases: dict[int, Mapping[str, Any]] = {}
    for text in _lines(folder, rank):
        line = json.loads(text)
        if "facts" in line:
            facts |= line["facts"]
        else:
            cases[line["case"]] = line
    log = (folder / f"log-{rank}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    output = "\n".join(log[-_TAIL_LINES:])
    if failure:
        failure = f"rank {rank} {failure}; the end of its output:\n{output}"
    return Found(facts, cases, failure, output)
