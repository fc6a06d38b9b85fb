"""Bytes that a KV cache holds per token on one rank, by cache and layout.

Layouts and the rules that choose them are those of vLLM 0.31 (docs/guide/kv-shapes.md). All figures are bytes per
token and layer unless a name says otherwise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from profiler.core.errors import ConfigError, unknown
from profiler.core.shard import geometry, stage_layers
from profiler.core.stack import text_config
from profiler.core.types import LayerKind, ModelSpec, Parallel

KV_DTYPES = ("auto", "bf16", "fp8", "fp8_ds_mla", "nvfp4")
INDEX_DTYPES = ("auto", "bf16", "fp8")
SPARSE_MLA_ARCHITECTURES = ("sm90", "sm100", "sm103", "sm120")

Layout = Literal["bf16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"]

DSA_BLOCK_TOKENS = 64
MSA_BLOCK_TOKENS = 128
GQA_BLOCK_TOKENS = 16
MLA_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Cache:
    """One kind of per-layer cache. bytes_per_token_layer is what one rank holds; tp_sharded: less of it per rank at a
    larger tp, down to one head."""

    name: str
    bytes_per_token_layer: int
    layers: int
    tp_sharded: bool


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What one rank stores per token.

    layout: element format of the main cache. backend: the engine's attention kernels that it implies, "" where the
    size does not depend on them. block_tokens: tokens per block on one rank; dcp ranks share a sequence, so a block
    covers block_tokens x dcp of its tokens. row_bytes: a block's bytes are rounded up to a multiple of this.
    """

    layout: Layout
    backend: str
    block_tokens: int
    caches: tuple[Cache, ...]
    dcp: int = 1
    row_bytes: int = 1
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one rank stores for each token that it holds, over all its layers."""
        return sum(cache.bytes_per_token_layer * cache.layers for cache in self.caches)

    @property
    def bytes_per_block(self) -> int:
        return -(-self.block_tokens * self.bytes_per_token // self.row_bytes) * self.row_bytes

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a sequence that one block stands for."""
        return self.block_tokens * self.dcp


def kv_layout(
    spec: ModelSpec,
    parallel: Parallel,
    architecture: str,
    kv_dtype: str = "auto",
    *,
    index_dtype: str = "auto",
    block_tokens: int | None = None,
    dcp: int = 1,
    mtp_layers: int = 0,
    stage: int | None = None,
) -> KvLayout:
    """What one rank stores per token.

    architecture: "sm90" and the like. kv_dtype: one of KV_DTYPES, index_dtype (block indexers only): one of
    INDEX_DTYPES; "auto" is what the engine chooses on that GPU. block_tokens: None for the engine's choice.
    mtp_layers: layers of multi-token prediction, each with caches of its own on the last stage. stage: a pipeline
    stage; None takes the widest. Raises ConfigError for an unknown name, an illegal block size or split, or a
    combination that the engine has no kernel for.
    """
    if kv_dtype not in KV_DTYPES:
        raise unknown("KV dtype", kv_dtype, KV_DTYPES)
    if index_dtype not in INDEX_DTYPES:
        raise unknown("index cache dtype", index_dtype, INDEX_DTYPES)
    if not 0 <= mtp_layers <= spec.mtp_layers:
        raise ConfigError(f"{spec.name} has {spec.mtp_layers} multi-token prediction layers, {mtp_layers} asked for")
    split = geometry(spec, parallel, dcp)
    main = (_mla if spec.mla else _gqa)(spec, architecture, kv_dtype, split.heads)
    per_token = main.bytes_per_token(spec, split.kv_heads)
    index_bytes, index_note = _index_bytes(spec, architecture, index_dtype)
    layouts = [
        KvLayout(
            layout=main.layout,
            backend=main.backend,
            block_tokens=_block_tokens(spec, block_tokens),
            caches=_caches(spec, kinds, per_token, index_bytes),
            dcp=dcp,
            row_bytes=main.row_bytes,
            notes=tuple(note for note in (main.note, index_note, _dcp_note(spec, architecture, dcp)) if note),
        )
        for kinds in _stage_kinds(spec, parallel, mtp_layers)
    ]
    return max(layouts, key=lambda layout: layout.bytes_per_token) if stage is None else layouts[stage]


def _stage_kinds(spec: ModelSpec, parallel: Parallel, mtp_layers: int) -> list[tuple[LayerKind, ...]]:
    kinds = [tuple(spec.layers[i] for i in layers) for layers in stage_layers(spec, parallel)]
    kinds[-1] += (mtp_kind(spec),) * mtp_layers
    return kinds


