"""A recording validated with its own host's times, once for all tests of a module."""

from pathlib import Path

from serving.recording.validate import Validation, validate


def of(path: Path, known: dict[str, Validation]) -> Validation:
    if path.name not in known:
        known[path.name] = validate(path, with_own_host=True)
    return known[path.name]
