"""`python -m serving explain` and `routing` as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profiler.core.paths import data_root

ROOT = data_root()
CLUSTER = "configs/cluster/h200-8x-deepseek-v32-dp8-ep8.yaml"


def run(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "serving", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == expect, done.stderr
    return done


def test_tree_json_and_page_of_one_step(tmp_path: Path) -> None:
    shown = run("explain", "--cluster-config", CLUSTER, "--batch", "32x4096").stdout
    assert "58 x mla-full-moe" in shown and "measured, H200/fp8, vllm 0.26.0" in shown
    found = json.loads(run("explain", "--cluster-config", CLUSTER, "--batch", "32x4096", "--format", "json").stdout)
    assert found["tree"]["name"] == "step"
    assert sum(child["us"] for child in found["tree"]["children"]) > 0.999 * found["step_us"]
    target = tmp_path / "step.html"
    done = run(
        "explain", "--cluster-config", CLUSTER, "--batch", "32x4096", "--format", "html", "--output", str(target)
    )
    assert done.stdout == "" and target.read_text().startswith("<!doctype html>")


def test_bad_batches_end_with_one_message() -> None:
    done = run("explain", "--cluster-config", CLUSTER, "--batch", "32*4096", expect=2)
    assert done.stdout == "" and "'32*4096' is not a batch" in done.stderr and "Traceback" not in done.stderr
    done = run("explain", "--cluster-config", CLUSTER, "--batch", "3000x4096", expect=3)
    assert "outside its table" in done.stderr
    done = run("explain", "--cluster-config", CLUSTER, "--batch", "1x150000@50000", expect=2)
    assert "a request of 200,000 tokens; deepseek-ai/DeepSeek-V3.2-Exp ends at 163,840" in done.stderr


def test_the_longest_request_leaves_room_for_the_token_that_it_emits() -> None:
    cluster = "configs/cluster/h200-16x-glm-5.2-tp8-dp2-ep16.yaml"
    run("explain", "--cluster-config", cluster, "--batch", "1x1048575")
    done = run("explain", "--cluster-config", cluster, "--batch", "1x1048576", expect=2)
    assert "ends at 1,048,576, the token that the step emits included" in done.stderr


def test_contexts_beyond_the_tables_of_a_kin_ask_for_tables_of_the_model_itself() -> None:
    cluster = "configs/cluster/h200-8x-glm-5.2-fp8-tp8.yaml"
    done = run("explain", "--cluster-config", cluster, "--batch", "1x400000", expect=3)
    assert "of at most 202,752 tokens. " in done.stderr and "Measure the model itself with: " in done.stderr
    assert done.stderr.rstrip().endswith("python -m profiler profile zai-org/GLM-5.2-FP8 --hardware H200 --tp 8")
    done = run("explain", "--cluster-config", CLUSTER, "--instance", "1", "--batch", "1x10", expect=2)
    assert "has instances 0 to 0" in done.stderr


def test_routing_prints_the_exact_and_the_drawn_reach() -> None:
    found = json.loads(
        run("routing", "deepseek-ai/DeepSeek-V3.2", "--ep", "8", "--tokens", "512", "--format", "json").stdout
    )
    assert abs(found["reach_independent_groups"] - 0.453626) < 1e-6
    assert abs(found["loads"][0]["reach"] - 0.4956) < 0.003
    again = run("routing", "deepseek-ai/DeepSeek-V3.2", "--ep", "8", "--tokens", "512", "--format", "csv").stdout
    assert (
        again == run("routing", "deepseek-ai/DeepSeek-V3.2", "--ep", "8", "--tokens", "512", "--format", "csv").stdout
    )
    assert again.splitlines()[0].startswith("tokens,reach,")
    for name in ("tokens", "pairs", "distinct"):
        least, *_, most = found["loads"][0][f"busiest_{name}_p50_p90_p99"]
        assert found["loads"][0][f"mean_{name}"] <= least <= most
        assert f",busiest_{name}_p99" in again.splitlines()[0]
    table = run("routing", "deepseek-ai/DeepSeek-V3.2", "--ep", "8", "--tokens", "512").stdout.splitlines()
    assert [line[35:44].strip() for line in table[2:]] == ["of a rank", "tokens", "pairs", "experts"]


def test_routing_refuses_what_breaks_a_rule(tmp_path: Path) -> None:
    assert "ep is at most 256" in run("routing", "deepseek-ai/DeepSeek-V3.2", "--ep", "300", expect=2).stderr
    assert "did you mean 'zipf'" in run("routing", "zai-org/GLM-5", "--ep", "8", "--gate", "zpf", expect=2).stderr
    counts = tmp_path / "counts.json"
    counts.write_text("[1, 2]")
    done = run("routing", "zai-org/GLM-5", "--ep", "8", "--gate", "histogram", "--counts", str(counts), expect=2)
    assert "2 counts for 256 experts" in done.stderr
    bias = tmp_path / "bias.json"
    bias.write_text("[1, NaN]")
    done = run("routing", "zai-org/GLM-5", "--ep", "8", "--bias", str(bias), expect=2)
    assert "bias.json: the bias has 2 numbers for 256 experts" in done.stderr
    assert "gate even draws nothing" in run("routing", "zai-org/GLM-5", "--ep", "8", "--gate", "even", expect=2).stderr
    assert "has no experts" in run("routing", "meta-llama/Llama-3.1-8B", "--ep", "8", expect=2).stderr


def placements(
    kv_dtype: str, gpus: int = 8, model: str = "deepseek-ai/DeepSeek-V3.2-Exp"
) -> dict[tuple[int, int, int], dict[str, Any]]:
    sizes = ("--gpus", str(gpus), "--max-model-len", "81920", "--pp", "1", "--step-context", "4096")
    done = run("plan", model, "--hardware", "H200", "--kv-dtype", kv_dtype, *sizes, "--format", "json")
    return {(row["tp"], row["dp"], row["ep"]): row for row in json.loads(done.stdout)["placements"]}


@pytest.mark.parametrize("cache", ["bf16", "fp8_ds_mla"])
def test_plan_compares_the_steps_of_placements(cache: str) -> None:
    rows = placements(cache)
    rates = [rows[tp, dp, 8]["decode_tokens_per_s"] for tp, dp in ((1, 8), (2, 4), (4, 2), (8, 1))]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0
    assert rates[-1] < rows[8, 1, 1]["decode_tokens_per_s"] < rates[0], "experts divided over the ranks"


def test_plan_says_which_table_a_placement_lacks() -> None:
    """Nothing was measured at tp 16."""
    rows = placements("bf16", gpus=16)
    assert rows[8, 2, 16]["decode_tokens_per_s"] > 0
    assert "no tables of tp 16, only of tp 1, 2, 4, 8." in rows[16, 1, 16]["step_reason"]


def test_plan_tells_what_has_no_price_once_per_reason() -> None:
    sizes = ("--gpus", "8", "--max-model-len", "65536", "--step-context", "4096")
    many = ("--gpus", "16", *sizes[2:])
    shown = run("plan", "zai-org/GLM-5.2-FP8", "--hardware", "H200", "--pp", "1", *many).stdout
    lacking = [line for line in shown.splitlines() if "no tables of tp 16" in line]
    assert [line.split(": ")[0] for line in lacking] == ["no step of tp 16 pp 1 dp 1 ep 16; tp 16 pp 1 dp 1 ep 1"]
    shown = run("plan", "deepseek-ai/DeepSeek-V3.2", "--hardware", "H200", "--pp", "1", *sizes).stdout
    for split, budget in (("tp 1 pp 1 dp 8 ep 1", 2048), ("tp 2 pp 1 dp 4 ep 1", 4096)):
        (line,) = (line for line in shown.splitlines() if line.startswith(f"no prefill of {split}: the tables end"))
        assert line.endswith(f"; --max-num-batched-tokens {budget} is the most that has a rate")
    shown = run("plan", "deepseek-ai/DeepSeek-V3.2", "--hardware", "B200", "--pp", "1", *sizes).stdout
    assert "no step of any placement: no bundle of" in shown


def test_tables_of_a_model_of_the_same_kernels_price_it_and_are_named() -> None:
    own, kin = placements("bf16"), placements("bf16", model="deepseek-ai/DeepSeek-V3.2")
    assert own == kin
    assert kin[1, 8, 8]["step_tables"] == "H200/deepseek-ai/DeepSeek-V3.2-Exp/fp8, measured"