def mtp_kind(spec: ModelSpec) -> LayerKind:
    """What a multi-token prediction layer runs: the last layer's kind with an indexer of its own."""
    last = spec.layers[-1]
    return LayerKind(last.attention, "full" if last.selection == "shared" else last.selection, last.mlp)


def _caches(spec: ModelSpec, kinds: tuple[LayerKind, ...], main_bytes: int, index_bytes: int) -> tuple[Cache, ...]:
    main = Cache("mla_latent" if spec.mla else "gqa_kv", main_bytes, len(kinds), tp_sharded=spec.mla is None)
    indexed = sum(kind.selection in ("full", "block") for kind in kinds)
    return (main, Cache("index_keys", index_bytes, indexed, tp_sharded=False)) if indexed else (main,)


@dataclass(frozen=True, slots=True)
class _Main:
    """The main cache's format: bytes per element block, the backend that reads it, the pool's row alignment."""

    layout: Layout
    backend: str
    row_bytes: int = 1
    note: str = ""

    def bytes_per_token(self, spec: ModelSpec, kv_heads: int) -> int:
        if spec.mla is None:
            assert spec.gqa is not None
            return 2 * kv_heads * spec.gqa.head_dim * (1 if self.layout == "fp8" else 2)
        return mla_bytes(spec.mla.kv_lora_rank, spec.mla.qk_rope_head_dim, self.layout)


