"""Profile a block of shots and sum its kernels: from the profiler's events in memory, or through an exported trace.

Writing and reading a full trace costs the host several times what the passes cost. Ranges and device activities alone
say the same, and the profiler has them in memory; `checked` compares the ways once on the card at hand.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from profiler.engines.vllm_support import trace

Times = Mapping[trace.TraceKey, tuple[float, int]]
# Share of launches that may lie elsewhere in the two recordings, which are of two runs of one pass.
MOST_UNLIKE = 0.02


class Recorder(Protocol):
    """Runs a block under the profiler; what the block recorded, by shot, repeat, module and kernel."""

    def __call__(self, block: Callable[[], object]) -> Times: ...


def through_trace(switch: trace.Switch) -> Recorder:
    """Everything that torch.profiler records by itself, through an exported Chrome trace."""

    def record(block: Callable[[], object]) -> Times:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            _switched(switch, block)
        return _exported(profile.export_chrome_trace)

    return record


def short_trace(switch: trace.Switch) -> Recorder:
    """Ranges and device activities alone, through an exported Chrome trace."""

    def record(block: Callable[[], object]) -> Times:
        return _exported(_ranges_and_device(switch, block).save)

    return record


def in_memory(switch: trace.Switch) -> Recorder:
    """Ranges and device activities alone, from the profiler's events where they are."""

    def record(block: Callable[[], object]) -> Times:
        from torch._C import _autograd

        result = _ranges_and_device(switch, block)
        return trace.kernel_times_of(result.events(), _autograd.DeviceType.CPU)

    return record


def _exported(save: Callable[[str], object]) -> Times:
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder, prefix="sparsight-trace-") as scratch:
        path = Path(scratch, "trace.json")
        save(str(path))
        return trace.kernel_times(trace.read_trace(path))


def _ranges_and_device(switch: trace.Switch, block: Callable[[], object]) -> Any:
    """Runs the block; the profiler's result, without operators and without their links to kernels."""
    import torch
    from torch._C import _autograd
    from torch._C._profiler import RecordScope, _ExperimentalConfig

    controls: Any = _autograd
    profile = torch.autograd.profiler.profile(
        use_kineto=True,
        use_device="cuda" if torch.cuda.is_available() else None,
        experimental_config=_ExperimentalConfig(disable_external_correlation=True),
    )
    activities = profile.kineto_activities
    controls._prepare_profiler(profile.config(create_trace_id=True), activities)
    controls._enable_profiler(profile.config(create_trace_id=False), activities, {RecordScope.USER_SCOPE})
    try:
        _switched(switch, block)
    finally:
        result = controls._disable_profiler()
    return result


def _switched(switch: trace.Switch, block: Callable[[], object]) -> None:
    """The block with ranges on, and the device idle at its end."""
    import torch

    switch.on = True
    try:
        block()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        switch.on = False


def checked(switch: trace.Switch, block: Callable[[], object]) -> tuple[Recorder, str]:
    """The fastest recorder that finds the kernels of a full trace in a pass, and what it reads.

    block: one warm pass inside a shot range. What differs is told on stderr.
    """
    slow = through_trace(switch)
    reference = slow(block)
    launches = sum(count for _, count in reference.values())
    for name, recorder in (("events in memory", in_memory(switch)), ("short trace", short_trace(switch))):
        try:
            found = recorder(block)
        except Exception as error:
            print(f"kernels are not read from {name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        differences = unlike(reference, found)
        if launches and sum(abs(a - b) for _, a, b in differences) <= MOST_UNLIKE * launches:
            return recorder, name
        print(f"kernels are not read from {name}: {len(differences)} of {len(reference)} differ", file=sys.stderr)
        for key, there, here in differences[:6]:
            print(f"  {key[2] or '(no module)'}  {key[3][:80]}: {there} launches, {here} there", file=sys.stderr)
    return slow, "full trace"


def unlike(a: Times, b: Times) -> list[tuple[trace.TraceKey, int, int]]:
    """Keys whose number of launches differs, with both numbers."""
    none: tuple[float, int] = (0.0, 0)
    pairs = [(key, a.get(key, none)[1], b.get(key, none)[1]) for key in sorted(a.keys() | b.keys())]
    return [pair for pair in pairs if pair[1] != pair[2]]
