import math
from pathlib import Path

import pytest

from profiler.core.bundle import Table, find_bundle, make_table, read_bundle, read_table, write_bundle
from profiler.core.errors import ConfigError, ContractError, CoverageError


def meta(**changes: object) -> dict[str, object]:
    return {
        "schema_version": 1,
        "provenance": "measured",
        "hardware": "H200",
        "gpu": {"name": "NVIDIA H200", "driver": "580.1"},
        "engine": {"name": "reference", "versions": {"torch": "2.13"}},
        "model": "acme/Tiny",
        "model_config_sha256": "0" * 64,
        "variant": "bf16",
        "weights": "bf16",
        "kv": {
            "layout": "bf16",
            "block_tokens": 64,
            "caches": [{"name": "mla", "bytes_per_token_layer": 1152}],
        },
        "contract": "serving",
        "attended_cap_tokens": 2048,
        "protocol": {"warmup": 1, "repeats": 3, "statistic": "median"},
        "grid": {"dense": [1, 2]},
        "measured_at": "2026-01-01T00:00:00+00:00",
        "command": "python -m profiler profile acme/Tiny",
    } | changes


def dense(*tokens: int) -> Table:
    return make_table("dense", [("o_proj", n, 1.5 * n, 0.01) for n in tokens])


def test_round_trip(tmp_path: Path) -> None:
    table = make_table("dense", [("o_proj", 2, 3.25, 0.01), ("o_proj", 1, 1.5, math.nan), ("act", 1, 1e-3, 0)])
    moe = make_table("moe", [("experts", 8, 16, 14.25, 16, 40.0, 0.0)])
    path = write_bundle(tmp_path, meta(), {(1, "dense"): table, (1, "moe"): moe})
    assert path == tmp_path / "H200/acme/Tiny/bf16"
    bundle = read_bundle(path)
    assert bundle.tps == (1,)
    rows = list(bundle.table(1, "dense").rows())
    assert rows[0] == ("act", 1, 0.001, 0.0)
    assert rows[1][:3] == ("o_proj", 1, 1.5) and math.isnan(float(rows[1][3]))
    assert rows[2] == ("o_proj", 2, 3.25, 0.01)
    assert bundle.table(1, "moe").columns["activated_experts"] == (14.25,)
    assert bundle.table(1, "dense").names == ("act", "o_proj")
    assert bundle.meta["files"]["tp1/dense.csv"]["rows"] == 3
    assert not [p for p in path.parent.iterdir() if p.name.startswith(".")]


def test_equal_tables_write_equal_bytes(tmp_path: Path) -> None:
    one = write_bundle(tmp_path / "a", meta(), {(1, "dense"): dense(1, 2)})
    two = write_bundle(tmp_path / "b", meta(), {(1, "dense"): dense(2, 1)})
    for name in ("meta.yaml", "tp1/dense.csv"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_missing_table_names_what_exists_and_the_command(tmp_path: Path) -> None:
    bundle = read_bundle(write_bundle(tmp_path, meta(), {(1, "dense"): dense(1)}))
    with pytest.raises(CoverageError, match=r"tp1/attention; the bundle has tp1/dense.*--tp 1 --categories attention"):
        bundle.table(1, "attention")
    with pytest.raises(CoverageError, match=r"no tables of tp 2, only of tp 1\. .*--tp 2$"):
        bundle.table(2, "attention")


def test_added_tables_merge_and_keep_their_stamp(tmp_path: Path) -> None:
    write_bundle(tmp_path, meta(), {(1, "dense"): dense(1)})
    later = meta(measured_at="2026-02-02T00:00:00+00:00", command="again", grid={"moe": [1]})
    path = write_bundle(tmp_path, later, {(2, "dense"): dense(4)})
    bundle = read_bundle(path)
    assert sorted(bundle.tables) == [(1, "dense"), (2, "dense")]
    assert bundle.meta["files"]["tp1/dense.csv"]["measured_at"].startswith("2026-01")
    assert bundle.meta["files"]["tp2/dense.csv"]["measured_at"].startswith("2026-02")
    assert bundle.meta["grid"] == {"dense": [1, 2], "moe": [1]}


def test_existing_table_needs_force(tmp_path: Path) -> None:
    write_bundle(tmp_path, meta(), {(1, "dense"): dense(1)})
    with pytest.raises(ConfigError, match=r"tp1/dense\.csv already"):
        write_bundle(tmp_path, meta(), {(1, "dense"): dense(2)})
    path = write_bundle(tmp_path, meta(), {(1, "dense"): dense(2)}, force=True)
    assert read_bundle(path).table(1, "dense").columns["tokens"] == (2,)


def test_disagreeing_meta_is_refused_by_key(tmp_path: Path) -> None:
    write_bundle(tmp_path, meta(), {(1, "dense"): dense(1)})
    other = meta(gpu={"name": "NVIDIA H100", "driver": "580.1"})
    with pytest.raises(ConfigError, match=r"gpu: .*H200.* there, .*H100"):
        write_bundle(tmp_path, other, {(2, "dense"): dense(1)})
    path = write_bundle(tmp_path, other, {(2, "dense"): dense(1)}, force=True)
    assert read_bundle(path).tps == (2,)


def test_edited_table_is_refused(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, meta(), {(1, "dense"): dense(1, 2)})
    table = path / "tp1/dense.csv"
    table.write_text(table.read_text().replace("1.5", "1.6"))
    with pytest.raises(ContractError, match=r"tp1/dense\.csv: .*sha256") as refused:
        read_bundle(path)
    assert refused.value.exit_code == 4


def test_truncated_table_is_refused_by_line(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, meta(), {(1, "dense"): dense(1, 2)})
    table = path / "tp1/dense.csv"
    table.write_text(table.read_text()[:-9])
    with pytest.raises(ConfigError, match=r"dense\.csv:3: "):
        read_bundle(path)


def test_extra_column_is_refused_by_line(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, meta(), {(1, "dense"): dense(1)})
    table = path / "tp1/dense.csv"
    table.write_text("layer,tokens,time_us,spread_rel,note\no_proj,1,1.5,0.01,x\n")
    with pytest.raises(ConfigError, match=r"dense\.csv:1: unknown columns \['note'\]"):
        read_bundle(path)


def test_missing_listed_table_is_refused(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, meta(), {(1, "dense"): dense(1)})
    (path / "tp1/dense.csv").unlink()
    with pytest.raises(ContractError, match="missing"):
        read_bundle(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("o_proj,1,1.5", "3 fields"),
        ("o_proj,1.5,1.5,0", "tokens must be an integer"),
        ("o_proj,-1,1.5,0", "tokens must be an integer"),
        ("o_proj,1,0,0", "time_us must be a positive number"),
        ("o_proj,1,nan,0", "time_us must be a positive number"),
        ("o_proj,1,inf,0", "time_us must be a positive number"),
        ("o_proj,1,fast,0", "time_us must be a positive number"),
        ("o_proj,1,1.5,-1", "spread_rel must be a number of at least 0"),
        (",1,1.5,0", "layer must be a name"),
        ("o_proj,2,1,0", "appears twice"),
    ],
)
def test_malformed_rows_are_refused_by_line(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "dense.csv"
    path.write_text(f"layer,tokens,time_us,spread_rel\no_proj,2,1,0\n{row}\n")
    with pytest.raises(ConfigError, match=message) as refused:
        read_table(path, "dense")
    assert f"{path}:3: " in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"provenance": "guessed"}, "provenance is 'guessed'"),
        ({"contract": "demo"}, "contract is 'demo'"),
        ({"schema_version": 2}, "schema_version 2"),
        ({"model": "../../etc"}, "cannot name a folder"),
        ({"kv": {"layout": "bf16"}}, "kv has no block_tokens, caches"),
        ({"gpu": "H200"}, "gpu must be a mapping"),
    ],
)
def test_illegal_meta_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_bundle(tmp_path, meta(**change), {(1, "dense"): dense(1)})
    assert not list(tmp_path.iterdir())


