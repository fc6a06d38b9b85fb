"""`python -m profiler profile` end to end: the reference engine measures this CPU, the bundle is read back."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from profiling import SMALL, small_root

from profiler.__main__ import main
from profiler.core.bundle import Bundle, read_bundle
from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.kv import kv_layout
from profiler.core.registry import load_model
from profiler.core.types import Parallel

pytest.importorskip("torch")

V32 = "deepseek-ai/DeepSeek-V3.2-Exp"


def profile(*arguments: str) -> None:
    main(["profile", *arguments], standalone_mode=False)


def in_a_process(*arguments: str) -> "subprocess.CompletedProcess[str]":
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-m", "profiler", "profile", *arguments],
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"COLUMNS": "200"},
        timeout=300,
        check=False,
    )


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Arguments of the small model with a tiny grid, into a folder of the test."""
    root = small_root(tmp_path / "models")
    return [
        *(SMALL, "--hardware", "CPU", "--grid", "tiny", "--ep", "1,4", "--repeats", "2", "--warmup", "0"),
        *("--model-config-root", str(root), "--out-root", str(tmp_path / "perf")),
    ]


def bundle_of(tmp_path: Path, variant: str = "bf16") -> Bundle:
    return read_bundle(tmp_path / "perf" / "CPU" / SMALL / variant)


def test_a_model_is_measured_and_its_bundle_read_back(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = tmp_path / "s.csv.gz"
    profile(*small, "--skip-skew", "--save-samples", str(samples))
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == str(tmp_path / "perf" / "CPU" / SMALL / "bf16")
    bundle = bundle_of(tmp_path)
    tables = {category: table for (_, category), table in bundle.tables.items()}
    assert set(tables) == {"attention", "dense", "indexer", "moe", "per_sequence", "sparse_attention"}
    for category, table in tables.items():
        assert f"tp1/{category}.csv: {len(table)} rows" in printed.out
    # 29 dense components at 4 token counts; 8 prefill and 8 decode cells of each kernel; two expert slices.
    assert len(tables["dense"]) == 4 * len(tables["dense"].names)
    assert len(tables["indexer"]) == 2 * 16 and len(tables["sparse_attention"]) == 16
    assert set(tables["moe"].columns["ep"]) == {1, 4}
    assert set(tables["attention"].names) == {"mla_dense_prefill"}
    meta = bundle.meta
    assert (meta["hardware"], meta["engine"]["name"], meta["weights"]) == ("CPU", "reference", "bf16")
    assert meta["gpu"]["name"] == "CPU" and meta["gpu"]["cores"] == os.cpu_count()

    assert meta["command"] == (
        f"python -m profiler profile {SMALL} --hardware CPU --ep 1,4 --engine auto --grid tiny --kv-cache-dtype auto "
        "--max-num-batched-tokens 8192 --max-num-seqs 256 --warmup 0 --repeats 2 --skip-skew"
    )

    # The samples alone give the same tables again, without measuring.
    profile(*small[:-1], str(tmp_path / "again"), "--skip-skew", "--from-samples", str(samples))
    again = read_bundle(tmp_path / "again" / "CPU" / SMALL / "bf16")
    assert again.meta == meta


def test_unequal_batches_are_fitted_per_kernel(small: list[str], tmp_path: Path, capsys: Any) -> None:
    profile(*small, "--categories", "indexer,skew", "--max-model-len", "2200")
    bundle = bundle_of(tmp_path)
    assert {kernel for _, kernel in bundle.skew} == {"index_scores", "index_topk"}
    assert all(0.0 <= alpha <= 1.0 for points in bundle.skew.values() for _, _, alpha in points)
    skew = bundle.table(1, "skew").columns
    assert set(skew["use"]) == {"fit", "held_out", "joint", "prefills"}
    assert "1x2048 2x683 1x682" in skew["decodes"]
    report = bundle.meta["grid"]["tp1/skew"]["fit"]
    assert set(report["index_topk"]) == {"decode", "joint", "prefills"}
    assert all(report["index_topk"][kind]["batches"] for kind in ("decode", "joint", "prefills"))
    assert "unequal batches, index_topk, decode: " in capsys.readouterr().out


def test_the_recorded_layout_is_the_one_that_serving_sizes(small: list[str], tmp_path: Path) -> None:
    profile(*small, "--categories", "per_sequence", "--kv-cache-dtype", "fp8")
    kv = bundle_of(tmp_path, "bf16-kvfp8_ds_mla").meta["kv"]
    layout = kv_layout(load_model(SMALL, tmp_path / "models"), Parallel(), "sm90", "fp8")
    assert (kv["layout"], kv["block_tokens"]) == (layout.layout, layout.block_tokens)
    assert {c["name"]: c["bytes_per_token_layer"] for c in kv["caches"]} == {
        c.name: c.bytes_per_token_layer for c in layout.caches
    }


def test_full_width_head_and_experts_are_measured(tmp_path: Path) -> None:
    """DeepSeek-V3.2 at its own widths: a head of 1.85 GB and 8 of 256 experts, the slice of one rank of 32."""
    profile(
        *(V32, "--hardware", "CPU", "--grid", "tiny", "--ep", "32", "--categories", "per_sequence,moe"),
        *("--repeats", "1", "--warmup", "0", "--out-root", str(tmp_path)),
    )
    bundle = read_bundle(tmp_path / "CPU" / V32 / "bf16")
    moe = bundle.table(1, "moe").columns
    assert set(moe["ep"]) == {32} and max(float(a) for a in moe["activated_experts"]) <= 8
    head = bundle.table(1, "per_sequence")
    times = [float(t) for n, t in zip(head.columns["layer"], head.columns["time_us"], strict=True) if n == "lm_head"]
    # 1.85 GB of weights cannot be read in less than 1 ms on any machine that runs this test.
    assert min(times) > 1_000


def test_a_dry_run_counts_shots_and_measures_nothing(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile(*small, "--dry-run", "--tp", "1,2")
    lines = capsys.readouterr().out.splitlines()
    assert "tp1/indexer: 16 shots" in lines and "tp2/sparse_attention: 16 shots" in lines
    # Of DSA, the indexer is measured at one degree for all.
    assert not any(line.startswith("tp2/indexer") for line in lines)
    assert not any(line.startswith("tp2/moe") for line in lines)
    assert not (tmp_path / "perf").exists()


def test_an_expert_slice_without_memory_withholds_its_table(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from profiler.engines.reference_support import bench

    # Enough for a head of 0.5 MB, not for 16 experts of 1.5 MB in all.
    monkeypatch.setattr(bench, "free_bytes", lambda device: 1_500_000)
    with pytest.raises(
        AcquisitionError, match=r"tp1/moe: .*out of memory: weights of w13 of 16 of 16 experts"
    ) as error:
        profile(*small, "--categories", "per_sequence,moe")
    assert error.value.exit_code == 6
    assert {category for _, category in bundle_of(tmp_path).tables} == {"per_sequence"}


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"model": "deepseek-ai/DeepSeek-V3.2-Epx"}, 2, "did you mean 'deepseek-ai/DeepSeek-V3.2-Exp'"),
        ({"--hardware": "H20000"}, 2, "unknown GPU 'H20000'"),
        ({"--hardware": "RTXPRO6000", "--engine": "vllm"}, 6, "--hardware RTXPRO6000"),
        ({"--engine": "vllm"}, 6, "--hardware CPU is measured by --engine reference"),
        ({"--categories": "indexr"}, 2, "did you mean 'indexer'"),
        ({"model": "MiniMaxAI/MiniMax-M3", "--hardware": "H200", "--block-size": "16"}, 2, "a block size of 128"),
        ({"--tp": "two"}, 2, "'two' is not a comma-separated list of integers"),
        ({"--from-samples": "no-such-file.gz"}, 2, "no-such-file.gz"),
    ],
)
def test_bad_input_ends_with_one_message_and_its_exit_code(
    tmp_path: Path, changes: dict[str, str], code: int, message: str
) -> None:
    options = {"--hardware": "CPU", "--grid": "tiny", "--out-root": str(tmp_path)} | changes
    model = options.pop("model", V32)
    done = in_a_process(model, *[part for pair in options.items() for part in pair])
    assert done.returncode == code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not done.stdout and not list(tmp_path.iterdir())


