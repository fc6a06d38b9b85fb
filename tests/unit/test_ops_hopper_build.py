"""Kernels assembled for SM90 without a card: they fit, the Hopper ones spill nothing and stay asynchronous."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profiler.ops.triton.launches import _HOPPER

# Not imported here: other tests import Triton for its interpreter, which must be chosen first.
_VERSION = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"
if not _VERSION.startswith("3.6."):
    pytest.skip(f"Gluon as of Triton 3.6 is needed, found {_VERSION}", allow_module_level=True)

BUILD = """
import json, pathlib, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from profiler.ops.triton import launches, mla_hopper, mla_roles, select_wide

ptxas = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


def build(source_type, kernel, types, sizes, options):
    names = [parameter.name for parameter in kernel.params]
    source = source_type(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in sizes.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names if types.get(name, "")[:1] == "*"},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.ptx"
        path.write_text(built.asm["ptx"])
        command = [ptxas, "-v", "--gpu-name=sm_90a", path, "-o", path.with_suffix(".cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"shared": built.metadata.shared, "wgmma": built.asm["ptx"].count("wgmma.mma_async"),
            "log": log.stdout + log.stderr}


def attend(module, kernel, packed, splits, **more):
    types = {"q": "*bf16", "indices": "*i32", "sinks": "*fp32", "out": "*bf16" if splits == 1 else "*fp32"}
    types |= {"tops": "*fp32", "totals": "*fp32", "scale_log2": "fp32", "heads": "i32", "picks": "i32"}
    rows = "*fp8e4nv" if packed else "*bf16"
    types |= {"rows": rows, "codes": rows, "scales": "*fp32" if packed else "*bf16", "ropes": "*bf16"}
    sizes = {"PICKS_PADDED": 2048, "SPLITS": splits, "HAS_SINK": True} | more
    return build(GluonASTSource, kernel, types, sizes, {"num_warps": 8})


def roles(packed, splits, ahead, held):
    score, copy = mla_roles.REGISTERS[packed, held]
    more = {"PACKED": packed, "AHEAD": ahead, "HELD": held, "SCORE_REGISTERS": score, "COPY_REGISTERS": copy}
    return attend(mla_roles, mla_roles._attend_kernel, packed, splits, **more)


def wide(launch):
    types = {"scores": "*fp32", "positions": "*i64", "out": "*i32", "scratch": "*fp32", "scratch_at": "*i32"}
    types |= {"rows": "i32", "score_stride": "i32"}
    sizes = {"TOPK": 2048, "TOPK_PADDED": 2048, "CAPACITY": 4096, "SAMPLE": launch.sample, "TARGET": 3072}
    sizes |= {"BLOCK": launch.block, "STAGES": launch.stages, "EMIT": min(1024, launch.block)}
    options = {"num_warps": launch.warps} | ({"maxnreg": launch.registers} if launch.registers else {})
    return build(ASTSource, select_wide._wide_kernel, types, sizes, options)


print(json.dumps(eval(sys.argv[1])))
"""


# (packed rows, query features held) of the kernel with roles.
ROLES = [(False, 0), (False, 256), (True, 0)]


def _reports(expression: str, folder: Path) -> list[dict[str, Any]]:
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", BUILD, expression], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    return reports


def _check(report: dict[str, Any], products: int) -> None:
    assert report["shared"] <= 227 * 1024
    assert report["wgmma"] == products
    assert "0 bytes spill stores, 0 bytes spill loads" in report["log"]
    assert "serialized" not in report["log"]


@pytest.mark.parametrize("splits", [1, 4])
def test_turns_fit_spill_nothing_and_stay_asynchronous(splits: int, tmp_path: Path) -> None:
    bf16 = f"attend(mla_hopper, mla_hopper._attend_kernel, False, {splits})"
    packed = f"attend(mla_hopper, mla_hopper._attend_packed_kernel, True, {splits})"
    for report in _reports(f"[{bf16}, {packed}]", tmp_path):
        # 36 products of 16 features for the logits, 4 of 16 picks for the output.
        _check(report, 36 + 4)


@pytest.mark.parametrize(("packed", "held"), ROLES)
def test_roles_fit_spill_nothing_and_stay_asynchronous(packed: bool, held: int, tmp_path: Path) -> None:
    ahead = [f"roles({packed}, {splits}, True, {held})" for splits in (1, 2)]
    *reports, behind = _reports(f"[{', '.join(ahead)}, roles({packed}, 2, False, {held})]", tmp_path)
    # The output takes 2 x 2 products of 16 picks and 128 values; the first turn's logits stand before the loop.
    for report in reports:
        _check(report, 2 * 36 + 4)
    _check(behind, 36 + 4)


def test_every_launch_of_the_table_is_assembled_here() -> None:
    used = [(packed, launch) for (packed, _), launch in _HOPPER.items() if launch is not None]
    assert used
    for packed, launch in used:
        # Other bounds of registers than the kernel's own would be another kernel.
        assert launch.registers is None
        assert launch.kernel == "turns" or (packed, launch.held) in ROLES


def test_the_wide_selection_fits(tmp_path: Path) -> None:
    for report in _reports("[wide(launches._SELECT_MANY), wide(launches._SELECT_FEW)]", tmp_path):
        assert report["shared"] <= 64 * 1024
        # Scans and 64-bit addresses may spill a little; arrays in local memory would be kilobytes.
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", report["log"])]
        assert spilled and max(spilled) <= 512
