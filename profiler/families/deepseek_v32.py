"""DeepSeek-V3.2 and GLM-5.x: MLA with a token indexer (DSA), dense layers first, then mixture of experts.

Component names follow the decomposed path of vLLM 0.26 (models/deepseek_v2.py).
"""

from collections.abc import Mapping
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.stack import text_config, token_selection
from profiler.core.types import Component, IndexerDims, LayerKind, ModelSpec, SelectionBranch
from profiler.families._deepseek import HEAD, MLA, PROLOGUE, mlp_components, mlp_types, read_mla_model
from profiler.families._fields import Fields, dense

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")

ATTEND = (
    # Dense prefill works on expanded keys and values, so only the sparse path passes through the latent space.
    Component("dense", "absorb_q", when="prefill_sparse"),
    Component("dense", "absorb_v", when="prefill_sparse"),
    Component("sparse_attention", "sparse_mla"),
    Component("attention", "mla_dense_prefill", when="prefill_dense"),
)
INDEXER = (
    *dense(
        "indexer_wq_b",
        "indexer_wk_weights",
        "indexer_k_norm",
        "indexer_rotary",
        "indexer_quant",
        "indexer_cache_write",
    ),
    Component("indexer", "index_scores"),
    Component("indexer", "index_topk"),
)


def read(name: str, config: Mapping[str, Any]) -> ModelSpec:
    text = Fields(text_config(config), name)
    if missing := [key for key in ("index_topk", "index_n_heads", "index_head_dim") if not text.has(key)]:
        raise ConfigError(
            f"{name}: {', '.join(missing)} missing. A sparse-attention checkpoint of this type has an indexer; a "
            "config without index_* keys is that of DeepSeek-V3 (model_type deepseek_v3), whose layers attend every key"
        )
    layers = text.integer("num_hidden_layers")
    selection = _selection(text, layers)
    indexer = IndexerDims(text.integer("index_n_heads"), text.integer("index_head_dim"), text.integer("index_topk"))
    return read_mla_model(name, config, selection, indexer, _notes(text, selection))


def _selection(text: Fields, layers: int) -> tuple[SelectionBranch, ...]:
    pattern = text.text("index_topk_pattern")
    frequency = text.integer("index_topk_freq", default=1)
    offset = text.integer("index_skip_topk_offset", default=2, minimum=0)
    try:
        return token_selection(layers, pattern, frequency, offset)
    except ConfigError as error:
        raise ConfigError(f"{text.where}: {error}") from None


def _notes(text: Fields, selection: tuple[SelectionBranch, ...]) -> tuple[str, ...]:
    """Lists that restate the engine's rules: of the right length, else refused; in agreement, else flagged."""
    notes = []
    mlps = tuple("sparse" if m == "moe" else "dense" for m in mlp_types(text, len(selection)))
    for key, rule, engine in (
        ("indexer_types", "index_topk_pattern / index_topk_freq / index_skip_topk_offset", selection),
        ("mlp_layer_types", "first_k_dense_replace / moe_layer_freq", mlps),
    ):
        listed = text.values.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list) or len(listed) != len(engine):
            found = f"has {len(listed)} entries" if isinstance(listed, list) else f"is {listed!r}, no list,"
            raise ConfigError(f"{text.where}: {key} {found} for {len(engine)} layers")
        if bad := sorted(set(map(str, listed)) - {"full", "shared", "dense", "sparse"}):
            raise ConfigError(f"{text.where}: {key} has the entry {bad[0]!r}")
        if wrong := [i for i, (a, b) in enumerate(zip(listed, engine, strict=True)) if a != b]:
            notes.append(
                f"{key} disagrees with {rule} in {len(wrong)} layers, first layer {wrong[0]} "
                f"({listed[wrong[0]]!r} against {engine[wrong[0]]!r}); the engine reads the latter, and so does this"
            )
    pattern = text.text("index_topk_pattern")
    if pattern is not None and len(pattern) != len(selection):
        notes.append(
            f"index_topk_pattern has {len(pattern)} letters for {len(selection)} layers; the engine runs a full "
            "indexer in the layers beyond it"
        )
    return tuple(notes)


def layer_components(spec: ModelSpec, kind: LayerKind) -> tuple[Component, ...]:
    return (*MLA, *(INDEXER if kind.selection == "full" else ()), *ATTEND, *mlp_components(kind))


def prologue_components(spec: ModelSpec) -> tuple[Component, ...]:
    return PROLOGUE


def head_components(spec: ModelSpec) -> tuple[Component, ...]:
    return HEAD
