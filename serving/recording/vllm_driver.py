"""A real vLLM engine in this process, driven step by step, with a log of what each step ran and how long it took."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profiler.core.errors import AcquisitionError
from profiler.core.hardware import canonical_name
from serving.recording.drive import Finished
from serving.recording.steps import Step
from serving.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """How the engine is started. num_gpu_blocks and block_tokens: None is the engine's own choice."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_dtype: str
    utilization: float
    num_gpu_blocks: int | None
    block_tokens: int | None
    eager: bool
    prefix_caching: bool
    async_scheduling: bool
    seed: int

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of vllm.LLM."""
        chosen: dict[str, Any] = {
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_dtype": self.kv_cache_dtype,
            "gpu_memory_utilization": self.utilization,
            "enforce_eager": self.eager,
            "enable_prefix_caching": self.prefix_caching,
            "async_scheduling": self.async_scheduling,
            "seed": self.seed,
        }
        if self.num_gpu_blocks is not None:
            chosen["num_gpu_blocks_override"] = self.num_gpu_blocks
        if self.block_tokens is not None:
            chosen["block_size"] = self.block_tokens
        return chosen


def check_card(hardware: str) -> None:
    """Refuses to record on another card than the one named, with AcquisitionError."""
    try:
        import torch
    except ImportError:
        raise AcquisitionError("record needs vllm and torch: pip install 'sparsight[vllm]'") from None
    if not torch.cuda.is_available():
        raise AcquisitionError(f"--hardware {hardware}: no CUDA device is visible here")
    here = torch.cuda.get_device_name()
    if canonical_name(here) != hardware:
        raise AcquisitionError(f"--hardware {hardware}: the card here is {here}")


class VllmDriver:
    """The engine of `serving.recording.drive.play`. Weights are random normal, so that routing and scores are real."""

    def __init__(self, config: Mapping[str, Any], arguments: EngineArguments) -> None:
        """Starts vLLM on `config`, a raw HF config, already reduced. Raises AcquisitionError when it cannot."""
        from profiler.engines.vllm_support import boot, state

        self._version = boot.installed_version()
        boot.set_environment(boot.SERVING_ENVIRONMENT)
        started = boot.start(config, disable_log_stats=False, **arguments.keywords())
        self._started = started
        self._engine = started.llm.llm_engine
        self.worker, self.runner = started.worker, started.runner
        self.vocab = int(self.runner.vllm_config.model_config.get_vocab_size())
        state.randomise_weights(self.runner.get_model())
        self._log = _StepLog(started.core, self.runner)

    def add(self, request: TraceRequest) -> None:
        from vllm import SamplingParams

        ids = prompt_token_ids(request, self.vocab)
        exact = request.output_tokens
        params = SamplingParams(temperature=0.0, ignore_eos=True, min_tokens=exact, max_tokens=exact, detokenize=False)
        self._engine.add_request(request.request_id, {"prompt_token_ids": ids}, params)

    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> list[Finished]:
        finished = []
        for output in self._engine.step():
            if output.finished:
                stats = output.metrics
                finished.append(
                    Finished(
                        request_id=output.request_id,
                        prompt_tokens=len(output.prompt_token_ids),
                        output_tokens=len(output.outputs[0].token_ids),
                        arrival_time=stats.arrival_time,
                        queued_ts=stats.queued_ts,
                        scheduled_ts=stats.scheduled_ts,
                        first_token_ts=stats.first_token_ts,
                        last_token_ts=stats.last_token_ts,
                    )
                )
        return finished

    def begin(self) -> None:
        """Forgets the steps so far and empties the prefix cache: the next play starts as the first one did."""
        self._started.llm.reset_prefix_cache()
        self._log.clear()

    def steps(self) -> list[Step]:
        return self._log.steps()

    def facts(self) -> dict[str, Any]:
        """Memory in GiB as the engine counted it, its blocks, and what ran."""
        from profiler.engines.vllm_engine import gpu_facts

        gib = 1 << 30
        names = ("requested_memory", "peak_activation_memory", "non_torch_memory", "cudagraph_memory_estimate",
                 "available_kv_cache_memory_bytes")  # fmt: skip
        memory = {name.removesuffix("_bytes"): getattr(self.worker, name, None) for name in names}
        memory["weights"] = self.runner.model_memory_usage
        backends = sorted({g.backend.get_name() for group in self.runner.attn_groups for g in group})
        return {
            "vllm": self._version,
            "gpu": gpu_facts(),
            "memory_gib": {name: value / gib for name, value in memory.items() if value is not None},
            "num_gpu_blocks": int(self.runner.kv_cache_config.num_blocks),
            "block_tokens": int(self.runner.vllm_config.cache_config.block_size),
            "attention_backends": backends,
            "cudagraph_mode": str(self.runner.vllm_config.compilation_config.cudagraph_mode),
            "capture_sizes": list(self.runner.vllm_config.compilation_config.cudagraph_capture_sizes or ()),
            "async_scheduling": bool(self.runner.vllm_config.scheduler_config.async_scheduling),
            "weights": "random normal, fan-in scaled",
        }


def prompt_token_ids(request: TraceRequest, vocab: int) -> list[int]:
    """The trace's own token ids, else random ones below `vocab`, equal in every play.

    Requests with equal leading prefix hashes get equal leading tokens; without hashes each request has its own.
    """
    if request.prompt_ids:
        return list(request.prompt_ids)
    ids: list[int] = []
    if request.prefix is not None:
        for block in request.prefix.ids:
            ids += _random_ids(f"block {block}", request.prefix.block_tokens, vocab)
        del ids[request.prefix.tokens :]
    rest = request.prompt_tokens - len(ids)
    return ids + _random_ids(f"request {request.request_id}", rest, vocab)


def _random_ids(seed: str, count: int, vocab: int) -> list[int]:
    import random

    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(count)]


class _StepLog:
    """Wraps the scheduler and the model runner: what was scheduled, and device time by events."""

    def __init__(self, core: Any, runner: Any) -> None:
        import torch

        self._core = core
        self._torch = torch
        self._schedule = core.scheduler.schedule
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        core.scheduler.schedule = self._logged_schedule
        runner.execute_model, runner.sample_tokens = self._timed_execute, self._timed_sample
        self.clear()

    def clear(self) -> None:
        self._started = time.perf_counter()
        self._steps: list[Step] = []
        self._events: list[tuple[Any, Any]] = []
        self._open: deque[Any] = deque()
        self._ended = self._started

    def steps(self) -> list[Step]:
        """The log; wall_us reaches to the next step's scheduling, at most to the end of the last call."""
        self._torch.cuda.synchronize()
        ends = [step.start_s for step in self._steps[1:]] + [self._ended - self._started]
        gpu = [start.elapsed_time(end) * 1e3 for start, end in self._events]
        gpu += [None] * (len(self._steps) - len(gpu))
        return [
            replace(step, wall_us=(end - step.start_s) * 1e6, gpu_us=us)
            for step, end, us in zip(self._steps, ends, gpu, strict=False)
        ]

    def _logged_schedule(self, *args: Any, **kwargs: Any) -> Any:
        at = time.perf_counter() - self._started
        output = self._schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self._steps.append(self._step(at, output))
        return output

    def _step(self, at: float, output: Any) -> Step:
        scheduler = self._core.scheduler
        prefills: list[tuple[int, int]] = []
        decode_keys: list[int] = []
        for name, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            # The scheduler has advanced num_computed_tokens by this step already.
            before = request.num_computed_tokens - tokens
            if tokens > 1 or before < request.num_prompt_tokens - 1:
                prefills.append((tokens, before))
            else:
                decode_keys.append(before + 1)
        return Step(
            start_s=at,
            wall_us=0.0,
            gpu_us=None,
            prefill_requests=len(prefills),
            prefill_tokens=sum(chunk for chunk, _ in prefills),
            prefill_context_tokens=sum(context for _, context in prefills),
            decode_requests=len(decode_keys),
            decode_kv_tokens=sum(decode_keys),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=float(scheduler.kv_cache_manager.usage),
            preemptions=len(output.preempted_req_ids or ()),
        )

    def _timed_execute(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        if not output.total_num_scheduled_tokens:
            return self._execute(output, *args, **kwargs)
        start = self._torch.cuda.Event(enable_timing=True)
        start.record()
        self._open.append(start)
        return self._execute(output, *args, **kwargs)

    def _timed_sample(self, *args: Any, **kwargs: Any) -> Any:
        result = self._sample(*args, **kwargs)
        if self._open:
            end = self._torch.cuda.Event(enable_timing=True)
            end.record()
            self._events.append((self._open.popleft(), end))
        self._ended = time.perf_counter()
        return result


def cluster_file(
    model: str, hardware: str, layers: int, arguments: EngineArguments, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The same deployment as a cluster file of `serving replay`, with the blocks that the engine had."""
    return {
        "instances": [
            {
                "model": model,
                "layers": layers,
                "hardware": hardware,
                "engine": {
                    "max_model_len": arguments.max_model_len,
                    "max_num_batched_tokens": arguments.max_num_batched_tokens,
                    "max_num_seqs": arguments.max_num_seqs,
                    "kv_cache_dtype": arguments.kv_cache_dtype,
                    "gpu_memory_utilization": arguments.utilization,
                    "num_gpu_blocks": facts["num_gpu_blocks"],
                    "enforce_eager": arguments.eager,
                    "enable_prefix_caching": arguments.prefix_caching,
                    "async_scheduling": arguments.async_scheduling,
                },
            }
        ]
    }


def wrong_lengths(asked: Sequence[TraceRequest], got: Sequence[Finished]) -> list[str]:
    """Requests whose lengths are not those of the trace, one line each."""
    by_id = {one.request_id: one for one in got}
    wrong = []
    for request in asked:
        one = by_id.get(request.request_id)
        if one is None:
            wrong.append(f"request {request.request_id}: did not finish")
        elif (one.prompt_tokens, one.output_tokens) != (request.prompt_tokens, request.output_tokens):
            wrong.append(
                f"request {request.request_id}: {one.prompt_tokens} + {one.output_tokens} tokens, "
                f"the trace has {request.prompt_tokens} + {request.output_tokens}"
            )
    return wrong
