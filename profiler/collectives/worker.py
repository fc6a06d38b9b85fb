"""One rank, a process of its own: `python -m profiler.collectives.worker JOB.json RANK`.

Reads its job, joins the others and appends one JSON line per finished case to its results; line `facts` comes first.
"""

import dataclasses
import datetime
import gc
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from profiler.collectives import clock, operations
from profiler.collectives.cases import CUSTOM, ELEMENT_BYTES, Case
from profiler.collectives.operations import Ranks

# Long enough for a card to leave its idle clocks.
_WARM_CALLS = 300


def main(job_path: str, rank: int) -> None:
    job = json.loads(Path(job_path).read_text())
    with Path(job["results"].format(rank=rank)).open("w", encoding="utf-8") as stream:
        ranks = _join(job, rank)
        _write(stream, {"facts": _facts(ranks)})
        _run(job, ranks, stream)
    # All are done. The driver frees what is left; taking communicators and graphs down in order may wait for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _join(job: Mapping[str, Any], rank: int) -> Ranks:
    import torch
    import torch.distributed as dist

    cuda = job["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=job["rendezvous"],
        rank=rank,
        world_size=job["ranks"],
        timeout=datetime.timedelta(seconds=job["timeout_s"]),
        **({"device_id": device} if cuda else {}),
    )
    return Ranks(torch, dist, device, rank, job["ranks"], cuda)


def _run(job: Mapping[str, Any], ranks: Ranks, stream: IO[str]) -> None:
    cases = [Case(**one) for one in job["cases"]]
    buffers = operations.allocate(ranks, max(case.bytes for case in cases))
    flag = ranks.torch.ones(1, device=ranks.device)

    def barrier() -> None:
        # The value stays 1, whatever the number of calls.
        ranks.dist.all_reduce(flag, op=ranks.dist.ReduceOp.MAX)

    if ranks.cuda:
        _warm(ranks, buffers)
    custom, absent = None, ""
    for index, case in enumerate(cases):
        if case.backend == CUSTOM and custom is None and not absent:
            custom, absent, versions = _custom(ranks)
            _write(stream, {"facts": versions})
        if case.backend == CUSTOM and (why := absent or _refused(custom, case, buffers)):
            _write(stream, {"case": index, "skipped": why})
            continue
        found = _measure(case, job, ranks, buffers, barrier, custom)
        _write(stream, {"case": index, **found})
    barrier()
    if ranks.cuda:
        ranks.torch.cuda.synchronize()


def _measure(
    case: Case,
    job: Mapping[str, Any],
    ranks: Ranks,
    buffers: operations.Buffers,
    barrier: Callable[[], object],
    custom: Any,
) -> dict[str, Any]:
    op = operations.operation(case, ranks, buffers, custom if case.backend == CUSTOM else None)

    def around() -> Any:
        return custom.capture() if case.backend == CUSTOM else None

    error = _error(case, ranks, buffers, op, around)
    # A wrong result is timed all the same: a rank that stops here would leave the others waiting. Text, for NaN.
    wrong = {} if error <= operations.tolerance(case) else {"wrong": str(error)}
    operations.shrink(case, buffers)
    for _ in range(job["warmup"]):
        op.reset()
        op.call()
    if case.mode == "graph":
        times = clock.time_graph(case, ranks, op, job["batches"], around, barrier)
    else:
        times = clock.time_eager(case, ranks, op, job["batches"], barrier)
    return dataclasses.asdict(times) | wrong


def _error(
    case: Case, ranks: Ranks, buffers: operations.Buffers, op: operations.Operation, around: Callable[[], Any]
) -> float:
    """Of one call, the way that is timed: the relative error of its result on this rank."""
    operations.fill(case, ranks, buffers)
    op.reset()
    op.call()
    result = op.result()
    if case.mode == "graph":
        captured = clock.capture(ranks, op, 1, around())
        captured.result.fill_(math.nan)
        operations.fill(case, ranks, buffers)
        op.reset()
        captured.graph.replay()
        ranks.torch.cuda.synchronize()
        error = operations.relative_error(case, ranks, captured.result)
        captured.graph.reset()
        return error
    return operations.relative_error(case, ranks, result)


def _warm(ranks: Ranks, buffers: operations.Buffers) -> None:
    buffers.given.fill_(0.5)
    for _ in range(_WARM_CALLS):
        buffers.taken.copy_(buffers.given)
        ranks.dist.all_reduce(buffers.taken)
    ranks.torch.cuda.synchronize()


def _custom(ranks: Ranks) -> tuple[Any, str, dict[str, Any]]:
    """vLLM's own all-reduce as its engine makes it without symmetric memory, or why there is none, and versions."""
    try:
        import vllm
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    except (ImportError, OSError, RuntimeError) as error:  # its libraries may not load either
        here, why = None, f"vllm is not importable: {error}"
    else:
        here, why = vllm.__version__, ""
    # Every rank takes part, whether it has vllm or not.
    group = ranks.dist.new_group(backend="gloo")
    versions: list[Any] = [None] * ranks.count
    ranks.dist.all_gather_object(versions, here, group=group)
    if None in versions:
        return None, why or "vllm is not importable on another rank", {}
    gc.collect()
    gc.freeze()
    made = CustomAllreduce(group, ranks.device)
    if made.disabled:
        return None, "vLLM's custom all-reduce refuses these GPUs", {}
    return made, "", {"vllm": here, "vllm_custom_most_bytes": made.max_size}


def _refused(custom: Any, case: Case, buffers: operations.Buffers) -> str:
    tensor = buffers.taken[: case.bytes // ELEMENT_BYTES]
    return "" if custom.should_custom_ar(tensor) else f"the engine uses it below {custom.max_size} bytes"


def _facts(ranks: Ranks) -> dict[str, Any]:
    torch = ranks.torch
    facts: dict[str, Any] = {"torch": torch.__version__}
    if ranks.cuda:
        facts |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        peers = [
            torch.cuda.can_device_access_peer(ranks.rank, peer) for peer in range(ranks.count) if peer != ranks.rank
        ]
        facts |= {"peer_access": all(peers)}
    return facts


def _write(stream: IO[str], line: Mapping[str, Any]) -> None:
    stream.write(json.dumps(line) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
