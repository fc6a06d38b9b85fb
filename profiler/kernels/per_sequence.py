"""Work done once per request that emits a token: the head's projection and the sampler."""

from typing import Final

from profiler.core.shots import Fill, Shot
from profiler.core.types import Category, ModelSpec
from profiler.kernels._axes import Limits
from profiler.kernels._components import names_of
from profiler.kernels._work import Work, elementwise, gemm

CATEGORY: Final[Category] = "per_sequence"
UNITS: Final = {"sequences": "requests"}
DRIVERS: Final = ("sequences",)


def kv_cap_tokens(spec: ModelSpec) -> int | None:
    return None


def shots(spec: ModelSpec, limits: Limits) -> list[Shot]:
    """Decode batches at the shortest measured length, so that they are run once for this table and for decode."""
    names = names_of(spec, CATEGORY)
    context = min(limits.axes.decode_kv_tokens) - 1
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    return [
        Shot(fills=(Fill(CATEGORY, (count,), names),), requests=((1, context),) * count)
        for count in limits.up_to(limits.axes.sequences, most)
    ]


def work(spec: ModelSpec, name: str, key: tuple[int, ...], weights: str) -> Work | None:
    """Least work of one call; key is (sequences,). The head stays in bf16 whatever the checkpoint's format."""
    (count,) = key
    if name == "lm_head":
        return gemm(count, spec.hidden, spec.vocab, 2.0)
    return elementwise(count * spec.vocab) if name == "sampler" else None
