"""DeepSeek sparse attention over a paged MLA cache: key stores, a step's plan, and the manager that runs a layer."""

from profiler.ops.dsa.keys import IndexKeyStore
from profiler.ops.dsa.manager import DSAManager
from profiler.ops.dsa.paged_keys import PagedIndexKeyStore
from profiler.ops.dsa.plan import (
    MAIN,
    DSAConfig,
    DSAPlan,
    DSASpan,
    DSASpec,
    DSAStep,
    EngineResourceInfo,
    KVRows,
    StepContext,
)
from profiler.ops.indexer import index_topk, select_topk_causal

__all__ = [
    "MAIN",
    "DSAConfig",
    "DSAManager",
    "DSAPlan",
    "DSASpan",
    "DSASpec",
    "DSAStep",
    "EngineResourceInfo",
    "IndexKeyStore",
    "KVRows",
    "PagedIndexKeyStore",
    "StepContext",
    "index_topk",
    "select_topk_causal",
]
