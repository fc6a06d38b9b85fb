"""`python -m profiler collectives`: measure collective operations among the GPUs here and add them to the table."""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.commands._options import integers, names, out_root_option, progress_bar

if TYPE_CHECKING:
    from profiler.collectives.cases import Case
    from profiler.collectives.outcome import Outcome

_NAMED = 5  # lost cells that the message lists
_OPERATIONS = "all_reduce,all_gather,reduce_scatter,all_to_all,send"


@click.command("collectives", context_settings={"show_default": True})
@click.option("--hardware", required=True, help="GPU name or alias, which must be the card here, or CPU.")
@click.option("--ranks", default="2", callback=integers, help="Numbers of GPUs to measure, each on its own.")
@click.option("--ops", default=_OPERATIONS, callback=names, help="Operations; send is between two GPUs.")
@click.option(
    "--backend",
    default="auto",
    callback=names,
    help="nccl, vllm-custom (its own all-reduce), gloo (CPU); auto is those that are here.",
)
@click.option("--modes", default="graph,eager", callback=names, help="In CUDA graphs; launched by the host.")
@click.option("--min-bytes", type=click.IntRange(min=16), default=1024, help="Smallest message.")
@click.option("--max-bytes", type=click.IntRange(min=16), default=268435456, help="Largest message; powers of two.")
@click.option("--warmup", type=click.IntRange(min=1), default=3, help="Untimed calls of each cell.")
@click.option("--batches", type=click.IntRange(min=3), default=20, help="Timed batches of each cell.")
@click.option("--timeout", type=click.IntRange(min=10), default=300, help="Seconds for each number of GPUs.")
@out_root_option
@click.option("--force", is_flag=True, help="Measure and replace rows that the table has; else they are kept.")
@click.option("--save-samples", type=click.Path(dir_okay=False, path_type=Path), help="Write every batch as CSV here.")
def command(
    hardware: str,
    ranks: tuple[int, ...],
    ops: tuple[str, ...],
    backend: tuple[str, ...],
    modes: tuple[str, ...],
    out_root: Path | None,
    force: bool,
    save_samples: Path | None,
    **options: Any,
) -> None:
    """Measure collective operations of bf16 tensors, one process per GPU, and add them to HARDWARE's collectives.csv.

    Every cell is checked once against a reference, then timed: the median over batches of back-to-back calls, of the
    slowest rank in each. Rows that the table has already are kept and not measured again. Exit code 6 when a cell has
    no result or a wrong one; the others are written.
    """
    from profiler.card import CPU, check_card, hardware_name
    from profiler.collectives import cases, provenance
    from profiler.collectives.launch import launch
    from profiler.collectives.outcome import outcome
    from profiler.core.collective_table import add_run, collectives_path, read_collectives, write_collectives
    from profiler.core.errors import AcquisitionError
    from profiler.core.paths import default_bundle_root

    name, root = hardware_name(hardware), out_root or default_bundle_root()
    backends = _backends(backend, name == CPU)
    sizes = cases.powers_of_two(options["min_bytes"], options["max_bytes"])
    plans = {count: cases.plan(count, ops, backends, modes, sizes) for count in ranks}
    check_card(name)
    if name != CPU:
        _check_count(max(ranks))
    path = collectives_path(root, name)
    rows = read_collectives(path) if path.exists() and not force else ()
    asked = f"python -m profiler collectives --hardware {name} --ranks {','.join(map(str, ranks))}"
    asked += f" --ops {','.join(ops)} --backend {','.join(backends)} --modes {','.join(modes)}"
    asked += "".join(
        f" --{one.replace('_', '-')} {options[one]}" for one in ("min_bytes", "max_bytes", "warmup", "batches")
    )
    failures: list[str] = []
    for count, planned in plans.items():
        todo = cases.missing(planned, count, rows)
        if len(todo) < len(planned):
            click.echo(f"{count} ranks: {len(planned) - len(todo)} cells are in {path} already", err=True)
        if not todo:
            continue
        run = provenance.started(asked, count, name == CPU)
        began = time.monotonic()
        with progress_bar(f"{name}, {count} ranks") as report:
            found = launch(todo, count, name != CPU, options["warmup"], options["batches"], options["timeout"], report)
        result = outcome(todo, found)
        seconds = time.monotonic() - began
        click.echo(f"{count} ranks: {len(result.rows)} of {len(todo)} cells measured in {seconds:.0f} s", err=True)
        if save_samples is not None:
            _save(save_samples, count, todo, found)
        if result.rows:
            write_collectives(root, name, result.rows, force=True)
            add_run(root, name, provenance.finished(run, found[0].facts, result, options["batches"]))
        _print(count, result)
        if any("GPUs" in why or "importable" in why for _, why in result.skipped):
            click.echo(f"the end of rank 0's output:\n{found[0].output}", err=True)
        failures += [one.failure for one in found if one.failure]
        failures += [f"{count} ranks, {_cell(case)}: {why}" for case, why in result.lost[:_NAMED]]
        if len(result.lost) > _NAMED:
            failures.append(f"and {len(result.lost) - _NAMED} cells more")
    click.echo(f"{path}")
    if failures:
        raise AcquisitionError("not everything was measured\n" + "\n".join(failures))


