"""From a profiler trace to kernel samples: which module launched each GPU kernel, and how long it ran.

A kernel is assigned to the innermost annotated range that was open on the launching thread when the host called the
launch, so the GPU time is free of launch gaps and independent of how far the device lags behind the host.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOT_PREFIX = "shot|"
MODULE_PREFIX = "mod|"
GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
KERNEL_NAME_LIMIT = 160

_LAYER = re.compile(r"\blayers\.\d+")

TraceKey = tuple[int, int, str, str]
"""(shot index, repeat, module path, kernel name)."""


def shot_range_name(shot_index: int, repeat: int) -> str:
    return f"{SHOT_PREFIX}{shot_index}|{repeat}"


def read_trace(path: Path) -> list[Mapping[str, Any]]:
    """Events of an exported Chrome trace."""
    events: list[Mapping[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def kernel_times(events: Sequence[Mapping[str, Any]]) -> dict[TraceKey, tuple[float, int]]:
    """Sum of GPU microseconds and number of launches per (shot, repeat, module, kernel).

    events: Chrome trace events with `cat`, `ts`, `dur` (microseconds), `tid` and `args.correlation`. Ranges are the
    annotations named by `shot_range_name` and `mod|<path>`. Kernels launched outside every shot are left out; kernels
    of a shot launched outside every module get the module path "".
    """
    ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    launches: dict[int, tuple[Any, float]] = {}
    kernels: list[tuple[int, str, float]] = []
    for event in events:
        category = event.get("cat")
        if category in GPU_CATEGORIES:
            kernels.append((event["args"]["correlation"], event["name"], float(event["dur"])))
        elif category in LAUNCH_CATEGORIES:
            correlation = event.get("args", {}).get("correlation")
            if correlation is not None:
                launches[correlation] = (event["tid"], float(event["ts"]))
        elif category == "user_annotation" and event["name"].startswith((SHOT_PREFIX, MODULE_PREFIX)):
            start = float(event["ts"])
            ranges[event["tid"]].append((start, start + float(event["dur"]), event["name"]))
    return _totals(ranges, launches, kernels)


def kernel_times_of(events: Iterable[Any], cpu: Any) -> dict[TraceKey, tuple[float, int]]:
    """The same from the profiler's own events (torch._C._autograd._KinetoEvent), with no trace written or read.

    cpu: the device type of host events (torch.autograd.DeviceType.CPU). Host events named like a runtime or driver
    call (cudaLaunchKernel, cuLaunchKernelEx, ...) are launches; device events are kernels, copies and fills, except
    those that mirror a range on the device.
    """
    ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    launches: dict[int, tuple[Any, float]] = {}
    kernels: list[tuple[int, str, float]] = []
    own = (SHOT_PREFIX, MODULE_PREFIX)
    for event in events:
        name = event.name()
        if event.device_type() != cpu:
            if not name.startswith(own):
                kernels.append((event.correlation_id(), name, event.duration_ns() / 1_000.0))
        elif name.startswith(own):
            start = event.start_ns()
            ranges[event.device_resource_id()].append((start, start + event.duration_ns(), name))
        elif name.startswith("cu"):
            launches[event.correlation_id()] = (event.device_resource_id(), event.start_ns())
    return _totals(ranges, launches, kernels)


def _totals(
    ranges: Mapping[Any, list[tuple[float, float, str]]],
    launches: Mapping[int, tuple[Any, float]],
    kernels: Iterable[tuple[int, str, float]],
) -> dict[TraceKey, tuple[float, int]]:
    placed = _innermost_ranges(ranges, launches)
    totals: dict[TraceKey, tuple[float, int]] = {}
    for correlation, name, duration_us in kernels:
        shot, module = placed.get(correlation, (None, ""))
        if shot is None:
            continue
        key = (*shot, module, name[:KERNEL_NAME_LIMIT])
        us, count = totals.get(key, (0.0, 0))
        totals[key] = (us + duration_us, count + 1)
    return totals


def _innermost_ranges(
    ranges: Mapping[Any, list[tuple[float, float, str]]], launches: Mapping[int, tuple[Any, float]]
) -> dict[int, tuple[tuple[int, int] | None, str]]:
    """correlation -> (shot, module path) by one sweep over each thread's ranges and launches in time order."""
    by_thread: dict[Any, list[tuple[float, int]]] = defaultdict(list)
    for correlation, (thread, at) in launches.items():
        by_thread[thread].append((at, correlation))
    placed: dict[int, tuple[tuple[int, int] | None, str]] = {}
    for thread, points in by_thread.items():
        points.sort()
        # Longer ranges first where two start together, so that the inner one ends up on top of the stack.
        todo = sorted(ranges.get(thread, ()), key=lambda r: (r[0], -r[1]))
        stack: list[tuple[float, str]] = []
        index = 0
        for at, correlation in points:
            while index < len(todo) and todo[index][0] <= at:
                start, end, name = todo[index]
                while stack and stack[-1][0] < start:
                    stack.pop()
                stack.append((end, name))
                index += 1
            while stack and stack[-1][0] < at:
                stack.pop()
            shot: tuple[int, int] | None = None
            module = ""
            for _, name in stack:
                if name.startswith(SHOT_PREFIX):
                    shot_index, repeat = name[len(SHOT_PREFIX) :].split("|")
                    shot = (int(shot_index), int(repeat))
                    module = ""
                else:
                    module = _in_layer_of(module, name[len(MODULE_PREFIX) :])
            placed[correlation] = (shot, module)
    return placed


