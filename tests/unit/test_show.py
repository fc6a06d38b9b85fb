"""Summaries and pages of bundles: what they say is in the tables, and no text of a bundle becomes markup."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_bundle import meta

from profiler.__main__ import main
from profiler.core.bundle import make_table, read_bundle, write_bundle
from profiler.core.errors import ConfigError
from profiler.core.skew_fit import SkewFit
from profiler.page import page
from profiler.summary import flat, summarise

EVIL = "<script>alert(1)</script>"


def bundle(tmp_path: Path, name: str = "index_scores", **changes: Any) -> Path:
    cells = [(name, 0, 0, n, kv, 1, 3.0 + 0.01 * n * kv, 0.02) for n in (1, 2, 4) for kv in (64, 1_024, 4_096, 16_384)]
    cells += [
        (name, chunk, context, 0, 0, 0, 9.0 + chunk + context, 0.02) for chunk in (16, 64) for context in (0, 512)
    ]
    tables = {
        (1, "indexer"): make_table("indexer", cells),
        (1, "dense"): make_table("dense", [("o_proj", n, 25.0 + n, 0.01) for n in (1, 2, 4)]),
        (1, "moe"): make_table("moe", [("experts", 8, n, 4, 2 * n, 30.0 + n, 0.01) for n in (8, 16)]),
        (1, "skew"): make_table("skew", [(name, "none", "1x8192 3x64", "fit", 80.0, 0.01)]),
    }
    facts = {"model": "deepseek-ai/DeepSeek-V3.2-Exp"} | changes
    return write_bundle(tmp_path, meta(**facts), tables, skew_fits={1: [SkewFit(name, 0, 4, 0.5, 1)]})  # type: ignore[arg-type]


def test_a_summary_has_every_table_with_its_figures(tmp_path: Path) -> None:
    found = {one.category: one for one in summarise(read_bundle(bundle(tmp_path)))}
    assert set(found) == {"indexer", "dense", "moe", "skew"}
    assert found["indexer"].rows == 16 and found["indexer"].axes["decode_requests"] == (0.0, 1.0, 2.0, 4.0)
    assert found["indexer"].quality["leave_one_out"]["p90"] == pytest.approx(0.0, abs=1e-3)
    assert found["dense"].quality["spread_from_20_us"] == {"p50": 0.01, "p90": 0.01, "cells": 3}
    assert (found["moe"].least_us, found["moe"].most_us) == (38.0, 46.0)


def test_the_page_holds_every_plot_and_fetches_nothing(tmp_path: Path) -> None:
    text = page(read_bundle(bundle(tmp_path)))
    for title in ("time against the end of the chunk", "decode: time against the keys", "dense: time against tokens"):
        assert title in text
    assert "alpha of unequal decode batches" in text and "experts: time against local_pairs" in text
    body = text.replace(text[text.index("<script>") : text.index("</script>")], "")
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", body)
    # Three of the kernel (two chunks are no line), one dense, two of the experts, one of alpha.
    assert text.count('class="plotly-graph-div"') == 3 + 1 + 2 + 1


def test_no_text_of_a_bundle_becomes_markup(tmp_path: Path) -> None:
    text = page(read_bundle(bundle(tmp_path, EVIL, command=EVIL, gpu={"name": EVIL, "driver": '"><b>'})))
    assert EVIL not in text and "<b>" not in text[text.index("<body>") :]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_nested_facts_are_flattened_with_their_path() -> None:
    assert flat({"a": {"b": [1, 2]}, "c": [{"d": 3}]}) == [("a.b", "1, 2"), ("c.0.d", "3")]


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bundle(tmp_path / "perf")
    main(["show", str(path), "--html", str(tmp_path / "out" / "page.html")], standalone_mode=False)
    printed = capsys.readouterr().out
    assert printed.startswith("deepseek-ai/DeepSeek-V3.2-Exp on H200")
    assert re.search(r"1 indexer +16 ", printed)
    assert (tmp_path / "out" / "page.html").read_text().startswith("<!doctype html>")
    relative = str(path.relative_to(tmp_path / "perf"))
    main(["show", relative, "--out-root", str(tmp_path / "perf"), "--format", "json"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    assert [table["category"] for table in report["tables"]] == ["dense", "indexer", "moe", "skew"]


def test_a_table_of_another_degree_or_layout_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = {"tp1/indexer": {"from": {"tp": 2}}, "tp1/moe": {"from": {"kv_layout": "bf16", "measured_at": "then"}}}
    path = bundle(tmp_path / "perf", grid=grid)
    main(["show", str(path)], standalone_mode=False)
    rows = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if re.match(r" +1 \w", line)}
    assert rows["indexer"].endswith(" of tp 2") and rows["moe"].endswith(" of the bf16 cache")
    assert " of t" not in rows["dense"]
    main(["show", str(path), "--format", "json"], standalone_mode=False)
    tables = {table["category"]: table for table in json.loads(capsys.readouterr().out)["tables"]}
    assert tables["indexer"]["from"] == {"tp": 2} and "from" not in tables["dense"]


def test_experts_of_whole_passes_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes = {"ep": 1, "tokens": "8", "passes": "3", "kv_layout": "fp8_ds_mla", "run": "then"}
    origin = {"kv_layout": "fp8_ds_mla", "measured_at": "then", "from": {"kv_layout": "bf16", "measured_at": "before"}}
    for entry, ending in (
        ({"whole_passes": [passes]}, " ep 1 in whole passes"),
        (
            {"whole_passes": [passes], "from": origin},
            " ep 1 in whole passes of the fp8_ds_mla cache, the rest of the bf16 cache",
        ),
    ):
        path = bundle(tmp_path / str(len(entry)), grid={"tp1/moe": entry})
        main(["show", str(path)], standalone_mode=False)
        (row,) = [line for line in capsys.readouterr().out.splitlines() if re.match(r" +1 moe", line)]
        assert row.endswith(ending)
        main(["show", str(path), "--format", "json"], standalone_mode=False)
        tables = {table["category"]: table for table in json.loads(capsys.readouterr().out)["tables"]}
        assert tables["moe"]["whole_passes"] == [passes] and "whole_passes" not in tables["dense"]


def test_a_bundle_that_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "root")
    name = str(folder.relative_to(tmp_path / "root"))
    for command in (["show", f"{name}x"], ["show", name.rsplit("/", 1)[0]], ["compare", name, f"{name}x"]):
        done = CliRunner().invoke(main, [*command, "--out-root", str(tmp_path / "root")])
        assert isinstance(done.exception, ConfigError)
        assert str(done.exception).startswith("unknown bundle ") and f"did you mean {name!r}?" in str(done.exception)
    for named in (name, f"{name}/", str(folder)):
        assert CliRunner().invoke(main, ["show", named, "--out-root", str(tmp_path / "root")]).exit_code == 0