def _backends(asked: tuple[str, ...], cpu: bool) -> tuple[str, ...]:
    from profiler.collectives.cases import CUSTOM, GLOO, NCCL
    from profiler.core.errors import ConfigError

    if asked == ("auto",):
        if cpu:
            return (GLOO,)
        return (NCCL, CUSTOM) if importlib.util.find_spec("vllm") else (NCCL,)
    for name in asked:
        if name in (NCCL, CUSTOM, GLOO) and (name == GLOO) is not cpu:
            here = GLOO if cpu else f"{NCCL}, {CUSTOM}"
            raise ConfigError(f"--backend {name}: {'CPUs' if cpu else 'GPUs'} are measured with {here}")
    return asked


def _check_count(needed: int) -> None:
    import torch

    from profiler.core.errors import AcquisitionError

    if (here := torch.cuda.device_count()) < needed:
        raise AcquisitionError(f"--ranks {needed}: {here} GPUs are visible here")


def _cell(case: "Case") -> str:
    return f"{case.backend} {case.operation} {case.mode} of {case.bytes} bytes"


def _print(ranks: int, result: "Outcome") -> None:
    """One line per operation, backend and size: both modes, and the device's time of a single call."""
    cells: dict[tuple[str, str, int], dict[str, tuple[float, float, float]]] = {}
    for row, single in zip(result.rows, result.single_us, strict=True):
        key = row.backend, row.operation, row.bytes
        cells.setdefault(key, {})[row.mode] = row.time_us, row.spread_rel, single
    form = "{:>5} {:<11} {:<14} {:>10} {:>10} {:>7} {:>10} {:>7} {:>10} {:>9}"
    head = ("ranks", "backend", "operation", "bytes", "graph us", "spread", "eager us", "spread", "single us", "GB/s")
    if cells:
        click.echo(form.format(*head))
    for (backend, operation, size), modes in cells.items():
        parts: list[str] = []
        for mode in ("graph", "eager"):
            us, spread, _ = modes.get(mode, (0.0, 0.0, 0.0))
            parts += [f"{us:.2f}", f"{spread:.1%}"] if mode in modes else ["-", "-"]
        us, _, single = modes.get("graph") or modes["eager"]
        click.echo(form.format(ranks, backend, operation, size, *parts, f"{single:.2f}", f"{size / us / 1e3:.1f}"))
    reasons: dict[tuple[str, str], list[int]] = {}
    for case, why in result.skipped:
        reasons.setdefault((case.backend, why), []).append(case.bytes)
    for (backend, why), sizes in reasons.items():
        click.echo(f"{ranks} ranks, {backend}: {min(sizes)} to {max(sizes)} bytes left out: {why}", err=True)


def _save(path: Path, ranks: int, todo: "Sequence[Case]", found: "Sequence[Any]") -> None:
    import csv
    import io

    from profiler.core.load import atomic_write

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    if not earlier:
        writer.writerow(("ranks", "backend", "operation", "mode", "bytes", "rank", "batch", "calls", "us"))
    for index, case in enumerate(todo):
        for rank, one in enumerate(found):
            line = one.cases.get(index, {})
            for kind, calls in (("long_us", case.calls), ("short_us", case.short_calls), ("single_us", 1)):
                for batch, us in enumerate(line.get(kind, ())):
                    at = (ranks, case.backend, case.operation, case.mode, case.bytes, rank, batch, calls)
                    writer.writerow((*at, f"{us:.3f}"))
    with atomic_write(path) as out:
        out.write(earlier + stream.getvalue())
