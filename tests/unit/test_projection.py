"""Projection between cards, and comparison of bundles, on tables of closed form."""

from pathlib import Path
from typing import Any

import priced
import pytest
from click.testing import CliRunner

from profiler import projection
from profiler.commands.compare import command as compare_command
from profiler.commands.project import command as project_command
from profiler.comparison import Lookup, compare, summarise
from profiler.core.bundle import Bundle, Table, make_table, read_bundle, write_bundle
from profiler.core.errors import ConfigError, ContractError, CoverageError
from profiler.core.hardware import Hardware, load_hardware
from profiler.core.modules import module_kinds
from profiler.core.registry import load_model
from profiler.core.types import Category
from profiler.module_work import parts_of_row, roofline_us
from profiler.sweep import rank_spec
from serving.api import replay
from serving.commands.chakra import command as chakra_command
from serving.commands.explain import command as explain_command
from serving.config import load_cluster
from serving.deployment import deploy
from serving.explained import explain_instance

MODEL = priced.MODEL
M3 = "MiniMaxAI/MiniMax-M3"
FLOOR_US = 4.0
EFFICIENCY = {"H200": 0.7, "B200": 0.5}


def on_card(model: str, card: Hardware, efficiency: float, floor_us: float = FLOOR_US) -> dict[Any, Table]:
    """Modules and products that take a floor and then the same share of this card's roofline."""
    spec = load_model(model)
    rank = rank_spec(spec, 1)
    weights = spec.quantization.weights
    (name,) = module_kinds(spec)

    def us(category: Category, kernel: str, key: tuple[int, ...]) -> float:
        return floor_us + roofline_us(parts_of_row(rank, category, kernel, key, weights), card) / efficiency

    batches = [(chunk, context, 0, 0, 0) for chunk in (16, 1024, 8192) for context in (0, 16384)]
    batches += [(0, 0, requests, keys, 1) for requests in (1, 64) for keys in (64, 2048, 65536)]
    modules = [(name, *key, us("attention", name, key), "") for key in batches]
    dense = [("gate_up_proj", tokens, us("dense", "gate_up_proj", (tokens,)), "") for tokens in (1, 64, 4096)]
    tables: dict[Any, Table] = {
        (1, "attention"): make_table("attention", modules),
        (1, "dense"): make_table("dense", dense),
    }
    return tables


def meta(model: str, hardware: str, **changed: object) -> dict[str, object]:
    kv: dict[str, object] = {"layout": "bf16", "block_tokens": 128, "caches": []}
    own: dict[str, object] = {"hardware": hardware, "model": model, "variant": "bf16", "weights": "bf16", "kv": kv}
    return priced.meta(**{**own, "granularity": "module", "attended_cap_tokens": 2048, **changed})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for hardware, efficiency in EFFICIENCY.items():
        write_bundle(tmp_path, meta(M3, hardware), on_card(M3, load_hardware(hardware), efficiency))
    return tmp_path


def test_equal_efficiency_projects_exactly(tmp_path: Path) -> None:
    """The floor is the fastest row beyond its roofline, so rows of one floor and one share come out as they are."""
    h200, b200 = load_hardware("H200"), load_hardware("B200")
    source = read_bundle(write_bundle(tmp_path, meta(M3, "H200"), on_card(M3, h200, 1.0)))
    projected = projection.project_tables(source, load_model(M3), h200, b200)
    expected = on_card(M3, b200, 1.0)
    assert projected.tables.keys() == expected.keys() and not projected.unscaled
    for key, table in expected.items():
        assert list(projected.tables[key].columns["time_us"]) == pytest.approx(list(table.columns["time_us"]))


def test_the_band_is_the_ratio_of_efficiencies(root: Path) -> None:
    """Large rows of a card that reaches 5/7 of the other's share are projected to 5/7 of their time."""
    (check,) = projection.checks(root, load_hardware("H200"), load_hardware("B200"))
    bands = {(band.kernel, band.phase): band for band in check.bands}
    assert set(bands) == {("gate_up_proj", "all"), ("msa_module", "prefill"), ("msa_module", "decode")}
    assert bands["msa_module", "prefill"].p50 == pytest.approx(5 / 7, rel=0.1)
    assert check.whole.rows == 6 + 6 + 3 and check.whole.p10 >= 0.5


def test_rows_of_unknown_work_are_carried_over_and_counted(tmp_path: Path) -> None:
    h200, b200 = load_hardware("H200"), load_hardware("B200")
    dense = make_table("dense", [("unheard_of", 1, 5.0, "")])
    source = read_bundle(write_bundle(tmp_path, meta(M3, "H200"), {(1, "dense"): dense}))
    projected = projection.project_tables(source, load_model(M3), h200, b200)
    assert list(projected.tables[1, "dense"].columns["time_us"]) == [5.0]
    assert projected.unscaled == {"unheard_of": 1}