def test_missing_meta_key_is_named(tmp_path: Path) -> None:
    short = meta()
    del short["contract"]
    with pytest.raises(ConfigError, match="no contract"):
        write_bundle(tmp_path, short, {(1, "dense"): dense(1)})


def test_failed_write_leaves_the_published_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bundle(tmp_path, meta(), {(1, "dense"): dense(1)})
    before = (path / "tp1/dense.csv").read_bytes()

    def fail(value: object) -> str:
        raise OSError("disk full")

    monkeypatch.setattr("profiler.core.bundle._cell", fail)
    with pytest.raises(OSError, match="disk full"):
        write_bundle(tmp_path, meta(), {(1, "dense"): dense(3)}, force=True)
    monkeypatch.undo()
    assert (path / "tp1/dense.csv").read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["bf16"]


def test_bundle_set_aside_by_a_killed_writer_is_still_read_and_restored(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, meta(), {(1, "dense"): dense(1)})
    path.rename(path.with_name(".bf16.old"))  # killed between the two renames of a replacement
    assert find_bundle(tmp_path, "H200", "acme/Tiny") == path
    assert read_bundle(path).tps == (1,)
    write_bundle(tmp_path, meta(), {(2, "dense"): dense(1)})
    assert read_bundle(path).tps == (1, 2)


def test_find_bundle_lists_what_exists(tmp_path: Path) -> None:
    write_bundle(tmp_path, meta(), {(1, "dense"): dense(1)})
    with pytest.raises(CoverageError, match=r"H200/acme/Tiny.*python -m profiler profile acme/Tiny --hardware B200"):
        find_bundle(tmp_path, "B200", "acme/Tiny")
    with pytest.raises(ConfigError, match=r"unknown variant .*'fp8'.*bf16"):
        find_bundle(tmp_path, "H200", "acme/Tiny", "fp8")
    write_bundle(tmp_path, meta(variant="fp8", weights="fp8"), {(1, "dense"): dense(1)})
    with pytest.raises(ConfigError, match="bf16, fp8: name one"):
        find_bundle(tmp_path, "H200", "acme/Tiny")
    assert find_bundle(tmp_path, "H200", "acme/Tiny", "fp8").name == "fp8"
    with pytest.raises(ConfigError, match="no such folder"):
        find_bundle(tmp_path / "none", "H200", "acme/Tiny")


def test_folder_of_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "meta.yaml").write_text("colour: green\n")
    with pytest.raises(ConfigError, match="no known foreign format"):
        read_bundle(tmp_path)
