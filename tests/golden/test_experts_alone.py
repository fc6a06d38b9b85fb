"""Shots of experts alone on an H200: the shipped slices are theirs, and what docs/validation.md says of them."""

import csv
import subprocess
import sys
from collections.abc import Mapping
from statistics import median

import pytest

from profiler.core.bundle import read_bundle
from profiler.core.paths import data_root, default_bundle_root
from profiler.core.registry import load_model

ROOT = data_root()
V32 = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
BUNDLES = default_bundle_root() / "H200" / V32.name

Row = Mapping[str, str]


@pytest.fixture(scope="module")
def shots() -> list[Row]:
    script = ROOT / "tests" / "perf" / "expert_shots.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    return list(csv.DictReader(done.stdout.splitlines(), delimiter="\t"))


def per_expert(shots: list[Row], ep: int, tokens: int, skew: str = "0.0") -> float:
    (found,) = [s for s in shots if (s["ep"], s["tokens"], s["skew"]) == (str(ep), str(tokens), skew)]
    return float(found["per expert"])


@pytest.mark.parametrize("variant", ["fp8", "fp8-kvfp8_ds_mla"])
def test_the_shipped_slices_are_those_of_the_samples(shots: list[Row], variant: str) -> None:
    columns = read_bundle(BUNDLES / variant).table(1, "moe").columns
    names = ("ep", "tokens", "activated_experts", "local_pairs", "time_us")
    shipped = {row[:4]: row[4] for row in zip(*(columns[name] for name in names), strict=True)}
    keys = ("ep", "tokens", "experts", "pairs")
    measured = {tuple(int(shot[key]) for key in keys): float(shot["us"]) for shot in shots if shot["ep"] != "1"}
    assert len(measured) == sum(key[0] > 1 for key in shipped) == 196
    for key, us in measured.items():
        assert shipped[key] == pytest.approx(us, abs=0.1)


def test_the_kernel_takes_as_long_in_a_slice_as_with_all_experts_for_as_many_reached(shots: list[Row]) -> None:
    for together, ep, tokens in (((1, 1), 4, 4), ((1, 2), 4, 9), ((1, 16, "1.5"), 4, 16), ((1, 16), 2, 64)):
        assert per_expert(shots, ep, tokens) == pytest.approx(per_expert(shots, *together), rel=0.06)


def test_tiles_go_by_the_tokens_of_the_group(shots: list[Row]) -> None:
    steps = {ep: per_expert(shots, ep, 65) / per_expert(shots, ep, 64) for ep in (1, 2, 4, 8, 16)}
    assert all(1.1 < steps[ep] < 1.34 for ep in (1, 2, 4, 16)), "vLLM's default tiles"
    assert steps[8] == pytest.approx(1.0, abs=0.03), "a tuned file, whose tiles change from 57 tokens on"
    assert per_expert(shots, 8, 64) / per_expert(shots, 8, 48) == pytest.approx(1.10, abs=0.02)
    assert per_expert(shots, 32, 32) / per_expert(shots, 16, 17) == pytest.approx(1.58, abs=0.02), "five experts each"


def test_all_experts_together_take_in_a_pass_what_they_take_alone(shots: list[Row]) -> None:
    """17 and 65 tokens have no pass but one of a prompt without context, whose draw is no average one."""
    ratios = [float(shot["in passes"]) for shot in shots if shot["in passes"] and int(shot["tokens"]) <= 512]
    assert len(ratios) == 18 and 0.965 < median(ratios) < 0.985
