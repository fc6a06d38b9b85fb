"""Throughput against load when the KV cache runs full: `python tests/perf/kv_saturation.py`.

The shipped 8 x H200 cluster with 1,200 KV blocks per rank; N requests at once of 3,000 to 5,000 prompt tokens and 1,500
to 2,500 output tokens each (seed 1). Prints output tokens per second, preemptions and mean TPOT per N.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

import serving  # noqa: E402
from serving.metrics import summary  # noqa: E402

LOADS = (40, 60, 80, 100, 120, 160, 240)


def main() -> None:
    cluster = yaml.safe_load((ROOT / "configs" / "cluster" / "h200-8x-deepseek-v32-dp8-ep8.yaml").read_text())
    cluster["instances"][0]["engine"]["num_gpu_blocks"] = 1200
    print("requests  output tokens/s  preemptions  TPOT mean ms")
    with tempfile.TemporaryDirectory() as scratch:
        file, trace = Path(scratch, "cluster.yaml"), Path(scratch, "trace.jsonl")
        file.write_text(yaml.safe_dump(cluster))
        for load in LOADS:
            source = random.Random(1)
            rows = (
                {"input_toks": source.randint(3000, 5000), "output_toks": source.randint(1500, 2500),
                 "arrival_time_ns": index * 1000}
                for index in range(load)
            )  # fmt: skip
            trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
            found = summary(serving.replay(file, trace))
            tpot_ms = found["tpot_ns"]["mean"] / 1e6
            print(f"{load:8d}  {found['output_tokens_per_s']:15.0f}  {found['preemptions']:11d}  {tpot_ms:12.1f}")


if __name__ == "__main__":
    main()
