"""The vLLM engine: runs shots inside a real vLLM worker and times its kernels with the CUDA profiler."""

import functools
import importlib.metadata
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from profiler.core.errors import AcquisitionError, unknown
from profiler.core.shots import MoeBatch, Shot
from profiler.core.stack import stack_of, text_config
from profiler.core.types import ModelSpec
from profiler.engines.base import EngineInfo, EngineOptions, KernelSample, PowerTarget, ShotResult
from profiler.engines.vllm_support import (
    balance,
    batches,
    boot,
    expert_backends,
    experts,
    jit,
    msa,
    recorder,
    repeats,
    state,
    trace,
)
from profiler.engines.vllm_support import power as sampling
from profiler.engines.vllm_support.card import gpu_facts as gpu_facts
from profiler.engines.vllm_support.overrides import per_rank_config

# A window of shots is warmed up, then profiled as one: it ends after so many shots, or so much time of warming up.
SHOTS_PER_WINDOW = 16
WINDOW_S = 1.5
# Inputs of expert shots that are kept on the device: 4 GiB at a hidden size of 7,168.
KEPT_EXPERT_TOKENS = 300_000
JIT_WORKERS_VARIABLE = "SPARSIGHT_JIT_WORKERS"
UTILIZATION = 0.80
# Of the random prompts on which the routers' loads are evened, and the seed of their tokens: no pass has the same ones.
BALANCE_TOKENS = 16384
BALANCE_SEED = state.SEED + 1


def create(options: EngineOptions) -> "VllmEngine":
    version = boot.installed_version()
    boot.set_environment()
    return VllmEngine(options, version)


