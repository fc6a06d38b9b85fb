from typing import Any

import pytest

from profiler.core.errors import ConfigError
from profiler.core.registry import load_model, load_model_config, read_model
from profiler.core.types import IndexerDims, MlaDims, Quantization

V32, GLM52, M3 = "deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5.2", "MiniMaxAI/MiniMax-M3"


def changed(name: str, **fields: Any) -> dict[str, Any]:
    config = load_model_config(name)
    config.get("text_config", config).update(fields)
    return config


def test_dimensions_of_the_sparse_models() -> None:
    v32, glm, m3 = load_model(V32), load_model("zai-org/GLM-5"), load_model(M3)
    assert (v32.hidden, v32.num_heads, v32.vocab, v32.max_position) == (7168, 128, 129280, 163840)
    # vLLM rotates V3.2's positions by yarn, from fp32 tables, and its indexer's otherwise than its attention's.
    assert v32.mla == MlaDims(1536, 512, 128, 64, 128, rotary_tables=2, rotary_bytes=4)
    assert glm.mla == MlaDims(2048, 512, 192, 64, 256), "the head_dim field of GLM is the rotary width"
    assert load_model("deepseek-ai/DeepSeek-V3").mla == MlaDims(1536, 512, 128, 64, 128, rotary_bytes=4)
    assert v32.indexer == IndexerDims(64, 128, 2048)
    assert glm.indexer == IndexerDims(32, 128, 2048)
    assert m3.indexer == IndexerDims(4, 128, 16, 128)
    assert m3.indexer.attended_cap_tokens == 2048
    assert m3.gqa is not None
    assert (m3.gqa.num_kv_heads, m3.gqa.head_dim) == (4, 128)
    assert (m3.intermediate, m3.max_position) == (12288, 1048576)


def test_routing_fields() -> None:
    v32, glm, m3 = (load_model(name).moe for name in (V32, GLM52, M3))
    assert v32 is not None and glm is not None and m3 is not None
    assert (v32.num_experts, v32.topk, v32.n_group, v32.topk_group, v32.routed_scaling) == (256, 8, 8, 4, 2.5)
    assert (glm.n_group, glm.topk_group, glm.has_bias) == (1, 1, True)
    assert (m3.num_experts, m3.topk, m3.intermediate, m3.scoring, m3.routed_scaling) == (128, 4, 3072, "sigmoid", 2.0)


def test_quantization_of_the_checkpoints() -> None:
    assert (
        load_model(V32).quantization == load_model("zai-org/GLM-5-FP8").quantization == Quantization("fp8", (128, 128))
    )
    assert load_model("zai-org/GLM-5").quantization == Quantization("bf16")
    for name, entries in (("zai-org/GLM-5-FP8", 712), ("zai-org/GLM-5.2-FP8", 541)):
        kept = load_model_config(name)["quantization_config"]["modules_to_not_convert"]
        assert len(kept) == len(set(kept)) == entries


def test_fp8_checkpoints_differ_from_bf16_in_weights_only() -> None:
    for name in ("zai-org/GLM-5", GLM52):
        assert load_model(name).layers == load_model(f"{name}-FP8").layers


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "awq"},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [True, 128]},
    ],
)
def test_unknown_weight_formats_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="quantization_config"):
        read_model("org/x", changed(V32, quantization_config=section))


def test_a_config_of_v3_under_the_name_of_v3_2_is_refused() -> None:
    config = load_model_config("deepseek-ai/DeepSeek-V3")
    with pytest.raises(ConfigError, match=r"index_\* keys is the config of DeepSeek-V3"):
        read_model("deepseek-ai/DeepSeek-V3.2-copy", config)
    with pytest.raises(ConfigError, match=r"index_topk, index_n_heads, index_head_dim missing.*DeepSeek-V3"):
        read_model("org/x", config | {"model_type": "deepseek_v32"})
    assert read_model("org/x", config).indexer is None
    assert read_model("org/DeepSeek-V3-2512", config).indexer is None, "a date is no version"


