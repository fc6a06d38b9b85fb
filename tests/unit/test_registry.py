import json
import sys
import types
from pathlib import Path

import pytest

from profiler.core.errors import ConfigError
from profiler.core.registry import family_names, family_of, known_models, load_model, load_model_config, read_model

ASKED_FOR = {
    "deepseek-ai/DeepSeek-V3.2-Exp",
    "deepseek-ai/DeepSeek-V3.2",
    "zai-org/GLM-5",
    "zai-org/GLM-5.2",
    "zai-org/GLM-5-FP8",
    "zai-org/GLM-5.2-FP8",
    "MiniMaxAI/MiniMax-M3",
    "deepseek-ai/DeepSeek-V3",
    "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-8B",
}


def test_every_shipped_model_is_read_by_one_family() -> None:
    assert set(known_models()) >= ASKED_FOR
    for name in known_models():
        spec = load_model(name)
        assert spec.name == name
        assert spec.family in family_names()


def test_nested_config_stays_nested() -> None:
    config = load_model_config("MiniMaxAI/MiniMax-M3")
    assert "num_hidden_layers" not in config
    assert config["text_config"]["num_hidden_layers"] == 60


def test_names_are_found_whatever_their_case() -> None:
    assert load_model("deepseek-ai/deepseek-v3.2-exp").name == "deepseek-ai/DeepSeek-V3.2-Exp"


def test_unknown_model_lists_the_known_and_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"did you mean 'deepseek-ai/DeepSeek-V3\.2'") as caught:
        load_model("deepseek-ai/DeepSeek-V3.3")
    assert "zai-org/GLM-5.2" in str(caught.value)
    assert str(Path("deepseek-ai") / "DeepSeek-V3.3.json") in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["../../etc/passwd", "no-slash", "a/b/c", "", "org/.hidden"])
def test_names_that_are_no_repository_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="org/name"):
        load_model_config(name)


def _fake_hub(monkeypatch: pytest.MonkeyPatch, download: object) -> None:
    module = types.ModuleType("huggingface_hub")
    module.hf_hub_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_missing_model_is_fetched_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cached = tmp_path / "root", tmp_path / "config.json"
    cached.write_text(json.dumps(load_model_config("meta-llama/Llama-3.1-8B")))
    _fake_hub(monkeypatch, lambda name, file, **_: str(cached))
    assert load_model("some-org/a-llama", root).num_layers == 32
    assert known_models(root) == ("some-org/a-llama",)
    _fake_hub(monkeypatch, None)
    assert load_model("some-org/a-llama", root).num_layers == 32


def test_a_failed_download_says_where_to_put_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    _fake_hub(monkeypatch, fail)
    with pytest.raises(ConfigError, match=r"no route to host.*put its config\.json at"):
        load_model("some-org/some-model", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_fetched_model_of_no_family_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cached = tmp_path / "root", tmp_path / "config.json"
    cached.write_text(json.dumps({"model_type": "whisper"}))
    _fake_hub(monkeypatch, lambda name, file, **_: str(cached))
    with pytest.raises(ConfigError, match="no model family reads"):
        load_model("some-org/whisper", root)
    assert known_models(root) == ()


def test_family_is_chosen_by_type_then_by_architecture() -> None:
    assert family_of({"model_type": "glm_moe_dsa"}, "x") == "deepseek_v32"
    assert family_of({"model_type": "renamed", "architectures": ["LlamaForCausalLM"]}, "x") == "llama"
    with pytest.raises(ConfigError, match=r"'lama'.*nearest: 'llama'"):
        family_of({"model_type": "lama"}, "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2]", "a JSON object"), ('{"a": 1,}', "not valid JSON"), ('{"a": 1, "a": 2}', "appears twice")],
)
def test_malformed_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "org" / "broken.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model("org/broken", tmp_path)
    assert str(path) in str(caught.value)


def test_a_config_file_can_be_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(load_model_config("Qwen/Qwen3-32B")))
    assert load_model(str(path)).layers == load_model("Qwen/Qwen3-32B").layers


def test_a_missing_key_is_named() -> None:
    config = load_model_config("zai-org/GLM-5")
    del config["kv_lora_rank"]
    with pytest.raises(ConfigError, match="'kv_lora_rank' is missing"):
        read_model("org/model", config)
