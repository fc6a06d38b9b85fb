"""Writes example_trace.jsonl: `python workloads/generate_example.py > workloads/example_trace.jsonl`.

200 requests with Poisson arrivals, 4 per second: short chat, assistants that share a system prompt (the only rows with
token ids), prompts around 2,048 tokens, where sparse attention starts to select, and long documents.
"""

import json
import math
import random
import sys
from typing import Any

SEED = 20
REQUESTS_PER_S = 4.0
KINDS = {"chat": 90, "assistant": 40, "around_topk": 30, "document": 30, "long_document": 10}
SYSTEM_PROMPT_TOKENS = 256
VOCABULARY = 90_000


def rows() -> list[dict[str, Any]]:
    draw = random.Random(SEED)
    system_prompts = [_ids(draw, SYSTEM_PROMPT_TOKENS) for _ in range(2)]
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    draw.shuffle(kinds)
    result = []
    arrival_s = 0.0
    for kind in kinds:
        arrival_s += -math.log(1.0 - draw.random()) / REQUESTS_PER_S
        result.append({"arrival_time_ns": round(arrival_s * 1e9), **_lengths(kind, draw, system_prompts)})
    return result


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def _lengths(kind: str, draw: random.Random, system_prompts: list[list[int]]) -> dict[str, Any]:
    if kind == "chat":
        return {"input_toks": draw.randint(20, 900), "output_toks": draw.randint(40, 500)}
    if kind == "assistant":
        ids = system_prompts[draw.randrange(2)] + _ids(draw, draw.randint(16, 100))
        return {"input_toks": len(ids), "output_toks": draw.randint(20, 200), "input_tok_ids": ids}
    if kind == "around_topk":
        return {"input_toks": draw.randint(1_600, 2_600), "output_toks": draw.randint(60, 400)}
    if kind == "document":
        return {"input_toks": draw.randint(4_096, 16_384), "output_toks": draw.randint(100, 500)}
    return {"input_toks": draw.randint(16_384, 30_000), "output_toks": draw.randint(100, 300)}


if __name__ == "__main__":
    for row in rows():
        sys.stdout.write(json.dumps(row, separators=(",", ":")) + "\n")
