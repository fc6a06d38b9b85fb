"""Per-kernel latency tables of sparse-attention models: acquisition, bundles, model and hardware descriptions."""

__version__ = "0.1.0"
