"""The Hopper kernels assembled for SM90 without a card: they fit, spill nothing and keep products asynchronous."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Not imported here: other tests import Triton for its interpreter, which must be chosen first.
_VERSION = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"
if not _VERSION.startswith("3.6."):
    pytest.skip(f"Gluon as of Triton 3.6 is needed, found {_VERSION}", allow_module_level=True)

BUILD = """
import json, pathlib, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from profiler.ops.triton import mla_hopper

splits = int(sys.argv[1])
sizes = {"PICKS_PADDED": 2048, "SPLITS": splits, "HAS_SINK": True}
common = {"q": "*bf16", "indices": "*i32", "sinks": "*fp32", "out": "*bf16" if splits == 1 else "*fp32"}
common |= {"tops": "*fp32", "totals": "*fp32", "scale_log2": "fp32", "heads": "i32", "picks": "i32"}
kernels = {
    mla_hopper._attend_kernel: {"rows": "*bf16"},
    mla_hopper._attend_packed_kernel: {"codes": "*fp8e4nv", "scales": "*fp32", "ropes": "*bf16"},
}
ptxas = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
reports = []
for kernel, own in kernels.items():
    names = [parameter.name for parameter in kernel.params]
    types = common | own
    source = GluonASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in sizes.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names if types.get(name, "")[:1] == "*"},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.ptx"
        path.write_text(built.asm["ptx"])
        command = [ptxas, "-v", "--gpu-name=sm_90a", path, "-o", path.with_suffix(".cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True)
    reports.append({"shared": built.metadata.shared, "ptx": built.asm["ptx"].count("wgmma.mma_async"),
                    "log": log.stdout + log.stderr})
print(json.dumps(reports))
"""


@pytest.mark.parametrize("splits", [1, 4])
def test_kernels_fit_spill_nothing_and_stay_asynchronous(splits: int, tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(splits)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for report in json.loads(done.stdout):
        assert report["shared"] <= 227 * 1024
        # 36 products of 16 features for the logits, 4 of 16 picks for the output.
        assert report["ptx"] == 40
        assert "0 bytes spill stores, 0 bytes spill loads" in report["log"]
        assert "serialized" not in report["log"]