def _in_layer_of(outer: str, inner: str) -> str:
    """`inner` with the layer number of `outer`: layers share modules such as rotary embeddings, which have one path."""
    layer = _LAYER.search(outer)
    return _LAYER.sub(layer[0], inner, count=1) if layer else inner


@dataclass(slots=True)
class Switch:
    """Whether ranges are opened: only while a profile runs, since each costs the host some microseconds."""

    on: bool = False


def annotate_modules(root: Any, switch: Switch, prefix: str = "") -> list[Any]:
    """Open a range named `mod|<dotted path>` around each submodule's forward. Returns the hook handles."""
    import torch

    handles = []
    for path, module in root.named_modules():
        name = f"{prefix}.{path}".strip(".")
        if not name:
            continue
        handles.append(module.register_forward_pre_hook(_opener(torch, switch, name)))
        handles.append(module.register_forward_hook(_close, always_call=True))
    return handles


_RANGE_STACK = "_sparsight_ranges"


def _opener(torch: Any, switch: Switch, name: str) -> Any:
    label = f"{MODULE_PREFIX}{name}"

    def open_range(module: Any, args: Any) -> None:
        if not switch.on:
            return
        scope = torch.profiler.record_function(label)
        scope.__enter__()
        module.__dict__.setdefault(_RANGE_STACK, []).append(scope)

    return open_range


def _close(module: Any, args: Any, output: Any) -> None:
    if opened := module.__dict__.get(_RANGE_STACK):
        opened.pop().__exit__(None, None, None)


def annotate_method(owner: Any, method: str, switch: Switch, name: str) -> None:
    """Replace owner.method by itself inside a range named `mod|<name>`; owner is a module or any object."""
    import torch

    original = getattr(owner, method)
    label = f"{MODULE_PREFIX}{name}"

    def annotated(*args: Any, **kwargs: Any) -> Any:
        if not switch.on:
            return original(*args, **kwargs)
        with torch.profiler.record_function(label):
            return original(*args, **kwargs)

    object.__setattr__(owner, method, annotated)


def shot_range(shot_index: int, repeat: int) -> AbstractContextManager[Any]:
    import torch

    scope: AbstractContextManager[Any] = torch.profiler.record_function(shot_range_name(shot_index, repeat))
    return scope
