"""Expert tables taken from the samples or the bundle of another KV layout, and from no other measurement."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from profiling import SMALL, FakeEngine, each_component, small_root

from profiler import acquire
from profiler.commands.profile import command
from profiler.core.bundle import read_bundle, table_text
from profiler.core.errors import ConfigError
from profiler.engines.base import EngineOptions

PACKED = {
    "layout": "fp8_ds_mla",
    "block_tokens": 64,
    "caches": [{"name": "mla_latent", "bytes_per_token_layer": 656}],
    "tokens": None,
}
OTHER_THAN_EXPERTS = "dense,attention,indexer,sparse_attention,per_sequence"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `profile` on an engine without a device; gives the result and the shots that ran."""
    models = small_root(tmp_path / "models")

    def run(*arguments: str, **facts: Any) -> tuple[Result, list[Any]]:
        started: list[FakeEngine] = []

        def create(name: str, options: EngineOptions) -> FakeEngine:
            started.append(FakeEngine(options, each_component, **facts))
            return started[-1]

        monkeypatch.setattr(acquire, "create_engine", create)
        fixed = ["--hardware", "CPU", "--grid", "tiny", "--repeats", "3", "--warmup", "0", "--skip-skew"]
        fixed += ["--model-config-root", str(models), "--out-root", str(tmp_path / "out")]
        result = CliRunner().invoke(command, [SMALL, *fixed, *arguments], catch_exceptions=True)
        return result, [shot for engine in started for shot in engine.ran]

    return run


def folder(tmp_path: Path, variant: str) -> Any:
    return tmp_path / "out" / "CPU" / SMALL / variant


@pytest.mark.parametrize("from_bundle", [False, True])
def test_the_other_layout_is_complete_without_running_an_expert(call: Any, tmp_path: Path, from_bundle: bool) -> None:
    samples = tmp_path / "bf16.csv.gz"
    result, ran = call("--ep", "1,2", "--save-samples", str(samples))
    assert result.exit_code == 0, result.output
    assert any(shot.moe for shot in ran)
    source = folder(tmp_path, "bf16") if from_bundle else samples
    result, ran = call("--categories", OTHER_THAN_EXPERTS, "--moe-from", str(source), kv=PACKED)
    assert result.exit_code == 0, result.output
    assert "tp1/moe.csv" in result.output
    assert ran
    assert not any(shot.moe for shot in ran)
    first, second = read_bundle(folder(tmp_path, "bf16")), read_bundle(folder(tmp_path, "bf16-kvfp8_ds_mla"))
    assert set(second.tables) == set(first.tables)
    assert table_text(second.tables[1, "moe"]) == table_text(first.tables[1, "moe"])
    entry = second.meta["grid"]["tp1/moe"]
    assert entry["from"] == {"kv_layout": "bf16", "measured_at": first.meta["measured_at"]}
    assert entry["run"] in second.meta["grid"], "what the experts ran under is told"
    assert "from" not in second.meta["grid"]["tp1/dense"]


def test_experts_are_added_to_a_bundle_that_lacks_them(call: Any, tmp_path: Path) -> None:
    source, own = tmp_path / "bf16.csv.gz", tmp_path / "packed.csv.gz"
    assert call("--save-samples", str(source))[0].exit_code == 0
    assert call("--categories", OTHER_THAN_EXPERTS, "--save-samples", str(own), kv=PACKED)[0].exit_code == 0
    before = read_bundle(folder(tmp_path, "bf16-kvfp8_ds_mla"))
    assert (1, "moe") not in before.tables
    result, ran = call("--from-samples", str(own), "--moe-from", str(source))
    assert (result.exit_code, ran) == (0, []), result.output
    after = read_bundle(folder(tmp_path, "bf16-kvfp8_ds_mla"))
    assert {key: table_text(table) for key, table in after.tables.items() if key != (1, "moe")} == {
        key: table_text(table) for key, table in before.tables.items()
    }
    assert (1, "moe") in after.tables


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"versions": {"torch": "1"}}, "versions"),
        ({"weights": "fp8"}, "weights"),
        ({"gpu": {"name": "another"}}, "card"),
        ({"settings": {"moe_backend": {"1": "FlashInferExperts"}}}, "expert back end"),
    ],
)
def test_experts_measured_otherwise_are_refused(call: Any, tmp_path: Path, facts: dict[str, Any], named: str) -> None:
    samples = tmp_path / "bf16.csv.gz"
    assert call("--save-samples", str(samples))[0].exit_code == 0
    result, _ = call("--moe-from", str(samples), **{"kv": PACKED, **facts})
    assert isinstance(result.exception, ConfigError)
    assert f"  {named}: " in str(result.exception)
    assert not folder(tmp_path, "bf16-kvfp8_ds_mla").exists()


