"""Engines whose host takes time: two timelines, the thread that schedules and launches, and the device.

The thread of an engine goes round: it takes in requests, schedules a step, prepares its inputs and launches it; then it
waits for the tokens of the oldest step in flight, updates the scheduler with them and makes the outputs. With
asynchronous scheduling two steps are in flight, so a step is launched while the one before runs; a thread with only one
in flight goes round once more before it waits. Without, it waits for the step that it has just launched.

The device begins a step when it has ended the one before and the first kernel is launched; a device that waited for
that has the step's inputs by then. Some models' inputs are prepared with a wait for the device: then even the first
launch of such a step comes behind the end of the one before, and so do the tokens of that.

Kernels that are launched one by one end no earlier than from their launch on: the device has idled among layers that it
runs faster than they are launched, so it ends no earlier than the last layer's experts and the head need behind the
launch of what comes before, and, where a stack begins with layers of another kind (dense ones before experts), than the
others need behind the launch of these; nor than all from the first experts on need behind the launch of those. The same
holds for graphs of parts of layers with launched attention between them. A step ends, and its tokens are known, when
the thread has updated the scheduler.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from serving.core.engine import Engine, Group
from serving.core.request import Request
from serving.core.shape import StepCost, StepShape


class HostTimes(NamedTuple):
    """Nanoseconds of the host's thread for one step: before its first launch, launching, and once its tokens are there
    until they are known; then making the outputs. first_ns: of launching, the layers ahead of those of another kind,
    layers_ns: all layers, up to the experts of the last one where it has some; both 0 where they are one graph.
    experts_ns: all up to the first experts, 0 where those are not launched by themselves.
    behind_ns: the first launch comes no sooner than this after the device has ended the step before; None where
    preparing does not wait for that."""

    before_ns: int
    launch_ns: int
    update_ns: int
    output_ns: int
    first_ns: int = 0
    layers_ns: int = 0
    behind_ns: int | None = None
    experts_ns: int = 0

    def begin_ns(self, thread_ns: int, device_ns: int) -> int:
        """The first launch, of a thread that is free at `thread_ns` and a device that is at `device_ns`."""
        begin_ns = thread_ns + self.before_ns
        return begin_ns if self.behind_ns is None else max(begin_ns, device_ns + self.behind_ns)


class Behind(NamedTuple):
    """Costs of what the device runs behind the launches of HostTimes.first_ns, layers_ns and experts_ns, up to the end.

    first: the other layers and the head, None where all layers are of one kind. layers: the last layer's experts, if it
    has some, and the head. experts: all from the first experts on, None without any.
    """

    first: StepCost | None
    layers: StepCost
    experts: StepCost | None = None

    def end_ns(self, begin_ns: int, times: HostTimes, shapes: Sequence[StepShape | None]) -> int:
        """Before this the device does not end a step whose launches begin at `begin_ns`."""
        if not times.layers_ns:
            return begin_ns
        end_ns = begin_ns + times.layers_ns + self.layers.step_ns(shapes)
        if self.experts is not None and times.experts_ns:
            end_ns = max(end_ns, begin_ns + times.experts_ns + self.experts.step_ns(shapes))
        if self.first is None:
            return end_ns
        return max(end_ns, begin_ns + times.first_ns + self.first.step_ns(shapes))


class HostCost(Protocol):
    """The host's time of steps. Implementations are pure."""

    def times(self, shapes: Sequence[StepShape | None]) -> HostTimes:
        """Of one step of a group, one shape per rank; None marks one without work."""
        ...


class _InFlight(NamedTuple):
    """end_ns: of the device. void: requests were preempted and none was scheduled."""

    end_ns: int
    update_ns: int
    output_ns: int
    repeated_tokens: int
    void: bool


class HostedGroup(Group):
    """A group whose steps cost the host time; waves, dummy steps and times as those of Group.

    cost: of the device alone; behind: of parts of it, None leaves out when kernels are launched; inputs_ns: what
    copying the inputs is of it. Ranks have a thread each and wait for each other: `host` prices the slowest.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        cost: StepCost,
        host: HostCost,
        *,
        behind: Behind | None = None,
        inputs_ns: int = 0,
        asynchronous: bool = False,
        sync_steps: int = 1,
    ) -> None:
        super().__init__(engines, cost, asynchronous=asynchronous, sync_steps=sync_steps)
        self.host = host
        self.behind, self.inputs_ns = behind, inputs_ns
        self._in_flight: deque[_InFlight] = deque()
        self._free_ns = 0  # the thread
        self._device_ns = 0
        self._awaits = False  # the next event is the end of the oldest step, not of a launch

    def wake(self, now_ns: int, left: list[Request]) -> int | None:
        """Start stepping at `now_ns`; nanoseconds to the next event of the thread, None without work."""
        for engine in self.engines:
            if engine.inbox:
                engine.take_in(now_ns, left)
        self._wave_steps = 0
        self._free_ns = max(self._free_ns, now_ns)
        return self._go_round(now_ns)

    def end_step(self, now_ns: int, left: list[Request]) -> int | None:
        """The thread has ended the oldest step or a launch at `now_ns`; nanoseconds to its next event, None without
        work."""
        if self._awaits:
            ended = self._in_flight.popleft()
            self._void += ended.void
            self._end(ended.repeated_tokens, now_ns, left)
            self._free_ns = now_ns + ended.output_ns
        else:
            for engine in self.engines:
                if engine.inbox:
                    engine.take_in(now_ns, left)
        return self._go_round(now_ns)

    def _go_round(self, now_ns: int) -> int | None:
        in_flight = self._in_flight
        composed = self._compose(now_ns)
        if composed is None and not in_flight:
            if any(engine.waiting and not engine.scheduler.reserved for engine in self.engines):
                raise RuntimeError("the scheduler left waiting requests without scheduling any")
            if not self._wave_steps or (self._wave_steps - 1) % self.sync_steps == 0:
                return None
            composed = [None] * len(self.engines), 0
            self.composed += 1
            self.dummy_steps += 1
            self._launch_step(composed)
        elif composed is not None and not any(composed[0]):
            in_flight.append(_InFlight(self._free_ns, 0, 0, 0, True))
        elif composed is not None:
            self._launch_step(composed)
        self._awaits = composed is None or not self.asynchronous or len(in_flight) > 1
        if not self._awaits:
            return self._free_ns - now_ns
        return max(self._free_ns, in_flight[0].end_ns) + in_flight[0].update_ns - now_ns

    def _launch_step(self, composed: tuple[Sequence[StepShape | None], int]) -> None:
        shapes, repeated_tokens = composed
        self._wave_steps += 1
        device_ns = self.cost.step_ns(shapes)
        if device_ns <= 0:
            raise ValueError(f"a step must take at least 1 ns, the cost model says {device_ns}")
        times = self.host.times(shapes)
        begin_ns = times.begin_ns(self._free_ns, self._device_ns)
        self._free_ns = begin_ns + times.launch_ns
        self._device_ns = max(max(self._device_ns, begin_ns - self.inputs_ns) + device_ns, self._free_ns)
        if self.behind is not None:
            self._device_ns = max(self._device_ns, self.behind.end_ns(begin_ns, times, shapes))
        self._in_flight.append(_InFlight(self._device_ns, times.update_ns, times.output_ns, repeated_tokens, False))