def mla_bytes(latent: int, rope: int, layout: Layout) -> int:
    """Bytes of one token's latent and rotary key in a layout.

    bf16: 2 per element. fp8: 1 per element. fp8_ds_mla: latent in fp8, one fp32 scale per 128 of it, rotary key in
    bf16. nvfp4_ds_mla as vLLM 0.31 lays it out: latent in fp4, one fp8 scale per 16 of it, rotary key in fp8.
    """
    return {
        "bf16": 2 * (latent + rope),
        "fp8": latent + rope,
        "fp8_ds_mla": latent + 4 * -(-latent // 128) + 2 * rope,
        "nvfp4_ds_mla": latent // 2 + -(-latent // 16) + rope,
    }[layout]


def _mla(spec: ModelSpec, architecture: str, kv_dtype: str, heads: int) -> _Main:
    if spec.indexer is None:
        return _dense_mla(spec, kv_dtype)
    if architecture not in SPARSE_MLA_ARCHITECTURES:
        known = ", ".join(SPARSE_MLA_ARCHITECTURES)
        raise ConfigError(f"{spec.name}: no sparse MLA kernel for {architecture}; they exist for {known}")
    if architecture == "sm120":
        return _sparse_mla_sm120(spec, kv_dtype)
    flat = spec.mla.latent_dim * 2 if spec.mla else 1
    if kv_dtype == "nvfp4":
        return _nvfp4(architecture)
    if architecture == "sm90":
        if kv_dtype in ("auto", "bf16"):
            return _Main("bf16", "FLASH_ATTN_MLA_SPARSE")
        return _Main("fp8_ds_mla", "FLASHMLA_SPARSE")
    if kv_dtype in ("auto", "bf16"):
        return _Main("bf16", "FLASHINFER_MLA_SPARSE" if heads <= 16 else "FLASHMLA_SPARSE", flat)
    if kv_dtype == "fp8_ds_mla":
        return _Main("fp8_ds_mla", "FLASHMLA_SPARSE", mla_bytes(*_latent(spec), "fp8_ds_mla"))
    return _Main("fp8", "FLASHINFER_MLA_SPARSE", flat // 2)


def _nvfp4(architecture: str) -> _Main:
    note = "nvfp4_ds_mla as vLLM 0.31 lays it out; a public fork packs 432 bytes"
    return _Main("nvfp4_ds_mla", "", note=note + ("; no sm90 kernel is known" if architecture == "sm90" else ""))


def _latent(spec: ModelSpec) -> tuple[int, int]:
    assert spec.mla is not None
    return spec.mla.kv_lora_rank, spec.mla.qk_rope_head_dim


def _sparse_mla_sm120(spec: ModelSpec, kv_dtype: str) -> _Main:
    """The one kernel of SM120 reads 656-byte rows only."""
    assert spec.indexer is not None
    if spec.indexer.topk != 2048:
        raise ConfigError(
            f"{spec.name}: the sparse MLA kernel of sm120 needs index_topk 2048, found {spec.indexer.topk}"
        )
    if kv_dtype == "nvfp4":
        return _nvfp4("sm120")
    if kv_dtype == "bf16" and spec.architecture != "DeepseekV32ForCausalLM":
        raise ConfigError(f"{spec.name}: the sparse MLA kernel of sm120 reads fp8_ds_mla rows only; bf16 KV is refused")
    note = "" if kv_dtype != "bf16" else "the engine turns bf16 into auto for this model, which on sm120 is fp8_ds_mla"
    return _Main("fp8_ds_mla", "FLASHINFER_MLA_SPARSE_SM120", note=note)


def _dense_mla(spec: ModelSpec, kv_dtype: str) -> _Main:
    if kv_dtype == "nvfp4":
        raise ConfigError(f"{spec.name}: nvfp4 is a layout of sparse MLA; this model attends every key")
    if kv_dtype == "fp8_ds_mla":
        return _Main("fp8_ds_mla", "", note="fp8_ds_mla is a layout of sparse MLA; sized here as a control")
    return _Main("fp8" if kv_dtype == "fp8" else "bf16", "")


def _gqa(spec: ModelSpec, architecture: str, kv_dtype: str, heads: int) -> _Main:
    if kv_dtype in ("fp8_ds_mla", "nvfp4"):
        raise ConfigError(f"{spec.name}: {kv_dtype} is a layout of MLA caches; a GQA cache is bf16 or fp8")
    return _Main("fp8" if kv_dtype == "fp8" else "bf16", "")


def _index_bytes(spec: ModelSpec, architecture: str, index_dtype: str) -> tuple[int, str]:
    """Bytes of one index key, and a note. They follow neither the weights' dtype nor that of the main cache."""
    indexer = spec.indexer
    if indexer is None:
        if index_dtype != "auto":
            raise ConfigError(f"{spec.name} has no indexer, so no index cache of dtype {index_dtype}")
        return 0, ""
    if spec.mla:
        if index_dtype == "bf16":
            raise ConfigError(f"{spec.name}: a token indexer's keys are stored as fp8 with an fp32 scale, not as bf16")
        return indexer.head_dim + 4 * -(-indexer.head_dim // 128), ""
    if index_dtype != "fp8":
        return 2 * indexer.head_dim, ""
    note = (
        ""
        if architecture in ("sm100", "sm103")
        else f"vLLM 0.31 offers fp8 index keys on sm100 only, not on {architecture}"
    )
    return indexer.head_dim, note


def _block_tokens(spec: ModelSpec, asked: int | None) -> int:
    if asked is not None and not 1 <= asked <= spec.max_position:
        raise ConfigError(f"block size is {asked}; it must be between 1 and the model's {spec.max_position} tokens")
    if spec.indexer and spec.mla:
        if asked not in (None, DSA_BLOCK_TOKENS):
            raise ConfigError(
                f"{spec.name} needs a block size of {DSA_BLOCK_TOKENS}: the indexer's kernels read pages of that many "
                f"tokens; {asked} was asked for"
            )
        return DSA_BLOCK_TOKENS
    if spec.indexer:
        size = spec.indexer.block_tokens
        if asked not in (None, size):
            raise ConfigError(
                f"{spec.name} needs a block size of {size}: one KV page is one selection block; {asked} was asked for"
            )
        return size
    default = MLA_BLOCK_TOKENS if spec.mla else GQA_BLOCK_TOKENS
    if asked is not None and asked % GQA_BLOCK_TOKENS:
        raise ConfigError(f"{spec.name} needs a block size that is a multiple of {GQA_BLOCK_TOKENS}, not {asked}")
    return asked or default


def _dcp_note(spec: ModelSpec, architecture: str, dcp: int) -> str:
    if dcp > 1 and spec.mla and spec.indexer and architecture == "sm90":
        return "decode context parallelism with FlashMLA sparse returns no log-sum-exp in public vLLM (issue 27544)"
    return ""


def gqa_bytes_per_token(config: Mapping[str, Any]) -> int:
    """What the grouped-query reading of a raw config gives per token in bf16, whatever the model really caches.

    2 x layers x key-value heads x head width x 2 B, with the head width hidden_size / heads where head_dim is absent.
    For an MLA model this is the common mistake; it is printed for comparison only. Raises ConfigError naming a field
    that is missing or no positive integer.
    """
    text = text_config(config)
    heads = _positive(text, "num_attention_heads")
    head_dim = _positive(text, "head_dim", _positive(text, "hidden_size") // heads)
    return 2 * _positive(text, "num_hidden_layers") * _positive(text, "num_key_value_heads", heads) * head_dim * 2


def _positive(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be a positive integer, found {value!r}")
    return value


def blocks_for(layout: KvLayout, tokens: int) -> int:
    """Blocks that a sequence of `tokens` occupies on a rank."""
    return math.ceil(tokens / layout.tokens_per_block)
