"""Several traces on one engine: what is to be played, and a play that is worth keeping."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from profiler.core.errors import ConfigError
from serving.recording.drive import EngineLike, Finished, play
from serving.recording.steps import Step, stand_outs
from serving.recording.vllm_driver import Limits
from serving.traces import TraceRequest, read_trace


@dataclass(frozen=True, slots=True)
class Asked:
    """One trace to play, its limits, and the folder of its recording."""

    name: str
    dataset: Path
    limits: Limits
    limits_text: str
    requests: tuple[TraceRequest, ...]
    folder: Path


@dataclass(frozen=True, slots=True)
class Played:
    """The play that was kept. stalls: places of the steps that stall; seconds: from its start to its last token."""

    finished: list[Finished]
    steps: list[Step]
    stalls: list[int]
    plays: int
    seconds: float


class Driver(EngineLike, Protocol):
    def begin(self, requests: Sequence[TraceRequest], limits: Limits) -> None: ...

    def steps(self) -> list[Step]: ...


def asked_plays(datasets: Sequence[str], output: Path, num_reqs: int | None, max_model_len: int) -> list[Asked]:
    """Reads TRACE[:LIMITS] texts. One trace is recorded in `output`, several each in a folder of its name below it.

    Raises ConfigError for unreadable traces, sessions, unknown limits, requests longer than the model takes, and two
    traces of one name.
    """
    found: list[Asked] = []
    for text in datasets:
        path_text, _, limits_text = text.partition(":")
        path = Path(path_text)
        requests = read_trace(path).requests[:num_reqs]
        for index, request in enumerate(requests):
            if request.prompt_tokens + request.output_tokens > max_model_len:
                raise ConfigError(f"{path}: request {index} needs more than --max-model-len {max_model_len}")
        folder = output if len(datasets) == 1 else output / path.stem
        if any(folder == one.folder for one in found):
            raise ConfigError(f"--dataset: two traces are named {path.stem}; their recordings need different names")
        found.append(Asked(path.stem, path, Limits.parse(limits_text), limits_text, tuple(requests), folder))
    return found


def play_until_smooth(
    driver: Driver,
    asked: Asked,
    most: int,
    until: float | None,
    say: Callable[[str], None],
    progress: Callable[[str], Callable[[int, int], None]],
    clock: Callable[[], float] = time.monotonic,
) -> Played | None:
    """Plays a trace at most `most` times, until a play has no step that stalls; the last play, or None where even the
    first would not end before `until` on `clock`.

    A play is expected to take as long as the one before, the first as long as its arrivals.
    """
    expected_s = asked.requests[-1].arrival_ns / 1e9 if asked.requests else 0.0
    kept: Played | None = None
    for number in range(1, most + 1):
        if until is not None and clock() + expected_s > until:
            break
        driver.begin(asked.requests, asked.limits)
        start = clock()
        finished = play(driver, asked.requests, progress(f"{asked.name}, play {number} of at most {most}"))
        expected_s = clock() - start
        steps = driver.steps()
        stalls = stand_outs(steps)
        kept = Played(finished, steps, stalls, number, expected_s)
        say(f"{asked.name}, play {number}: {expected_s:.1f} s, {len(steps)} steps, {len(stalls)} stall")
        if not stalls:
            break
    return kept
