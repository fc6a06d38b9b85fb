"""Routers, one file each: a module whose `create(seed)` returns a serving.core.loop.Router with its own state."""

import importlib
import pkgutil

from profiler.core.errors import unknown
from serving.core.loop import Router


def known_routers() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def create_router(name: str, seed: int = 0) -> Router:
    """A fresh router; `seed` is for those that draw. Raises ConfigError when `name` is not one of known_routers()."""
    if name not in known_routers():
        raise unknown("router", name, known_routers())
    router: Router = importlib.import_module(f"{__name__}.{name}").create(seed)
    return router
