"""Predictions of recordings that have not been made: the shipped traces on the first layers of a model.

    P=tests/recorded/predictions-of-recordings
    python tests/perf/predict_recordings.py zai-org/GLM-5-FP8 --layers 6 --out $P/GLM-5-FP8-6L

One JSON per recording of configs/queue/h200-recordings-*.yaml, with the engine's settings, the memory that is to be
expected and the times that the requests will see, from the shipped tables and the host's times of the GPU's file.
queued_to_first_token_ms is what a recording has as TTFT: it counts from when the scheduler took a request in. `serving
validate` compares the recordings themselves, step by step; this is what was said before.
"""

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

TRACES = ROOT / "tests" / "recorded" / "traces"
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY"}
PIECES = [1, 2, 4, *range(8, 65, 8), 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
# Name of a recording: its trace, and what its engine has otherwise than the others.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "graphs-heldout": ("heldout", {**GRAPHS, "max_num_seqs": 48}),
    "graphs-chat": ("chat", GRAPHS),
    "graphs-mixed": ("mixed", GRAPHS),
    "graphs-saturated": ("saturated", {**GRAPHS, "kv_tokens": 57_600}),
    "graphs-prefixes": ("prefixes", GRAPHS),
    "graphs-long": ("long", GRAPHS),
    "eager-chat": ("chat", {"enforce_eager": True}),
    "eager-mixed": ("mixed", {"enforce_eager": True}),
    "sync-mixed": ("mixed", {**GRAPHS, "async_scheduling": False}),
    "single-stream-mixed": ("mixed", {**GRAPHS, "shared_experts_stream": False}),
}
# vLLM's default where a model's layers are compiled, else graphs of parts of layers.
MIXED = {
    "engine": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
    "piecewise": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": PIECES},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument(
        "--mixed", choices=sorted(MIXED), default="engine", help="how steps with prefills run in graphs"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cases = CASES | {f"{options.mixed}-{trace}": (trace, MIXED[options.mixed]) for trace in ("chat", "mixed")}
    for name, (trace, changes) in cases.items():
        found = predicted(options, trace, changes)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}.json").write_text(json.dumps({"recording": name, **found}, indent=1) + "\n")
        ttft, tpot = found["queued_to_first_token_ms"], found["tpot_ms"]
        print(
            f"| {name} | {found['num_gpu_blocks']:,} | {found['makespan_s']:.1f} | {ttft['mean']:,.1f} | "
            f"{ttft['p99']:,.1f} | {tpot['mean']:.1f} | {tpot['p99']:.1f} | {found['preemptions']} |",
            flush=True,
        )
    return 0


def predicted(options: argparse.Namespace, trace: str, changes: dict[str, Any]) -> dict[str, Any]:
    from full_size_run import prediction_of

    from serving.api import replay

    engine = {
        "max_model_len": 135_168,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "kv_cache_dtype": "auto",
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
        "async_scheduling": True,
        "shared_experts_stream": True,
        **changes,
    }
    if tokens := engine.pop("kv_tokens", 0):
        engine["num_gpu_blocks"] = tokens // options.block_tokens
    instance = {"model": options.model, "layers": options.layers, "hardware": "H200", "engine": engine}
    with tempfile.TemporaryDirectory() as folder:
        path, requests = Path(folder) / "config.json", TRACES / f"{trace}.jsonl"
        path.write_text(json.dumps({"instances": [instance]}))
        result = replay(path, requests, keep_itl=True)
        found = prediction_of(result, path, requests)
    found["queued_to_first_token_ms"] = queued_to_first_token_ms(result)
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"made_at": made, "trace_name": trace, "cluster": {"instances": [instance]}, **found}


def queued_to_first_token_ms(result: Any) -> dict[str, float]:
    from profiler.timing import percentile

    waits = [(one.first_token_ns - one.queued_ns) / 1e6 for one in result.records]
    shares = {f"p{percent}": percentile(waits, percent) for percent in (50, 90, 99)}
    return {name: round(value, 3) for name, value in {"mean": sum(waits) / len(waits), **shares}.items()}


if __name__ == "__main__":
    sys.exit(main())
