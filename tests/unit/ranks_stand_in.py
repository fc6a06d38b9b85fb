"""One rank of collectives on the CPU whose CUDA is a stand-in: a graph records calls and repeats them.

python ranks_stand_in.py JOB.json RANK, as profiler.collectives.worker.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from profiler.collectives import worker
from profiler.collectives.operations import Ranks


class Graph:
    """torch.cuda.CUDAGraph."""

    open: "Graph | None" = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()

    def reset(self) -> None:
        self.calls.clear()


class Event:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1e3


@contextlib.contextmanager
def capturing(graph: Graph, capture_error_mode: str) -> Iterator[None]:
    Graph.open = graph
    yield
    Graph.open = None


class Recorded:
    """A module whose calls go into the open graph."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(dist, name)
        if name not in ("all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
                        "reduce_scatter_single", "all_to_all_single", "send", "recv"):  # fmt: skip
            return found

        def call(*args: Any, **kwargs: Any) -> object:
            if Graph.open is None:
                return found(*args, **kwargs)
            Graph.open.calls.append(lambda: found(*args, **kwargs))
            return None

        return call


class Custom:
    """vLLM's all-reduce: out of place, and its buffers are registered when a capture ends."""

    disabled, max_size = False, 4096

    def __init__(self, group: Any, device: Any) -> None:
        self.group, self.registered = group, 0

    def should_custom_ar(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() * tensor.element_size() < self.max_size

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        yield
        self.registered += 1

    def custom_all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(tensor)

        def reduce() -> None:
            out.copy_(tensor)
            dist.all_reduce(out, group=self.group)

        if Graph.open is None:
            reduce()
        else:
            count = self.registered

            def replayed() -> None:
                assert self.registered > count, "replayed before its buffers were registered"
                reduce()

            Graph.open.calls.append(replayed)
        return out


def main(job_path: str, rank: int) -> None:
    job = json.loads(Path(job_path).read_text())
    dist.init_process_group("gloo", init_method=job["rendezvous"], rank=rank, world_size=job["ranks"])
    cuda = SimpleNamespace(
        CUDAGraph=Graph, Event=Event, graph=capturing, synchronize=lambda: None, _sleep=lambda cycles: None
    )
    stand_in = SimpleNamespace(**{name: getattr(torch, name) for name in (
        "empty", "ones", "randn", "cat", "Generator", "bfloat16", "float32"
    )}, cuda=cuda)  # fmt: skip
    worker._custom = lambda ranks: (Custom(dist.new_group(backend="gloo"), ranks.device), "", {"vllm": "stand-in"})
    worker._WARM_CALLS = 1
    ranks = Ranks(stand_in, Recorded(), torch.device("cpu"), rank, job["ranks"], True)
    with Path(job["results"].format(rank=rank)).open("w") as stream:
        worker._run(job, ranks, stream)
    # As the worker does: a rank whose peer has gone may not take its threads down in order.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
