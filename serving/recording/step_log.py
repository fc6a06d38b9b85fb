"""The step log of a running vLLM engine: its scheduler and its model runner, wrapped where they are called.

Every wrapper takes a time before and after, and records events on the device's stream. What needs more than a few
microseconds is left for `StepLog.steps`, when the play is over.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serving.recording.steps import Chunk, Decode, Step, changes

_US = 1e6


@dataclass(slots=True)
class _Open:
    """A step under way. batch: (engine's request id, tokens, tokens computed before them, still a prefill after)."""

    start_s: float
    batch: list[tuple[str, int, int, bool]]
    running: int
    waiting: int
    free_blocks: int
    preemptions: int
    add_us: float
    schedule_us: float
    log_us: float
    launch_us: float = 0.0
    input_wait_us: float = 0.0
    forward_launch_us: float | None = None
    sample_us: float = 0.0
    bookkeep_us: float | None = None
    wait_us: float = 0.0
    update_us: float = 0.0
    output_us: float = 0.0
    updated_s: float = 0.0
    end_s: float = 0.0
    graph: str = ""
    padded_tokens: int | None = None
    events: dict[str, Any] = field(default_factory=dict)


class StepLog:
    """The log of one engine. torch: the module, or what has its cuda.Event and cuda.synchronize.

    names: the row in the trace of every request, by the engine's id. `held_blocks` are neither free nor used.
    """

    def __init__(self, core: Any, runner: Any, torch: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._scheduler, self._runner, self._torch, self._clock = core.scheduler, runner, torch, clock
        self.names: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.held_blocks = 0
        self.missing: list[str] = []
        self._wrap(core.scheduler, "schedule", self._schedule)
        self._wrap(core.scheduler, "update_from_output", self._update)
        self._wrap(runner, "execute_model", self._execute)
        self._wrap(runner, "sample_tokens", self._sample)
        # Private parts of the runner: without one the log lacks a column and says so.
        for name, wrapper in (
            ("_model_forward", self._forward),
            ("_determine_batch_execution_and_padding", self._padding),
            ("_bookkeeping_sync", self._bookkeep),
        ):
            if callable(getattr(runner, name, None)):
                self._wrap(runner, name, wrapper)
            else:
                self.missing.append(name)
        if getattr(runner, "prepare_inputs_event", None) is not None:
            runner.prepare_inputs_event = _TimedEvent(runner.prepare_inputs_event, self._input_waited, clock)
        self.clear()

    def clear(self) -> None:
        """Forgets all steps; the clock of the log starts now, on an idle device."""
        self._done: list[_Open] = []
        self._scheduled: deque[_Open] = deque()
        self._awaited: deque[_Open] = deque()
        self._current: _Open | None = None
        self._updated: _Open | None = None
        self._add_us = 0.0
        self._torch.cuda.synchronize()
        self._reference = self._event()
        self._reference.synchronize()
        self._started = self._host_end = self._clock()

    def added(self, engine_id: str, row: int, prompt_tokens: int, took_s: float) -> None:
        """A request was handed to the engine, which took `took_s`."""
        self.names[engine_id], self.prompts[engine_id] = row, prompt_tokens
        self._add_us += took_s * _US

    def returned(self) -> None:
        """The engine's step function returned: what came behind the last update made its outputs."""
        now = self._clock()
        if self._updated is not None:
            self._updated.output_us = (now - self._host_end) * _US
            self._updated.end_s = now - self._started
            self._updated = None
        self._host_end = now

    def steps(self) -> list[Step]:
        """The log of all steps whose outputs came."""
        self._torch.cuda.synchronize()
        total_blocks = self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1 - self.held_blocks
        decoding: dict[int, int] = {}
        found = []
        for place, step in enumerate(self._done):
            following = self._done[place + 1].start_s if place + 1 < len(self._done) else step.end_s
            found.append(self._closed(step, min(following, step.end_s), total_blocks, decoding))
        return found

    def _closed(self, step: _Open, end_s: float, total_blocks: int, decoding: dict[int, int]) -> Step:
        chunks, decodes = [], []
        for name, tokens, context, _ in step.batch:
            if tokens > 1 or context < self.prompts[name]:
                chunks.append(Chunk(self.names[name], tokens, context))
            else:
                decodes.append(Decode(self.names[name], context + 1))
        joined, left = changes(decoding, decodes)
        return Step(
            start_s=step.start_s,
            wall_us=(end_s - step.start_s) * _US,
            gpu_us=self._between(step, "start", "end"),
            prefill_requests=len(chunks),
            prefill_tokens=sum(one.tokens for one in chunks),
            prefill_context_tokens=sum(one.context for one in chunks),
            decode_requests=len(decodes),
            decode_kv_tokens=sum(one.keys for one in decodes),
            running=step.running,
            waiting=step.waiting,
            kv_usage=1.0 - step.free_blocks / total_blocks if total_blocks else 0.0,
            preemptions=step.preemptions,
            sampled=sum(not unfinished for *_, unfinished in step.batch),
            graph=step.graph,
            padded_tokens=step.padded_tokens,
            add_us=step.add_us,
            schedule_us=step.schedule_us,
            launch_us=step.launch_us,
            input_wait_us=step.input_wait_us,
            forward_launch_us=step.forward_launch_us,
            sample_us=step.sample_us,
            bookkeep_us=step.bookkeep_us,
            wait_us=step.wait_us,
            update_us=step.update_us,
            output_us=step.output_us,
            log_us=step.log_us,
            updated_s=step.updated_s,
            gpu_start_s=self._reference.elapsed_time(step.events["start"]) / 1e3 if "start" in step.events else None,
            prepare_us=self._between(step, "start", "forward"),
            forward_us=self._between(step, "forward", "forwarded"),
            sample_gpu_us=self._between(step, "forwarded", "end"),
            chunks=tuple(chunks),
            joined=joined,
            left=left,
        )

    def _between(self, step: _Open, first: str, second: str) -> float | None:
        if first not in step.events or second not in step.events:
            return None
        return float(step.events[first].elapsed_time(step.events[second])) * 1e3

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def _event(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _schedule(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = self._clock()
        output = original(*args, **kwargs)
        end = self._clock()
        if output.total_num_scheduled_tokens:
            scheduler = self._scheduler
            requests = scheduler.requests
            batch = []
            for name, tokens in output.num_scheduled_tokens.items():
                request = requests[name]
                # The scheduler has counted this step's tokens as computed already.
                batch.append((name, tokens, request.num_computed_tokens - tokens, bool(request.is_prefill_chunk)))
            step = _Open(
                start_s=start - self._started,
                batch=batch,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting) + len(getattr(scheduler, "skipped_waiting", ())),
                free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                preemptions=len(output.preempted_req_ids or ()),
                add_us=self._add_us,
                schedule_us=(end - start) * _US,
                log_us=0.0,
            )
            self._add_us = 0.0
            self._scheduled.append(step)
            self._awaited.append(step)
            now = self._clock()
            step.log_us, end = (now - end) * _US, now
        self._host_end = end
        return output

    def _execute(self, original: Callable[..., Any], output: Any, *args: Any, **kwargs: Any) -> Any:
        if not output.total_num_scheduled_tokens:
            self._current = None
            return original(output, *args, **kwargs)
        step = self._current = self._scheduled.popleft()
        step.events["start"] = self._event()
        start = self._clock()
        result = original(output, *args, **kwargs)
        self._host_end = self._clock()
        step.launch_us = (self._host_end - start) * _US
        return result

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._current
        if step is None:
            return original(*args, **kwargs)
        step.events["forward"] = self._event()
        start = self._clock()
        result = original(*args, **kwargs)
        step.forward_launch_us = (self._clock() - start) * _US
        step.events["forwarded"] = self._event()
        return result

    def _padding(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._current is not None:
            mode, batch = result[0], result[1]
            self._current.graph = getattr(mode, "name", str(mode))
            self._current.padded_tokens = int(batch.num_tokens)
        return result

    def _sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._current
        if step is None:
            return original(*args, **kwargs)
        start = self._clock()
        result = original(*args, **kwargs)
        self._host_end = self._clock()
        step.sample_us = (self._host_end - start) * _US
        if "end" not in step.events:
            step.events["end"] = self._event()
        self._current = None
        return result

    def _bookkeep(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._current
        if step is None:
            return original(*args, **kwargs)
        step.events["end"] = self._event()
        start = self._clock()
        result = original(*args, **kwargs)
        step.bookkeep_us = (self._clock() - start) * _US
        return result

    def _input_waited(self, took_s: float) -> None:
        if self._current is not None:
            self._current.input_wait_us += took_s * _US

    def _update(self, original: Callable[..., Any], output: Any, *args: Any, **kwargs: Any) -> Any:
        if not output.total_num_scheduled_tokens:
            result = original(output, *args, **kwargs)
            self._host_end = self._clock()
            return result
        step = self._awaited.popleft()
        start = self._clock()
        step.wait_us = (start - self._host_end) * _US
        result = original(output, *args, **kwargs)
        self._host_end = self._clock()
        step.update_us = (self._host_end - start) * _US
        step.updated_s = step.end_s = self._host_end - self._started
        self._done.append(step)
        self._updated = step
        return result


class _TimedEvent:
    """An event whose waits are reported; everything else goes through."""

    def __init__(self, event: Any, report: Callable[[float], None], clock: Callable[[], float]) -> None:
        self._event, self._report, self._clock = event, report, clock

    def synchronize(self) -> None:
        start = self._clock()
        self._event.synchronize()
        self._report(self._clock() - start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)
