"""An engine and its host as a program that runs from top to bottom, as the engine's own loop does."""

from collections.abc import Sequence

from reference.engine import Engine, Step
from reference.request import Request
from serving.core.hosted import HostCost
from serving.core.shape import StepCost


def run(
    engines: Sequence[Engine],
    cost: StepCost,
    host: HostCost,
    asynchronous: bool,
    requests: Sequence[Request],
    behind_first: StepCost | None = None,
    behind_layers: StepCost | None = None,
    behind_experts: StepCost | None = None,
    inputs_ns: int = 0,
) -> list[tuple[int, int]]:
    """Replay `requests`, sorted by arrival, on ranks in lockstep, in turn; (begin of the launch, end on the device) of
    every step."""
    arriving = list(requests)
    turn = 0
    now_ns = thread_ns = device_ns = 0
    in_flight: list[tuple[int, Step | None, int, int]] = []
    seen: list[tuple[int, int]] = []

    def take_in() -> None:
        nonlocal turn
        while arriving and arriving[0].arrival_ns <= now_ns:
            engines[turn % len(engines)].submit(arriving.pop(0))
            turn += 1
        for engine in engines:
            engine.take_in(now_ns)

    while arriving or in_flight or any(one.running or one.waiting for one in engines):
        if not in_flight and not any(one.running or one.waiting for one in engines):
            now_ns = max(now_ns, arriving[0].arrival_ns)
            thread_ns = max(thread_ns, now_ns)
            take_in()
        before = sum(one.preemptions for one in requests)
        batches = [engine.scheduler.schedule(now_ns) for engine in engines]
        launched = True
        if any(batches):
            step = Step(batches, engines)
            times = host.times(step.shapes)
            thread_ns += times.before_ns
            if times.behind_ns is not None:  # preparing has waited for the device
                thread_ns = max(thread_ns, device_ns + times.behind_ns)
            begin_ns = thread_ns
            thread_ns += times.launch_ns
            kernels_ns = cost.step_ns(step.shapes)
            # A device that is free before the launch copies the inputs meanwhile, else after the step before.
            device_ns = max(device_ns + kernels_ns, begin_ns + kernels_ns - inputs_ns, thread_ns)
            late = [(behind_first, times.first_ns), (behind_layers, times.layers_ns)]
            if times.experts_ns > 0:
                late.append((behind_experts, times.experts_ns))
            for rest, after_ns in late:
                if rest is not None and times.layers_ns > 0:
                    device_ns = max(device_ns, begin_ns + after_ns + rest.step_ns(step.shapes))
            seen.append((begin_ns, device_ns))
            in_flight.append((device_ns, step, times.update_ns, times.output_ns))
        elif sum(one.preemptions for one in requests) > before:
            in_flight.append((thread_ns, None, 0, 0))
        else:
            launched = False
        if launched and asynchronous and len(in_flight) < 2:
            now_ns = thread_ns
            take_in()
            continue
        if in_flight:
            end_ns, ended, update_ns, output_ns = in_flight.pop(0)
            now_ns = max(thread_ns, end_ns) + update_ns
            for engine, emitting in zip(engines, ended.emitting if ended else (), strict=ended is not None):
                for request, *_, drafts in emitting:
                    if engine.scheduler.emit(request, now_ns, drafts):
                        request.outcome = "finished"
                        engine.assigned -= 1
                        engine.assigned_tokens -= request.prompt_tokens
            take_in()
            thread_ns = now_ns + output_ns
    return seen
