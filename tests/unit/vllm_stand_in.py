"""A stand-in with the shape of vLLM's in-process engine: who calls whom, and a host and a device clock."""

from collections import deque
from types import SimpleNamespace
from typing import Any

US = 1e-6


class Device:
    """Host clock in seconds and the time until which the device has work."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.busy_until = 0.0

    def clock(self) -> float:
        return self.now

    def host(self, us: float) -> None:
        self.now += us * US

    def launch(self, us: float) -> None:
        self.busy_until = max(self.busy_until, self.now) + us * US


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = max(self.device.now, self.device.busy_until)

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1e3


def torch(device: Device) -> Any:
    def synchronize() -> None:
        device.now = max(device.now, device.busy_until)

    return SimpleNamespace(cuda=SimpleNamespace(Event=lambda enable_timing: Event(device), synchronize=synchronize))


class Pool:
    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.free = blocks - 1

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_new_blocks(self, count: int) -> list[int]:
        if count > self.free:
            raise ValueError("no blocks")
        self.free -= count
        return list(range(count))

    def free_blocks(self, blocks: list[int]) -> None:
        self.free += len(blocks)


class Scheduler:
    """One chunk of at most 8 prompt tokens per request and step, then one token per step; times in microseconds."""

    SCHEDULE_US, UPDATE_US = 100.0, 40.0

    def __init__(self, device: Device, blocks: int, ahead: int) -> None:
        self.device, self.ahead = device, ahead
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.finished: list[str] = []
        self.max_num_running_reqs = 4
        self.max_num_scheduled_tokens = 64
        self.kv_cache_manager = SimpleNamespace(block_pool=Pool(blocks))

    def add(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def has_requests(self) -> bool:
        return bool(self.running or self.waiting or self.finished)

    def schedule(self, throttle: bool = False) -> Any:
        self.device.host(self.SCHEDULE_US)
        while self.waiting and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.pop(0)
            request.scheduled_at = self.device.now
            self.running.append(request)
        tokens = {}
        for request in self.running:
            total = request.num_prompt_tokens + request.outputs + request.placeholders
            if request.outputs + request.placeholders >= request.max_tokens:
                continue
            tokens[request.request_id] = min(8, total - request.num_computed_tokens)
            request.num_computed_tokens += tokens[request.request_id]
            request.is_prefill_chunk = request.num_computed_tokens < total
            request.placeholders += not request.is_prefill_chunk
        self.finished.clear()
        return SimpleNamespace(
            num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()), preempted_req_ids=set()
        )

    def update_from_output(self, output: Any, sampled: set[str]) -> list[str]:
        self.device.host(self.UPDATE_US)
        done = []
        for name in sampled:
            request = self.requests[name]
            request.outputs += 1
            request.placeholders -= 1
            if request.outputs == 1:
                request.first_at = self.device.now
            if request.outputs == request.max_tokens:
                request.last_at = self.device.now
                self.running.remove(request)
                self.finished.append(name)
                done.append(name)
        return done


class Runner:
    """PREPARE_US before the layers, of the host and of the device each; LAUNCH_US for the layers; SAMPLE_US behind."""

    PREPARE_US, LAUNCH_US, SAMPLE_US = 200.0, 300.0, 50.0

    def __init__(self, device: Device, asynchronous: bool, forward_us: float) -> None:
        self.device, self.asynchronous, self.forward_us = device, asynchronous, forward_us
        self.prepare_inputs_event = Event(device) if asynchronous else None
        self.model_memory_usage = 1 << 30
        self.attn_groups: list[Any] = []

    def get_model(self) -> None:
        return None

    def execute_model(self, output: Any, intermediate: Any = None) -> None:
        if not output.total_num_scheduled_tokens:
            return
        if self.prepare_inputs_event is not None:
            self.prepare_inputs_event.synchronize()
        self.device.host(self.PREPARE_US)
        self.device.launch(10.0)
        if self.prepare_inputs_event is not None:
            self.prepare_inputs_event.record()
        self._determine_batch_execution_and_padding(num_tokens=output.total_num_scheduled_tokens)
        self._model_forward(input_ids=None)
        self.output = output

    def _determine_batch_execution_and_padding(self, num_tokens: int) -> Any:
        return SimpleNamespace(name="FULL"), SimpleNamespace(num_tokens=num_tokens + num_tokens % 2), False, None, None

    def _model_forward(self, input_ids: Any) -> None:
        self.device.host(self.LAUNCH_US)
        self.device.launch(self.forward_us)

    def sample_tokens(self, grammar: Any) -> Any:
        self.device.host(self.SAMPLE_US)
        self.device.launch(30.0)
        return self._bookkeeping_sync(self.output)

    def _bookkeeping_sync(self, output: Any) -> Any:
        ready = Event(self.device)
        ready.record()
        if not self.asynchronous:
            ready.synchronize()
        return ready


class Core:
    """The two step functions of an engine core: with a queue of two steps, and without."""

    def __init__(self, device: Device, asynchronous: bool, forward_us: float, blocks: int) -> None:
        self.scheduler = Scheduler(device, blocks, 2 if asynchronous else 1)
        self.runner = Runner(device, asynchronous, forward_us)
        self.batch_queue: deque[Any] | None = deque(maxlen=2) if asynchronous else None

    def step_fn(self) -> list[str] | None:
        return self.step() if self.batch_queue is None else self.step_with_batch_queue()

    def step(self) -> list[str]:
        output = self.scheduler.schedule(False)
        self.runner.execute_model(output, None)
        if not output.total_num_scheduled_tokens:
            return self.scheduler.update_from_output(output, set())
        self.runner.sample_tokens(None)
        return self.scheduler.update_from_output(output, self._sampled(output))

    def step_with_batch_queue(self) -> list[str] | None:
        assert self.batch_queue is not None
        if self.scheduler.has_requests():
            output = self.scheduler.schedule(False)
            sampled = self._sampled(output)
            self.runner.execute_model(output, None)
            ready = self.runner.sample_tokens(None) if output.total_num_scheduled_tokens else None
            self.batch_queue.appendleft((ready, output, sampled))
            if len(self.batch_queue) < 2:
                return None
        ready, output, sampled = self.batch_queue.pop()
        if ready is not None:
            ready.synchronize()
        return self.scheduler.update_from_output(output, sampled)

    def _sampled(self, output: Any) -> set[str]:
        return {name for name in output.num_scheduled_tokens if not self.scheduler.requests[name].is_prefill_chunk}


class Engine:
    """The front end: adds requests under a longer id, steps the core, makes outputs of what finished."""

    OUTPUT_US, ADD_US = 25.0, 15.0

    def __init__(self, core: Core, device: Device) -> None:
        self.core, self.device = core, device
        self.logger_manager: Any = object()
        self.alive: dict[str, str] = {}
        self.resets = 0
        self.input_processor = SimpleNamespace(process_inputs=self._process)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _process(self, request_id: str, prompt: Any, params: Any, supported_tasks: Any) -> Any:
        return SimpleNamespace(request_id=request_id, prompt=prompt["prompt_token_ids"], params=params, arrival_time=0)

    def reset_prefix_cache(self) -> bool:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        self.resets += 1
        return bool(pool.free == pool.num_gpu_blocks - 1)

    def add_request(self, request_id: str, ready: Any, params: Any) -> str:
        self.device.host(self.ADD_US)
        name = f"{request_id}-{len(self.core.scheduler.requests):08x}"
        self.alive[name] = request_id
        self.core.scheduler.add(
            SimpleNamespace(
                request_id=name, prompt=ready.prompt, num_prompt_tokens=len(ready.prompt), max_tokens=params.max_tokens,
                num_computed_tokens=0, outputs=0, placeholders=0, is_prefill_chunk=False,
                queued_at=self.device.now, scheduled_at=0.0, first_at=0.0, last_at=0.0,
            )
        )  # fmt: skip
        return name

    def has_unfinished_requests(self) -> bool:
        return bool(self.alive)

    def step(self) -> list[Any]:
        done = self.core.step_fn()
        if done is None:
            return []
        self.device.host(self.OUTPUT_US)
        outputs = []
        for name in done:
            request = self.core.scheduler.requests[name]
            times = SimpleNamespace(
                arrival_time=1e9, queued_ts=request.queued_at, scheduled_ts=request.scheduled_at,
                first_token_ts=request.first_at, last_token_ts=request.last_at,
            )  # fmt: skip
            tokens = [SimpleNamespace(token_ids=[0] * request.outputs)]
            outputs.append(
                SimpleNamespace(
                    request_id=self.alive.pop(name), finished=True, outputs=tokens, metrics=times,
                    prompt_token_ids=request.prompt,
                )
            )  # fmt: skip
        return outputs


def started(device: Device, asynchronous: bool, forward_us: float = 2_000.0, blocks: int = 100) -> Any:
    """What `boot.start` gives."""
    core = Core(device, asynchronous, forward_us, blocks)
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 1_000),
        cache_config=SimpleNamespace(block_size=64),
        compilation_config=SimpleNamespace(
            mode=SimpleNamespace(name="NONE"),
            cudagraph_mode=SimpleNamespace(name="FULL_DECODE_ONLY"),
            cudagraph_capture_sizes=[1, 2, 4],
        ),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )
    core.runner.vllm_config = config  # type: ignore[attr-defined]
    llm = SimpleNamespace(llm_engine=Engine(core, device))
    worker = SimpleNamespace(requested_memory=2 << 30)
    return SimpleNamespace(llm=llm, core=core, worker=worker, runner=core.runner, folder=None)
