"""`python -m serving plan` as a user calls it."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
V32, GLM52, M3 = "deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5.2", "MiniMaxAI/MiniMax-M3"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serving", "plan", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def document(*arguments: str) -> Any:
    result = run(*arguments, "--format", "json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def _processor_s(*arguments: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_starts_fast_and_imports_nothing_heavy() -> None:
    # Of the processor, beside that of click and YAML alone: others may be at work, and hosts differ.
    least = min(_processor_s("-c", "import click, yaml") for _ in range(3))
    assert min(_processor_s("-m", "serving", "plan", "--help") for _ in range(3)) < 5.0 * least
    code = (
        "import sys; from click.testing import CliRunner; from serving.commands.plan import command; "
        "CliRunner().invoke(command, ['--help']); "
        "print([m for m in ('torch', 'pandas', 'numpy', 'vllm', 'pydantic', 'rich') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_keys_and_values_of_the_json() -> None:
    found = document(V32, "--hardware", "NVIDIA H200", "--gpus", "8", "--max-model-len", "81920")
    assert (found["model"], found["hardware"]) == (V32, "H200")
    assert found["kv"]["layout"] == "bf16"
    assert found["kv"]["block_tokens"] == 64
    assert found["kv"]["bytes_per_token_per_rank"] == 78_324
    assert found["kv"]["gqa_bytes_per_token"] == 1_748_992
    assert found["kv"]["caches"] == [
        {"name": "mla_latent", "bytes_per_token_layer": 1152, "layers": 61, "tp_sharded": False},
        {"name": "index_keys", "bytes_per_token_layer": 132, "layers": 61, "tp_sharded": False},
    ]
    nominal = found["weights"]["nominal"]
    assert (nominal["dense_gib"], nominal["experts_gib"]) == pytest.approx((14.257, 611.478), abs=0.001)
    assert nominal["expert_share"] == pytest.approx(0.977, abs=0.0005)
    assert found["weights"]["engine"]["total_gib"] > nominal["dense_gib"] + nominal["experts_gib"]
    for placement in found["placements"]:
        assert {
            "tp",
            "pp",
            "dp",
            "ep",
            "weights_gib",
            "weights_nominal_gib",
            "kv_available_gib",
            "num_gpu_blocks",
            "kv_tokens_per_rank",
            "kv_tokens_total",
            "max_concurrency",
            "fits",
            "reason",
            "suggestion",
            "terms",
            "bytes_per_token_per_rank",
            "launchable",
            "risk",
        } <= set(placement)
        assert sum(placement["terms"].values()) == pytest.approx(found["memory_total_gib"], abs=0.01)
        assert placement["kv_tokens_total"] == placement["dp"] * placement["kv_tokens_per_rank"]
    assert found["largest_safe_dp"] == {"tp": 1, "pp": 1, "dp": 8, "ep": 8}


def test_the_kv_section_is_for_the_given_tp() -> None:
    sizes = {
        tp: document(M3, "--hardware", "H200", "--gpus", str(tp), "--tp", str(tp), "--max-model-len", "8192")["kv"][
            "bytes_per_token_per_rank"
        ]
        for tp in (1, 2, 4, 8)
    }
    assert sizes == {1: 137_472, 2: 76_032, 4: 45_312, 8: 45_312}


def test_a_logged_kv_size_gives_the_logged_blocks() -> None:
    found = document(
        *(GLM52, "--hardware", "GB200", "--gpus", "4", "--tp", "4", "--ep", "4", "--kv-dtype", "fp8"),
        *("--utilization", "0.92", "--max-model-len", "819200", "--available-kv-gib", "50.62"),
    )
    (placement,) = found["placements"]
    assert placement["num_gpu_blocks"] == 17_804
    assert placement["kv_tokens_per_rank"] == 1_139_456
    assert placement["max_concurrency"] == pytest.approx(1.39, abs=0.005)
    assert any("the KV memory is given" in note for note in found["notes"]), "bf16 weights exceed the card"


def test_speculation_adds_caches() -> None:
    found = document(GLM52, "--hardware", "H200", "--gpus", "16", "--kv-dtype", "fp8", "--mtp", "3")
    assert found["kv"]["bytes_per_token_per_rank"] == 54_728
    assert [cache["layers"] for cache in found["kv"]["caches"]] == [79, 22]
    assert document(GLM52, "--hardware", "H200", "--gpus", "16", "--mtp")["kv"]["bytes_per_token_per_rank"] == 93_912


def test_nothing_fits_is_a_result_and_an_error_on_request() -> None:
    arguments = (V32, "--hardware", "RTXPRO6000", "--gpus", "8", "--tp", "1", "--dp", "8", "--ep", "8")
    (placement,) = document(*arguments)["placements"]
    assert placement["fits"] is False
    assert placement["suggestion"] == "16 GPUs as tp 1 pp 1 dp 16 ep 16"
    assert placement["risk"] is None
    demanded = run(*arguments, "--require-fit", "--format", "json")
    assert demanded.returncode == 5
    assert json.loads(demanded.stdout)["placements"] == [placement]
    assert "no placement of" in demanded.stderr and "16 GPUs" in demanded.stderr
    assert run(V32, "--hardware", "RTXPRO6000", "--gpus", "16", "--require-fit").returncode == 0


def test_csv_and_table() -> None:
    arguments = (V32, "--hardware", "H200", "--gpus", "8")
    rows = list(csv.DictReader(io.StringIO(run(*arguments, "--format", "csv").stdout)))
    assert rows[0]["tp"] == "1" and rows[0]["dp"] == "8" and rows[0]["fits"] == "False"
    table = run(*arguments)
    assert table.stdout == run(*arguments).stdout
    assert "78,324" in table.stdout and "1,748,992" in table.stdout and "max-DP" in table.stdout
    assert "utilization 0.9" in table.stdout
    assert "tp 2 pp 1 dp 4 ep 8" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zai-org/GLM-6", "--hardware", "H200", "--gpus", "8"), "did you mean 'zai-org/GLM-5'"),
        ((V32, "--hardware", "H20O", "--gpus", "8"), "did you mean 'H200'"),
        ((V32, "--hardware", "H200", "--gpus", "0"), "gpus is 0"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--tp", "5"), "tp x pp x dp must be 8"),
        ((V32, "--hardware", "H200", "--gpus", "32", "--tp", "32"), "fp8 block width 128"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--block-tokens", "16"), "needs a block size of 64"),
        ((M3, "--hardware", "H200", "--gpus", "8", "--block-tokens", "64"), "needs a block size of 128"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--utilization", "-1"), "utilization is -1"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--available-kv-gib", "0"), "available_kv_gib is 0"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--kv-dtype", "int4"), "unknown KV dtype 'int4'"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--mtp=-1"), "No such option"),
        (("Qwen/Qwen3-32B", "--hardware", "H200", "--gpus", "8", "--mtp", "1"), "no multi-token prediction"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--max-model-len", "200000"), "takes 1 to 163840"),
        ((V32, "--hardware", "H200", "--gpus", "many"), "not a valid integer"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--mtp", "99"), "mtp is 99; it must be between 0 and 32"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--utilization", "nan"), "utilization is nan"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--ep", "3"), "no split of 8 GPUs with ep 3 is legal; for example"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--headroom-gib", "nan"), "headroom_gib is nan"),
        ((V32, "--hardware", "", "--gpus", "8"), "unknown GPU ''. Known"),
        ((V32, "--hardware", "H200", "--gpus", "8", "--model-config-root", "nowhere"), "does not exist"),
        (
            ("meta-llama/Llama-3.1-8B", "--hardware", "H200", "--gpus", "8", "--block-tokens", "1600000000"),
            "block size is 1600000000",
        ),
    ],
)
def test_bad_input_exits_2_with_one_message(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_config_of_the_users_own(tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs/model/deepseek-ai/DeepSeek-V3.json").read_text())
    (tmp_path / "deepseek-ai").mkdir()
    (tmp_path / "deepseek-ai" / "DeepSeek-V3.2.json").write_text(json.dumps(config))
    refused = run(
        *("deepseek-ai/DeepSeek-V3.2", "--hardware", "H200", "--gpus", "8", "--model-config-root", str(tmp_path))
    )
    assert refused.returncode == 2
    assert "is the config of DeepSeek-V3" in refused.stderr
    path = tmp_path / "deepseek-ai" / "plain.json"
    path.write_text(json.dumps(config))
    assert document(str(path), "--hardware", "H200", "--gpus", "8")["kv"]["bytes_per_token_per_rank"] == 70_272


def test_a_split_that_public_engines_cannot_run_is_flagged() -> None:
    """Decode context parallelism with sparse MLA on Hopper (vLLM issue 27544)."""
    found = run(V32, "--hardware", "H200", "--gpus", "8", "--dcp", "8", "--format", "json")
    assert found.returncode == 0
    assert "issue 27544" in found.stderr
    assert any("issue 27544" in note for note in json.loads(found.stdout)["notes"])


@pytest.mark.skipif(shutil.which("script") is None, reason="needs script(1) for a terminal")
@pytest.mark.parametrize("columns", [80, 200])
def test_no_number_is_cut_on_a_terminal(columns: int) -> None:
    command = f"stty cols {columns}; {sys.executable} -m serving plan {V32} --hardware H200 --gpus 8"
    result = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert "\u2026" not in result.stdout
    row = document(V32, "--hardware", "H200", "--gpus", "8")["placements"][0]
    assert f"{row['kv_tokens_total']:,}" in result.stdout
    assert "try max_model_len" in result.stdout
