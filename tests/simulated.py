"""Small simulated clusters for tests: a linear cost and builders of groups, of the core and of the specification."""

from collections.abc import Sequence
from dataclasses import dataclass

import reference.blocks
import reference.engine
import reference.request
import reference.scheduler

from serving.core.acceptance import Acceptance
from serving.core.blocks import BlockPool
from serving.core.engine import Engine, Group
from serving.core.loop import run
from serving.core.request import Request
from serving.core.runlog import RunLog
from serving.core.scheduler import Limits, Scheduler
from serving.core.shape import StepCost, StepShape
from serving.policies import load_policy
from serving.routers import create_router


@dataclass(frozen=True, slots=True)
class LinearCost:
    """base + tokens of the busiest rank + attended keys, all in nanoseconds."""

    base_ns: int = 1_000
    token_ns: int = 10
    key_ns: int = 1

    def step_ns(self, shapes: Sequence[StepShape | None]) -> int:
        return self.base_ns + max(self._rank_ns(shape) for shape in shapes)

    def _rank_ns(self, shape: StepShape | None) -> int:
        if shape is None:
            return self.token_ns
        keys = sum(chunk * (chunk + 2 * context) // 2 for chunk, context in shape.prefills)
        return self.token_ns * shape.tokens + self.key_ns * (keys + shape.decode_kv_sum_tokens)


SMALL = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len_tokens=1024)


def engine(
    index: int = 0,
    *,
    num_blocks: int = 100,
    block_tokens: int = 16,
    prefix_caching: bool = True,
    limits: Limits | None = None,
    cap_tokens: int | None = None,
    policy: str = "fcfs",
    asynchronous: bool = False,
) -> Engine:
    scheduler = Scheduler(
        limits or SMALL,
        BlockPool(num_blocks, block_tokens, prefix_caching),
        load_policy(policy),
        attended_cap_tokens=cap_tokens,
        asynchronous=asynchronous,
    )
    return Engine(index, scheduler)


def group(*engines: Engine, cost: StepCost | None = None, asynchronous: bool = False) -> Group:
    return Group(engines, cost or LinearCost(), asynchronous=asynchronous)


def request(
    index: int = 0, prompt: int = 10, output: int = 3, arrival_ns: int = 0, keys: Sequence[int] = (), priority: int = 0
) -> Request:
    return Request(index, arrival_ns, prompt, output, keys, priority)


def plain_engine(
    index: int = 0,
    *,
    num_blocks: int = 100,
    block_tokens: int = 16,
    prefix_caching: bool = True,
    limits: Limits | None = None,
    cap_tokens: int | None = None,
    policy: str = "fcfs",
    pipelined: bool = False,
    speculative_tokens: int = 0,
    acceptance: Acceptance | None = None,
    verify_as: str = "prefill",
) -> reference.engine.Engine:
    """An engine of the specification."""
    blocks = reference.blocks.BlockManager(num_blocks, block_tokens, prefix_caching)
    scheduler = reference.scheduler.Scheduler(
        limits or SMALL, blocks, policy, pipelined, speculative_tokens, acceptance
    )
    return reference.engine.Engine(index, scheduler, cap_tokens, verify_as)


def plain_request(
    index: int = 0, prompt: int = 10, output: int = 3, arrival_ns: int = 0, keys: Sequence[int] = (), priority: int = 0
) -> reference.request.Request:
    """A request of the specification."""
    return reference.request.Request(index, arrival_ns, prompt, output, keys, priority)


def replayed(groups: Sequence[Group], requests: Sequence[Request], router: str = "round_robin", **options: object):
    """The records by trace index, and the log."""
    log = RunLog()
    run(groups, requests, create_router(router), log, **options)
    return [log.records[i] for i in range(len(log.records))], log


def in_sessions(requests: Sequence, sessions: Sequence[tuple[int, int] | None]) -> list:
    """`requests`, of the core or of the specification, with those of equal session numbers hung one on another.

    sessions: per request (session, tool_duration_ns) or None. Returns those that arrive by themselves.
    """
    last: dict[int, object] = {}
    own = []
    for one, session in zip(requests, sessions, strict=True):
        if session is None:
            own.append(one)
            continue
        number, tool_ns = session
        one.session = str(number)
        if number in last:
            one.arrival_ns, one.tool_duration_ns = -1, tool_ns
            last[number].following = one
        else:
            own.append(one)
        last[number] = one
    return own
