"""Public tables of AIConfigurator (0.12.0, Apache-2.0) through the importer, against figures from outside."""

import shutil
from pathlib import Path

import public_tables
import pytest

from profiler import projection
from profiler.aiconfigurator.convert import Imported, Request, convert
from profiler.comparison import compare, summarise
from profiler.core.bundle import Bundle, find_bundle, read_bundle, write_bundle
from profiler.core.hardware import load_hardware
from profiler.core.paths import default_bundle_root
from profiler.core.registry import load_model

V32, GLM, M3 = "deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5", "MiniMaxAI/MiniMax-M3"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The public tables in the package's layout; products and plain attention, which are not among them, made up."""
    folder = public_tables.systems(tmp_path_factory.mktemp("aic") / "systems")
    moe = folder / "data/h200_sxm/moe/vllm/0.24.0/moe_perf.csv"
    (folder / "data/rtx_pro_6000_server/moe/vllm/0.24.0").mkdir(parents=True)
    shutil.copy(moe, folder / "data/rtx_pro_6000_server/moe/vllm/0.24.0/moe_perf.csv")
    return folder


def run(root: Path, model: str, system: str = "h200_sxm", **changed: object) -> Imported:
    return convert(Request(system, model, "vllm", **changed), root)  # type: ignore[arg-type]


def ms(found: Imported, tp: int, name: str, chunk: int = 0, context: int = 0, requests: int = 0, kv: int = 0) -> float:
    rows = found.tables[tp, "attention"].rows()
    (us,) = (row[6] for row in rows if row[:5] == (name, chunk, context, requests, kv))
    return float(us) / 1e3


def test_decode_modules_of_deepseek_v32_and_glm_5(root: Path) -> None:
    """Figures read from the same tables by others, milliseconds per layer. Keys are the cached ones and the new one."""
    v32 = run(root, V32, kv_dtype="fp8")
    assert ms(v32, 8, "dsa_module", requests=32, kv=65537) == pytest.approx(0.313, abs=5e-4)
    assert ms(v32, 1, "dsa_module", requests=128, kv=131073) == pytest.approx(1.088, abs=5e-4)
    bf16 = run(root, V32)
    assert ms(bf16, 8, "dsa_module", requests=8, kv=65537) == pytest.approx(0.273, abs=6e-4)
    assert ms(bf16, 1, "dsa_module", chunk=16384) == pytest.approx(28.72, abs=5e-3)
    assert ms(bf16, 8, "dsa_module", chunk=8192) == pytest.approx(6.750, abs=5e-4)


def test_decode_and_prefill_modules_of_minimax_m3(root: Path) -> None:
    h200, rtx = run(root, M3), run(root, M3, "rtx_pro_6000_server")
    assert ms(h200, 8, "msa_module", requests=128, kv=131072) == pytest.approx(1.063, abs=5e-4)
    assert ms(h200, 1, "msa_module", chunk=8192) == pytest.approx(6.270, abs=5e-4)
    assert ms(rtx, 1, "msa_module", requests=32, kv=131072) == pytest.approx(1.010, abs=5e-4)
    assert ms(rtx, 1, "msa_module", chunk=8192) == pytest.approx(10.85, abs=5e-3)
    # These prefills are timed in a CUDA graph: short ones are what the device needs.
    assert "at_launch_floor" not in h200.changes


def test_our_cache_sizes_not_theirs(root: Path) -> None:
    """Theirs is 122,880 bytes per token for MiniMax-M3 (no index cache) and 640 per row for fp8 latents."""
    caches = run(root, M3).meta["kv"]["caches"]
    layers = {"gqa_kv": 60, "index_keys": 57}
    assert sum(one["bytes_per_token_layer"] * layers[one["name"]] for one in caches) == 137_472
    fp8 = run(root, V32, kv_dtype="fp8").meta["kv"]["caches"]
    assert 61 * sum(one["bytes_per_token_layer"] for one in fp8) == 48_068


