"""Buffers of one rank beside weights and KV cache, as vLLM's profiling run meets them (read in vLLM 0.26).

The engine runs one dummy step of max_num_batched_tokens and keeps the highest point of allocated memory. That point
lies in one of a few moments: in an attention layer, a dense MLP, an expert layer, or the sampler. Each moment holds the
hidden states, its own tensors, and one workspace that all layers share, as large as its largest user so far. The
moment with most memory is charged, term by term; the others are not added to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from profiler.core.kv import KvLayout
from profiler.core.shard import Geometry, stage_layers
from profiler.core.types import LayerKind, ModelSpec, Parallel
from profiler.core.units import GIB, MIB

_INDEX_WORKSPACE_ROWS_PER_TOKEN = 40
_INDEX_LOGITS_BYTES = 512 * MIB
_FLASHMLA_ROWS_PER_TOKEN = 5
_MHA_EXPAND_TOKENS = 64 * 1024
_EXPERT_PASS_TOKENS = 32 * 1024
_SAMPLER_BYTES_PER_LOGIT = 2 + 3 * 4
_CUBLAS_WORKSPACE_BYTES = 32 * MIB


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the device's memory in GiB, and where the figure comes from."""

    name: str
    gib: float
    source: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes of one buffer, and the rule that gives them."""

    name: str
    size_bytes: float
    source: str


@dataclass(frozen=True, slots=True)
class Step:
    """The dummy step of one rank: its part of the model and the engine's limits.

    kinds: layers of the rank's pipeline stage; samples: whether it is the last stage. batched_tokens and num_seqs:
    the engine's limits; block_tokens: of the KV cache.
    """

    spec: ModelSpec
    parallel: Parallel
    split: Geometry
    layout: KvLayout
    kinds: tuple[LayerKind, ...]
    samples: bool
    batched_tokens: int
    num_seqs: int

    @property
    def hidden_bytes(self) -> int:
        """Hidden states of the step, bf16."""
        return self.batched_tokens * self.spec.hidden * 2

    @property
    def gathered_tokens(self) -> int:
        """Tokens that a rank's experts see: of the whole data-parallel group under the all-gather back end."""
        return self.batched_tokens * self.parallel.dp

    @property
    def expert_rows(self) -> int:
        """(token, expert) rows of one pass of the expert kernel."""
        return min(self.gathered_tokens, _EXPERT_PASS_TOKENS) * (self.spec.moe.topk if self.spec.moe else 0)

    @property
    def block_fp8(self) -> bool:
        """Whether matrix inputs are quantised to fp8 on the way, one fp32 scale per 128."""
        return self.spec.quantization.weights == "fp8"


def profiled_step(
    spec: ModelSpec,
    parallel: Parallel,
    split: Geometry,
    layout: KvLayout,
    stage: int,
    batched_tokens: int,
    num_seqs: int,
) -> Step:
    """The dummy step of a rank of a pipeline stage. All sizes in tokens and sequences."""
    layers = stage_layers(spec, parallel)
    kinds = tuple(spec.layers[i] for i in layers[stage])
    return Step(spec, parallel, split, layout, kinds, stage == len(layers) - 1, batched_tokens, num_seqs)


def activation_terms(step: Step, max_model_len: int) -> tuple[Term, ...]:
    """Buffers of the engine at the highest point of its profiling run, at a max_model_len in tokens; GiB each."""
    moments = [
        [*workspace_in_use(step, max_model_len, after_experts), *buffers]
        for after_experts, buffers in _moments(step, max_model_len)
    ]
    peak = max(moments, key=lambda buffers: sum(buffer.size_bytes for buffer in buffers))
    held = [*_held_from_load(step), *peak, _CUBLAS]
    return tuple(Term(buffer.name, buffer.size_bytes / GIB, buffer.source) for buffer in held)


_CUBLAS = Buffer("cublas_workspace", _CUBLAS_WORKSPACE_BYTES, "torch's cuBLAS workspace, 32 MiB on Hopper and later")


def _held_from_load(step: Step) -> list[Buffer]:
    """Allocated with the model, so that the engine's log counts them among the weights."""
    spec = step.spec
    if spec.mla is None:
        return []
    rotary = Buffer(
        "rotary_tables",
        spec.mla.rotary_tables * spec.max_position * spec.mla.qk_rope_head_dim * spec.mla.rotary_bytes,
        "cosines and sines of every position, in fp32 where positions are scaled; a table for the indexer where it "
        "rotates other halves than the attention",
    )
    if spec.indexer is None:
        return [rotary]
    topk = step.batched_tokens * spec.indexer.topk * 4
    return [Buffer("topk_buffer", topk, "max_num_batched_tokens x top-k x 4 B, one per model"), rotary]


def workspace_users(step: Step, max_model_len: int) -> tuple[Buffer, ...]:
    """What the shared workspace is asked for; it is as large as the largest of them. Experts last."""
    spec, moe = step.spec, step.spec.moe
    users = []
    if spec.mla and any(kind.selection == "full" for kind in step.kinds):
        assert spec.indexer is not None
        users.append(
            Buffer(
                "index_workspace",
                _INDEX_WORKSPACE_ROWS_PER_TOKEN * max_model_len * (spec.indexer.head_dim + 4) + MIB,
                "40 x max_model_len rows of index keys, https://github.com/vllm-project/vllm/issues/55221",
            )
        )
    if spec.mla and step.layout.backend == "FLASHMLA_SPARSE":
        rows = step.batched_tokens * step.split.heads
        if step.layout.layout == "fp8_ds_mla":
            rows += _FLASHMLA_ROWS_PER_TOKEN * max_model_len
        users.append(
            Buffer(
                "flashmla_workspace",
                rows * spec.mla.latent_dim * 2,
                "queries of the step and, with fp8_ds_mla, 5 x max_model_len latents, in bf16 (flashmla_sparse)",
            )
        )
    if moe and any(kind.mlp == "moe" for kind in step.kinds):
        width = max(step.split.moe_intermediate, spec.hidden) + max(2 * step.split.moe_intermediate, spec.hidden)
        users.append(
            Buffer(
                "moe_workspace",
                step.expert_rows * width * 2,
                "two buffers of (token, expert) rows in bf16, of a pass of up to 32,768 tokens: gate-up or down "
                "output, and activation",
            )
        )
    return tuple(users)