def folders(root: Path) -> tuple[str, ...]:
    return "--bundle-root", str(root), "--out-root", str(root)


def project(root: Path, *arguments: str) -> Any:
    return CliRunner().invoke(project_command, [M3, *folders(root), *arguments])


def test_the_command_prints_the_band_and_keeps_it(root: Path) -> None:
    done = project(root, "--from", "H200", "--to", "RTXPRO6000")
    assert isinstance(done.exception, CoverageError) and "error of a projection is not known" in str(done.exception)
    write_bundle(root, meta("zai-org/GLM-5", "H200"), on_card("zai-org/GLM-5", load_hardware("H200"), 0.7))
    done = CliRunner().invoke(project_command, ["zai-org/GLM-5", *folders(root), "--from", "H200", "--to", "B200"])
    assert done.exit_code == 0 and "error band, projected / measured: MiniMaxAI/MiniMax-M3 bf16" in done.output
    bundle = read_bundle(root / "B200" / "zai-org" / "GLM-5" / "bf16")
    assert bundle.meta["provenance"] == "projected" and bundle.meta["hardware"] == "B200"
    (band,) = bundle.meta["projection"]["error_band"]
    assert band["model"] == M3 and len(band["projected_over_measured"]["all all"]) == 3
    assert bundle.meta["projection"]["limits"]["B200"]["hbm_gbps"] == 8000
    again = CliRunner().invoke(project_command, ["zai-org/GLM-5", *folders(root), "--from", "B200", "--to", "H200"])
    assert isinstance(again.exception, ConfigError) and "is a projection itself" in str(again.exception)


def test_without_a_pair_the_band_is_left_open_only_when_asked(root: Path) -> None:
    done = project(root, "--from", "H200", "--to", "MI355X", "--no-error-band")
    assert done.exit_code == 0 and "error band: unknown" in done.output
    assert read_bundle(root / "MI355X" / M3 / "bf16").meta["projection"]["error_band"] is None


def test_a_cache_that_the_target_does_not_store_is_refused(tmp_path: Path) -> None:
    """RTX PRO 6000 reads 656-byte rows alone; tables of the bf16 cache say nothing about them."""
    priced.bundle(tmp_path)
    arguments = ["--from", "H200", "--to", "RTXPRO6000", *folders(tmp_path), "--no-error-band"]
    done = CliRunner().invoke(project_command, [MODEL, *arguments])
    assert isinstance(done.exception, ConfigError)
    assert "on a bf16 KV cache, on RTXPRO6000 the engine stores fp8_ds_mla" in str(done.exception)
    assert "--kv-cache-dtype fp8_ds_mla" in str(done.exception)


def test_the_replay_takes_projected_tables_only_when_told(tmp_path: Path) -> None:
    band = {"model": M3, "projected_over_measured": {"all all": [0.8, 1.0, 1.3]}}
    origin = {"from": {"hardware": "H100"}, "error_band": [band]}
    priced.bundle(tmp_path, provenance="projected", projection=origin)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        f"instances: [{{model: {MODEL}, hardware: H200, parallel: {{dp: 8, ep: 8}}, "
        "engine: {max_model_len: 4096, max_num_batched_tokens: 2048, max_num_seqs: 64, num_gpu_blocks: 1000}}]\n"
    )
    (instance,) = load_cluster(cluster).instances
    with pytest.raises(ContractError, match=r"projected from H100.*0\.8 to 1\.3 times.*--allow-projected"):
        deploy(instance, 0, tmp_path, False)
    with pytest.raises(ContractError, match="explain and chakra take them with --allow-projected"):
        explain_instance(instance, ["4x300"], tmp_path)
    _, title = explain_instance(instance, ["4x300"], tmp_path, allow_projected=True)
    assert "(projected, H200/" in title
    flags = ["--cluster-config", str(cluster), "--bundle-root", str(tmp_path), "--batch", "4x300"]
    assert isinstance(CliRunner().invoke(explain_command, flags).exception, ContractError)
    assert "projected" in CliRunner().invoke(explain_command, [*flags, "--allow-projected"]).output
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_toks": 300, "output_toks": 4, "arrival_time_ns": 0}\n')
    result = replay(cluster, trace, bundle_root=tmp_path, allow_projected=True)
    assert result.deployments[0].tables.provenance == "projected"
    one = ["--cluster-config", str(cluster), "--bundle-root", str(tmp_path), "--output", str(tmp_path / "step")]
    for steps in (["--batch", "4x300"], ["--dataset", str(trace)]):
        assert isinstance(CliRunner().invoke(chakra_command, [*one, *steps]).exception, ContractError)
        told = CliRunner().invoke(chakra_command, [*one, *steps, "--allow-projected"])
        # Where the extra is not installed that is what is missing, and no longer the tables.
        assert told.exit_code == 0 or "chakra" in str(told.exception)


