"""Recorded runs of one vLLM deployment over all GPUs of a host: tensor parallel, or data parallel with expert parallel.

    python tests/perf/full_size_run.py LAYOUT --out DIR [--model M] [--layers N] [--workloads chat,long,poisson] [...]

LAYOUT is tp8, dp8 (8 data-parallel ranks of one GPU, experts over all eight), tp4dp2 and so on. The deployment is the
engine's own: AsyncLLM, as `vllm serve` runs it, with its engine and worker processes, dummy weights made random and
strict lengths. Workloads: chat (many short requests at once), long (32k in, 100 out), poisson (chat at half of the rate
at which chat finished), or the path of a trace. Each is played --plays times and the last play is kept: one folder per
workload in the layout of a recorded run (`serving compare` reads it), with a step log of every rank: what ran and the
GPU's time.

A workload whose folder is whole is not played again, and none is started for which --seconds has no room, so calls of
bounded length continue each other; exit status 3 says that something is left. --warm-requests shortens the plays that
are not kept. --prepare writes traces and cluster files alone. --predict DIR also replays them on the shipped tables,
before any run is made: the cluster file and one JSON per workload, with the memory of a rank, the times that are to
be expected, what they were computed from, and the command of the run. A predicted Poisson load has half of the rate at
which the predicted chat finishes; that command repeats it, so that the run plays the trace that was predicted.
--stand-in plays on a made-up engine: a test of all but the engine.

NVLink multicast stays off: neither NCCL, nor symmetric memory, nor FlashInfer's fused all-reduce, which vLLM chooses
for tensor parallelism on this architecture unless told otherwise, may use it.
"""

import argparse
import asyncio
import csv
import datetime
import gzip
import hashlib
import io
import json
import os
import random
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
COLUMNS = ("start_s", "dummy", "prefill_requests", "prefill_tokens", "prefill_context_tokens", "decode_requests",
           "decode_kv_tokens", "launch_us", "gpu_us", "graph", "padded_tokens")  # fmt: skip


