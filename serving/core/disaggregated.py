"""The event loop of prefill and decode on separate engines.

A request runs its prompt on a prefill engine, which keeps the blocks. When the prompt is done, a decode engine is
chosen, and the request waits in that engine's admission queue, first come first served, until it has a place and blocks
for the whole prompt. Then its cache is sent, all but the last prompt token's: one transfer at a time leaves a prefill
engine, and one at a time enters a decode engine; they begin in the order in which they were admitted. Once it is there,
the prefill engine lets its blocks go and the decode engine runs the last prompt token, which yields the first output
token (as vLLM's connectors do). A request that is preempted on the decode engine computes its prompt again there.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from serving.core.engine import Engine, Group
from serving.core.loop import Router, record_all, release
from serving.core.request import Request
from serving.core.runlog import RunLog
from serving.core.window import Window


@dataclass(frozen=True, slots=True)
class Wire:
    """bytes_per_block: of one rank, which receives its own copy over a link of its own. gbps: 1e9 bytes per second."""

    bytes_per_block: int
    gbps: float
    latency_ns: int

    def ns(self, blocks: int) -> int:
        """Nanoseconds of one transfer of so many blocks; nothing to send takes no time."""
        return self.latency_ns + round(blocks * self.bytes_per_block / self.gbps) if blocks else 0


@dataclass(slots=True)
class Traffic:
    """What went from prefill to decode engines. blocks: sent, per rank. admission_wait_ns: from the end of a prompt to
    its place on the decode engine; link_wait_ns: from there to the begin of its transfer; both summed over requests.
    transfer_ns: summed durations. longest_queue: most requests waiting for a place on one engine.
    """

    transfers: int = 0
    blocks: int = 0
    admission_wait_ns: int = 0
    link_wait_ns: int = 0
    transfer_ns: int = 0
    longest_queue: int = 0


class _Handover:
    """Admission queues and transfers between engines. Positions count the engines of each side."""

    def __init__(self, prefill: Sequence[Engine], decode: Sequence[Engine], wire: Wire) -> None:
        self.traffic = Traffic()
        self.ends: list[tuple[int, int, int, int, Request, Request]] = []
        self._prefill = prefill
        self._decode = decode
        self._wire = wire
        self._leaving_ns = [0] * len(prefill)
        self._entering_ns = [0] * len(decode)
        self._queues: list[deque[tuple[int, int, Request, Request]]] = [deque() for _ in decode]

    def queue(self, source: int, target: int, prompt: Request, request: Request, now_ns: int) -> None:
        """`prompt` has been computed at `source`; `request` is to go on at `target`."""
        self._queues[target].append((now_ns, source, prompt, request))
        self.admit(target, now_ns)
        self.traffic.longest_queue = max(self.traffic.longest_queue, len(self._queues[target]))

    def admit(self, target: int, now_ns: int) -> None:
        """Give the head of the queue its place, and so on, while there is one."""
        queue, traffic = self._queues[target], self.traffic
        while queue:
            since_ns, source, prompt, request = queue[0]
            blocks = self._decode[target].scheduler.reserve(request)
            if blocks is None:
                return
            queue.popleft()
            begin_ns = max(now_ns, self._leaving_ns[source], self._entering_ns[target]) if blocks else now_ns
            end_ns = begin_ns + self._wire.ns(blocks)
            if blocks:
                self._leaving_ns[source] = self._entering_ns[target] = end_ns
            traffic.transfers += 1
            traffic.blocks += blocks
            traffic.admission_wait_ns += now_ns - since_ns
            traffic.link_wait_ns += begin_ns - now_ns
            traffic.transfer_ns += end_ns - begin_ns
            heapq.heappush(self.ends, (end_ns, traffic.transfers, source, target, prompt, request))


def run_disaggregated(
    prefill: Sequence[Group],
    decode: Sequence[Group],
    requests: Iterable[Request],
    route: Router,
    route_decode: Router,
    wire: Wire,
    log: RunLog,
    *,
    horizon_ns: int | None = None,
    observe: Callable[[int, Group], None] | None = None,
    advance: Callable[[int], None] | None = None,
    max_concurrency: int | None = None,
) -> Traffic:
    """Replay `requests`, given in order of arrival_ns, and record every one of them in `log`.

    Engines of `prefill` have schedulers that keep finished requests. Requests, sessions, horizon, observe, advance and
    max_concurrency as in serving.core.loop.run. A request that some decode engine could never run is rejected on
    arrival. Events at equal times: arrivals, released calls by index, transfers in order of admission, step ends by
    group, prefill first.
    queued_ns, scheduled_ns and prefix_hit_tokens of the records are those of the prefill engine, engine_index is the
    decode engine's.
    """
    groups = [*prefill, *decode]
    sources = [engine for group in prefill for engine in group.engines]
    targets = [engine for group in decode for engine in group.engines]
    group_of = {id(engine): number for number, group in enumerate(groups) for engine in group.engines}
    position_of = {engine.index: position for position, engine in enumerate(sources)}
    handover = _Handover(sources, targets, wire)
    log.open(sorted(groups, key=lambda group: group.engines[0].index))
    step_ends: list[tuple[int, int]] = []
    stepping = [False] * len(groups)
    left: list[Request] = []
    alive: dict[int, tuple[Request, Request]] = {}
    arrivals = iter(requests)
    arriving = next(arrivals, None)
    released: list[tuple[int, int, Request]] = []
    window = Window(max_concurrency)
    last_arrival_ns = 0

    def wake(number: int, now_ns: int) -> None:
        if not stepping[number]:
            duration_ns = groups[number].wake(now_ns, left)
            if duration_ns is not None:
                stepping[number] = True
                heapq.heappush(step_ends, (now_ns + duration_ns, number))

    def leave(request: Request, now_ns: int) -> None:
        del alive[request.index]
        log.record(request)
        window.leave(now_ns, released)
        if request.following is not None:
            release(request, now_ns, released, log)

    def settle(now_ns: int) -> None:
        """Requests that have left an engine: prompts go on to a decode engine, the others leave the run."""
        for one in left:
            prompt, request = alive[one.index]
            if one is request:
                leave(request, now_ns)
                continue
            _carry(prompt, request)
            if one.outcome == "rejected":
                request.engine_index, request.outcome = one.engine_index, "rejected"
                leave(request, now_ns)
                continue
            target = route_decode(targets, request)
            engine = targets[target]
            request.engine_index = engine.index
            engine.assigned += 1
            engine.assigned_tokens += request.prompt_tokens
            handover.queue(position_of[one.engine_index], target, prompt, request, now_ns)
        left.clear()

    while True:
        next_ns = min(
            inf if arriving is None else arriving.arrival_ns,
            released[0][0] if released else inf,
            handover.ends[0][0] if handover.ends else inf,
            step_ends[0][0] if step_ends else inf,
        )
        if next_ns == inf or (horizon_ns is not None and next_ns > horizon_ns):
            break
        now_ns = int(next_ns)
        if arriving is not None and arriving.arrival_ns < last_arrival_ns:
            raise ValueError(f"request {arriving.index} arrives before the one given before it")
        if advance is not None:
            advance(now_ns)
        if (arriving is not None and arriving.arrival_ns == now_ns) or (released and released[0][0] == now_ns):
            woken: set[int] = set()
            while True:
                if arriving is not None and arriving.arrival_ns == now_ns:
                    request, arriving = arriving, next(arrivals, None)
                    last_arrival_ns = now_ns
                elif released and released[0][0] == now_ns:
                    request = heapq.heappop(released)[2]
                else:
                    break
                if not window.admits(request):
                    continue
                prompt = _prompt_of(request)
                alive[request.index] = prompt, request
                if not all(engine.scheduler.can_ever_run(request) for engine in targets):
                    request.outcome, request.queued_ns = "rejected", now_ns
                    left.append(request)
                    continue
                engine = sources[route(sources, prompt)]
                engine.submit(prompt)
                woken.add(group_of[id(engine)])
            for number in sorted(woken):
                wake(number, now_ns)
        elif handover.ends and handover.ends[0][0] == now_ns:
            _, _, source, target, prompt, request = heapq.heappop(handover.ends)
            sources[source].scheduler.let_go(prompt)
            targets[target].scheduler.receive(request)
            wake(group_of[id(sources[source])], now_ns)
            wake(group_of[id(targets[target])], now_ns)
        else:
            _, number = heapq.heappop(step_ends)
            duration_ns = groups[number].end_step(now_ns, left)
            stepping[number] = duration_ns is not None
            if duration_ns is not None:
                heapq.heappush(step_ends, (now_ns + duration_ns, number))
            if observe is not None:
                observe(now_ns, groups[number])
        settle(now_ns)
        for target in range(len(targets)):
            handover.admit(target, now_ns)

    for prompt, request in alive.values():
        _carry(prompt, request)
        if request.engine_index < 0:
            request.engine_index = prompt.engine_index
        record_all(request, log)
    for call in [*(call for *_, call in sorted(released)), *window.held()]:
        record_all(call, log)
    while arriving is not None:
        record_all(arriving, log)
        arriving = next(arrivals, None)
    return handover.traffic


def _prompt_of(request: Request) -> Request:
    """What a prefill engine runs of a request: its prompt, until one token is out."""
    return Request(
        request.index,
        request.arrival_ns,
        request.prompt_tokens,
        1,
        request.block_keys,
        request.priority,
        request.session,
    )


def _carry(prompt: Request, request: Request) -> None:
    """What the record keeps of the time on the prefill engine."""
    if request.queued_ns is None:
        request.queued_ns = prompt.queued_ns
    request.scheduled_ns = prompt.scheduled_ns
    request.prefix_hit_tokens = prompt.prefix_hit_tokens
    request.preemptions += prompt.preemptions
    prompt.preemptions = 0
