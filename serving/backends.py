"""How the tokens of data-parallel ranks get to the experts and back: vLLM's `all2all_backend` values by behaviour.

gather: every rank receives all tokens of the group and sums its experts' shares with a reduce-scatter; volumes do not
depend on the routing. per_rank: a token is sent once to each rank that it reaches. per_expert: a token is sent once for
each of its experts. The two last answer with as many rows. Tokens go out in fp8 with one 4-byte scale per 128 elements
where the experts' weights are fp8, as vLLM 0.26 quantises them before the exchange (prepare_finalize/naive_dp_ep.py for
the first; FlashInfer's CUTLASS experts, whose tables are not measured, would get bf16), and in bf16 otherwise; results
come back in bf16. Weights and numbers of the chosen experts, 8 bytes for each, are left out: below 2 % of a token.
"""

from typing import Literal

from profiler.core.errors import unknown
from profiler.core.types import ModelSpec

Sends = Literal["gather", "per_rank", "per_expert"]

DEFAULT = "allgather_reducescatter"
BACKENDS: dict[str, Sends] = {
    DEFAULT: "gather",
    "naive": "gather",  # vLLM maps these two to the default
    "pplx": "gather",
    "deepep_high_throughput": "per_rank",
    "deepep_low_latency": "per_expert",
    "nixl_ep": "per_expert",
    "flashinfer_nvlink_one_sided": "per_rank",
    "flashinfer_nvlink_two_sided": "per_rank",
}

ACTIVATION_BYTES = 2
_SCALE_BYTES_PER_ELEMENT = 4 / 128


def sends(backend: str) -> Sends:
    """What a back end sends. Raises ConfigError for one that is not priced."""
    if backend not in BACKENDS:
        raise unknown("all2all back end", backend, BACKENDS)
    return BACKENDS[backend]


def dispatch_bytes(spec: ModelSpec) -> float:
    """Bytes of one copy of a token's hidden state on its way to the experts."""
    width = 1 + _SCALE_BYTES_PER_ELEMENT if spec.quantization.weights == "fp8" else ACTIVATION_BYTES
    return spec.hidden * width
