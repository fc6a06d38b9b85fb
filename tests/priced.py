"""A bundle whose every table follows a closed form, written down a second time here as the expected price."""

import math
from itertools import product
from pathlib import Path

from profiler.core.bundle import Bundle, Table, make_table, read_bundle, write_bundle
from profiler.core.registry import load_model
from profiler.core.stack import fold
from profiler.core.types import Category, Component, ModelSpec

MODEL = "deepseek-ai/DeepSeek-V3.2-Exp"
CAP = 2048
CHUNKS = (1, 16, 256, 1024, 2048, 4096)
CONTEXTS = (0, 1024, 2048, 4096, 65536)
REQUESTS = (1, 8, 64, 256)
KEYS = (1, 64, 2048, 65536)


def weight(name: str) -> float:
    """A factor of its own for every component, so that taking another's table shows."""
    return 1.0 + sum(map(ord, name)) % 97 / 10.0


def token_us(name: str, count: float) -> float:
    return weight(name) * (1.0 + 0.01 * count)


def prefill_us(name: str, chunk: float, context: float) -> float:
    """Linear in chunk and context, hence exact under piecewise linear lookup; 2 us are fixed per launch."""
    return weight(name) * (2.0 + 0.02 * chunk + 1e-5 * chunk * context)


def decode_us(name: str, requests: float, keys: float) -> float:
    return weight(name) * (3.0 + 0.1 * requests + 1e-4 * requests * keys)


def experts_us(pairs: float, experts: float) -> float:
    return 5.0 * experts + 0.01 * pairs


def meta(**changes: object) -> dict[str, object]:
    return {
        "schema_version": 1,
        "provenance": "measured",
        "hardware": "H200",
        "gpu": {"name": "NVIDIA H200"},
        "engine": {"name": "closed form", "versions": {}},
        "model": MODEL,
        "model_config_sha256": "0" * 64,
        "variant": "fp8",
        "weights": "fp8",
        "kv": {
            "layout": "bf16",
            "block_tokens": 64,
            "caches": [
                {"name": "mla_latent", "bytes_per_token_layer": 1152},
                {"name": "index_keys", "bytes_per_token_layer": 132},
            ],
        },
        "contract": "serving",
        "attended_cap_tokens": CAP,
        "protocol": {},
        "grid": {},
        "measured_at": "2026-01-01T00:00:00+00:00",
        "command": "none",
    } | changes


def tables(spec: ModelSpec, ep: int = 8) -> dict[Category, Table]:
    rows: dict[Category, list[tuple[str | float, ...]]] = {}
    for one, _ in fold(spec).components:
        rows.setdefault(one.category, []).extend(_rows(one, spec, ep))
    return {category: make_table(category, found) for category, found in rows.items()}


def _rows(one: Component, spec: ModelSpec, ep: int) -> list[tuple[str | float, ...]]:
    name = one.name
    if one.category in ("dense", "per_sequence"):
        return [(name, n, token_us(name, n), 0.0) for n in (1, 64, 4096)]
    if one.category == "moe":
        assert spec.moe is not None
        local = spec.moe.num_experts // ep
        return [
            (name, ep, tokens, experts, tokens, experts_us(tokens, experts), 0.0)
            for tokens, experts in product((1, 8, 64, 512, 32768), (1, 4, local))
            if experts <= tokens * spec.moe.topk
        ]
    limit: int | float = CAP if one.when == "prefill_dense" else math.inf
    prefills = [
        (name, c, k, 0, 0, 0, prefill_us(name, c, _kept(one, k)), 0.0)
        for c in CHUNKS
        if c <= limit
        for k in sorted({*CONTEXTS, *([limit - c] if limit < math.inf else [])})
        if c + k <= limit
    ]
    if one.when == "prefill_dense":
        return prefills
    return prefills + [
        (name, 0, 0, n, kv, 1, decode_us(name, n, _kept(one, kv)), 0.0) for n, kv in product(REQUESTS, KEYS)
    ]


def _kept(one: Component, keys: int) -> int:
    return min(keys, CAP) if one.category == "sparse_attention" else keys


def bundle(root: Path, changed: dict[Category, Table] | None = None, **changes: object) -> Bundle:
    """The bundle, written below `root` and read back; `changed` tables replace those of the closed form."""
    own = tables(load_model(MODEL)) | (changed or {})
    path = write_bundle(root, meta(**changes), {(1, category): table for category, table in own.items()})
    return read_bundle(path)