def workspace_in_use(step: Step, max_model_len: int, after_experts: bool) -> list[Buffer]:
    """The shared workspace as its largest user so far; before the first expert layer that is not the experts."""
    users = [u for u in workspace_users(step, max_model_len) if after_experts or u.name != "moe_workspace"]
    return [max(users, key=lambda user: user.size_bytes)] if users else []


def _moments(step: Step, max_model_len: int) -> list[tuple[bool, list[Buffer]]]:
    """The moments of the step: whether an expert layer ran before or runs, and what is alive beside the workspace."""
    experts = [i for i, kind in enumerate(step.kinds) if kind.mlp == "moe"]
    dense = [i for i, kind in enumerate(step.kinds) if kind.mlp == "dense"]
    first = experts[0] if experts else len(step.kinds)
    moments = [
        (first < len(step.kinds) - 1, [_hidden(step, 2), *buffers])
        for buffers in (_mla_attention(step, max_model_len) if step.spec.mla else [[_gqa_attention(step)]])
    ]
    if dense:
        moments.append((first < dense[-1], [_hidden(step, 3), _dense_mlp(step)]))
    if experts:
        moments.append((True, [_hidden(step, 3), *_experts(step)]))
    if step.samples:
        moments.append((bool(experts), [_hidden(step, 1), _sampler(step)]))
    return moments


def _hidden(step: Step, copies: int) -> Buffer:
    return Buffer("hidden_states", copies * step.hidden_bytes, "input, residual and output of a layer, as far as alive")


def _mla_attention(step: Step, max_model_len: int) -> Sequence[list[Buffer]]:
    """The projections, and either the keys and values expanded for dense prefill or what the indexer needs."""
    spec, mla, heads = step.spec, step.spec.mla, step.split.heads
    assert mla is not None
    lora = mla.q_lora_rank or 0
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    projected = Buffer(
        "projections",
        step.batched_tokens * (2 * lora + mla.latent_dim + mla.kv_lora_rank + query) * 2,
        "compressed and expanded queries, latents, in bf16",
    )
    context = min(
        max(8 * max_model_len, 4 * step.num_seqs * step.layout.block_tokens),
        max(_MHA_EXPAND_TOKENS, step.num_seqs * step.layout.block_tokens),
    )
    expanded = [
        projected,
        Buffer("attention_output", step.batched_tokens * heads * mla.v_head_dim * 2, "of all heads, bf16"),
        Buffer(
            "mha_workspace",
            context * heads * (mla.qk_nope_head_dim + mla.v_head_dim) * 2,
            "keys and values of up to 65,536 context tokens, expanded for dense prefill; the profiling run allocates "
            "them on every GPU",
        ),
    ]
    if spec.indexer is None or all(kind.selection != "full" for kind in step.kinds):
        return (expanded,)
    queries = step.batched_tokens * spec.indexer.num_heads * spec.indexer.head_dim
    indexed = [
        projected,
        Buffer("index_queries", 3 * queries, "in bf16 and in fp8"),
        Buffer("index_logits", _INDEX_LOGITS_BYTES, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, 512"),
    ]
    return (expanded, indexed)


def _gqa_attention(step: Step) -> Buffer:
    gqa, split, indexer = step.spec.gqa, step.split, step.spec.indexer
    assert gqa is not None
    width = (2 * split.heads + 2 * split.kv_heads) * gqa.head_dim
    if indexer:
        width += (split.index_heads + 1) * indexer.head_dim
    return Buffer("attention_buffers", step.batched_tokens * width * 2, "queries, keys, values and output in bf16")


def _dense_mlp(step: Step) -> Buffer:
    width = 3 * step.split.intermediate * 2 + step.spec.hidden * 2
    if step.block_fp8:
        width += step.split.intermediate
    return Buffer("mlp_buffers", step.batched_tokens * width, "gate-up output, activation, its fp8 copy, and output")


def _experts(step: Step) -> list[Buffer]:
    moe, hidden = step.spec.moe, step.spec.hidden
    assert moe is not None
    shared = step.hidden_bytes if moe.num_shared_experts else 0
    logits = step.gathered_tokens * moe.num_experts * 4
    quantised = 0.0
    if step.block_fp8:
        quantised = (step.gathered_tokens * hidden + step.expert_rows * step.split.moe_intermediate) * (1 + 4 / 128)
    buffers = [
        Buffer(
            "expert_buffers",
            step.hidden_bytes + shared + logits + quantised,
            "outputs of the routed and the shared experts, router logits, fp8 copies of inputs and activations",
        )
    ]
    if step.parallel.dp > 1:
        gathered = 2 * step.gathered_tokens * hidden * 2
        buffers.append(
            Buffer("gathered_tokens", gathered, "hidden states of the data-parallel group, in and out, in bf16")
        )
    return buffers


def _sampler(step: Step) -> Buffer:
    logits = min(step.num_seqs, step.batched_tokens) * step.spec.vocab
    return Buffer(
        "sampler_buffers",
        logits * _SAMPLER_BYTES_PER_LOGIT,
        "max_num_seqs x vocabulary: logits in bf16 and fp32, probabilities and noise in fp32",
    )
