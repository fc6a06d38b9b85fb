"""AIConfigurator's public tables (0.12.0, Apache-2.0) where they are at hand, for the tests that compare with them."""

import shutil
from pathlib import Path
from typing import Final

import imported
import pytest

from profiler.aiconfigurator.convert import Request, convert
from profiler.comparison import Ratio, compare
from profiler.core.bundle import Bundle, read_bundle, write_bundle
from profiler.core.registry import load_model

EVIDENCE: Final = Path(__file__).resolve().parents[1].parent / "shared" / "evidence" / "module_tables"
_PLACES: Final = {
    "h200_vllm0.24.0_dsa_context_module": "h200_sxm/sparse_attention/vllm/0.24.0/dsa_context_module",
    "h200_vllm0.24.0_dsa_generation_module": "h200_sxm/sparse_attention/vllm/0.24.0/dsa_generation_module",
    "h200_vllm0.24.0_msa_context_module": "h200_sxm/msa/vllm/0.24.0/msa_context_module",
    "h200_vllm0.24.0_msa_generation_module": "h200_sxm/msa/vllm/0.24.0/msa_generation_module",
    "h200_vllm0.24.0_moe_3shapes": "h200_sxm/moe/vllm/0.24.0/moe",
    "h200_nccl2.29.2": "h200_sxm/comm/nccl/2.29.2/nccl",
    "rtxpro6000_vllm0.24.0_msa_context_module": "rtx_pro_6000_server/msa/vllm/0.24.0/msa_context_module",
    "rtxpro6000_vllm0.24.0_msa_generation_module": "rtx_pro_6000_server/msa/vllm/0.24.0/msa_generation_module",
    "rtxpro6000_nccl2.29.2": "rtx_pro_6000_server/comm/nccl/2.29.2/nccl",
}


def systems(folder: Path) -> Path:
    """The public tables in the package's layout, in `folder`, which is returned; products and plain attention, which
    are not among them, made up. Skips where there are none."""
    if not EVIDENCE.is_dir():
        pytest.skip(f"{EVIDENCE} is not here")
    for name in ("h200_sxm", "rtx_pro_6000_server"):
        imported.system(folder, name)
        imported.gemm(folder, name)
        imported.attention(folder, name)
    for file, place in _PLACES.items():
        target = folder / "data" / f"{place}_perf.csv"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(EVIDENCE / f"{file}.csv", target)
    return folder


def modules(folder: Path, own: Bundle, kernel: str) -> list[Ratio]:
    """`own` over the attention modules of vLLM 0.24 on H200, one for each shape of theirs. folder: an empty one."""
    model = str(own.meta["model"])
    theirs = convert(Request("h200_sxm", model, "vllm"), systems(folder / "systems"))
    bundle = read_bundle(write_bundle(folder / "bundles", theirs.meta, theirs.tables))
    return [one for one in compare(bundle, own, load_model(model)) if one.kernel == kernel]
