"""How fast the replay is: `python tests/perf/bench_replay.py [case ...]`.

Every case runs in a process of its own. The load is drawn with a fixed seed: Poisson arrivals, prompts and outputs from
log-normal lengths with means of about 744 and 188 tokens. Printed are the seconds of the replay inside the process
(without imports, reading and writing), the wall clock of the whole process, steps, and the peak memory.
"""

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "recorded"
sys.path.insert(0, str(ROOT))

# DeepSeek-V3.2 on one H200: 671 GB of weights do not fit it, so the case prices an engine whose experts are all there
# and gives it the KV blocks that one rank of the shipped cluster file has.
CLUSTER = {
    "instances": [
        {
            "model": "deepseek-ai/DeepSeek-V3.2-Exp",
            "hardware": "H200",
            "variant": "fp8",
            "replicas": 1,
            "parallel": {"tp": 1, "dp": 1, "ep": 1},
            "engine": {"max_model_len": 81920, "max_num_batched_tokens": 2048, "max_num_seqs": 256,
                       "num_gpu_blocks": 6000},
        }
    ]
}  # fmt: skip
# Requests per second and rank; ranks, with the seconds for which requests arrive.
LOADS = {"idle": 1 / 32, "loaded": 1 / 2}
RANKS = {2: 3600, 8: 3600, 64: 900}
CASES = {
    "recorded": "the recorded 300-request Llama-3.1-8B run, as the command line runs it",
    "one": "10,000 requests at 8 per second on one engine, more than it can serve",
    "light": "10,000 requests at 2 per second on the same engine, which then keeps up: many small steps",
    "saturated": "2,000 requests at once on one engine with a small cache: preemptions",
    "group": "10,000 requests at 64 per second on 8 data-parallel ranks in lockstep, experts over all",
    "eight": "100,000 requests at 64 per second on 8 engines",
    "million": "1,000,000 requests at 64 per second on 8 engines",
    **{
        f"{load}-{ranks}": f"{seconds} s of {rate * ranks:g} requests per second on {ranks} ranks in lockstep, {load}"
        for load, rate in LOADS.items()
        for ranks, seconds in RANKS.items()
    },
    "day": "a day of 2 requests per second on 64 ranks in lockstep, 172,800 in all, as `trace generate` writes them",
}
LONG = ("million", "day")


def load(count: int, rate: float, seed: int = 0):
    """A trace of `count` requests."""
    from serving.traces import Trace, TraceRequest

    draw = random.Random(seed)
    rows, at = [], 0.0
    for number in range(count):
        at += draw.expovariate(rate)
        lengths = []
        for mean, sigma, most in ((744, 1.0, 16_384), (188, 0.8, 2_048)):
            lengths.append(min(most, max(1, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))))
        rows.append(TraceRequest(str(number), round(at * 1e9), *lengths))
    return Trace("jsonl", tuple(rows))


def cluster_file(folder: Path, **changes) -> Path:
    content = json.loads(json.dumps(CLUSTER))
    instance = content["instances"][0]
    instance["engine"].update(changes.pop("engine", {}))
    instance.update(changes)
    path = folder / "cluster.json"
    path.write_text(json.dumps(content))
    return path


def generated(folder: Path, count: int, rate: float) -> Path:
    """A trace of the same lengths as `load`'s, of the command line's own making."""
    path = folder / "trace.jsonl"
    words = f"trace generate {path} --requests {count} --rate {rate} --seed 0 --prompt lognormal:744:1.0:1:16384"
    command = [sys.executable, "-m", "serving", *words.split(), "--output-tokens", "lognormal:188:0.8:1:2048"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return path


def lockstep(folder: Path, ranks: int) -> Path:
    return cluster_file(folder, parallel={"tp": 1, "dp": ranks, "ep": ranks})


def measure(case: str, folder: Path) -> dict[str, float]:
    from serving.api import replay
    from serving.metrics import summary

    options = {}
    if case == "recorded":
        cluster = SHARED / "RTXPRO6000" / "Llama-3.1-8B" / "config.json"
        trace = SHARED / "workloads" / "sharegpt-llama-3.1-8b-300-sps10.jsonl"
        options["bundle_root"] = SHARED / "perf"
    elif case == "one":
        cluster, trace = cluster_file(folder), load(10_000, 8)
    elif case == "saturated":
        cluster, trace = cluster_file(folder, engine={"num_gpu_blocks": 1200}), load(2_000, 1e6)
    elif case == "light":
        cluster, trace = cluster_file(folder), load(10_000, 2)
    elif case == "group":
        cluster, trace = lockstep(folder, 8), load(10_000, 64)
    elif case == "day":
        cluster, trace = lockstep(folder, 64), generated(folder, 2 * 86_400, 2)
    elif case.startswith(("idle-", "loaded-")):
        name, _, number = case.partition("-")
        ranks, rate = int(number), LOADS[name] * int(number)
        cluster, trace = lockstep(folder, ranks), generated(folder, round(rate * RANKS[ranks]), rate)
    else:
        cluster, trace = cluster_file(folder, replicas=8), load(100_000 if case == "eight" else 1_000_000, 64)
    before = time.perf_counter()
    result = replay(cluster, trace, **options)
    seconds = time.perf_counter() - before
    figures = summary(result)
    ranks = sum(one.parallel.dp for one in result.deployments if one.lockstep) or 1
    return {
        "replay_s": seconds,
        "steps": result.steps,
        "steps_per_s": result.steps / seconds,
        "us_per_rank_step": 1e6 * seconds / result.steps / ranks,
        "requests_per_s": len(result.records) / seconds,
        "preemptions": figures["preemptions"],
        "simulated_s": figures["makespan_ns"] / 1e9,
        "finished": figures["requests"]["finished"],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [case for case in arguments.cases if case not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    if arguments.inside:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(arguments.inside, Path(folder))))
        return
    for case in arguments.cases or [case for case in CASES if case not in LONG]:
        if case == "recorded" and not SHARED.is_dir():
            print(f"{case:10} skipped: {SHARED} is not here")
            continue
        before = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, "--inside", case], capture_output=True, text=True, check=False)
        wall = time.perf_counter() - before
        if done.returncode:
            sys.exit(done.stderr)
        got = json.loads(done.stdout)
        print(
            f"{case:10} replay {got['replay_s']:7.2f} s, process {wall:7.2f} s | {got['steps']:>9,.0f} steps "
            f"({got['steps_per_s']:,.0f}/s, {got['us_per_rank_step']:.1f} us per rank), "
            f"{got['requests_per_s']:,.0f} requests/s, {got['finished']:,} finished, "
            f"{got['preemptions']:,} preemptions, {got['simulated_s']:,.0f} s simulated, {got['peak_mib']:,.0f} MiB "
            f"| {CASES[case]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