class Steps:
    """What vLLM mixes into its worker (worker_extension_cls): a log of every step of a rank, dummy ones too."""

    def sparsight_install(self, random_weights: bool) -> None:
        import torch

        self.sparsight_torch = torch
        self.sparsight_rows: list[list[Any]] = []
        self.sparsight_events: list[tuple[Any, Any]] = []
        self.sparsight_requests: list[str] = []
        self.sparsight_prompts: dict[str, int] = {}
        runner = self.model_runner
        if random_weights:
            from profiler.engines.vllm_support.state import randomise_weights

            randomise_weights(runner.get_model())
        execute, sample, dummy = runner.execute_model, runner.sample_tokens, runner._dummy_run
        determine = getattr(runner, "_determine_batch_execution_and_padding", None)
        state: dict[str, Any] = {"open": None, "shape": ("", "")}

        def chosen(*args: Any, **kwargs: Any) -> Any:
            found = determine(*args, **kwargs)
            state["shape"] = (getattr(found[0], "name", str(found[0])), int(found[1].num_tokens))
            return found

        def timed_execute(output: Any, *args: Any, **kwargs: Any) -> Any:
            if not output.total_num_scheduled_tokens:
                return execute(output, *args, **kwargs)
            start, began = torch.cuda.Event(enable_timing=True), time.monotonic()
            counts = self.sparsight_counts(output)
            start.record()
            state["open"] = (start, began, counts)
            return execute(output, *args, **kwargs)

        def close(start: Any, began: float, flags: list[Any]) -> None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            launch_us = (time.monotonic() - began) * 1e6
            self.sparsight_events.append((start, end))
            self.sparsight_rows.append([began, *flags, launch_us, None, *state["shape"]])

        def timed_sample(*args: Any, **kwargs: Any) -> Any:
            result = sample(*args, **kwargs)
            if state["open"] is not None:
                start, began, counts = state["open"]
                state["open"] = None
                close(start, began, [0, *counts])
            return result

        def timed_dummy(*args: Any, **kwargs: Any) -> Any:
            start, began = torch.cuda.Event(enable_timing=True), time.monotonic()
            start.record()
            result = dummy(*args, **kwargs)
            close(start, began, [1, 0, 0, 0, 0, 0])
            return result

        if determine is not None:
            runner._determine_batch_execution_and_padding = chosen
        runner.execute_model, runner.sample_tokens, runner._dummy_run = timed_execute, timed_sample, timed_dummy

    def sparsight_counts(self, output: Any) -> list[int]:
        """Requests, tokens and context of prefill chunks; requests and keys of decode tokens."""
        new = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        self.sparsight_requests += new
        cached = output.scheduled_cached_reqs
        before = {**new, **dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))}
        found = [0, 0, 0, 0, 0]
        for name, tokens in output.num_scheduled_tokens.items():
            if name in new or tokens > 1 or cached.is_context_phase(name):
                found[0] += 1
                found[1] += tokens
                found[2] += before[name]
            else:
                found[3] += 1
                found[4] += before[name] + 1
        return found

    def sparsight_clear(self) -> None:
        self.sparsight_rows, self.sparsight_events, self.sparsight_requests = [], [], []

    def sparsight_write(self, folder: str) -> None:
        """One file for this rank: its place, memory, requests and steps."""
        self.sparsight_torch.cuda.synchronize()
        for row, (start, end) in zip(self.sparsight_rows, self.sparsight_events, strict=True):
            row[COLUMNS.index("gpu_us")] = start.elapsed_time(end) * 1e3
        parallel, runner = self.vllm_config.parallel_config, self.model_runner
        names = ("requested_memory", "peak_activation_memory", "non_torch_memory", "cudagraph_memory_estimate",
                 "available_kv_cache_memory_bytes")  # fmt: skip
        memory = {name.removesuffix("_bytes"): getattr(self, name, None) for name in names}
        memory["weights"] = getattr(runner, "model_memory_usage", None)
        groups = [group for one in getattr(runner, "attn_groups", ()) for group in one]
        place = {"dp": int(parallel.data_parallel_rank), "rank": int(self.rank)}
        facts = {
            **place,
            "memory_gib": {name: value / (1 << 30) for name, value in memory.items() if value is not None},
            "num_gpu_blocks": int(runner.kv_cache_config.num_blocks),
            "block_tokens": int(self.vllm_config.cache_config.block_size),
            "attention_backends": sorted({group.backend.get_name() for group in groups}),
            "cudagraph_mode": str(self.vllm_config.compilation_config.cudagraph_mode),
            "async_scheduling": bool(self.vllm_config.scheduler_config.async_scheduling),
            "requests": self.sparsight_requests,
            "steps": self.sparsight_rows,
        }
        path = Path(folder, f"dp{place['dp']}-rank{place['rank']}.json")
        path.with_suffix(".part").write_text(json.dumps(facts))
        path.with_suffix(".part").rename(path)


class Statistics:
    """What an engine's scheduler reports after every step, at the time at which the front end hears of it."""

    def __init__(self, rows: list[tuple[float, int, int, int, float, int, int, int]], engine: int) -> None:
        self.rows, self.engine = rows, engine

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is None:
            return
        prompt = iteration_stats.prompt_token_stats.computed if iteration_stats else 0
        tokens = iteration_stats.num_generation_tokens if iteration_stats else 0
        preempted = iteration_stats.num_preempted_reqs if iteration_stats else 0
        self.rows.append((time.monotonic(), self.engine, scheduler_stats.num_running_reqs,
                          scheduler_stats.num_waiting_reqs, scheduler_stats.kv_cache_usage, prompt, tokens,
                          preempted))  # fmt: skip

    def log_engine_initialized(self) -> None:
        pass

    def log(self) -> None:
        pass

    def record_sleep_state(self, *args: Any, **kwargs: Any) -> None:
        pass


