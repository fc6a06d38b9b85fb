"""A real vLLM engine in this process, driven step by step, with a log of what each step ran and how long it took."""

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from profiler.core.errors import AcquisitionError, ConfigError, unknown
from profiler.core.hardware import canonical_name
from profiler.core.types import MoeDims
from serving.recording.drive import Finished
from serving.recording.step_log import StepLog
from serving.recording.steps import Step
from serving.traces import TraceRequest

MODES: Final = {
    "decode-graphs": "the kernels of the tables: nothing compiled, decode steps in CUDA graphs, others launched",
    "eager": "every kernel launched by the host",
    "piecewise": "the kernels of the tables too, nothing fused; decode steps in CUDA graphs, others in graphs of parts "
    "of layers as far as the captured sizes reach",
    "engine": "as vLLM runs by default: compiled, with CUDA graphs of whole decode steps and of parts of the others",
}


# Random prompts on which expert loads are evened, tokens each and how many: a step of 8,192 tokens.
_BALANCE_TOKENS: Final = 2048
_BALANCE_REQUESTS: Final = 4


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """How the engine is started. num_gpu_blocks, block_tokens and capture_sizes: None is the engine's own choice.

    mode: one of MODES. single_stream: shared experts run behind the routed ones, as in the tables, instead of beside.
    """

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_dtype: str
    utilization: float
    num_gpu_blocks: int | None
    block_tokens: int | None
    mode: str
    capture_sizes: tuple[int, ...] | None
    prefix_caching: bool
    async_scheduling: bool
    single_stream: bool
    seed: int

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of vllm.LLM."""
        chosen: dict[str, Any] = {
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_dtype": self.kv_cache_dtype,
            "gpu_memory_utilization": self.utilization,
            "enforce_eager": self.mode == "eager",
            "enable_prefix_caching": self.prefix_caching,
            "async_scheduling": self.async_scheduling,
            "seed": self.seed,
        }
        compilation: dict[str, Any] = {}
        if self.mode == "decode-graphs":
            compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        if self.mode == "piecewise":
            # Layers are cut at attention, as vLLM compiles them, and what is between runs as it is written.
            compilation = {"mode": 3, "backend": "eager", "custom_ops": ["all"], "cudagraph_mode": "FULL_AND_PIECEWISE"}
        if self.capture_sizes is not None and self.mode != "eager":
            compilation["cudagraph_capture_sizes"] = list(self.capture_sizes)
        if compilation:
            chosen["compilation_config"] = compilation
        if self.num_gpu_blocks is not None:
            chosen["num_gpu_blocks_override"] = self.num_gpu_blocks
        if self.block_tokens is not None:
            chosen["block_size"] = self.block_tokens
        return chosen

    def environment(self) -> dict[str, str]:
        """Environment variables that vLLM reads."""
        return {"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"} if self.single_stream else {}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one play, below those of the engine; None leaves the engine's.

    num_gpu_blocks: as if the engine had no more, the null block included. The blocks beyond are taken out of its pool.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_gpu_blocks: int | None = None

    @staticmethod
    def parse(text: str) -> "Limits":
        """Reads `max_num_seqs=64,num_gpu_blocks=3000`. Raises ConfigError for other keys and numbers below 1."""
        names = [one.name for one in fields(Limits)]
        given: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in names:
                raise unknown("limit of a play", name, names)
            if not value.isdecimal() or int(value) < (2 if name == "num_gpu_blocks" else 1):
                raise ConfigError(f"{name}={value}: must be a positive integer")
            given[name] = int(value)
        return Limits(**given)


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

    def __init__(self, config: Mapping[str, Any], arguments: EngineArguments, moe: MoeDims | None = None) -> None:
        """Starts vLLM on `config`, a raw HF config, already reduced; `moe` are its experts.

        Raises AcquisitionError when it cannot.
        """
        from profiler.engines.vllm_support import boot, state

        self._version = boot.installed_version()
        boot.set_environment({**boot.SERVING_ENVIRONMENT, **arguments.environment()})
        started = boot.start(config, disable_log_stats=False, **arguments.keywords())
        self._reach(started, arguments)
        state.randomise_weights(self.runner.get_model())
        if moe is not None and moe.has_bias:
            self.routing = self._balanced(moe)

    def _balanced(self, moe: MoeDims) -> dict[str, Any]:
        """Even loads of the experts, as trained models have them; what was found, or why they are as they come."""
        from profiler.engines.vllm_support.balance import even_loads

        length = min(_BALANCE_TOKENS, self._arguments.max_model_len - 1)
        rounds = itertools.count()

        def run() -> None:
            # A prompt is of its request's name, and every round wants others.
            name = f"balance {next(rounds)}"
            requests = [TraceRequest(f"{name} {i}", 0, length, 1) for i in range(_BALANCE_REQUESTS)]
            self.begin(requests, Limits())
            for one in requests:
                self.add(one)
            while self.has_work():
                self.step()

        return even_loads(self.runner.get_model(), moe, run)

    def _reach(self, started: Any, arguments: EngineArguments) -> None:
        import torch

        self._started, self._core = started, started.core
        self._engine = started.llm.llm_engine
        # Requests keep their times without it; its counters belong to a front end in another process.
        self._engine.logger_manager = None
        self.worker, self.runner = started.worker, started.runner
        self.vocab = int(self.runner.vllm_config.model_config.get_vocab_size())
        self._arguments = arguments
        self._limits = Limits()
        self._held: list[Any] = []
        self._prompts: dict[TraceRequest, list[int]] = {}
        self._ready: dict[str, Any] = {}
        self._rows: dict[str, int] = {}
        self._log = StepLog(self._core, self.runner, torch)
        self.routing = dict[str, Any](not_evened="routers have no bias")

    @property
    def missing(self) -> list[str]:
        """Parts of the engine that the step log looked for in vain."""
        return self._log.missing

    def begin(self, requests: Sequence[TraceRequest], limits: Limits) -> None:
        """Readies a play of `requests`: prompts, an empty prefix cache, the limits, an empty log on an idle device.

        Raises AcquisitionError when the engine still holds blocks of an earlier play, ConfigError for a limit above
        the engine's.
        """
        self._make_ready(requests)
        self._restrict(limits)
        gc.collect()
        gc.freeze()
        self._log.clear()

    def _make_ready(self, requests: Sequence[TraceRequest]) -> None:
        """Requests as the front end hands them to the engine, made before the play so that it only adds them."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        tasks = self._engine.get_supported_tasks()
        self._ready.clear()
        self._prompts = {one: self._prompts.get(one) or prompt_token_ids(one, self.vocab) for one in requests}
        self._rows = {one.request_id: row for row, one in enumerate(requests)}
        for one in requests:
            params = SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=one.output_tokens,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"type": "token", "prompt_token_ids": list(self._prompts[one])}
            self._ready[one.request_id] = (
                self._engine.input_processor.process_inputs(one.request_id, prompt, params, supported_tasks=tasks),
                params,
            )

    def _restrict(self, limits: Limits) -> None:
        scheduler, pool = self._core.scheduler, self._core.scheduler.kv_cache_manager.block_pool
        if self._held:
            pool.free_blocks(self._held)
            self._held = []
        if not self._engine.reset_prefix_cache():
            raise AcquisitionError("the engine still holds KV blocks of an earlier play")
        own = (
            ("max_num_seqs", limits.max_num_seqs, self._arguments.max_num_seqs),
            ("max_num_batched_tokens", limits.max_num_batched_tokens, self._arguments.max_num_batched_tokens),
            ("num_gpu_blocks", limits.num_gpu_blocks, int(pool.num_gpu_blocks)),
        )
        for name, wanted, most in own:
            if wanted is not None and wanted > most:
                raise ConfigError(f"{name}={wanted}: the engine has {most}")
        scheduler.max_num_running_reqs = limits.max_num_seqs or self._arguments.max_num_seqs
        scheduler.max_num_scheduled_tokens = limits.max_num_batched_tokens or self._arguments.max_num_batched_tokens
        if limits.num_gpu_blocks is not None and (surplus := int(pool.num_gpu_blocks) - limits.num_gpu_blocks):
            self._held = list(pool.get_new_blocks(surplus))
        self._log.held_blocks = len(self._held)
        self._limits = limits

    def add(self, request: TraceRequest) -> None:
        start = time.perf_counter()
        ready, params = self._ready.pop(request.request_id)
        ready.arrival_time = time.time()
        engine_id = self._engine.add_request(request.request_id, ready, params)
        took_s = time.perf_counter() - start
        self._log.added(engine_id, self._rows[request.request_id], request.prompt_tokens, took_s)

    def has_work(self) -> bool:
        """Also while a step under way has yet to be taken back, as an engine's own loop has it."""
        core = self._core
        return bool(self._engine.has_unfinished_requests() or core.scheduler.has_requests() or core.batch_queue)

    def step(self) -> list[Finished]:
        outputs = self._engine.step()
        self._log.returned()
        finished = []
        for output in outputs:
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

    def steps(self) -> list[Step]:
        return self._log.steps()

    def facts(self) -> dict[str, Any]:
        """Memory in GiB as the engine counted it, its blocks, and what ran in the last play."""
        from profiler.engines.vllm_engine import gpu_facts

        gib = 1 << 30
        names = ("requested_memory", "peak_activation_memory", "non_torch_memory", "cudagraph_memory_estimate",
                 "available_kv_cache_memory_bytes")  # fmt: skip
        memory = {name.removesuffix("_bytes"): getattr(self.worker, name, None) for name in names}
        memory["weights"] = self.runner.model_memory_usage
        backends = sorted({g.backend.get_name() for group in self.runner.attn_groups for g in group})
        config = self.runner.vllm_config
        scheduler, pool = self._core.scheduler, self._core.scheduler.kv_cache_manager.block_pool
        return {
            "vllm": self._version,
            "gpu": gpu_facts(),
            "memory_gib": {name: value / gib for name, value in memory.items() if value is not None},
            "num_gpu_blocks": int(pool.num_gpu_blocks) - len(self._held),
            "own_num_gpu_blocks": int(pool.num_gpu_blocks),
            "block_tokens": int(config.cache_config.block_size),
            "max_num_seqs": int(scheduler.max_num_running_reqs),
            "max_num_batched_tokens": int(scheduler.max_num_scheduled_tokens),
            "attention_backends": backends,
            "model_runner": type(self.runner).__module__,
            "compilation_mode": _name(config.compilation_config.mode),
            "cudagraph_mode": _name(config.compilation_config.cudagraph_mode),
            "capture_sizes": sorted(config.compilation_config.cudagraph_capture_sizes or ()),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "environment": self._arguments.environment(),
            "weights": "random normal, fan-in scaled",
            "routing": self.routing,
            "step_log_lacks": self.missing,
        }


