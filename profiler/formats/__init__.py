"""Readers of foreign bundle formats, one file per format, found by listing this folder.

Each module has `NAME` (a sentence for messages), `recognises(meta) -> bool` and `read(path, meta, tps) -> Bundle`.
"""

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from profiler.core.bundle import Bundle
from profiler.core.errors import ConfigError


def read_foreign(path: Path, meta: Mapping[str, Any], tps: Collection[int] | None = None) -> Bundle:
    """Reads the bundle folder `path` whose meta.yaml is not ours.

    Raises ConfigError when no format recognises it.
    """
    names = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if module.recognises(meta):
            bundle: Bundle = module.read(path, meta, tps)
            return bundle
        names.append(module.NAME)
    raise ConfigError(f"{path / 'meta.yaml'}: has no schema_version and is no known foreign format: {'; '.join(names)}")