class VllmEngine:
    """One vLLM engine on one GPU, kept for all shots."""

    def __init__(self, options: EngineOptions, version: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise AcquisitionError("the vllm engine needs a CUDA device, none is visible")
        self._options = options
        if options.expert_backend not in (expert_backends.OWN_CHOICE, *expert_backends.KERNELS):
            known = sorted((expert_backends.OWN_CHOICE, *expert_backends.KERNELS))
            raise unknown("expert back end", options.expert_backend, known)
        self._version = version
        self._layers, shrunk = stack_of(options.spec, options.config, options.layer_kinds)
        config = per_rank_config(shrunk, options.tp)
        workers = int(os.environ.get(JIT_WORKERS_VARIABLE, "0"))
        if workers and "quantization_config" in config:
            _compile_ahead(config, options, workers)
        if options.execution == "native":
            boot.register_native()
        started = time.monotonic()
        self._boot = boot.boot(
            config,
            max_model_len=options.max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            kv_cache_dtype=options.kv_cache_dtype,
            block_tokens=options.block_tokens,
            utilization=UTILIZATION,
            kv_cache_gib=options.kv_cache_gib,
        )
        print(f"engine started in {time.monotonic() - started:.0f} s", file=sys.stderr)
        jit.wait_for_others()
        self._randomised = state.randomise_weights(self._boot.model)
        state.randomise_caches(dict(self._boot.kv_caches))
        self._switch = trace.Switch()
        # Path of every annotated module or method -> what has it, and the attribute's name.
        self._callables: dict[str, tuple[Any, str]] = {}
        self._annotate()
        self._recorder: recorder.Recorder | None = None
        # Where the seconds went, told at the end.
        self._spent_s: dict[str, float] = defaultdict(float)
        generator = torch.Generator().manual_seed(state.SEED)
        self._vocab = int(text_config(config)["vocab_size"])
        length = options.max_model_len + 8192 * 8
        self._tokens = torch.randint(0, self._vocab, (length,), generator=generator, dtype=torch.int32).numpy()
        self._slices: dict[int, experts.ExpertSlice] = {}
        # Routing and activations of expert shots, which their repeats share: hidden, weights, expert ids.
        self._expert_inputs: dict[MoeBatch, tuple[Any, Any, Any]] = {}
        self._finished: set[str] = set()
        self._steps = 0
        self._routing = self._even_loads()
        self._experts_reached = balance.Counter(self._boot.model, options.spec.moe)

    def info(self) -> EngineInfo:
        import torch

        runner = self._boot.runner
        kinds = tuple(self._options.spec.layers[layer].name for layer in self._layers)
        return EngineInfo(
            name="vllm",
            versions={
                "vllm": self._version,
                "torch": torch.__version__,
                "cuda": str(torch.version.cuda),
                **{p: _version(p) for p in ("triton", "flashinfer-python")},
            },
            gpu=gpu_facts(),
            kv={
                "layout": _layout_name(self._boot.kv_caches),
                "block_tokens": self._boot.block_tokens,
                "caches": _cache_facts(self._boot.kv_caches, self._boot.block_tokens, self._options.spec),
                "tokens": (self._boot.num_blocks - 1) * self._boot.block_tokens,
            },
            weights=self._options.spec.quantization.weights,
            layer_kinds=kinds,
            whole_forward=True,
            settings={
                "environment": dict(boot.ENVIRONMENT),
                "attention_backends": sorted({g.backend.get_name() for group in runner.attn_groups for g in group}),
                "moe_backend": self._moe_backend(),
                "linear_kernels": _linear_kernels(self._boot.model),
                "enforce_eager": True,
                "model_runner": "v1",
                "weights": "random normal, fan-in scaled",
                "index_scores": "random normal, distinct",
                "routing": "the engine's own router on random hidden states; expert slices by the model's rule",
                "expert_loads": self._routing,
                "sampler": "greedy",
                "repeat_rule": repeats.RULE,
                "max_model_len": self._options.max_model_len,
                "max_num_batched_tokens": self._options.max_num_batched_tokens,
                **({} if self._options.kv_cache_gib is None else {"kv_cache_gib": self._options.kv_cache_gib}),
                "mla_decode_threshold_tokens": _decode_threshold(runner),
                # The native module calls the sparse kernel whatever the lengths.
                **({"execution": "native", "dense_prefill": "never"} if self._options.execution == "native" else {}),
                **(msa.SETTINGS if self._options.spec.family == "minimax_m3" else {}),
            },
        )

    def run(self, shots: Sequence[Shot], warmup: int, repeats: int) -> Iterator[ShotResult]:
        """Forward passes first; the expert shots then get the memory of the KV caches."""
        passes = [i for i, shot in enumerate(shots) if shot.moe is None]
        expert_shots = [i for i, shot in enumerate(shots) if shot.moe is not None]
        yield from self._run(shots, passes, warmup, repeats)
        if expert_shots:
            self._release_caches()
            yield from self._run(shots, expert_shots, warmup, repeats)

    def _run(self, shots: Sequence[Shot], indices: Sequence[int], warmup: int, wanted: int) -> Iterator[ShotResult]:
        """Windows of shots: each is warmed up, timed, and those that spread are timed further."""
        lost: str | None = None
        position = 0
        while position < len(indices):
            if lost:
                yield from (ShotResult(i, (), lost) for i in indices[position:])
                return
            failures: dict[int, str] = {}
            warm: dict[int, tuple[float, float | None]] = {}
            started = time.monotonic()
            window: list[int] = []
            while position < len(indices) and len(window) < SHOTS_PER_WINDOW and time.monotonic() - started < WINDOW_S:
                window.append(indices[position])
                warm[window[-1]] = self._warm(shots[window[-1]], warmup, window[-1], failures)
                position += 1
            self._spent_s["warm-up"] += time.monotonic() - started
            samples: dict[int, list[KernelSample]] = defaultdict(list)
            todo = {i: range(repeats.first(wanted, warm[i][0])) for i in window if i not in failures}
            lost = _device_lost(failures.values())
            while todo and not lost:
                for index, sample in self._timed(shots, todo, failures):
                    samples[index].append(sample)
                lost = _device_lost(failures.values())
                left = {i: repeats.further(samples[i], wanted) for i in todo if i not in failures}
                todo = {i: further for i, further in left.items() if further}
            for index in window:
                yield ShotResult(index, tuple(samples.get(index, ())), failures.get(index, lost), warm[index][1])

    def close(self) -> None:
        import torch

        if self._spent_s:
            parts = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self._spent_s.items())
            print(f"time by part: {parts}", file=sys.stderr)
        torch.cuda.synchronize()

    def _timed(
        self, shots: Sequence[Shot], todo: Mapping[int, range], failures: dict[int, str]
    ) -> Iterator[tuple[int, KernelSample]]:
        """Runs the repeats of every shot of `todo` under the profiler."""

        def block() -> None:
            started = time.monotonic()
            run_all()
            self._spent_s["timed runs"] += time.monotonic() - started

        def run_all() -> None:
            for index, numbers in todo.items():
                if (batch := shots[index].moe) is not None:
                    self._expert_input(batch)  # outside the range of the shot
                for repeat in numbers:
                    try:
                        with trace.shot_range(index, repeat):
                            self._step(shots[index])
                    except Exception as error:
                        self._boot.runner.execute_model_state = None
                        failures[index] = f"{type(error).__name__}: {error}"
                        break

        started, before = time.monotonic(), self._spent_s["timed runs"]
        try:
            if self._recorder is None:
                self._recorder = self._choose_recorder(shots[next(iter(todo))])
            times = self._recorder(block)
            inside = self._spent_s["timed runs"] - before
            self._spent_s["profiler"] += time.monotonic() - started - inside
        except Exception as error:  # the profiler ends with the device, and its window with it
            failures.update({i: f"{type(error).__name__}: {error}" for i in todo if i not in failures})
            return
        for (index, repeat, module, kernel), (us, launches) in times.items():
            yield index, KernelSample(index, repeat, module, kernel, us, launches)

    def _choose_recorder(self, shot: Shot) -> recorder.Recorder:
        def block() -> None:
            with trace.shot_range(0, 0):
                self._step(shot)

        found, what = recorder.checked(self._switch, block)
        print(f"kernels are read from {what}", file=sys.stderr)
        return found

    def _warm(self, shot: Shot, times: int, index: int, failures: dict[int, str]) -> tuple[float, float | None]:
        """Milliseconds of the last untimed run, and the experts that a pass reached, as the first of them counts; a
        failure goes to `failures`."""
        import torch

        last, reached = 0.0, None
        try:
            for run in range(max(1, times)):
                started = time.monotonic()
                if run == 0 and shot.moe is None:
                    reached = self._experts_reached.reached(lambda: self._step(shot))
                else:
                    self._step(shot)
                torch.cuda.synchronize()
                last = (time.monotonic() - started) * 1e3
        except Exception as error:
            self._boot.runner.execute_model_state = None
            failures[index] = f"{type(error).__name__}: {error}"
        return last, reached

    def power(self, targets: Sequence[PowerTarget], seconds: float) -> Mapping[str, Any]:
        """Power and clocks of every target, each repeated for `seconds`, as vllm_support/power.py returns them."""
        todo = []
        for target in targets:
            shot = target.shot
            what = {"category": target.category, "phase": target.phase, "module": target.module or "experts"}
            size = {"tokens": shot.moe.tokens if shot.moe else shot.new_tokens, "kv_tokens": shot.kv_tokens}
            todo.append((what | size, functools.partial(self._power_of, target, seconds)))
        started = time.monotonic()
        found = sampling.measure(todo, seconds)
        self._spent_s["power"] += time.monotonic() - started
        return found

    def _power_of(self, target: PowerTarget, seconds: float, sensor: sampling.Sensor) -> dict[str, Any]:
        import torch

        try:
            self._step(target.shot)
            if target.module is None:
                return sampling.alone(lambda: self._step(target.shot), sensor, seconds, torch.cuda.synchronize)
            owner, name = self._callables[target.module]
            step = functools.partial(self._step, target.shot)
            return sampling.in_a_pass(owner, name, step, sensor, seconds, torch.cuda.synchronize)
        except Exception:
            self._boot.runner.execute_model_state = None
            raise

    def _even_loads(self) -> dict[str, Any]:
        """Evens the routers' loads, so that a batch reaches as many experts as the tables say; what was found."""
        import torch

        count = min(BALANCE_TOKENS, self._options.max_num_batched_tokens, self._options.max_model_len - 1)
        generator = torch.Generator().manual_seed(BALANCE_SEED)

        def run() -> None:
            drawn = torch.randint(0, self._vocab, (count,), generator=generator, dtype=torch.int32)
            self._step(Shot((), ((count, 0),)), drawn.numpy())

        return balance.even_loads(self._boot.model, self._options.spec.moe, run)

    def _release_caches(self) -> None:
        import torch

        for cache in self._boot.kv_caches.values():
            cache.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    def _step(self, shot: Shot, tokens: Any = None) -> None:
        """tokens: int32 ids that a pass takes instead of those of every other."""
        if shot.moe is not None:
            self._expert_step(shot)
            return
        runner = self._boot.runner
        attention_config = runner.vllm_config.attention_config
        if hasattr(attention_config, "sparse_mla_force_mqa"):
            attention_config.sparse_mla_force_mqa = shot.regime == "sparse"
        placed = batches.place_blocks(shot.requests, self._boot.block_tokens, self._boot.num_blocks)
        if placed is None:
            raise AcquisitionError(f"{shot.kv_tokens} KV tokens do not fit into {self._boot.num_blocks} blocks")
        self._steps += 1
        ids = self._tokens if tokens is None else tokens
        output = batches.scheduler_output(shot.requests, placed, ids, self._finished, f"s{self._steps}")
        self._finished = set(output.num_scheduled_tokens)
        self._boot.worker.execute_model(output)
        self._boot.worker.sample_tokens(None)

    def _expert_step(self, shot: Shot) -> None:
        import torch
        from vllm.forward_context import set_forward_context

        assert shot.moe is not None
        moe = self._options.spec.moe
        assert moe is not None
        if shot.moe.ep not in self._slices:
            from vllm.v1.worker.workspace import unlock_workspace

            unlock_workspace()
            ep, routed = shot.moe.ep, self._routed_experts()
            self._slices[ep] = experts.ExpertSlice(routed, moe.num_experts, ep, self._slice_backend(ep))
        hidden, weights, ids = self._expert_input(shot.moe)
        with (
            set_forward_context(None, self._boot.runner.vllm_config),
            torch.profiler.record_function(f"{trace.MODULE_PREFIX}experts.ep{shot.moe.ep}"),
        ):
            self._slices[shot.moe.ep](hidden, weights, ids)

    def _expert_input(self, batch: MoeBatch) -> tuple[Any, Any, Any]:
        """hidden (tokens, hidden) bf16, weights (tokens, k) fp32 and ids (tokens, k) int32 of a batch, on the GPU."""
        import torch

        from profiler.kernels.moe import topk_ids

        moe = self._options.spec.moe
        assert moe is not None
        if batch not in self._expert_inputs:
            if sum(kept.tokens for kept in self._expert_inputs) + batch.tokens > KEPT_EXPERT_TOKENS:
                self._expert_inputs.clear()
            ids = torch.as_tensor(topk_ids(moe, batch)).to(device="cuda", dtype=torch.int32)
            weights = torch.full(ids.shape, 1.0 / moe.topk, device="cuda", dtype=torch.float32)
            generator = torch.Generator(device="cuda").manual_seed(batch.seed)
            hidden = torch.empty(ids.shape[0], self._options.spec.hidden, device="cuda", dtype=torch.bfloat16)
            self._expert_inputs[batch] = (hidden.normal_(generator=generator), weights, ids)
        return self._expert_inputs[batch]

    def _routed_experts(self) -> Any:
        for _, module in self._boot.model.named_modules():
            if hasattr(module, "w13_weight") and hasattr(module, "quant_method"):
                return module
        raise AcquisitionError("no routed experts in the model that vllm built")

    def _moe_backend(self) -> dict[str, str]:
        if self._options.spec.moe is None:
            return {}
        kernel = self._routed_experts().quant_method.moe_kernel
        own = type(kernel.fused_experts).__name__
        return {"1": own, **{str(ep): self._slice_backend(ep) for ep in self._options.ep_degrees if ep > 1}}

    def _slice_backend(self, ep: int) -> str:
        wanted = self._options.expert_backend
        if wanted == expert_backends.OWN_CHOICE:
            return expert_backends.engine_choice(self._routed_experts(), ep)
        return wanted

    def _annotate(self) -> None:
        """Ranges around modules, and around the parts of the attention module that run without a module."""
        runner = self._boot.runner
        for root, prefix in ((self._boot.model, ""), (runner.sampler, "runner.sampler")):
            trace.annotate_modules(root, self._switch, prefix)
            for path, module in root.named_modules():
                self._callables[f"{prefix}.{path}".strip(".")] = (module, "forward")
        for path, module in self._boot.model.named_modules():
            if hasattr(module, "W_UK_T") and hasattr(module, "_v_up_proj"):
                self._annotate_method(module, "_v_up_proj", f"{path}.v_up")
                for method in ("forward_mqa", "forward_mha", "do_kv_cache_update"):
                    if hasattr(module.impl, method):
                        self._annotate_method(module.impl, method, f"{path}.{method}")
        for method in (
            "_prepare_inputs",
            "_build_attention_metadata",
            "_sample",
            "_bookkeeping_sync",
            "_update_states",
        ):
            if hasattr(runner, method):
                self._annotate_method(runner, method, f"runner.{method.strip('_')}")

    def _annotate_method(self, owner: Any, method: str, path: str) -> None:
        trace.annotate_method(owner, method, self._switch, path)
        self._callables[path] = (owner, method)