def _name(value: Any) -> str:
    return str(getattr(value, "name", value))


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
        del ids[min(request.prefix.tokens, request.prompt_tokens) :]
    rest = request.prompt_tokens - len(ids)
    return ids + _random_ids(f"request {request.request_id}", rest, vocab)


def _random_ids(seed: str, count: int, vocab: int) -> list[int]:
    import random

    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(count)]


def cluster_file(
    model: str, hardware: str, layers: int, arguments: EngineArguments, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The same deployment as a cluster file of `serving replay`, with the limits and blocks of the play."""
    return {
        "instances": [
            {
                "model": model,
                "layers": layers,
                "hardware": hardware,
                "engine": {
                    "max_model_len": arguments.max_model_len,
                    "max_num_batched_tokens": facts["max_num_batched_tokens"],
                    "max_num_seqs": facts["max_num_seqs"],
                    "kv_cache_dtype": arguments.kv_cache_dtype,
                    "gpu_memory_utilization": arguments.utilization,
                    "num_gpu_blocks": facts["num_gpu_blocks"],
                    "cudagraph_mode": facts["cudagraph_mode"],
                    "cudagraph_capture_sizes": facts["capture_sizes"],
                    "enable_prefix_caching": arguments.prefix_caching,
                    "async_scheduling": facts["async_scheduling"],
                    "shared_experts_stream": not arguments.single_stream,
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