class StandIn:
    """An engine that is none: every request takes 1 ms and 20 us per token, on the engine with the fewest requests."""

    def __init__(self, arguments: dict[str, Any], factory: Any) -> None:
        self.engines = arguments["data_parallel_size"]
        self.ranks = arguments["tensor_parallel_size"]
        self.loggers = [factory(None, index) for index in range(self.engines)]
        self.busy, self.requests = [0] * self.engines, [[] for _ in range(self.engines)]  # type: ignore[var-annotated]
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 1000))

    async def reset_prefix_cache(self) -> None:
        pass

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        if method == "sparsight_clear":
            self.requests = [[] for _ in range(self.engines)]
        if method == "sparsight_write":
            for dp in range(self.engines):
                for rank in range(self.ranks):
                    facts = {"dp": dp, "rank": rank, "num_gpu_blocks": 100, "block_tokens": 64,
                             "async_scheduling": True, "requests": self.requests[dp],
                             "steps": [[time.monotonic(), 0, 1, 8, 0, 0, 0, 10.0, 20.0, "NONE", 8]]}  # fmt: skip
                    Path(args[0], f"dp{dp}-rank{rank}.json").write_text(json.dumps(facts))

    async def generate(self, prompt: dict[str, Any], tokens: int, name: str) -> Any:
        stamps = SimpleNamespace(arrival_time=time.time(), queued_ts=time.monotonic(), scheduled_ts=time.monotonic())
        dp = self.busy.index(min(self.busy))
        self.busy[dp] += 1
        self.requests[dp].append(f"{name}-0123abcd")
        await asyncio.sleep(1e-3)
        stamps.first_token_ts = time.monotonic()
        await asyncio.sleep(2e-5 * tokens)
        stamps.last_token_ts = time.monotonic()
        self.busy[dp] -= 1
        prompts = SimpleNamespace(computed=len(prompt["prompt_token_ids"]))
        self.loggers[dp].record(
            SimpleNamespace(num_running_reqs=self.busy[dp], num_waiting_reqs=0, kv_cache_usage=0.5),
            SimpleNamespace(prompt_token_stats=prompts, num_generation_tokens=tokens, num_preempted_reqs=0),
            engine_idx=dp,
        )
        yield SimpleNamespace(metrics=stamps, outputs=[SimpleNamespace(token_ids=[0] * tokens)])

    def shutdown(self, timeout: float) -> None:
        pass


def main() -> int:
    options = parsed(sys.argv[1:])
    began = time.monotonic()
    tp, dp = layout(options.layout)
    names = options.workloads.split(",")
    folders = {name: options.out / folder_name(options) / Path(name).stem for name in names}
    todo = [name for name in names if options.force or not (folders[name] / "vllm" / "meta.json").exists()]
    if not todo:
        print(f"{options.layout}: {', '.join(names)} are recorded already")
        return 0
    if options.predict:
        predict(options, tp, dp, todo, folders)
        return 0
    if options.prepare:
        prepare(options, tp, dp, todo, folders)
        return 0
    os.environ.update(ENVIRONMENT)
    # The engine's processes import this file by its name.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        left = asyncio.run(record(options, tp, dp, todo, folders, began))
    except (Exception, KeyboardInterrupt):
        traceback.print_exc()
        left = todo
    sys.stdout.flush()
    sys.stderr.flush()
    # Processes of a failed engine may never end by themselves; those of a sound one are down by now.
    os._exit(3 if left else 0)


async def record(
    options: argparse.Namespace, tp: int, dp: int, todo: list[str], folders: dict[str, Path], began: float
) -> list[str]:
    """Plays what there is time for; returns the workloads that are left."""
    from profiler.core.registry import load_model, load_model_config
    from profiler.core.stack import cut

    spec = load_model(options.model)
    layers = options.layers or spec.num_layers
    arguments = engine_arguments(options, tp, dp)
    statistics: list[tuple[float, int, int, int, float, int, int, int]] = []
    left, longest = list(todo), 0.0
    with tempfile.TemporaryDirectory(prefix="sparsight-model-") as model:
        Path(model, "config.json").write_text(json.dumps(cut(spec, load_model_config(options.model), layers)))
        engine = start(model, arguments, statistics, options.stand_in)
        try:
            await engine.collective_rpc("sparsight_install", args=(True,))
            say(began, f"{options.layout}: engine of {layers} layers started")
            for name in todo:
                requests = workload(name, options, folders)
                limit = options.seconds - (time.monotonic() - began)
                whole = 1 if options.warm_requests else options.plays
                if longest and limit < (whole + 0.5) * longest:
                    say(began, f"no time for {name}: {limit:.0f} s left, the last play took {longest:.0f} s")
                    break
                longest = await asyncio.wait_for(
                    _record_one(engine, name, requests, folders[name], options, arguments, statistics, layers, began),
                    limit,
                )
                left.remove(name)
        finally:
            engine.shutdown(timeout=20)
    return left