def test_a_source_without_experts_and_a_degree_without_them_are_refused_before_the_engine_starts(
    call: Any, tmp_path: Path
) -> None:
    samples = tmp_path / "dense.csv.gz"
    assert call("--categories", "dense", "--save-samples", str(samples))[0].exit_code == 0
    for arguments, message in (
        (("--moe-from", str(samples)), "holds no expert shots of tp 1"),
        (("--moe-from", str(folder(tmp_path, "bf16"))), "has no table tp1/moe"),
        (("--moe-from", str(samples), "--tp", "2"), "experts are measured whole"),
    ):
        result, ran = call(*arguments, kv=PACKED)
        assert message in str(result.exception)
        assert ran == []


def test_an_expert_shot_that_failed_is_not_taken_as_measured(call: Any, tmp_path: Path) -> None:
    samples = tmp_path / "bf16.csv.gz"
    failed, _ = call("--save-samples", str(samples), failures={"moe ep=1 tokens=1 ": "out of memory"})
    assert "out of memory" in str(failed.exception)
    result, _ = call("--moe-from", str(samples), kv=PACKED)
    assert "out of memory" in str(result.exception)
    assert (1, "moe") not in read_bundle(folder(tmp_path, "bf16-kvfp8_ds_mla")).tables


def test_what_no_layout_changes_is_taken_from_the_other_bundle(call: Any, tmp_path: Path) -> None:
    assert call("--ep", "1,2")[0].exit_code == 0
    source = folder(tmp_path, "bf16")
    result, ran = call("--tp", "1,2", "--shared-from", str(source), kv=PACKED)
    assert result.exit_code == 0, result.output
    assert ran and not any(shot.moe for shot in ran)
    assert not any(fill.category == "indexer" for shot in ran for fill in shot.fills)
    first, second = read_bundle(source), read_bundle(folder(tmp_path, "bf16-kvfp8_ds_mla"))
    for category in ("moe", "indexer"):
        assert table_text(second.tables[1, category]) == table_text(first.tables[1, category])
        origin = second.meta["grid"][f"tp1/{category}"]["from"]
        assert origin == {"kv_layout": "bf16", "measured_at": first.meta["measured_at"]}
    assert table_text(second.tables[2, "indexer"]) == table_text(first.tables[1, "indexer"])
    assert second.meta["grid"]["tp2/indexer"]["from"] == {"tp": 1}


def test_a_lender_of_another_index_cache_or_without_such_tables_is_refused(call: Any, tmp_path: Path) -> None:
    assert call("--categories", "dense")[0].exit_code == 0
    source = folder(tmp_path, "bf16")
    result, ran = call("--shared-from", str(source), kv=PACKED)
    assert "has none of the tables that serve every KV layout (moe, indexer)" in str(result.exception)
    assert ran == []
    result, ran = call("--tp", "2", "--shared-from", str(source), kv=PACKED)
    assert "so it goes first" in str(result.exception) and ran == []
    assert call("--categories", "indexer")[0].exit_code == 0
    wide = PACKED | {"caches": [*PACKED["caches"], {"name": "index_keys", "bytes_per_token_layer": 256}]}
    result, _ = call("--shared-from", str(source), kv=wide)
    assert "index_keys: [] there, [256] here" in str(result.exception)


def test_experts_from_two_places_are_refused_and_a_refused_lender_leaves_nothing(call: Any, tmp_path: Path) -> None:
    assert call("--ep", "1,2")[0].exit_code == 0
    source = folder(tmp_path, "bf16")
    result, ran = call("--shared-from", str(source), "--moe-from", str(source), kv=PACKED)
    assert "both take experts: give one of the two" in str(result.exception) and ran == []
    result, ran = call("--shared-from", str(source), kv=PACKED, versions={"torch": "1"})
    assert "versions: " in str(result.exception) and ran
    assert not folder(tmp_path, "bf16-kvfp8_ds_mla").exists()
