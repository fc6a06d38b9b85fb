"""Predictions of recordings to come: one for each that a queue would make, of its trace and its engine's settings."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from profiler.core.load import sha256_of
from profiler.core.paths import data_root

ROOT = data_root()
PREDICTIONS = ROOT / "tests" / "recorded" / "predictions-of-recordings"
PLANS = {
    "GLM-5-FP8-6L": "h200-recordings-glm-5-fp8",
    "MiniMax-M3-8L": "h200-recordings-minimax-m3",
    "GLM-5.2-7L": "h200-recordings-glm-52",
}


def planned(plan: str) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """Recordings of a plan by name: the command's flags with what follows each, and what the trace changes."""
    found = {}
    for job in yaml.safe_load((ROOT / "configs" / "queue" / f"{plan}.yaml").read_text())["jobs"]:
        arguments = shlex.split(" ".join(job["argv"]))
        pairs = list(zip(arguments, [*arguments[1:], ""], strict=True))
        for one in (value for flag, value in pairs if flag == "--dataset"):
            trace, _, changes = one.partition(":")
            found[f"{job['name']}-{Path(trace).stem}"] = (
                dict(pairs),
                dict(change.split("=") for change in changes.split(",") if change),
            )
    return found


@pytest.mark.parametrize("folder", PLANS)
def test_every_planned_recording_has_a_prediction_of_the_same_run(folder: str) -> None:
    plan = planned(PLANS[folder])
    there: dict[str, dict[str, Any]] = {
        path.stem: json.loads(path.read_text()) for path in (PREDICTIONS / folder).glob("*.json")
    }
    assert set(there) == set(plan)
    for name, found in there.items():
        (flags, changes), (instance,) = plan[name], found["cluster"]["instances"]
        engine, trace = instance["engine"], ROOT / "tests" / "recorded" / "traces" / f"{found['trace_name']}.jsonl"
        assert found["trace"]["sha256"] == sha256_of(trace)
        assert (flags["record"], int(flags["--layers"])) == (instance["model"], instance["layers"])
        assert int(flags["--max-model-len"]) == engine["max_model_len"]
        assert int(flags["--max-num-batched-tokens"]) == engine["max_num_batched_tokens"]
        assert int(changes.get("max_num_seqs", flags["--max-num-seqs"])) == engine["max_num_seqs"]
        assert "num_gpu_blocks" not in changes or int(changes["num_gpu_blocks"]) == found["num_gpu_blocks"]
        assert engine["async_scheduling"] == ("--no-async-scheduling" not in flags)
        assert engine["shared_experts_stream"] == ("--single-stream" not in flags)
        assert name.startswith(flags.get("--mode", name))
        assert found["finished"] == found["trace"]["requests"] and found["extrapolated_lookups"] == 0