async def _record_one(
    engine: Any,
    name: str,
    requests: list[Any],
    folder: Path,
    options: argparse.Namespace,
    arguments: dict[str, Any],
    statistics: list[Any],
    layers: int,
    began: float,
) -> float:
    """Plays one workload and writes its folder; returns the seconds of the last play."""
    vocab = int(engine.vllm_config.model_config.get_vocab_size())
    seconds: list[float] = []
    for number in range(1, options.plays + 1):
        await engine.reset_prefix_cache()
        await engine.collective_rpc("sparsight_clear")
        statistics.clear()
        started, wall = time.monotonic(), _now()
        some = requests if number == options.plays else requests[: options.warm_requests]
        rows = await play(engine, some, vocab, f"p{number}")
        seconds.append(time.monotonic() - started)
        say(began, f"{name}: play {number} of {len(rows)} requests took {seconds[-1]:.1f} s")
    with tempfile.TemporaryDirectory(prefix="sparsight-steps-") as steps:
        await engine.collective_rpc("sparsight_write", args=(steps,))
        ranks = [json.loads(path.read_text()) for path in sorted(Path(steps).glob("*.json"))]
    write(folder, rows, ranks, list(statistics), requests, {
        "schema_version": 1,
        "model": options.model,
        "layers": layers,
        "vllm_version": _vllm_version(options.stand_in),
        "engine_kwargs": {key: value for key, value in arguments.items() if key != "worker_extension_cls"},
        "dataset_path": f"{folder.name}.jsonl",
        "num_requests": len(rows),
        "started_at": wall,
        "finished_at": _now(),
        "tick_seconds": 1.0,
        "plays": options.plays,
        "play_seconds": [round(one, 3) for one in seconds],
        "weights": "random normal, fan-in scaled",
    }, cluster(options, arguments, layers, ranks[0]))  # fmt: skip
    say(began, f"{name}: {summary(rows)}")
    return seconds[-1]


def prepare(options: argparse.Namespace, tp: int, dp: int, names: list[str], folders: dict[str, Path]) -> None:
    """Writes traces and cluster files alone, and prints how to predict the runs before they are made."""
    from profiler.core.registry import load_model

    layers = options.layers or load_model(options.model).num_layers
    for name in names:
        folder = folders[name]
        folder.mkdir(parents=True, exist_ok=True)
        write_trace(folder, workload(name, options, folders))
        config = cluster(options, engine_arguments(options, tp, dp), layers, {})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        trace = f"--cluster-config {folder}/config.json --dataset {folder}/{folder.name}.jsonl"
        print(f"python -m serving {trace} --output {folder}/predicted.csv")


def predict(options: argparse.Namespace, tp: int, dp: int, names: list[str], folders: dict[str, Path]) -> None:
    """Prepares and replays: the cluster file and a prediction per workload in --predict's folder of the layout."""
    out = options.predict / folder_name(options)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name == "poisson" and options.poisson_rate is None:
            chat = json.loads((out / "chat.json").read_text())
            options.poisson_rate = round(0.5 * chat["requests_per_s"], 2)
        prepare(options, tp, dp, [name], folders)
        folder = folders[name]
        found = prediction(folder / "config.json", folder / f"{folder.name}.jsonl")
        rate = options.poisson_rate if name == "poisson" else None
        record = run_command(sys.argv[1:], name, options.poisson_rate)
        about = {"layout": options.layout, "workload": name, "made_at": _now(), "record": record, "rate_per_s": rate}
        (out / "cluster.json").write_bytes((folder / "config.json").read_bytes())
        (out / f"{folder.name}.json").write_text(json.dumps(about | found, indent=1) + "\n")


