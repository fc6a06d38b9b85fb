"""The tables of a bundle that a run of one tensor-parallel degree needs."""

from pathlib import Path

from profiler.core.bundle import Bundle, read_bundle


def read_degree(path: Path, tp: int) -> Bundle:
    """The tables of `tp`, and those of tp 1, where experts are measured whatever the run's degree; all tables where the
    bundle has none of `tp`, so that the refusal that follows names every degree that there is.

    Raises as read_bundle.
    """
    bundle = read_bundle(path, tps={1, tp})
    return bundle if tp in bundle.tps else read_bundle(path)
