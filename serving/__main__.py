"""`python -m serving`: replay a trace (the default command), plan placements, compare runs."""

import click

from profiler import __version__
from profiler.cli import LazyGroup, run


@click.group(
    cls=LazyGroup,
    package="serving.commands",
    default="replay",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="sparsight serving")
def main() -> None:
    """Replay request traces on measured tables, size models and compare runs.

    Without a command name the options are those of `replay`.
    """


if __name__ == "__main__":
    run(main, "python -m serving")