def _device_lost(failures: Iterable[str]) -> str | None:
    """The first failure after which the device runs nothing more."""
    fatal = ("CUDA error", "illegal memory access", "launch failure")
    return next((failure for failure in failures if any(sign in failure for sign in fatal)), None)


def _compile_ahead(config: Mapping[str, Any], options: EngineOptions, workers: int) -> None:
    """Fill the GEMM kernel caches with parallel workers, then wait for them."""
    tokens = jit.step_sizes(options.max_num_batched_tokens)
    started = time.monotonic()
    processes = jit.start_workers(jit.fp8_gemm_shapes(dict(config)), tokens, workers)
    import vllm  # noqa: F401  (slow to import; done while the workers compile)

    for process in processes:
        if process.wait() != 0:
            print("a compile worker failed; the engine compiles what is missing itself", file=sys.stderr)
    print(f"GEMM kernels compiled in {time.monotonic() - started:.0f} s", file=sys.stderr)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _layout_name(caches: Mapping[str, Any]) -> str:
    widths = {(cache.dtype.itemsize * cache.shape[-1], cache.dtype.itemsize) for cache in caches.values()}
    if (656, 1) in widths:
        return "fp8_ds_mla"
    # Latents of MLA; keys and values of one head of MiniMax-M3.
    if widths & {(576, 1), (256, 1)}:
        return "fp8"
    return "bf16"


