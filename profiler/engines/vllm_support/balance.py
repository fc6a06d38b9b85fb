"""Even expert loads on random weights: the correction biases of the routers, found as training finds them.

Random weights make some experts popular with every token: fewer are reached by a small batch, and a large one waits for
the busiest. Models that are served have even loads, by a bias that only the choice sees and that training moves against
the load (DeepSeek-V3, section 2.1.2). Here the logits of some thousand random tokens stand in for training.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from profiler.core.errors import AcquisitionError
from profiler.core.types import MoeDims

# A bias of one layer changes what the next ones see, so logits are taken anew.
_ROUNDS: Final = 2
_STEPS: Final = 200
# Of the scores' standard deviation, at first, and what is left of it after every step.
_RATE: Final = 0.5
_DECAY: Final = 0.98


def balance(model: Any, moe: MoeDims, run: Callable[[], object]) -> dict[str, float]:
    """Sets the bias of every router of `model` in place; run() sends some thousand tokens through it, not compiled,
    and others each time: a batch that loads were evened on fills the tiles of the expert kernels as no other does.

    Returns the number of routers and of tokens, and the spread of an expert's load (standard deviation over mean, mean
    of the routers) before and after, the latter of tokens that had no part in it. Raises AcquisitionError where no
    router with a bias was run.
    """
    spreads: list[float] = []
    tried: list[list[Any]] = []
    for step in range(_ROUNDS + 1):
        seen = _logits(model, run)
        if not seen:
            raise AcquisitionError("no router with a correction bias ran, so loads are not evened")
        spreads.append(sum(spread_of_loads(logits, moe, bias.float()) for bias, logits in seen) / len(seen))
        tried.append([bias.detach().clone() for bias, _ in seen])
        if step < _ROUNDS:
            for bias, logits in seen:
                bias.data.copy_(even_bias(logits, moe, bias))
    least = min(spreads)
    for (bias, _), kept in zip(seen, tried[spreads.index(least)], strict=True):
        bias.data.copy_(kept)
    return {
        "routers": len(seen),
        "tokens": seen[0][1].shape[0],
        "spread_before": round(spreads[0], 4),
        "spread_after": round(least, 4),
    }


def even_loads(model: Any, moe: MoeDims | None, run: Callable[[], object]) -> dict[str, Any]:
    """balance() with the layers as they are written, or why loads stay as they come: a run with uneven loads is one
    still, and says so."""
    if moe is None or not moe.has_bias:
        return {"not_evened": "routers have no bias"}
    try:
        with uncompiled(model):
            return dict(balance(model, moe, run))
    except Exception as error:
        print(f"warning: expert loads are not evened: {type(error).__name__}: {error}", file=sys.stderr)
        return {"not_evened": f"{type(error).__name__}: {error}"}


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Inside, modules that vLLM has compiled run as they are written, so that hooks see them."""
    compiled = [module for module in model.modules() if getattr(module, "do_not_compile", None) is False]
    for module in compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False


def even_bias(logits: Any, moe: MoeDims, bias: Any) -> Any:
    """A bias (E,), found from `bias` on, that evens the loads of logits (T, E)."""
    import torch

    best = current = bias.detach().float().clone()
    least = float("inf")
    rate = _RATE * float(torch.sigmoid(logits.float()).std())
    for _ in range(_STEPS):
        excess = _excess(logits, moe, current)
        spread = float(excess.std(correction=0))
        if spread < least:
            best, least = current, spread
        current = current - rate * excess.clamp(-1.0, 1.0)
        rate *= _DECAY
    return best


def spread_of_loads(logits: Any, moe: MoeDims, bias: Any) -> float:
    """Standard deviation over mean of how many of the tokens of logits (T, E) pick each expert under `bias` (E,)."""
    return float(_excess(logits, moe, bias).std(correction=0))


def _excess(logits: Any, moe: MoeDims, bias: Any) -> Any:
    """(E,): by how much each expert's load exceeds the mean, in parts of it."""
    loads = _loads(logits, moe, bias)
    return loads / loads.mean() - 1.0


def _loads(logits: Any, moe: MoeDims, bias: Any) -> Any:
    """(E,): how many of the tokens of logits (T, E) pick each expert under `bias` (E,)."""
    import torch

    from profiler.ops.moe import grouped_topk

    _, ids = grouped_topk(
        logits, moe.topk, n_group=moe.n_group, topk_group=moe.topk_group, scoring=moe.scoring, bias=bias
    )
    return torch.bincount(ids.flatten(), minlength=logits.shape[1]).float()


class Counter:
    """How many experts the tokens of a pass pick, told by the routers of `model` while it runs.

    A draw of few tokens reaches a tenth more or fewer experts than another, and takes as much longer or less long; with
    the count a table can say what an average one takes.
    """

    def __init__(self, model: Any, moe: MoeDims | None) -> None:
        self._model = model
        # None where nothing can be counted.
        self._moe = moe if moe is not None and moe.has_bias else None

    def reached(self, run: Callable[[], object]) -> float | None:
        """Runs run(), which the caller does not time. Distinct experts, mean over the layers; None where no router ran
        or where it cannot be counted, which is told once. Errors of run() itself are the caller's."""
        if self._moe is None:
            run()
            return None
        seen = _logits(self._model, run)
        try:
            counts = [distinct_experts(logits, self._moe, bias.float()) for bias, logits in seen]
        except Exception as error:
            print(f"warning: experts of passes are not counted: {type(error).__name__}: {error}", file=sys.stderr)
            self._moe = None
            return None
        return sum(counts) / len(counts) if counts else None


def distinct_experts(logits: Any, moe: MoeDims, bias: Any) -> int:
    """How many experts at least one token of logits (T, E) picks under `bias` (E,)."""
    return int((_loads(logits, moe, bias) > 0).sum())


def _routers(model: Any) -> Iterator[tuple[Any, Any]]:
    """(gate module, its bias): the bias belongs to the gate, or to the block around it."""
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        gate = module if getattr(module, "weight", None) is not None else getattr(module, "gate", None)
        if bias is not None and gate is not None:
            yield gate, bias


def _logits(model: Any, run: Callable[[], object]) -> list[tuple[Any, Any]]:
    """(bias, logits) of every router: the largest batch that each meets while run() runs."""
    found: dict[int, tuple[Any, Any]] = {}
    handles = []
    for number, (gate, bias) in enumerate(_routers(model)):

        def keep(module: Any, given: Any, output: Any, number: int = number, bias: Any = bias) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            if number not in found or logits.shape[0] > found[number][1].shape[0]:
                found[number] = bias, logits.detach().clone()

        handles.append(gate.register_forward_hook(keep))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())
