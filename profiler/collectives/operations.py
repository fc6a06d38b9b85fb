"""The calls themselves on torch tensors, and what each must leave behind.

Message of `bytes` B on n ranks, bf16 elements: an all-reduce works in place on B; an all-gather has B / n in and B out,
a reduce-scatter B in and B / n out, an all-to-all B in and B out; a send takes B from rank 0 to rank 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from profiler.collectives.cases import CUSTOM, ELEMENT_BYTES, Case

# A sum in place grows by a factor of the ranks with every call. From here 32 calls on 8 ranks stay finite in bf16.
_SCALE = 2.0**-60


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers. torch, dist: the modules; device: torch.device; cuda: whether it is a GPU."""

    torch: Any
    dist: Any
    device: Any
    rank: int
    count: int
    cuda: bool


@dataclass(frozen=True, slots=True)
class Buffers:
    """Flat bf16 tensors of the largest message: what a rank gives, and what it works on or receives into."""

    given: Any
    taken: Any


@dataclass(frozen=True, slots=True)
class Operation:
    """call: runs it once. reset: restores what a call overwrites. result: where the last call left its result."""

    call: Callable[[], object]
    reset: Callable[[], object]
    result: Callable[[], Any]


def allocate(ranks: Ranks, most_bytes: int) -> Buffers:
    torch = ranks.torch
    given, taken = (
        torch.empty(most_bytes // ELEMENT_BYTES, dtype=torch.bfloat16, device=ranks.device) for _ in range(2)
    )
    return Buffers(given, taken)


def operation(case: Case, ranks: Ranks, buffers: Buffers, custom: Any = None) -> Operation:
    """The operation of a case. custom: vLLM's CustomAllreduce, where the case asks for it."""
    dist, count = ranks.dist, case.bytes // ELEMENT_BYTES
    given, taken = buffers.given[:count], buffers.taken[:count]
    share = count // ranks.count

    def nothing() -> None:
        return None

    if case.operation == "all_reduce":

        def reset() -> None:
            taken.copy_(given)

        if case.backend == CUSTOM:
            held = [None]

            def reduce() -> None:
                held[0] = custom.custom_all_reduce(taken)

            return Operation(reduce, reset, lambda: held[0])
        return Operation(lambda: dist.all_reduce(taken), reset, lambda: taken)
    if case.operation == "all_gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return Operation(lambda: gather(taken, given[:share]), nothing, lambda: taken)
    if case.operation == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return Operation(lambda: scatter(taken[:share], given), nothing, lambda: taken[:share])
    if case.operation == "all_to_all":
        return Operation(lambda: dist.all_to_all_single(taken, given), nothing, lambda: taken)
    if ranks.rank == 0:
        return Operation(lambda: dist.send(given, 1), nothing, lambda: given)
    return Operation(lambda: dist.recv(taken, 0), nothing, lambda: taken)


def fill(case: Case, ranks: Ranks, buffers: Buffers) -> None:
    """Random input of this rank for a check, and NaN wherever a result belongs."""
    count = case.bytes // ELEMENT_BYTES
    buffers.given[:count] = _input(case, ranks, ranks.rank)
    buffers.taken[:count] = math.nan


def shrink(case: Case, buffers: Buffers) -> None:
    """Makes the input small enough for a batch of sums in place."""
    buffers.given[: case.bytes // ELEMENT_BYTES].mul_(_SCALE)


def relative_error(case: Case, ranks: Ranks, result: Any) -> float:
    """|result - expected| / |expected| on this rank, in float32; NaN where the result has any."""
    expected = _expected(case, ranks)
    difference = result.float().sub_(expected)
    return float(difference.norm() / expected.norm())


def tolerance(case: Case) -> float:
    """Sums round in bf16; what only moves is exact."""
    return 1e-2 if case.operation in ("all_reduce", "reduce_scatter") else 0.0


def _input(case: Case, ranks: Ranks, rank: int) -> Any:
    torch = ranks.torch
    generator = torch.Generator(device=ranks.device).manual_seed(case.bytes * 64 + rank)
    count = case.bytes // ELEMENT_BYTES
    return torch.randn(count, generator=generator, device=ranks.device, dtype=torch.float32).to(torch.bfloat16)


def _expected(case: Case, ranks: Ranks) -> Any:
    """float32 result of this rank."""
    share = case.bytes // ELEMENT_BYTES // ranks.count
    own = slice(ranks.rank * share, (ranks.rank + 1) * share)
    if case.operation == "send":
        return _input(case, ranks, 0).float()
    if case.operation in ("all_gather", "all_to_all"):
        part = slice(0, share) if case.operation == "all_gather" else own
        return ranks.torch.cat([_input(case, ranks, rank)[part] for rank in range(ranks.count)]).float()
    part = own if case.operation == "reduce_scatter" else slice(None)
    total = _input(case, ranks, 0)[part].float()
    for rank in range(1, ranks.count):
        total += _input(case, ranks, rank)[part].float()
    return total