def run_command(arguments: list[str], name: str, poisson_rate: float | None) -> str:
    """The command that records one workload of what these arguments predict."""
    kept = list(arguments)
    for flag in {"--predict", "--workloads", "--poisson-rate"}.intersection(kept):
        at = kept.index(flag)
        del kept[at : at + 2]
    rate = ["--poisson-rate", str(poisson_rate)] if name == "poisson" else []
    return " ".join(["python tests/perf/full_size_run.py", *kept, "--workloads", name, *rate])


def prediction(cluster_path: Path, trace_path: Path) -> dict[str, Any]:
    """A replay on the shipped tables, none of its lookups outside them, and what it was computed from."""
    from serving.api import replay

    return prediction_of(replay(cluster_path, trace_path, keep_itl=True), cluster_path, trace_path)


def prediction_of(result: Any, cluster_path: Path, trace_path: Path) -> dict[str, Any]:
    """The same of a replay that was made."""
    from profiler import __version__
    from profiler.core.bundle import find_bundle
    from profiler.core.load import read_mapping, sha256_of
    from profiler.core.paths import default_bundle_root
    from serving.bench_result import bench_result
    from serving.config import load_cluster
    from serving.metrics import summary as summarised

    (instance,) = load_cluster(cluster_path).instances
    found = summarised(result)
    one = found["instances"][0]
    tables = one["tables"]
    folder = find_bundle(default_bundle_root(), tables["hardware"], tables["model"], tables["variant"])
    collectives = folder.parents[2] / "collectives.csv"
    spreads = {"ttft_ms": "ttft_ns", "tpot_ms": "tpot_ns", "itl_ms": "itl_ns", "latency_ms": "e2e_ns"}
    return {
        "computed_from": {
            "version": __version__,
            "sources_sha256": sources_digest(),
            "tables": tables | {"measured_at": read_mapping(folder / "meta.yaml")["measured_at"],
                                "meta_sha256": sha256_of(folder / "meta.yaml")},
            "collectives": sha256_of(collectives) if collectives.exists() else "links of the hardware file",
        },
        "trace": {
            "sha256": sha256_of(trace_path),
            "requests": found["requests"]["total"],
            "prompt_tokens": found["prompt_tokens"],
            "output_tokens": found["output_tokens"],
        },
        "memory_gib": memory_lines(instance),
        "num_gpu_blocks": one["num_gpu_blocks_per_rank"],
        "block_tokens": one["block_tokens"],
        "finished": found["requests"]["finished"],
        "extrapolated_lookups": found["extrapolated_lookups"],
        "preemptions": found["preemptions"],
        "steps": found["steps"],
        "makespan_s": round(found["makespan_ns"] / 1e9, 3),
        **{name: round(found[name], 4) for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")},
        "peak_output_tokens_per_s": bench_result(result)["max_output_tokens_per_s"],
        **{name: {key: round(value / 1e6, 3) for key, value in found[own].items()} for name, own in spreads.items()},
    }  # fmt: skip


def memory_lines(instance: Any) -> dict[str, float]:
    """GiB of one rank, by the names under which a run logs them; peak_activation_memory is the sum of what is left."""
    from profiler.core.hardware import load_hardware
    from serving.capacity import memory_budget
    from serving.deployment import instance_model

    asked = instance.engine
    budget = memory_budget(
        instance_model(instance),
        load_hardware(instance.hardware),
        instance.parallel,
        max_model_len=asked.max_model_len_tokens,
        kv_dtype=asked.kv_cache_dtype,
        utilization=asked.gpu_memory_utilization,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        max_num_seqs=asked.max_num_seqs,
    )
    names = {"weights": "weights", "non_torch": "non_torch_memory", "cuda_graphs": "cudagraph_memory_estimate"}
    lines = {"requested_memory": budget.total_gib * budget.utilization, **dict.fromkeys(names.values(), 0.0)}
    for term in budget.terms:
        name = names.get(term.name, "peak_activation_memory")
        lines[name] = lines.get(name, 0.0) + term.gib
    lines["available_kv_cache_memory"] = budget.kv_available_gib
    return {name: round(value, 3) for name, value in lines.items()}


def sources_digest() -> str:
    """sha256 over names and contents of the simulator's sources, hardware files and model files."""
    digest = hashlib.sha256()
    for folder in ("configs/hardware", "configs/model", "profiler/core", "serving"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".json", ".py", ".yaml"):
                digest.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def engine_arguments(options: argparse.Namespace, tp: int, dp: int) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs, but for the model."""
    chosen: dict[str, Any] = {
        "tensor_parallel_size": tp,
        "data_parallel_size": dp,
        "enable_expert_parallel": dp > 1 or options.expert_parallel,
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_num_seqs": options.max_num_seqs,
        "kv_cache_dtype": options.kv_cache_dtype,
        "gpu_memory_utilization": options.utilization,
        "enforce_eager": options.eager,
        "enable_prefix_caching": True,
        "seed": 42,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "worker_extension_cls": "full_size_run.Steps",
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
    }
    if options.num_gpu_blocks is not None:
        chosen["num_gpu_blocks_override"] = options.num_gpu_blocks
    if options.moe_backend is not None:
        chosen["moe_backend"] = options.moe_backend
    return chosen


def start(model: str, arguments: dict[str, Any], statistics: list[Any], stand_in: bool) -> Any:
    def factory(config: Any, engine_index: int = 0) -> Statistics:
        return Statistics(statistics, engine_index)

    if stand_in:
        return StandIn(arguments, factory)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments), stat_loggers=[factory])


async def play(engine: Any, requests: list[Any], vocab: int, prefix: str) -> list[dict[str, Any]]:
    """Sends every request at its arrival; rows in the order of sending."""
    from serving.recording.vllm_driver import prompt_token_ids

    if any(request.call_index for request in requests):
        raise SystemExit("calls of sessions, which wait for one another, are not played")
    prompts = [prompt_token_ids(request, vocab) for request in requests]
    zero = time.monotonic()

    async def one(index: int) -> dict[str, Any]:
        request = requests[index]
        name, prompt = f"{prefix}-{index}", {"prompt_token_ids": prompts[index]}
        final = [output async for output in engine.generate(prompt, parameters(request), name)][-1]
        stats, output = final.metrics, final.outputs[0]
        got = len(output.token_ids)
        if got != request.output_tokens:
            raise RuntimeError(f"request {index}: {got} tokens, the trace has {request.output_tokens}")
        return {
            "request_id": str(index),
            "input_toks": len(prompts[index]),
            "output_toks": got,
            "arrival_time": stats.arrival_time,
            "queued_ts": stats.queued_ts,
            "scheduled_ts": stats.scheduled_ts,
            "first_token_ts": stats.first_token_ts,
            "last_token_ts": stats.last_token_ts,
            "sent": name,
        }

    parameters = _exact_lengths if isinstance(engine, StandIn) else _parameters
    tasks = []
    for index, request in enumerate(requests):
        if (wait := zero + request.arrival_ns / 1e9 - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(index)))
    return list(await asyncio.gather(*tasks))


def _exact_lengths(request: Any) -> int:
    return int(request.output_tokens)


def _parameters(request: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    exact = request.output_tokens
    return SamplingParams(
        temperature=0.0, ignore_eos=True, min_tokens=exact, max_tokens=exact, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def write(
    folder: Path,
    rows: list[dict[str, Any]],
    ranks: list[dict[str, Any]],
    statistics: list[Any],
    requests: list[Any],
    meta: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """A recorded run, meta.json last."""
    run = folder / "vllm"
    run.mkdir(parents=True, exist_ok=True)
    engine_of = {name: rank["dp"] for rank in ranks for name in rank["requests"]}
    zero = min(row["queued_ts"] for row in rows)
    lines = []
    for row in rows:
        sent = row.pop("sent")
        # The engine adds a suffix of its own to the name.
        found = {engine for name, engine in engine_of.items() if name == sent or name.rpartition("-")[0] == sent}
        lines.append(json.dumps(row | {"engine": found.pop()} if len(found) == 1 else row))
    (run / "requests.jsonl").write_text("\n".join(lines) + "\n")
    write_trace(folder, requests)
    for rank in ranks:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for step in rank["steps"]:
            writer.writerow([f"{step[0] - zero:.6f}", *(f"{x:.1f}" if isinstance(x, float) else x for x in step[1:])])
        path = run / f"steps_dp{rank['dp']}_rank{rank['rank']}.csv.gz"
        path.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))
    (run / "timeseries.csv").write_text(ticks(statistics, zero, meta["tick_seconds"]))
    facts = [{key: value for key, value in rank.items() if key not in ("steps", "requests")} for rank in ranks]
    (run / "engine.json").write_text(json.dumps({"cards": _cards(), "ranks": facts}, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (run / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def write_trace(folder: Path, requests: list[Any]) -> None:
    rows = ({"input_toks": one.prompt_tokens, "output_toks": one.output_tokens, "arrival_time_ns": one.arrival_ns}
            for one in requests)  # fmt: skip
    (folder / f"{folder.name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def ticks(statistics: list[Any], zero: float, tick_s: float) -> str:
    """Per tick: tokens of all engines, requests running and waiting at its end, and the mean use of their caches."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct"))
    latest: dict[int, tuple[int, int, float]] = {}
    rows = sorted(statistics)
    index, tick = 0, 1
    while index < len(rows):
        prompt = tokens = 0
        while index < len(rows) and rows[index][0] - zero < tick * tick_s:
            _, engine, running, waiting, usage, prompts, generated, _ = rows[index]
            latest[engine] = (running, waiting, usage)
            prompt, tokens, index = prompt + prompts, tokens + generated, index + 1
        if latest:
            usage = sum(one[2] for one in latest.values()) / len(latest)
            writer.writerow((round(tick * tick_s, 6), prompt / tick_s, tokens / tick_s,
                             sum(one[0] for one in latest.values()), sum(one[1] for one in latest.values()),
                             round(100 * usage, 2)))  # fmt: skip
        tick += 1
    return text.getvalue()


