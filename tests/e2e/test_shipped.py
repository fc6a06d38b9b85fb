"""What ships: the README's main command on the shipped data, and every measured bundle."""

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profiler.core.bundle import read_bundle
from profiler.core.errors import ContractError
from profiler.core.even_load import activated_experts, local_pairs
from profiler.core.grid import Outside
from profiler.core.grid_moe import moe_grid
from profiler.core.hardware import load_hardware
from profiler.core.kv import kv_layout
from profiler.core.paths import data_root, default_bundle_root
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from profiler.durations import LocalStep, local_durations
from serving.core.shape import StepShape
from serving.cost import build_cost
from serving.metrics import COLUMNS

ROOT = data_root()
BUNDLES = sorted(path.parent for path in default_bundle_root().rglob("meta.yaml"))
REPLAYED = [path for path in BUNDLES if path.name.endswith("-replay")]
SERVED = [path for path in BUNDLES if path not in REPLAYED]


def readme_command() -> list[str]:
    """Arguments of `python -m serving` in the README's first command."""
    block = re.search(r"<!-- run command -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    return shlex.split(block[1].replace("\\\n", " ").split("-m serving", 1)[1])


def run_readme(output: Path) -> str:
    arguments = readme_command()
    arguments[arguments.index("--output") + 1] = str(output)
    done = subprocess.run(
        [sys.executable, "-m", "serving", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_main_command_replays_the_example_on_measured_tables(tmp_path: Path) -> None:
    shown = run_readme(tmp_path / "run.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run.csv").read_text())))
    trace = [json.loads(line) for line in (ROOT / "workloads" / "example_trace.jsonl").read_text().splitlines()]
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["output_tokens"]) for row in rows] == [row["output_toks"] for row in trace]
    assert {row["outcome"] for row in rows} == {"finished"}
    assert {row["instance_id"] for row in rows} == {str(rank) for rank in range(8)}
    assert "measured: H200/fp8, vllm 0.26.0" in shown
    run_readme(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "run.csv").read_bytes()


def named(paths: list[Path]) -> dict[str, Any]:
    """Arguments of parametrize for bundles, with readable names."""
    return {
        "argnames": "path",
        "argvalues": paths,
        "ids": [str(one.relative_to(default_bundle_root())) for one in paths],
    }


@pytest.mark.parametrize(**named(SERVED))
def test_a_measured_bundle_prices_every_component_of_its_model(path: Path) -> None:
    bundle = read_bundle(path)
    meta = bundle.meta
    spec, hardware = load_model(str(meta["model"])), load_hardware(str(meta["hardware"]))
    layout = kv_layout(spec, Parallel(), hardware.architecture, str(meta["kv"]["layout"]))
    degrees = set(bundle.table(1, "moe").columns["ep"]) if spec.moe else set()
    for tp in sorted({tp for tp, _ in bundle.tables}):
        parallel = Parallel(tp=tp, ep=tp) if tp > 1 else Parallel(dp=8, ep=8) if 8 in degrees else Parallel()
        cost = build_cost(
            bundle=bundle, spec=spec, parallel=parallel, hardware=hardware, kv=layout, max_num_batched_tokens=8192
        )
        decode = StepShape((), 32, 32 * 5000, 5000, 32 * 2048, 32)
        mixed = StepShape(((1000, 0), (512, 30000)), 32, 32 * 5000, 5000, 32 * 2048, 34)
        short = StepShape(((1000, 0), (600, 300)), 0, 0, 0, 0, 2)
        for shape in (decode, mixed, short):
            assert cost.step_ns([shape] * parallel.dp) > 0


