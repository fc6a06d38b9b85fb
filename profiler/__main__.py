"""`python -m profiler`: acquire and inspect latency tables."""

import click

from profiler import __version__
from profiler.cli import LazyGroup, run


@click.group(cls=LazyGroup, package="profiler.commands", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sparsight profiler")
def main() -> None:
    """Acquire per-kernel latency tables on a GPU (or the CPU) and inspect them."""


if __name__ == "__main__":
    run(main, "python -m profiler")
