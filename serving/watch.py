"""What looks on during a replay: a Watch sees the engines at every moment at which something happens."""

from collections.abc import Sequence
from typing import Protocol


class WatchedEngine(Protocol):
    """The part of an engine that onlookers may read."""

    @property
    def index(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...


class WatchedGroup(Protocol):
    @property
    def engines(self) -> Sequence[WatchedEngine]: ...


class Watch(Protocol):
    def open(self, groups: Sequence[WatchedGroup]) -> None:
        """The replay is about to begin with these groups."""
        ...

    def advance(self, now_ns: int) -> None:
        """Called before what happens at `now_ns`, with everything before it done; more than once where several events
        share a time."""
        ...

    def close(self) -> None:
        """The replay has ended."""
        ...
