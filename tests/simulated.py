"""Small simulated clusters for tests: a linear cost and a builder of groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.blocks import BlockManager
from serving.core.engine import Engine, Group
from serving.core.request import Request
from serving.core.scheduler import Limits, Scheduler
from serving.core.shape import StepShape
from serving.policies import fcfs


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


def engine(
    index: int = 0,
    *,
    num_blocks: int = 100,
    block_tokens: int = 16,
    prefix_caching: bool = True,
    limits: Limits | None = None,
    cap_tokens: int | None = None,
) -> Engine:
    limits = limits or Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len_tokens=1024)
    scheduler = Scheduler(limits, BlockManager(num_blocks, block_tokens, prefix_caching), fcfs)
    return Engine(index, scheduler, cap_tokens)


def group(*engines: Engine, cost: LinearCost | None = None) -> Group:
    return Group(engines, cost or LinearCost())


def request(
    index: int = 0, prompt: int = 10, output: int = 3, arrival_ns: int = 0, keys: Sequence[int] = ()
) -> Request:
    return Request(index, arrival_ns, prompt, output, keys)
