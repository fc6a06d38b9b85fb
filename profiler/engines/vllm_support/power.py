"""Power and clocks while one kernel class runs: its module is called again and again inside a real pass.

The module sees the live inputs and the metadata of the pass that it is called in, so attention and selection read the
caches of the batch. Modules that write their inputs would drift; products, selection and attention do not.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from profiler.engines.vllm_support.card import gpu_facts, visible_id
from profiler.timing import median

EVERY_S: Final = 0.02
# The first part of a run is left out: clocks settle and the sensor averages.
SETTLE_SHARE: Final = 0.5
CALLS_PER_SYNC: Final = 8
_INSTANT_POWER_FIELD: Final = 186


@dataclass(slots=True)
class Readings:
    """What a thread read every EVERY_S: (seconds since its start, watts, SM MHz, memory MHz, degrees Celsius)."""

    rows: list[tuple[float, float, float, float, float]] = field(default_factory=list)

    def settled(self) -> dict[str, Any]:
        """Medians of the later readings, and how many there are; empty without readings."""
        if not self.rows:
            return {}
        start = self.rows[-1][0] * SETTLE_SHARE
        rows = [row for row in self.rows if row[0] >= start]
        watts, sm, memory, degrees = (median([row[column] for row in rows]) for column in (1, 2, 3, 4))
        return {
            "watts": round(watts, 1),
            "sm_clock_mhz": sm,
            "memory_clock_mhz": memory,
            "temperature_c": degrees,
            "readings": len(rows),
        }


Sensor = Callable[[], tuple[float, float, float, float]]
"""Reads (watts, SM MHz, memory MHz, degrees) once."""


def nvml_sensor() -> tuple[Sensor, str]:
    """A sensor of the visible GPU and what it reads. Raises what the NVML binding raises, ImportError without one."""
    nvml = _nvml()
    nvml.nvmlInit()
    gpu = visible_id()
    if gpu and gpu.startswith(("GPU-", "MIG-")):
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu)
        except TypeError:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.encode())
    else:
        handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu or 0))

    def instant() -> float | None:
        try:
            value = nvml.nvmlDeviceGetFieldValues(handle, [_INSTANT_POWER_FIELD])[0]
        except Exception:
            return None
        return value.value.uiVal / 1e3 if value.nvmlReturn == 0 and value.value.uiVal else None

    at_once = instant() is not None

    def read() -> tuple[float, float, float, float]:
        watts = instant() if at_once else None
        return (
            nvml.nvmlDeviceGetPowerUsage(handle) / 1e3 if watts is None else watts,
            float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )

    read()
    return read, "NVML instant power" if at_once else "NVML power averaged over a second"


def _nvml() -> Any:
    import importlib

    for name in ("pynvml", "vllm.third_party.pynvml"):
        try:
            found = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(found, "nvmlDeviceGetFieldValues"):
            return found
    raise ImportError("no NVML binding: pip install nvidia-ml-py")


@contextmanager
def reading(sensor: Sensor) -> Iterator[Readings]:
    """Readings taken by a thread while the block runs; a sensor that fails ends them."""
    readings = Readings()
    stop = threading.Event()

    def watch() -> None:
        started = time.monotonic()
        while not stop.is_set():
            try:
                values = sensor()
            except Exception as error:
                print(f"power readings end: {type(error).__name__}: {error}", file=sys.stderr)
                return
            readings.rows.append((time.monotonic() - started, *values))
            stop.wait(EVERY_S)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join(timeout=5.0)


def repeat_for(call: Callable[[], object], seconds: float, synchronise: Callable[[], object]) -> tuple[int, float]:
    """Calls for about `seconds`, in bursts with the device idle in between. Returns (calls, seconds)."""
    calls, started = 0, time.monotonic()
    while time.monotonic() - started < seconds:
        for _ in range(CALLS_PER_SYNC):
            call()
        synchronise()
        calls += CALLS_PER_SYNC
    return calls, time.monotonic() - started


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """owner.name is `value(original)` inside the block; owner is a module or any object with a __dict__."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    object.__setattr__(owner, name, value(getattr(owner, name)))
    try:
        yield
    finally:
        if had:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)


def in_a_pass(
    owner: Any,
    name: str,
    run_pass: Callable[[], object],
    sensor: Sensor,
    seconds: float,
    synchronise: Callable[[], object],
) -> dict[str, Any]:
    """Runs a pass in which the first call of owner.name is repeated for `seconds`; its readings and calls per second.

    Raises RuntimeError when the pass does not call it.
    """
    found: dict[str, Any] = {}

    def looping(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not found:
                found["calls"] = 0
                synchronise()
                with reading(sensor) as readings:
                    calls, took = repeat_for(lambda: original(*args, **kwargs), seconds, synchronise)
                found.update(readings.settled(), calls=calls, seconds=round(took, 3))
            return result

        return call

    with replaced(owner, name, looping):
        run_pass()
    if not found:
        raise RuntimeError(f"the pass calls no {name} of {type(owner).__name__}")
    return found


def alone(
    call: Callable[[], object], sensor: Sensor, seconds: float, synchronise: Callable[[], object]
) -> dict[str, Any]:
    """The same of a call that needs no pass around it."""
    synchronise()
    with reading(sensor) as readings:
        calls, took = repeat_for(call, seconds, synchronise)
    return readings.settled() | {"calls": calls, "seconds": round(took, 3)}


def idle(sensor: Sensor, seconds: float) -> dict[str, Any]:
    """Readings with nothing on the device."""
    with reading(sensor) as readings:
        time.sleep(seconds)
    return readings.settled()


def measure(
    todo: Sequence[tuple[dict[str, Any], Callable[[Sensor], dict[str, Any]]]], seconds: float
) -> dict[str, Any]:
    """Samples of `todo`, each a description and what runs it; failures are told on stderr and left out.

    Returns plain JSON: sensor, every_ms, samples, idle, and the card before and after. Raises what `nvml_sensor` does.
    """
    sensor, what = nvml_sensor()
    before = gpu_facts()
    samples = []
    for description, run in todo:
        try:
            sample = run(sensor)
        except Exception as error:
            print(f"no power of {description}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if "watts" in sample:
            samples.append({**description, **sample})
    return {
        "sensor": what,
        "every_ms": round(EVERY_S * 1e3),
        "samples": samples,
        "idle": idle(sensor, seconds),
        "card_before": before,
        "card_after": gpu_facts(),
    }
