"""Replay of request traces against measured tables, sizing and capacity planning.

`serving.replay(cluster, trace, ...)` is `serving.api.replay`; it is imported when first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.api import replay as replay

__all__ = ["replay"]


def __getattr__(name: str) -> Any:
    if name == "replay":
        from serving.api import replay

        return replay
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