def test_a_flattened_m3_is_refused_with_the_reason() -> None:
    config = load_model_config(M3)
    flat = config | config["text_config"]
    del flat["text_config"]
    with pytest.raises(ConfigError, match=r"must stay nested.*all-defaults backbone"):
        read_model(M3, flat)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (GLM52, {"indexer_types": ["full"] * 77}, "indexer_types has 77 entries for 78 layers"),
        (GLM52, {"mlp_layer_types": ["dense"] * 79}, "mlp_layer_types has 79 entries"),
        (GLM52, {"indexer_types": ["full"] * 77 + ["half"]}, "entry 'half'"),
        (GLM52, {"index_topk_freq": 0}, "at least 1"),
        (M3, {"moe_layer_freq": [0, 1]}, "moe_layer_freq has 2 entries for 60 layers"),
        (M3, {"moe_layer_freq": [0] * 59 + [2]}, "entry 2"),
        (M3, {"num_key_value_heads": 8}, "4 index heads for 8 key-value heads"),
        (V32, {"topk_group": 0}, "topk_group is 0"),
        (V32, {"num_experts_per_tok": 200}, "cannot give 200 experts"),
        (V32, {"hidden_size": 7168.0}, "hidden_size must be an integer"),
        (V32, {"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        (V32, {"vocab_size": "129280"}, "vocab_size must be an integer"),
        (V32, {"scoring_func": "tanh"}, "known: sigmoid, softmax"),
        (GLM52, {"qk_head_dim": 128}, "qk_head_dim 128"),
        ("meta-llama/Llama-3.1-8B", {"num_key_value_heads": 5}, "no multiple of 5"),
        ("meta-llama/Llama-3.1-8B", {"torch_dtype": "int3"}, "torch_dtype is 'int3'"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", {"num_experts_per_tok": 129}, "exceeds num_experts 128"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", {"mlp_only_layers": 5}, "mlp_only_layers must list layers from 0 to 47"),
        (
            "Qwen/Qwen3-30B-A3B-Instruct-2507",
            {"mlp_only_layers": [48]},
            "mlp_only_layers must list layers from 0 to 47",
        ),
        (V32, {"hidden_size": 10**30}, "hidden_size is beyond"),
        (V32, {"num_hidden_layers": 10**6}, "num_hidden_layers is beyond 4096"),
        (V32, {"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be a finite number"),
        (V32, {"architectures": "DeepseekV32ForCausalLM"}, "architectures must be a list of names"),
        (V32, {"architectures": [["x"]]}, "architectures must be a list of names"),
        (V32, {"architectures": ["LlamaForCausalLM"]}, "family deepseek_v32, architectures .* to llama"),
        (V32, {"model_type": ["deepseek_v32"]}, "model_type must be a string"),
        (GLM52, {"indexer_types": "full"}, "indexer_types is 'full', no list"),
        (GLM52, {"index_topk_freq": "4"}, "^org/x: index_topk_freq must be an integer"),
        (GLM52, {"torch_dtype": ["bfloat16"], "dtype": None}, "torch_dtype is"),
        (M3, {"moe_layer_freq": [0.0] * 60}, "entry 0.0"),
    ],
)
def test_contradicting_fields_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model("org/x", changed(name, **fields))


def test_sparse_lists_of_m3_are_checked() -> None:
    config = load_model_config(M3)
    config["text_config"]["sparse_attention_config"]["sparse_attention_freq"].pop()
    with pytest.raises(ConfigError, match="sparse_attention_freq has 59 entries"):
        read_model(M3, config)


def test_lists_that_disagree_with_the_engines_rule_are_flagged() -> None:
    assert load_model(GLM52).notes == ()
    types = load_model_config(GLM52)["indexer_types"]
    wrong = read_model("org/x", changed(GLM52, indexer_types=["full", "full", "shared", *types[3:]]))
    assert wrong.layers == load_model(GLM52).layers, "the engine's rule wins"
    assert len(wrong.notes) == 1
    assert "indexer_types disagrees" in wrong.notes[0]
    assert "first layer 2 ('shared' against 'full')" in wrong.notes[0]


def test_a_short_pattern_is_flagged() -> None:
    spec = read_model("org/x", changed("zai-org/GLM-5", index_topk_pattern="FS"))
    assert [kind.selection for kind in spec.layers[:3]] == ["full", "shared", "full"]
    assert "2 letters for 78 layers" in spec.notes[0]


def test_the_mtp_count_of_m3_is_flagged() -> None:
    assert any("num_mtp_modules" in note for note in load_model(M3).notes)
