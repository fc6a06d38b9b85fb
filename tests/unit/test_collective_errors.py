"""Measured collectives beside computed ones: what is compared with what, and the printed summary."""

import csv
from pathlib import Path

import pytest
from click.testing import CliRunner

from profiler.core.collective_table import CollectiveRow, write_collectives
from profiler.core.errors import ConfigError, CoverageError
from profiler.core.hardware import load_hardware
from serving.collective_errors import compare
from serving.collectives import from_hardware
from serving.commands.collectives import command

EVIDENCE = Path(__file__).resolve().parents[2].parent / "shared" / "evidence" / "module_tables"


def row(operation: str, backend: str, size: int, us: float, mode: str = "graph") -> CollectiveRow:
    return CollectiveRow(operation, backend, 2, "bf16", size, mode, us, 0.01)


def test_each_way_is_compared_with_its_own_formula() -> None:
    hardware = load_hardware("H200")
    links = from_hardware(hardware)
    assert links.node is not None
    size = 1 << 20
    library, engine = links.node.library_all_reduce_us(size, 2), links.node.engine_all_reduce_us(size, 2)
    gathered = links.all_gather_us(size, 2)
    found = compare(
        hardware,
        [
            row("all_reduce", "nccl", size, library / 1.5),
            row("all_reduce", "vllm-custom", size, engine / 0.8),
            row("all_gather", "nccl", size, gathered),
            row("send", "nccl", size, links.send_us(size) / 0.5),
            row("all_gather", "nccl", size, 1.0, "eager"),
        ],
        "graph",
    )
    errors = {(one.operation, one.way): one.error for one in found}
    # The fastest of the size, as the engine chooses: here the library's, had it measured less.
    best = min(library / 1.5, engine / 0.8)
    assert errors == {
        ("all_reduce", "library"): pytest.approx(0.5),
        ("all_reduce", "engine"): pytest.approx(engine / best - 1),
        ("all_gather", "library"): pytest.approx(0.0),
        ("send", "library"): pytest.approx(-0.5),
    }
    with pytest.raises(CoverageError, match="no collectives of H200 were measured in mode eager; there is graph"):
        compare(hardware, [row("all_gather", "nccl", size, gathered)], "eager")


def test_the_command_prints_groups_and_writes_cells(tmp_path: Path) -> None:
    links = from_hardware(load_hardware("H200"))
    sizes = [1 << power for power in range(10, 20)]
    rows = [row("all_gather", "nccl", size, links.all_gather_us(size, 2) / 1.1) for size in sizes]
    write_collectives(tmp_path, "H200", rows)
    cells = tmp_path / "cells.csv"
    done = CliRunner().invoke(command, ["h200_sxm", "--bundle-root", str(tmp_path), "--rows", str(cells)])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:8] for line in lines[1:]] == [
        ["all_gather", "2", "library", "below", "64K", "6", "+10.0%", "+10.0%"],
        ["all_gather", "2", "library", "from", "64K", "4", "+10.0%", "+10.0%"],
    ]
    with cells.open(newline="") as stream:
        assert [float(one["error"]) for one in csv.DictReader(stream)] == [0.1] * len(sizes)
    wrong = CliRunner().invoke(command, ["H200", "--bundle-root", str(tmp_path), "--mode", "graphs"])
    assert isinstance(wrong.exception, ConfigError) and "did you mean 'graph'" in str(wrong.exception)


@pytest.mark.parametrize("hardware", ["H200", "RTXPRO6000"])
def test_public_all_reduces_keep_their_bound(hardware: str) -> None:
    """The tables that the shares were fitted to, through the comparison: from 64 KiB within a quarter."""
    file = EVIDENCE / f"{hardware.lower()}_nccl2.29.2.csv"
    if not file.exists():
        pytest.skip("the public tables are not here")
    with file.open(newline="") as stream:
        lines = [one for one in csv.DictReader(stream) if (one["op_name"], one["nccl_dtype"]) == ("all_reduce", "half")]
    rows = []
    for one in lines:
        gpus, size, us = int(one["num_gpus"]), 2 * int(one["message_size"]), 1e3 * float(one["latency"])
        if gpus <= 8:
            rows.append(CollectiveRow("all_reduce", "nccl 2.29", gpus, "fp16", size, "graph", us, 0.0))
    found = [one for one in compare(load_hardware(hardware), rows, "graph") if one.bytes >= 1 << 16]
    assert len(found) > 30
    assert max(abs(one.error) for one in found) <= 0.25