# compare


def test_modules_are_compared_with_the_sum_of_their_kernels(tmp_path: Path) -> None:
    """Twice the sum of the closed forms, so every ratio of the kernels to the module is a half."""
    kernels = priced.bundle(tmp_path / "a")
    spec = load_model(MODEL)
    lookup = Lookup(kernels, spec, 1)
    batches = [(256, 0, 0, 0, 0), (4096, 65536, 0, 0, 0), (0, 0, 8, 2048, 1), (0, 0, 64, 65536, 1)]
    rows: list[tuple[str | float, ...]] = []
    for chunk, context, requests, keys, query in batches:
        capped = min(keys, priced.CAP)
        us = 0.0
        for one in projection_parts(spec):
            tokens = chunk or requests
            if one.category == "dense":
                us += priced.token_us(one.name, tokens)
            elif chunk:
                us += priced.prefill_us(one.name, chunk, min(context, priced.CAP) if _capped(one) else context)
            else:
                us += priced.decode_us(one.name, requests, capped if _capped(one) else keys)
        assert lookup.at("attention", "dsa_module", (chunk, context, requests, keys, query)) == pytest.approx(us)
        rows.append(("dsa_module", chunk, context, requests, keys, query, 2 * us, ""))
    tables: dict[tuple[int, Category], Table] = {(1, "attention"): make_table("attention", rows)}
    modules = read_bundle(write_bundle(tmp_path / "b", priced.meta(granularity="module"), tables))
    ratios = compare(modules, kernels, spec)
    assert [one.ratio for one in ratios] == pytest.approx([0.5] * 4)
    assert [(one.kernel, one.phase, one.shapes) for one in summarise(ratios)] == [
        ("dsa_module", "decode", 2),
        ("dsa_module", "prefill", 2),
    ]
    # The other way round the same shapes are compared.
    assert [one.ratio for one in compare(kernels, modules, spec)] == pytest.approx([2.0] * 4)


def projection_parts(spec: Any) -> Any:
    from profiler.core.modules import module_parts

    kinds = module_kinds(spec)
    return [one for one in module_parts(spec, kinds["dsa_module"]) if one.when != "prefill_dense"]


def _capped(one: Any) -> bool:
    return bool(one.category == "sparse_attention")


def scaled(bundle: Bundle, factor: float) -> dict[tuple[int, Category], Table]:
    return {
        key: make_table(key[1], [(*row[:-2], float(row[-2]) * factor, "") for row in table.rows()])
        for key, table in bundle.tables.items()
    }


def test_every_kernel_has_its_ratio_and_a_plot(tmp_path: Path) -> None:
    first = priced.bundle(tmp_path / "a")
    second = write_bundle(tmp_path / "b", priced.meta(), scaled(first, 1.25))
    rows, page = tmp_path / "rows.csv", tmp_path / "page.html"
    done = CliRunner().invoke(
        compare_command,
        [str(first.path), str(second), "--rows", str(rows), "--html", str(page)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    ratios = {line.rsplit(",", 1)[1] for line in rows.read_text().splitlines()[1:]}
    assert ratios == {"1.25"}
    assert len(rows.read_text().splitlines()) - 1 == sum(len(t) for t in first.tables.values())
    assert "sparse_mla" in page.read_text() and "<script src" not in page.read_text()


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    first = priced.bundle(tmp_path / "a")
    other = read_bundle(write_bundle(tmp_path / "b", meta(M3, "H200"), on_card(M3, load_hardware("H200"), 1.0)))
    with pytest.raises(ConfigError, match="two models"):
        compare(first, other, load_model(MODEL))
    with pytest.raises(ConfigError, match=r"^--tp 8: no degree of both; .* has tp 1, .* tp 1, in common: 1$"):
        compare(first, first, load_model(MODEL), (8,))
    # Equal layers under another name are the same model.
    renamed = read_bundle(write_bundle(tmp_path / "c", priced.meta(model="deepseek-ai/DeepSeek-V3.2"), first.tables))
    assert {round(one.ratio, 9) for one in compare(first, renamed, load_model(MODEL))} == {1.0}
