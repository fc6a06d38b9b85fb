"""Names of bundles."""

PLAIN_LAYOUT = "bf16"


def variant_name(weights: str, kv_layout: str) -> str:
    """`<weights>[-kv<layout>]`, the layout left out where the cache is plain bf16."""
    return weights if kv_layout == PLAIN_LAYOUT else f"{weights}-kv{kv_layout}"
