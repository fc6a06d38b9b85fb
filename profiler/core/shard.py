"""A model split over ranks: per-rank widths, and the rules that a split must keep."""

from dataclasses import dataclass

from profiler.core.errors import ConfigError
from profiler.core.stack import stages
from profiler.core.types import ModelSpec, Parallel

VOCAB_PADDING = 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """Widths of one rank, the fullest one where experts are uneven.

    heads, kv_heads, index_heads: of attention, its key-value side (replicated below one) and the block indexer; a
    token indexer's heads are never split. intermediate, shared_intermediate, moe_intermediate: MLP widths; `experts`
    whole experts of width moe_intermediate. moe_tp: ranks that share one expert. vocab: rows of embedding and head.
    """

    heads: int
    kv_heads: int
    index_heads: int
    intermediate: int
    shared_intermediate: int
    moe_intermediate: int
    experts: int
    moe_tp: int
    vocab: int


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def geometry(spec: ModelSpec, parallel: Parallel, dcp: int = 1, *, redundant_experts: int = 0) -> Geometry:
    """Per-rank widths. redundant_experts: copies of experts, which are spread over the ranks like the experts.

    Raises ConfigError naming every rule that the split breaks (see broken_rules).
    """
    if broken := broken_rules(spec, parallel, dcp):
        raise ConfigError(f"{spec.name} with {describe(parallel)}: {'; '.join(broken)}")
    tp, moe, moe_tp = parallel.tp, spec.moe, moe_tensor_parallel(parallel)
    kv_heads = max(1, spec.gqa.num_kv_heads // tp) if spec.gqa else 1
    return Geometry(
        heads=spec.num_heads // tp,
        kv_heads=kv_heads,
        index_heads=_index_heads(spec, kv_heads),
        intermediate=spec.intermediate // tp,
        shared_intermediate=_shared_width(spec) // (1 if shared_is_replicated(parallel) else tp),
        moe_intermediate=moe.intermediate // moe_tp if moe else 0,
        experts=ceil_div(moe.num_experts + redundant_experts, parallel.ep) if moe else 0,
        moe_tp=moe_tp,
        vocab=padded_vocab(spec) // tp,
    )


def describe(parallel: Parallel) -> str:
    return f"tp {parallel.tp} pp {parallel.pp} dp {parallel.dp} ep {parallel.ep}"


def padded_vocab(spec: ModelSpec) -> int:
    """Rows of the embedding as vLLM allocates them: a multiple of 64."""
    return ceil_div(spec.vocab, VOCAB_PADDING) * VOCAB_PADDING


def moe_tensor_parallel(parallel: Parallel) -> int:
    """Ranks that share one expert: the data-parallel group's ranks of a stage over the expert-parallel degree."""
    return max(1, parallel.tp * parallel.dp // parallel.ep)


def shared_is_replicated(parallel: Parallel) -> bool:
    """Whether every tensor-parallel rank holds the whole shared expert (sequence-parallel MoE of vLLM)."""
    return parallel.ep > 1 and parallel.tp > 1 and parallel.dp > 1


def is_launchable(parallel: Parallel) -> bool:
    """Whether vLLM itself offers this split: expert parallelism off, or over all ranks of the group."""
    return parallel.ep in (1, parallel.dp * parallel.tp)


def _index_heads(spec: ModelSpec, kv_heads: int) -> int:
    if spec.indexer is None:
        return 0
    return kv_heads if spec.gqa else spec.indexer.num_heads


def _shared_width(spec: ModelSpec) -> int:
    return spec.moe.num_shared_experts * spec.moe.shared_intermediate if spec.moe else 0


def broken_rules(spec: ModelSpec, parallel: Parallel, dcp: int = 1) -> tuple[str, ...]:
    """Every rule that a split breaks, one sentence each; empty when it is legal.

    Raises ConfigError for degrees below 1.
    """
    for name, degree in (("tp", parallel.tp), ("pp", parallel.pp), ("dp", parallel.dp), ("ep", parallel.ep)):
        if degree < 1:
            raise ConfigError(f"{name} is {degree}; it must be at least 1")
    if dcp < 1:
        raise ConfigError(f"dcp is {dcp}; it must be at least 1")
    expert_rules = _expert_rules(spec, parallel)
    widths = () if expert_rules else _width_rules(spec, parallel)
    return (*_group_rules(spec, parallel, dcp), *expert_rules, *widths)


def _group_rules(spec: ModelSpec, parallel: Parallel, dcp: int) -> tuple[str, ...]:
    broken = []
    if parallel.pp > spec.num_layers:
        broken.append(f"pp {parallel.pp} exceeds the {spec.num_layers} layers")
    if spec.num_heads % parallel.tp:
        broken.append(f"{spec.num_heads} attention heads do not divide by tp {parallel.tp}")
    if spec.gqa and spec.gqa.num_kv_heads % parallel.tp and parallel.tp % spec.gqa.num_kv_heads:
        broken.append(
            f"{spec.gqa.num_kv_heads} key-value heads neither divide by tp {parallel.tp} nor replicate evenly over it"
        )
    if padded_vocab(spec) % parallel.tp:
        broken.append(f"the padded vocabulary of {padded_vocab(spec)} rows does not divide by tp {parallel.tp}")
    if parallel.tp % dcp:
        broken.append(f"dcp {dcp} does not divide tp {parallel.tp}")
    elif spec.gqa and dcp > max(1, parallel.tp // spec.gqa.num_kv_heads):
        broken.append(
            f"dcp {dcp} exceeds the {max(1, parallel.tp // spec.gqa.num_kv_heads)} ranks that hold the same "
            "key-value head"
        )
    return tuple(broken)


def _expert_rules(spec: ModelSpec, parallel: Parallel) -> tuple[str, ...]:
    tp, dp, ep = parallel.tp, parallel.dp, parallel.ep
    if spec.moe is None:
        return (f"ep {ep} for a model without experts",) if ep != 1 else ()
    if ep > spec.moe.num_experts:
        return (f"ep {ep} exceeds the {spec.moe.num_experts} experts",)
    if ep == 1:
        return ()
    if ep % dp:
        return (f"ep {ep} is no multiple of dp {dp} (every data-parallel rank holds the same number of expert slices)",)
    if ep // dp > tp:
        return (f"ep {ep} / dp {dp} = {ep // dp} exceeds tp {tp} (ep is at most tp x dp = {tp * dp})",)
    if (tp * dp) % ep:
        return (f"tp {tp} x dp {dp} = {tp * dp} ranks do not divide by ep {ep}",)
    return ()


def _width_rules(spec: ModelSpec, parallel: Parallel) -> tuple[str, ...]:
    """Widths that a split cuts must stay whole, and with fp8 weights whole scale blocks."""
    block = spec.quantization.block
    broken = []
    for name, width, split, unit in _cut_widths(spec, parallel):
        if split == 1:
            continue
        if width % split:
            broken.append(f"{name} {width} does not divide by {split}")
        elif block and (width // split) % unit:
            broken.append(f"{name} {width} / {split} = {width // split} is no multiple of the fp8 block width {unit}")
    return tuple(broken)


def _cut_widths(spec: ModelSpec, parallel: Parallel) -> tuple[tuple[str, int, int, int], ...]:
    """(name, whole width, ranks that share it, fp8 block width along it) of every width that a split cuts."""
    rows, columns = spec.quantization.block or (1, 1)
    tp, heads = parallel.tp, spec.num_heads
    widths: list[tuple[str, int, int, int]] = []
    if spec.num_heads % tp == 0:
        if spec.mla:
            mla = spec.mla
            widths += [
                ("q_b width", heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), tp, rows),
                ("kv_b width", heads * (mla.qk_nope_head_dim + mla.v_head_dim), tp, rows),
                ("o_proj width", heads * mla.v_head_dim, tp, columns),
            ]
        if spec.gqa:
            widths.append(("o_proj width", heads * spec.gqa.head_dim, tp, columns))
    if any(kind.mlp == "dense" for kind in spec.layers):
        widths.append(("MLP width", spec.intermediate, tp, max(rows, columns)))
    if spec.moe:
        if spec.moe.num_shared_experts and not shared_is_replicated(parallel):
            widths.append(("shared expert width", _shared_width(spec), tp, max(rows, columns)))
        widths.append(("expert width", spec.moe.intermediate, moe_tensor_parallel(parallel), max(rows, columns)))
    return tuple(widths)


def stage_layers(spec: ModelSpec, parallel: Parallel) -> tuple[range, ...]:
    """Layers of each pipeline stage."""
    return stages(spec.num_layers, parallel.pp)
