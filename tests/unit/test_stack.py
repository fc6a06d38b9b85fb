import pytest

from profiler.core.errors import ConfigError
from profiler.core.registry import known_models, load_model, load_model_config, read_model
from profiler.core.stack import fold, one_of_each, shrink, shrunk_layers, stack_of, stages, text_config, token_selection
from profiler.core.types import LayerKind


def test_engine_rule_reproduces_the_indexer_list_of_glm_5_2() -> None:
    listed = load_model_config("zai-org/GLM-5.2")["indexer_types"]
    assert list(token_selection(78, None, 4, 3)) == listed
    assert listed.count("full") == 21
    assert [i for i, kind in enumerate(listed) if kind == "full"] == [0, 1, 2, *range(6, 78, 4)]


def test_a_pattern_beats_the_frequency_and_ends_in_full_layers() -> None:
    assert token_selection(5, "FSS", 1, 2) == ("full", "shared", "shared", "full", "full")


@pytest.mark.parametrize(
    ("pattern", "frequency", "message"),
    [("FXS", 1, "letters X"), ("SFF", 1, "layer 0"), (None, 0, "at least 1")],
)
def test_illegal_selection_rules(pattern: str | None, frequency: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        token_selection(3, pattern, frequency, 2)


def test_layer_kinds_of_each_model() -> None:
    def kinds(name: str) -> list[tuple[str, int]]:
        spec = load_model(name)
        return [(kind.name, spec.count(kind)) for kind in spec.kinds]

    assert kinds("deepseek-ai/DeepSeek-V3.2-Exp") == [("mla-full-dense", 3), ("mla-full-moe", 58)]
    assert kinds("zai-org/GLM-5") == [("mla-full-dense", 3), ("mla-full-moe", 75)]
    assert kinds("zai-org/GLM-5.2") == [("mla-full-dense", 3), ("mla-shared-moe", 57), ("mla-full-moe", 18)]
    assert kinds("MiniMaxAI/MiniMax-M3") == [("gqa-none-dense", 3), ("gqa-block-moe", 57)]
    assert kinds("deepseek-ai/DeepSeek-V3") == [("mla-none-dense", 3), ("mla-none-moe", 58)]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("deepseek-ai/DeepSeek-V3.2", 4),
        ("zai-org/GLM-5", 4),
        ("MiniMaxAI/MiniMax-M3", 4),
        ("zai-org/GLM-5.2", 7),
        ("zai-org/GLM-5.2-FP8", 7),
    ],
)
def test_shrinking_reaches_every_kind_with_the_fewest_layers(name: str, layers: int) -> None:
    assert shrunk_layers(load_model(name)) == layers


@pytest.mark.parametrize("name", known_models())
def test_a_shrunk_config_reads_as_the_leading_layers(name: str) -> None:
    spec, config = load_model(name), load_model_config(name)
    layers, small = shrink(spec, config)
    again = read_model(name, small)
    assert again.layers == spec.layers[:layers]
    assert again.kinds == spec.kinds
    assert ("text_config" in small) == ("text_config" in config)
    assert load_model_config(name) == config, "the caller's config is left alone"


def test_shrinking_cuts_nested_lists_and_patterns_and_nothing_else() -> None:
    _, small = shrink(load_model("MiniMaxAI/MiniMax-M3"), load_model_config("MiniMaxAI/MiniMax-M3"))
    text = small["text_config"]
    assert text["moe_layer_freq"] == [0, 0, 0, 1]
    assert text["sparse_attention_config"]["sparse_attention_freq"] == [0, 0, 0, 1]
    assert text["sparse_attention_config"]["sparse_disable_index_value"] == [0, 0, 0, 1]
    config = load_model_config("zai-org/GLM-5") | {"index_topk_pattern": "F" * 40 + "S" * 38}
    layers, small = shrink(read_model("org/x", config), config)
    assert (layers, small["index_topk_pattern"]) == (41, "F" * 40 + "S")
    assert len(small["eos_token_id"]) == 3


@pytest.mark.parametrize("name", known_models())
def test_a_stack_of_one_layer_of_each_kind_reads_as_these_layers(name: str) -> None:
    spec, config = load_model(name), load_model_config(name)
    layers, small = stack_of(spec, config)
    assert layers == one_of_each(spec)
    assert len(layers) == len(spec.kinds)
    again = read_model(name, small)
    assert again.layers == tuple(spec.layers[i] for i in layers)
    assert set(again.layers) == set(spec.layers)
    assert load_model_config(name) == config, "the caller's config is left alone"


