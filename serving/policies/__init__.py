"""Scheduling policies, one file each: a module with the function of serving.core.scheduler.Policy."""

import importlib
import pkgutil
from typing import cast

from profiler.core.errors import unknown
from serving.core.scheduler import Policy


def known_policies() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load_policy(name: str) -> Policy:
    """The policy module. Raises ConfigError when `name` is not one of known_policies()."""
    if name not in known_policies():
        raise unknown("policy", name, known_policies())
    return cast(Policy, importlib.import_module(f"{__name__}.{name}"))
