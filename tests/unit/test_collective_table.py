"""Measured collectives: written whole, read by line, looked up between sizes and never beyond them."""

import csv
import math
from pathlib import Path

import pytest

from profiler.core.collective_table import (
    COLUMNS,
    CollectiveRow,
    collective_curve,
    collectives_path,
    read_collectives,
    write_collectives,
)
from profiler.core.errors import ConfigError, CoverageError

EVIDENCE = Path(__file__).resolve().parents[2].parent / "shared" / "evidence" / "module_tables"


def row(size: int, us: float, **changes: object) -> CollectiveRow:
    fields: dict[str, object] = {
        "operation": "all_reduce",
        "backend": "nccl",
        "gpus": 8,
        "dtype": "bf16",
        "bytes": size,
        "mode": "graph",
        "time_us": us,
        "spread_rel": 0.01,
    }
    return CollectiveRow(**fields | changes)  # type: ignore[arg-type]


def test_rows_are_added_and_replaced_only_by_force(tmp_path: Path) -> None:
    path = write_collectives(tmp_path, "H200", [row(2048, 9.0), row(1024, 8.0)])
    assert path == collectives_path(tmp_path, "H200")
    write_collectives(tmp_path, "H200", [row(1024, 30.0, mode="eager", spread_rel=math.nan)])
    assert [(r.mode, r.bytes, r.time_us) for r in read_collectives(path)] == [
        ("eager", 1024, 30.0),
        ("graph", 1024, 8.0),
        ("graph", 2048, 9.0),
    ]
    with pytest.raises(ConfigError, match=r"has all_reduce, nccl, 8, bf16, 1024, graph already"):
        write_collectives(tmp_path, "H200", [row(1024, 7.0)])
    before = path.read_text()
    with pytest.raises(ConfigError, match=r"row 2: .* appears twice"):
        write_collectives(tmp_path, "H200", [row(4096, 7.0), row(4096, 8.0)])
    assert path.read_text() == before and [p.name for p in path.parent.iterdir()] == ["collectives.csv"]
    write_collectives(tmp_path, "H200", [row(1024, 7.0)], force=True)
    assert [r.time_us for r in read_collectives(path)] == [30.0, 7.0, 9.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("all_sum,nccl,8,bf16,1,graph,1.0,0", "unknown operation 'all_sum'"),
        ("all_reduce,nccl,8,bf16,1,replay,1.0,0", "unknown mode 'replay'"),
        ("all_reduce,nccl,one,bf16,1,graph,1.0,0", "gpus must be an integer, found 'one'"),
        ("all_reduce,nccl,1,bf16,1,graph,1.0,0", "at least 2 gpus"),
        ("all_reduce,nccl,8,bf16,1,graph,0,0", "time_us must be a positive number"),
        ("all_reduce,nccl,8,bf16,1,graph,1.0", "7 fields"),
        ("all_reduce,,8,bf16,1,graph,1.0,0", "backend must be a name"),
        ("all_reduce,nccl,8,bf16,64,graph,1.0,0", "appears twice"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "collectives.csv"
    path.write_text(f"{','.join(COLUMNS)}\nall_reduce,nccl,8,bf16,64,graph,1.0,0\n{line}\n")
    with pytest.raises(ConfigError, match=message) as error:
        read_collectives(path)
    assert str(error.value).startswith(f"{path}:3: ")


def test_another_header_and_an_empty_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "collectives.csv"
    path.write_text("operation,us\n")
    with pytest.raises(ConfigError, match=r":1: the header is operation,us"):
        read_collectives(path)
    path.write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(ConfigError, match="no rows"):
        read_collectives(path)


def test_sizes_are_interpolated_and_never_passed() -> None:
    curve = collective_curve([row(1000, 10.0), row(3000, 20.0)], "all_reduce", 8, "graph")
    assert [curve.at(x) for x in (1, 500, 1000, 2000, 3000)] == [10.0, 10.0, 10.0, 15.0, 20.0]
    with pytest.raises(CoverageError, match=r"bytes 4000 is outside its table"):
        curve.at(4000)


def test_the_fastest_of_several_backends_answers_and_one_can_be_named() -> None:
    rows = [row(1000, 10.0), row(1000, 6.0, backend="custom"), row(9000, 20.0), row(9000, 30.0, backend="custom")]
    curve = collective_curve(rows, "all_reduce", 8, "graph")
    assert (curve.at(1000), curve.at(9000)) == (6.0, 20.0)
    assert collective_curve(rows, "all_reduce", 8, "graph", backend="custom").at(9000) == 30.0


def test_what_is_not_measured_is_named_with_what_is() -> None:
    with pytest.raises(CoverageError, match=r"all_reduce of 4 GPUs, graph: not measured .* all_reduce, 8, graph, nccl"):
        collective_curve([row(1000, 10.0)], "all_reduce", 4, "graph")
    with pytest.raises(CoverageError, match="backend custom"):
        collective_curve([row(1000, 10.0)], "all_reduce", 8, "graph", backend="custom")


def test_a_public_table_of_the_h200_fits_the_format(tmp_path: Path) -> None:
    """The engine's own all-reduce, graph and eager: milliseconds there, microseconds here."""
    source = EVIDENCE / "h200_vllm0.24.0_custom_allreduce.csv"
    if not source.exists():
        pytest.skip(f"{source} is not here")
    with source.open(newline="", encoding="utf-8") as stream:
        rows = [
            row(
                int(line["message_size"]),
                1e3 * float(line["latency"]),
                backend="vllm_custom",
                gpus=int(line["num_gpus"]),
                mode=line["backend"].removeprefix("vllm_"),
                spread_rel=math.nan,
            )
            for line in csv.DictReader(stream)
            if line["backend"] in ("vllm_graph", "vllm_eager")
        ]
    path = write_collectives(tmp_path, "H200", list({r.key: r for r in rows}.values()))
    read = read_collectives(path)
    smallest = min((r for r in read if r.gpus == 2 and r.mode == "graph"), key=lambda r: r.bytes)
    assert collective_curve(read, "all_reduce", 2, "graph").at(smallest.bytes) == pytest.approx(smallest.time_us)
    # Launching from the host costs more than a graph at the smallest message.
    eager = collective_curve(read, "all_reduce", 2, "eager").at(smallest.bytes)
    assert eager > 2 * smallest.time_us
