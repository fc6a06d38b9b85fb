"""What MiniMax-M3 needs before vLLM 0.26 can start it and run batches of any kind on its Triton kernels."""

import functools
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from typing import Any

from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.stack import text_config

MODEL_TYPE = "minimax_m3_vl"
BACKBONE = "MiniMaxM3SparseForCausalLM"
TUNING_TOKENS = 32_768
# What differs from the engine as it comes, and what its Triton kernels are tuned on.
SETTINGS: Mapping[str, str | int] = {
    "selection_buffer": "heads first",
    "programmatic_dependent_launch": "off",
    "triton_tuned_at_tokens": TUNING_TOKENS,
}
_MARK = "_sparsight_heads_first"
_TUNED = ("_topk_index_kernel", "_topk_index_partial_kernel")
_DEVICE = "cuda"
_BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
# Holds the attention of the dense layers; vLLM marks what its graphs leave out as the module is imported.
_MARKED_ON_IMPORT = "vllm.model_executor.layers.attention.attention"


def is_msa(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == MODEL_TYPE


def backbone(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nested config with the text backbone as its architecture: no vision tower, no processor, no tokenizer.

    The configuration class of the engine stays; it reads the backbone's fields from `text_config`.
    """
    return {key: value for key, value in config.items() if key != "auto_map"} | {"architectures": [BACKBONE]}


def block_tokens(config: Mapping[str, Any]) -> int:
    """KV block length, which is the selection block. The engine alone would ask its first layer, which is dense.

    Raises ConfigError when the config has none.
    """
    sparse = text_config(config).get("sparse_attention_config")
    size = sparse.get("sparse_block_size") if isinstance(sparse, Mapping) else None
    if not isinstance(size, int):
        raise ConfigError("MiniMax-M3: text_config has no sparse_attention_config.sparse_block_size")
    return size


def heads_first(buffer: Any) -> Any:
    """The buffer of selected blocks, (tokens, heads, blocks), as (heads, tokens, blocks) over the same memory."""
    tokens, heads, blocks = buffer.shape
    return buffer.view(heads, tokens, blocks)


def hand_over_heads_first(attention: Any) -> None:
    """Makes a sparse attention class pass its keyword `topk_indices_buffer` on as `heads_first`; once per class.

    vLLM 0.26 allocates the buffer token by token, as its kernels of sm100 want it, while the Triton kernels of every
    other card slice its second axis by token. On their own terms a step with decodes before a prefill then writes
    through an empty slice (an illegal address in _topk_index_kernel, from as many decodes on as the rank has index
    heads), and picks of one head overwrite those of another one's tokens, which reads pages of other requests and
    gives rows of NaN where two prefills meet. Buffer addresses stay, so CUDA graphs may be captured afterwards.
    """
    if getattr(attention, _MARK, False):
        return
    original = attention.__init__

    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **keywords: Any) -> None:
        buffer = keywords.get("topk_indices_buffer")
        if buffer is not None:
            keywords["topk_indices_buffer"] = heads_first(buffer)
        original(self, *args, **keywords)

    attention.__init__ = initialise
    setattr(attention, _MARK, True)


def tuning_batches(longest: int, batched_tokens: int, sequences: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """A prefill's last chunk and a decode batch, both at TUNING_TOKENS where the limits allow, as (new, context).

    The top-k kernels tune themselves once per process, on the first batch that they meet. On one of a few tokens they
    would take the narrowest tiles and keep them for every context, as no server with real prompts does.
    """
    length = min(TUNING_TOKENS, longest)
    chunk = min(8192, batched_tokens, length)
    return ((chunk, length - chunk),), ((1, length - 1),) * min(32, sequences, batched_tokens)


class Plain:
    """A vLLM platform that says it has no programmatic dependent launch, and is the given one in all else."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_arch_support_pdl(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def without_overlap() -> None:
    """Launches the decode kernels one after the other, so that their times add up.

    Otherwise each starts while the one before it runs, waits inside, and its own time holds that of the other too.
    Launchers ask at every call, so that this may come after the engine has started and its kernels are tuned, which
    happens as it does in a recording.
    """
    from vllm.models.minimax_m3.common.ops import index_topk, sparse_attn

    for module in (index_topk, sparse_attn):
        if not isinstance(module.current_platform, Plain):
            module.current_platform = Plain(module.current_platform)


def tune(config: Mapping[str, Any], longest: int, batched_tokens: int, sequences: int) -> None:
    """Lets the two kernels that tune themselves do so on `tuning_batches`, before anything else calls them.

    config: of one rank. By their launchers alone, on scores and keys of their own, since an engine that captures graphs
    meets them first on contexts of one token, and one that records on whatever prompt comes first.
    """
    import torch
    from vllm.models.minimax_m3.common.ops import index_topk

    sparse = text_config(config)["sparse_attention_config"]
    heads, dim, block = sparse["sparse_num_index_heads"], sparse["sparse_index_dim"], block_tokens(config)
    picks = sparse["sparse_topk_blocks"], sparse.get("sparse_init_block", 0), sparse.get("sparse_local_block", 0)
    ((chunk, context),), decodes = tuning_batches(longest, batched_tokens, sequences)
    started = time.monotonic()
    starts, contexts = _integers(0, chunk), _integers(context)
    # A row of scores is as long as the blocks in sight, in sixteens.
    blocks = -(-(chunk + context) // (16 * block)) * 16
    scores = torch.randn(heads, chunk, blocks, device=_DEVICE)
    index_topk.minimax_m3_index_topk(scores, starts, contexts, chunk, *picks)
    requests, keys = len(decodes), sum(decodes[0])
    pages = -(-keys // block)
    table = _integers(*range(pages)).repeat(requests, 1)
    lengths = _integers(*[keys] * requests)
    query, cache = _random(requests, heads, dim), _random(pages, block, dim)
    index_topk.minimax_m3_index_decode(query, cache, table, lengths, keys, *picks, heads, 1, 1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    chosen = ", ".join(f"{name} {tile}" for name in _TUNED if (tile := _tile(getattr(index_topk, name, None))))
    print(f"kernels tuned in {time.monotonic() - started:.0f} s{f': {chosen}' if chosen else ''}", file=sys.stderr)


def _tile(kernel: Any) -> str:
    """Blocks that a tuned Triton kernel sorts at a time, and its warps; empty for one that was not tuned."""
    while kernel is not None and not hasattr(kernel, "best_config"):
        kernel = getattr(kernel, "fn", None)  # behind heuristics
    if kernel is None:
        return ""
    best = kernel.best_config
    return f"{best.kwargs.get('BLOCK_SIZE_K')} blocks of {best.num_warps} warps"


def _integers(*values: int) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int32, device=_DEVICE)


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, dtype=torch.bfloat16, device=_DEVICE)


def break_graphs(
    keywords: Mapping[str, Any],
    environment: MutableMapping[str, str] = os.environ,
    imported: Mapping[str, Any] = sys.modules,
) -> None:
    """Sets before the model is imported what vLLM sets for it while it reads the arguments of vllm.LLM, `keywords`.

    Attention is left out of the graphs of prefill steps only where the variable was there on import; otherwise they
    would replay the batch that they were captured on. Raises AcquisitionError where it is too late for that.
    """
    if _BREAKABLE in environment:
        return
    mode = (keywords.get("compilation_config") or {}).get("cudagraph_mode")
    whole = keywords.get("enforce_eager") or mode == "FULL_DECODE_ONLY"
    if not whole and _MARKED_ON_IMPORT in imported:
        raise AcquisitionError(
            f"graphs of parts of MiniMax-M3's layers need {_BREAKABLE}=1 in the environment before vllm is imported"
        )
    environment[_BREAKABLE] = "1"


def prepare(config: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
    """What is to be done before vllm.LLM is called with `keywords` on `config`, of one rank.

    The buffer of selected blocks is repaired on cards that run the Triton kernels, which is all but sm100; kernels that
    tune themselves do so. Raises as `break_graphs` does.
    """
    import torch

    break_graphs(keywords)
    import vllm

    _ = vllm.LLM  # looked up on first use, with what a server imports before its model
    if torch.cuda.get_device_capability()[0] != 10:
        from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention

        hand_over_heads_first(MiniMaxM3SparseAttention)
    tune(config, keywords["max_model_len"] - 1, keywords["max_num_batched_tokens"], keywords["max_num_seqs"])
