"""`python -m serving retime`: a trace whose arrivals are the queueing times of a recorded run."""

from pathlib import Path

import click

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("dataset", type=_FILE)
@click.argument("recorded", metavar="RECORDED_DIR", type=_FILE)
@click.argument("output", type=_FILE)
def command(dataset: Path, recorded: Path, output: Path) -> None:
    """Write DATASET to OUTPUT with the queueing times of RECORDED_DIR as arrivals.

    DATASET is the JSONL trace that the recorded run was driven with. What lies between sending and queueing (the front
    end) is thereby taken from the recording, and a replay starts where the engine's scheduler does.
    """
    from profiler.core.errors import ConfigError
    from profiler.core.load import atomic_write
    from serving.recorded import read_recorded, retimed

    if output.resolve() == dataset.resolve():
        raise ConfigError(f"{output} would overwrite the dataset")
    text = retimed(dataset, read_recorded(recorded))
    with atomic_write(output) as stream:
        stream.write(text)