@pytest.mark.parametrize(**named(SERVED))
def test_an_even_load_of_any_number_of_tokens_is_inside_the_tables_of_experts(path: Path) -> None:
    bundle = read_bundle(path)
    moe = load_model(str(bundle.meta["model"])).moe
    for (tp, category), table in bundle.tables.items():
        if category != "moe" or moe is None:
            continue
        most: dict[int, int] = {}
        for ep, tokens in zip(table.columns["ep"], table.columns["tokens"], strict=True):
            most[int(ep)] = max(most.get(int(ep), 0), int(tokens))
        for ep, last in most.items():
            grid = moe_grid(table, "experts", ep, moe.num_experts // ep, Outside(f"tp{tp} ep {ep}", "-"))
            for tokens in (*range(1, 513), *range(513, last, 1_021), last):
                assert grid.at(local_pairs(moe, ep, tokens), activated_experts(moe, ep, tokens)) > 0


@pytest.mark.parametrize(**named(REPLAYED))
def test_a_bundle_for_replay_prices_steps_and_is_refused_by_serving(path: Path) -> None:
    bundle = read_bundle(path)
    spec = load_model(str(bundle.meta["model"]))
    steps = [LocalStep(prefills=((8192, 0),)), LocalStep(decode_keys=(4096,) * 32)]
    assert all(step.us > 0 and step.parts["dsa_attention_tail"] > 0 for step in local_durations(bundle, spec, steps))
    with pytest.raises(ContractError, match="replay"):
        build_cost(
            bundle=bundle,
            spec=spec,
            parallel=Parallel(),
            hardware=load_hardware(str(bundle.meta["hardware"])),
            max_num_batched_tokens=8192,
        )


def test_the_native_module_takes_as_long_split_by_kernel_as_whole() -> None:
    """Two acquisitions of the same kernels on one card, in different order: the whole model on one GPU."""
    root = default_bundle_root() / "H200" / "deepseek-ai" / "DeepSeek-V3.2-Exp"
    spec = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
    split = build_cost(
        bundle=read_bundle(root / "fp8-kvfp8_ds_mla-native"),
        spec=spec,
        parallel=Parallel(),
        hardware=load_hardware("H200"),
        max_num_batched_tokens=8192,
    )
    whole = read_bundle(root / "fp8-kvfp8_ds_mla-native-replay")
    decode = StepShape((), 32, 32 * 4096, 4096, 32 * 2048, 32)
    prefill = StepShape(((8192, 0),), 0, 0, 0, 0, 1)
    steps = [LocalStep(decode_keys=(4096,) * 32), LocalStep(prefills=((8192, 0),))]
    for shape, local in zip((decode, prefill), local_durations(whole, spec, steps), strict=True):
        assert sum(line.us for line in split.explain([shape])) == pytest.approx(local.us, rel=0.03)


@pytest.mark.parametrize(("parallel", "ranks"), [(Parallel(tp=8), 1), (Parallel(dp=8), 8)], ids=["tp8", "dp8"])
def test_divided_experts_are_those_of_all_ranks_of_the_group(parallel: Parallel, ranks: int) -> None:
    """Without expert parallelism eight GPUs cut each expert in eight, whether they are one engine or eight."""
    spec = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
    bundle = read_bundle(default_bundle_root() / "H200" / spec.name / "fp8")
    cost = build_cost(
        bundle=bundle, spec=spec, parallel=parallel, hardware=load_hardware("H200"), max_num_batched_tokens=8192
    )
    each = 256 // ranks
    shapes = [StepShape((), each, each * 4096, 4096, each * 2048, each)] * ranks
    lines = {line.component: line.us for line in cost.explain(shapes)}
    columns = bundle.tables[8, "moe"].columns
    (us,) = (us for n, us in zip(columns["tokens"], columns["time_us"], strict=True) if n == 256)
    assert isinstance(us, float) and lines["experts"] == pytest.approx(58 * us, rel=1e-4)
    assert ("all_gather experts" in lines) == (ranks > 1)
    assert ("all_reduce mlp" in lines) == (ranks == 1)


def test_there_is_a_measured_bundle() -> None:
    assert BUNDLES