def test_rules_by_layer_number_follow_the_layers_that_stay() -> None:
    layers, small = stack_of(load_model("zai-org/GLM-5.2"), load_model_config("zai-org/GLM-5.2"))
    # The model's layers 0 to 2 are dense, 0, 1, 2 and 6 have an indexer (vllm 0.26: index_topk_freq 4, offset 3).
    assert layers == (0, 3, 6)
    assert (small["first_k_dense_replace"], small["index_topk_pattern"]) == (1, "FSF")
    assert (small["indexer_types"], small["num_hidden_layers"]) == (["full", "shared", "full"], 3)
    layers, small = stack_of(load_model("MiniMaxAI/MiniMax-M3"), load_model_config("MiniMaxAI/MiniMax-M3"))
    assert layers == (0, 3)
    assert small["text_config"]["moe_layer_freq"] == [0, 1]


def test_modules_left_out_of_a_quantisation_are_renumbered_with_their_layers() -> None:
    config = load_model_config("zai-org/GLM-5-FP8")
    _, small = stack_of(load_model("zai-org/GLM-5-FP8"), config)
    names = small["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.1.mlp.gate" in names, "the router of the model's layer 3"
    assert {"lm_head", "model.layers.78.eh_proj", "model.layers.0.input_layernorm"} <= set(names)
    assert not any(".layers.2." in name or ".layers.3." in name for name in names)
    whole = config["quantization_config"]["modules_to_not_convert"]
    assert sum(".layers.1." in name for name in names) == sum(".layers.3." in name for name in whole)


def test_earlier_runs_are_continued_on_their_own_stack() -> None:
    spec, config = load_model("deepseek-ai/DeepSeek-V3.2"), load_model_config("deepseek-ai/DeepSeek-V3.2")
    dense, sparse = (kind.name for kind in spec.kinds)
    assert stack_of(spec, config, [dense, sparse])[0] == (0, 3)
    layers, small = stack_of(spec, config, [dense, dense, dense, sparse])
    assert layers == (0, 1, 2, 3)
    assert small == shrink(spec, config)[1]
    with pytest.raises(ConfigError, match="earlier runs are of the layers"):
        stack_of(spec, config, [dense, dense, sparse])


def test_a_rule_that_no_shorter_stack_can_follow_keeps_the_leading_layers() -> None:
    config = load_model_config("deepseek-ai/DeepSeek-V3.2") | {"moe_layer_freq": 2}
    spec = read_model("org/x", config)
    assert one_of_each(spec) == (0, 4)
    layers, small = stack_of(spec, config)
    assert layers == (0, 1, 2, 3, 4)
    assert read_model("org/x", small).layers == spec.layers[:5]


def test_text_config_serves_flat_and_nested_files() -> None:
    assert text_config({"num_hidden_layers": 3})["num_hidden_layers"] == 3
    assert text_config({"text_config": {"num_hidden_layers": 4}, "num_hidden_layers": 3})["num_hidden_layers"] == 4
    with pytest.raises(ConfigError, match="must be a mapping"):
        text_config({"text_config": [1]})


def test_stages_are_the_engines() -> None:
    assert [len(stage) for stage in stages(61, 4)] == [15, 15, 16, 15]
    assert [len(stage) for stage in stages(78, 4)] == [19, 20, 20, 19]
    assert [len(stage) for stage in stages(7, 4)] == [2, 2, 2, 1]
    assert [i for stage in stages(61, 7) for i in stage] == list(range(61))
    with pytest.raises(ConfigError, match="between 1 and 3"):
        stages(3, 4)


def test_fold_counts_layers_by_what_they_run() -> None:
    counts = {(c.category, c.name): n for c, n in fold(load_model("zai-org/GLM-5.2")).components}
    assert counts["dense", "embedding"] == counts["per_sequence", "lm_head"] == 1
    assert counts["dense", "o_proj"] == counts["sparse_attention", "sparse_mla"] == 78
    assert counts["indexer", "index_scores"] == counts["dense", "indexer_wq_b"] == 21
    assert counts["dense", "gate_up_proj"] == 3
    assert counts["moe", "experts"] == counts["dense", "shared_down_proj"] == 75


def test_fold_of_minimax_m3_prices_dense_and_sparse_attention_apart() -> None:
    counts = {(c.category, c.name): n for c, n in fold(load_model("MiniMaxAI/MiniMax-M3")).components}
    assert counts["attention", "attention"] == 3
    assert counts["sparse_attention", "sparse_gqa"] == counts["indexer", "block_topk"] == 57
    assert counts["dense", "layernorm"] == 120
    assert counts["dense", "qkv_proj"] == 3


@pytest.mark.parametrize("name", known_models())
def test_fold_equals_the_sum_over_layers(name: str) -> None:
    from profiler.core.registry import family

    spec = load_model(name)
    module = family(spec.family)
    every = [*module.prologue_components(spec), *module.head_components(spec)]
    for kind in spec.layers:
        every += module.layer_components(spec, kind)
    assert dict(fold(spec).components) == {component: every.count(component) for component in every}


def test_a_layer_kind_has_one_name() -> None:
    assert LayerKind("mla", "shared", "moe").name == "mla-shared-moe"