def _cache_facts(caches: Mapping[str, Any], block_tokens: int, spec: ModelSpec) -> list[dict[str, Any]]:
    """One entry per distinct cache: its bytes per token and layer, measured on the allocated tensors."""
    seen: dict[str, int] = {}
    main = "mla_latent" if spec.mla else "gqa_kv"
    for name, cache in caches.items():
        role = "index_keys" if re.search(r"index|k_cache", name) else main
        seen[role] = cache.numel() * cache.dtype.itemsize // (cache.shape[0] * block_tokens)
    return [{"name": role, "bytes_per_token_layer": size} for role, size in sorted(seen.items())]


def _linear_kernels(model: Any) -> dict[str, str]:
    """Linear layer name -> the kernel class that its quantisation method chose."""
    found = {}
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "fp8_linear", None)
        if kernel is not None:
            found[path.rsplit(".", 1)[-1]] = type(kernel).__name__
    return found


def _decode_threshold(runner: Any) -> int | None:
    """Longest query that the main attention still runs as a decode."""
    thresholds = [
        getattr(builder, "reorder_batch_threshold", None)
        for group in runner.attn_groups
        for attention in group
        for builder in attention.metadata_builders
        if "Indexer" not in type(builder).__name__
    ]
    known = [t for t in thresholds if t]
    return max(known) if known else None