def cluster(
    options: argparse.Namespace, arguments: dict[str, Any], layers: int, facts: dict[str, Any]
) -> dict[str, Any]:
    """The same deployment for `serving replay`, with the KV blocks that each engine had where `facts` knows them."""
    tp, dp = arguments["tensor_parallel_size"], arguments["data_parallel_size"]
    spread = arguments["enable_expert_parallel"]
    blocks = facts.get("num_gpu_blocks", options.num_gpu_blocks)
    return {
        "router": "least_loaded",
        "instances": [
            {
                "model": options.model,
                "layers": layers,
                "hardware": options.hardware,
                "parallel": {"tp": tp, "pp": 1, "dp": dp, "ep": tp * dp if spread else 1},
                "engine": {
                    "max_model_len": options.max_model_len,
                    "max_num_batched_tokens": options.max_num_batched_tokens,
                    "max_num_seqs": options.max_num_seqs,
                    "kv_cache_dtype": options.kv_cache_dtype,
                    "gpu_memory_utilization": options.utilization,
                    **({} if blocks is None else {"num_gpu_blocks": blocks}),
                    "enforce_eager": options.eager,
                    "enable_prefix_caching": True,
                    "async_scheduling": facts.get("async_scheduling", True),
                },
            }
        ],
    }


def workload(name: str, options: argparse.Namespace, folders: dict[str, Path]) -> list[Any]:
    """Requests of a workload by name, or of a trace by path."""
    from serving.traces import TraceRequest, read_trace

    if name == "chat":
        return chat(options.chat_requests, None, options.max_model_len)
    if name == "long":
        count, prompt = options.long_requests, options.long_prompt
        return [TraceRequest(str(index), 0, prompt, 100) for index in range(count)]
    if name == "poisson":
        rate = options.poisson_rate or half_rate(folders.get("chat", options.out / folder_name(options) / "chat"))
        return chat(options.poisson_requests, rate, options.max_model_len)
    return list(read_trace(Path(name)).requests)