def test_exclusive_options_are_refused(small: list[str], tmp_path: Path) -> None:
    cases: list[tuple[list[str], str]] = [
        (["--resume"], "--resume goes with --save-samples"),
        (["--samples-only"], "--samples-only goes with --save-samples"),
        (["--from-samples", "a", "--save-samples", "b"], "give one of the two"),
    ]
    for extra, message in cases:
        with pytest.raises(ConfigError, match=message):
            profile(*small, *extra)


def test_samples_are_continued_only_on_request(small: list[str], tmp_path: Path, capsys: Any) -> None:
    samples = tmp_path / "s.csv.gz"
    arguments = [*small, "--categories", "per_sequence", "--save-samples", str(samples)]
    profile(*arguments, "--samples-only")
    assert capsys.readouterr().out == f"{samples}: 3 shots\n"
    assert not (tmp_path / "perf").exists()
    with pytest.raises(ConfigError, match="--resume continues it"):
        profile(*arguments)
    size = samples.stat().st_size
    profile(*arguments, "--resume")
    # Only the start of a run was added: all shots were there.
    assert samples.stat().st_size < 2 * size
    assert {category for _, category in bundle_of(tmp_path).tables} == {"per_sequence"}


def test_coverage_of_this_processor_is_complete(small: list[str], tmp_path: Path, capsys: Any) -> None:
    """Live: every representative batch runs, and every kernel of it has a component."""
    arguments = [part for part in small if part not in ("--grid", "tiny")]
    arguments = arguments[: arguments.index("--out-root")]
    main(["coverage", *arguments, "--max-num-batched-tokens", "48", "--format", "json"], standalone_mode=False)
    (report,) = json.loads(capsys.readouterr().out)
    assert report["complete"] is True and report["hardware"] == "CPU"
    assert {kind["kind"] for kind in report["kinds"]} == {"prefill", "dense prefill", "decode", "mixed", "experts"}
    for kind in report["kinds"]:
        assert kind["device_us"] > 0 and kind["bound_us"] == pytest.approx(kind["device_us"], abs=0.01)