def test_a_prefix_makes_a_chunk_dearer_as_another_engine_measured(root: Path) -> None:
    """SGLang's table of the same module has a prefix axis: 4,096 tokens take 5.77 ms behind none and 14.98 behind 128k
    tokens, 2.6 times as long. vLLM's table has no such rows; the derived ones must show the same growth."""
    found = run(root, V32, extend_context_tokens=135168)
    ratio = ms(found, 1, "dsa_module", 4096, 131072) / ms(found, 1, "dsa_module", 4096)
    assert ratio == pytest.approx(14.98 / 5.77, rel=0.15)


def measured() -> Bundle:
    return read_bundle(find_bundle(default_bundle_root(), "H200", V32, "fp8"))


def imported_bundle(root: Path, folder: Path, model: str = V32, system: str = "h200_sxm", **changed: object) -> Bundle:
    found = run(root, model, system, **changed)
    return read_bundle(write_bundle(folder, found.meta, found.tables))


def test_modules_against_the_kernels_that_we_measured(root: Path, tmp_path: Path) -> None:
    """Derived contexts and corrected short chunks against measured ones, kernels of each layer summed."""
    theirs = imported_bundle(root, tmp_path, extend_context_tokens=147456)
    ratios = compare(theirs, measured(), load_model(V32))
    long = [
        one.ratio
        for one in ratios
        if one.kernel == "dsa_module" and one.phase == "prefill" and one.key[0] >= 1024 and one.key[1] >= 4096
    ]
    assert len(long) > 150
    assert sorted(long)[len(long) // 2] == pytest.approx(0.94, abs=0.05)
    assert min(long) > 0.75 and max(long) < 1.1
    decode = [one for one in summarise(ratios) if one.kernel == "dsa_module" and one.phase == "decode"]
    # Their modules take 0.10 to 0.16 ms longer whatever the batch, which weighs most in small ones.
    assert all(0.4 < one.p50 < 0.7 and one.of_sums < 0.75 for one in decode)


def test_corrected_expert_load_agrees_with_a_model_without_groups(root: Path) -> None:
    """Two ways to the time of DeepSeek-V3.2's experts per pair must meet where one takes over from the other: its own
    rows, keyed by the load that the tied groups caused, and GLM-5's, scaled by the hidden size. As they stand the
    tables are 5 times apart at ep 8. At ep 64, 14.7 times, a rank also moves many tokens that it has no expert for, and
    the corrected rows do not continue the others.
    """
    found = run(root, V32)
    rows = list(found.tables[1, "moe"].rows())
    for ep in (4, 8, 16):
        own = sorted((float(row[4]), float(row[5])) for row in rows if row[1] == ep)
        scaled = [point for point in own if point[0] <= 16384 * 8 / ep]
        corrected = [point for point in own if point[0] > 16384 * 8 / ep]
        (pairs, last), (next_pairs, first) = scaled[-1], corrected[0]
        assert first / next_pairs == pytest.approx(last / pairs, rel=0.25)

    assert not any(row[1] == 64 and row[2] > 16384 for row in rows)
    assert found.changes["experts_load_corrected"] and found.changes["experts_grouped_dropped"]


def test_projection_of_minimax_m3_from_h200_to_rtx_pro_6000(root: Path, tmp_path: Path) -> None:
    """Modules measured on both cards: the median within 30 %, four in five within a factor of 2."""
    h200, rtx = (imported_bundle(root, tmp_path, M3, system) for system in ("h200_sxm", "rtx_pro_6000_server"))
    check = projection.error_band(h200, rtx, load_hardware("H200"), load_hardware("RTXPRO6000"))
    bands = {band.phase: band for band in check.bands if band.kernel == "msa_module"}
    assert set(bands) == {"prefill", "decode"}
    for band in bands.values():
        assert band.rows > 500 and 0.7 < band.p50 < 1.3 and band.p10 > 0.5 and band.p90 < 2.0