def chat(count: int, rate_per_s: float | None, most: int) -> list[Any]:
    """Short requests, log-normal lengths of mean 219 in and 197 out; at once, or at random times of a mean rate."""
    from serving.traces import TraceRequest

    source = random.Random(20261)
    found, at = [], 0.0
    for index in range(count):
        # The mean of exp(N(m, s)) is exp(m + s * s / 2).
        prompt, output = (
            min(most // 2, max(4, round(source.lognormvariate(m, s)))) for m, s in ((4.7, 1.17), (4.78, 1.0))
        )
        found.append(TraceRequest(str(index), round(at * 1e9), prompt, output))
        at += source.expovariate(rate_per_s) if rate_per_s else 0.0
    return found


def half_rate(folder: Path) -> float:
    """Half of the requests per second at which a recorded chat finished."""
    rows = [json.loads(line) for line in (folder / "vllm" / "requests.jsonl").read_text().splitlines()]
    seconds = max(row["last_token_ts"] for row in rows) - min(row["queued_ts"] for row in rows)
    return float(0.5 * len(rows) / seconds)


def summary(rows: list[dict[str, Any]]) -> str:
    def middle(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    zero = min(row["queued_ts"] for row in rows)
    seconds = max(row["last_token_ts"] for row in rows) - zero
    ttft = middle([row["first_token_ts"] - row["queued_ts"] for row in rows])
    tpot = [
        (row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1)
        for row in rows
        if row["output_toks"] > 1
    ]
    out = sum(row["output_toks"] for row in rows)
    speed = f"{len(rows)} requests in {seconds:.2f} s, {out / seconds:.0f} tokens/s out"
    return f"{speed}, median TTFT {1e3 * ttft:.1f} ms, TPOT {1e3 * middle(tpot or [0.0]):.2f} ms"


def folder_name(options: Any) -> str:
    """Of a deployment's runs: its layout, marked where experts are whole although tensor parallelism could divide."""
    return f"{options.layout}-ep" if options.expert_parallel and layout(options.layout)[1] == 1 else options.layout


def layout(text: str) -> tuple[int, int]:
    """(tp, dp) of a layout such as tp8, dp8 or tp4dp2."""
    found = re.fullmatch(r"(?:tp(\d+))?(?:dp(\d+))?", text)
    if not text or found is None:
        raise SystemExit(f"{text!r} is no layout: tp8, dp8, tp4dp2")
    return int(found[1] or 1), int(found[2] or 1)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("layout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="deepseek-ai/DeepSeek-V3.2-Exp")
    parser.add_argument("--hardware", default="H200")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--workloads", default="chat,long,poisson")
    parser.add_argument("--chat-requests", type=int, default=1000)
    parser.add_argument("--poisson-requests", type=int, default=1000)
    parser.add_argument("--poisson-rate", type=float, help="requests per second; default half of what chat reached")
    parser.add_argument("--long-requests", type=int, default=100)
    parser.add_argument("--long-prompt", type=int, default=32768)
    parser.add_argument("--max-model-len", type=int, default=81920)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--num-gpu-blocks", type=int)
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts per GPU without dp too")
    parser.add_argument(
        "--moe-backend", help="of the experts, as vLLM names them (triton); default the engine's choice"
    )
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--plays", type=int, default=2, help="of each workload; the last is kept")
    parser.add_argument("--warm-requests", type=int, help="the plays before the last are of so many requests alone")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--prepare", action="store_true", help="traces and cluster files alone, to predict the runs")
    parser.add_argument("--predict", type=Path, help="folder: predictions of the runs, from the shipped tables")
    parser.add_argument("--stand-in", action="store_true")
    return parser.parse_args(arguments)


def say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


def _cards() -> list[str]:
    from profiler.collectives.provenance import _output

    return _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).splitlines()


def _vllm_version(stand_in: bool) -> str:
    if stand_in:
        return "stand-in"
    import vllm

    return str(vllm.__version__)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


if __name__ == "__main__":
    sys.exit(main())
