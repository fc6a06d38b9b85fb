"""The importer on small tables of closed form, in the package's layout."""

from collections import Counter
from pathlib import Path

import imported
import pytest
import yaml
from click.testing import CliRunner

from profiler.aiconfigurator import source
from profiler.aiconfigurator.convert import Imported, Request, convert
from profiler.aiconfigurator.experts import balanced_picks, expert_rows, rank_load
from profiler.core.bundle import read_bundle, write_bundle
from profiler.core.collective_table import read_collectives
from profiler.core.errors import ConfigError, CoverageError
from profiler.core.modules import fold_for, fold_modules, granularity
from profiler.core.registry import load_model
from profiler.core.types import MoeDims

V32 = "deepseek-ai/DeepSeek-V3.2"
DEEPSEEK = MoeDims(256, 8, 2048, 1, 2048, n_group=8, topk_group=4)
PLAIN = MoeDims(256, 8, 2048, 1, 2048)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Tables of a system with everything that DeepSeek-V3.2 needs; experts of it and of a model without groups."""
    folder = tmp_path / "systems"
    imported.system(folder)
    imported.dsa(folder)
    imported.gemm(folder)
    imported.collectives(folder)
    rows = [
        ("fp8_block", tokens, hidden, 2048, 8, 256, tp, ep, distribution, _expert_ms(hidden, tp, ep, tokens))
        for hidden in (7168, 6144)
        for tp, ep in ((1, 1), (1, 8), (1, 64), (8, 1))
        for tokens in (1, 8, 64, 1024, 16384)
        for distribution in ("balanced", "power_law_1.2")
    ]
    imported.write(folder, "h200_sxm/moe/vllm/0.24.0/moe", imported.MOE, rows)
    return folder


def _expert_ms(hidden: int, tp: int, ep: int, tokens: int) -> float:
    pairs, reached = rank_load(DEEPSEEK if hidden == 7168 else PLAIN, ep, tokens)
    return imported.expert_ms(pairs, reached, hidden) / tp


def run(root: Path, **changed: object) -> Imported:
    asked: dict[str, object] = {"system": "h200_sxm", "model": V32, "backend": "vllm", "tps": (1, 8)} | changed
    return convert(Request(**asked), root)  # type: ignore[arg-type]


def attention(found: Imported, tp: int = 1) -> dict[tuple[int, ...], float]:
    return {tuple(map(int, row[1:5])): float(row[6]) for row in found.tables[tp, "attention"].rows()}


def test_a_bundle_of_modules_with_its_licence_and_our_own_sizes(root: Path, tmp_path: Path) -> None:
    found = run(root)
    folder = write_bundle(tmp_path / "bundles", found.meta, found.tables)
    bundle = read_bundle(folder)
    assert folder.parts[-4:] == ("H200", "deepseek-ai", "DeepSeek-V3.2", "fp8-aic-vllm-0.24.0")
    assert bundle.meta["provenance"] == "imported" and granularity(bundle.meta) == "module"
    assert "Apache License 2.0" in bundle.meta["imported_from"]["licence"]
    assert {cache["name"]: cache["bytes_per_token_layer"] for cache in bundle.meta["kv"]["caches"]} == {
        "mla_latent": 1152,
        "index_keys": 132,
    }
    counts = {component.name: count for component, count in fold_for(load_model(V32), bundle.meta).components}
    assert counts["dsa_module"] == 61 and counts["experts"] == 58 and "o_proj" not in counts
    assert {name for name in counts if name not in ("lm_head", "sampler", "experts", "dsa_module")} == set(
        bundle.table(1, "dense").names
    )


def test_fp8_keeps_the_656_byte_rows(root: Path) -> None:
    """The tables' own size would be 640 bytes of the 656 that the engine stores."""
    meta = run(root, kv_dtype="fp8").meta
    assert meta["kv"]["layout"] == "fp8_ds_mla" and meta["variant"] == "fp8-aic-vllm-0.24.0-kvfp8_ds_mla"
    assert sum(cache["bytes_per_token_layer"] for cache in meta["kv"]["caches"]) == 656 + 132


def test_decode_counts_the_new_token_and_heads_are_those_of_a_rank(root: Path) -> None:
    found = run(root)
    assert attention(found)[0, 0, 16, 2048] == pytest.approx(1e3 * imported.decode_ms(128, 16, 2047))
    assert attention(found, 8)[0, 0, 16, 2048] == pytest.approx(1e3 * imported.decode_ms(16, 16, 2047))


def test_short_prefills_leave_the_launch_floor(root: Path) -> None:
    """Up to the largest decode batch they take its time, beyond it a share of several prompts; above it their own."""
    found = run(root)
    cells = attention(found, 8)
    floor = 1e3 * imported.FLOOR_MS
    # 256 tokens behind none see 128 keys on average, the fewest of the decode table stand for fewer.
    rows = {keys: 1e3 * imported.decode_ms(16, 256, keys - 1) for keys in (2, 2048)}
    assert cells[256, 0, 0, 0] == pytest.approx(rows[2] + (rows[2048] - rows[2]) * 126 / 2046)
    # 2,048 tokens at tp 8: one prompt and two take the floor, four 2.83 ms; half the floor is within 15 % of a quarter.
    assert imported.context_ms(16, 2, 2048) < imported.FLOOR_MS
    assert cells[2048, 0, 0, 0] == pytest.approx(floor / 2)
    assert cells[8192, 0, 0, 0] == pytest.approx(1e3 * imported.context_ms(16, 1, 8192))
    # tp 8: 16, 64, 256, 1,024 and 2,048 tokens behind 0 and 128; tp 1: those of 2,048 tokens are above the floor.
    assert found.changes["at_launch_floor"] == 10 + 8
    assert found.changes["several_prompts_unused"] == 2 * 3 * len(imported.ISLS) * 2


def test_contexts_follow_from_whole_prompts(root: Path) -> None:
    cells = attention(run(root))

    def prompt(tokens: int) -> float:
        return 1e3 * imported.context_ms(128, 1, tokens)

    # 4,096 to 8,192 are both measured; their difference is the second half of the prompt.
    assert cells[4096, 4096, 0, 0] == pytest.approx(prompt(8192) - prompt(4096))
    assert max(chunk + context for chunk, context, *_ in cells) == 8192 + 128
    longer = run(root, extend_context_tokens=65536)
    # The closed form is a parabola, which the continuation meets exactly.
    assert attention(longer)[8192, 32768, 0, 0] == pytest.approx(prompt(40960) - prompt(32768), rel=1e-6)
    assert longer.changes["derived_context"] > run(root).changes["derived_context"]


def test_products_are_read_between_shapes_and_never_slower_than_in_bf16(root: Path) -> None:
    found = run(root)
    dense = {(row[0], row[1]): float(row[2]) for row in found.tables[1, "dense"].rows()}
    gate = {(row[0], row[1]): float(row[2]) for row in found.tables[8, "dense"].rows()}
    # router: bf16, k 7,168 and n 256 lie between the table's sizes.
    assert dense["router_gate", 64] == pytest.approx(1e3 * imported.gemm_ms(64, 256, 7168))
    # down_proj of one token at tp 8: 60 us of launches in fp8, less in bf16 after one small kernel of 3 us.
    assert gate["down_proj", 1] == pytest.approx(1e3 * imported.gemm_ms(1, 7168, 2304) + 3)
    assert dense["gate_up_proj", 8192] == pytest.approx(1e3 * imported.gemm_ms(8192, 36864, 7168) / 2)
    head = {row[1]: float(row[2]) for row in found.tables[1, "per_sequence"].rows() if row[0] == "lm_head"}
    # 129,280 columns are two parts of 64,640.
    assert head[64] == pytest.approx(2e3 * imported.gemm_ms(64, 64640, 7168))
    # norms: 3 us and two bytes read and written per element at 0.8 of 4.8 TB/s.
    assert dense["input_norm", 1024] == pytest.approx(3 + 1024 * 7168 * 4 / 3.84e6)


@pytest.mark.parametrize(
    ("ep", "times_fair"), [(1, 1), (2, 2), (4, 3), (8, 5), (16, 9), (32, 17), (64, 32), (128, 32), (256, 32)]
)
def test_load_of_rank_0_under_tied_groups(ep: int, times_fair: float) -> None:
    """5.0, 9.0 and 32 times its fair share at ep 8, 16 and 64 were found by running the routing itself."""
    pairs, _ = rank_load(DEEPSEEK, ep, 16384)
    assert pairs == times_fair * 16384 * 8 / ep
    assert rank_load(PLAIN, ep, 16384) == (16384 * 8 // ep, 256 // ep)


def test_picks_of_one_token() -> None:
    assert balanced_picks(PLAIN, 33) == tuple(range(1, 256, 32))
    assert balanced_picks(DEEPSEEK, 33) == (1, 33, 65, 97, 0, 2, 3, 4)


def test_experts_get_the_load_they_had(root: Path) -> None:
    found = run(root)
    rows = [row for row in found.tables[1, "moe"].rows() if row[1] == 8]
    for _, _, _, experts, pairs, us, _ in rows:
        assert us == pytest.approx(1e3 * imported.expert_ms(float(pairs), float(experts), 7168))
    # 16,384 tokens of the tables stand for the 81,920 that give a rank as many pairs at an even load.
    assert [row[2:5] for row in rows][-1] == (81920, 32.0, 81920.0)
    assert all(experts == min(32, tokens) for _, _, tokens, experts, *_ in rows if tokens <= 1024)
    assert found.changes["power_law_unknown_load"] == 20
    assert found.changes["experts_scaled_from_ungrouped"] == 20
    assert found.changes["experts_load_corrected"] + found.changes["experts_grouped_dropped"] == 20


def test_without_a_model_of_equal_experts_the_own_rows_stay(root: Path) -> None:

    frame = source.read(root / "data/h200_sxm/moe/vllm/0.24.0/moe_perf.csv", imported.MOE)
    own = frame[frame["hidden_size"] == 7168]
    changes: Counter[str] = Counter()
    rows = expert_rows(own, DEEPSEEK, 7168, 1, changes)
    assert len(rows) == 15 and changes["experts_load_corrected"] == 15
    assert ("experts", 64, 256, 4.0, 32.0, pytest.approx(1e3 * imported.expert_ms(32, 4, 7168)), "") in rows


def test_dense_fallback_is_left_out(root: Path) -> None:
    """A reference path that attends every key: each doubling costs four times as much, far below the card's peak."""
    path = root / "data/h200_sxm/sparse_attention/vllm/0.24.0/dsa_context_module_perf.csv"
    lines = path.read_text().splitlines()
    slow = [line if not _is_long(line) else ",".join([*line.split(",")[:-1], str(_quadratic(line))]) for line in lines]
    path.write_text("\n".join(slow) + "\n")
    found = run(root, tps=(1,))
    assert max(chunk for chunk, *_ in attention(found)) == 1024
    assert found.changes["dense_fallback"] == 6


def _is_long(line: str) -> bool:
    return line.split(",")[5].isdecimal() and int(line.split(",")[5]) >= 2048


def _quadratic(line: str) -> float:
    return 1e-4 * int(line.split(",")[5]) ** 2


def test_outliers_and_the_end_of_the_index_range_are_left_out(root: Path) -> None:
    where = "h200_sxm/sparse_attention/vllm/0.24.0/dsa_context_module"
    columns = ("model", "kv_cache_dtype", "gemm_type", "num_heads", "batch_size", "isl", "step", "latency")
    steps = (0, 4096, 16384, 65536, 1_000_000, 1_044_480)
    rows = [(V32, "bfloat16", "fp8_block", 128, 1, 4096, step, 6 + step / 1e4) for step in steps]
    rows += [(V32, "bfloat16", "fp8_block", 128, 1, 8192, step, 60 if step == 16384 else 12) for step in steps[:4]]
    rows += [(V32, "bfloat16", "fp8_block", 128, 1, 1024, 0, "nan")]
    imported.write(root, where, columns, rows)
    found = run(root, tps=(1,))
    prefills = {key[:2] for key in attention(found) if key[0]}
    assert prefills == {(4096, s) for s in steps[:4]} | {(8192, s) for s in (0, 4096, 65536)}
    assert (found.changes["outlier"], found.changes["beyond_index_range"], found.changes["not_a_time"]) == (1, 2, 1)


def test_collectives_go_beside_the_bundles(root: Path, tmp_path: Path) -> None:
    from profiler.commands.import_ import command

    arguments = ["aiconfigurator", "--system", "h200_sxm", "--model", V32, "--tp", "1", "--tables", str(root)]
    out = tmp_path / "bundles"
    done = CliRunner().invoke(command, [*arguments, "--out-root", str(out)], catch_exceptions=False)
    assert done.exit_code == 0 and "at_launch_floor" in done.output and "Apache" in done.stderr
    rows = {row.key: row.time_us for row in read_collectives(out / "H200" / "collectives.csv")}
    name = "nccl 2.29.2 of AIConfigurator"
    assert rows["all_gather", name, 8, "fp16", 1 << 21, "graph"] == pytest.approx(5 + (1 << 20) / 1e5)
    own = "vllm 0.24.0 of AIConfigurator"
    assert rows["all_reduce", own, 8, "bf16", 2048, "graph"] == pytest.approx(4.0)
    assert rows["all_reduce", own, 8, "bf16", 2048, "eager"] == pytest.approx(20.0)
    assert rows["all_to_all", name, 8, "fp16", 1 << 21, "graph"] == pytest.approx(5 + (1 << 20) / 1e5)
    assert len(rows) == 16 + 2
    (said,) = yaml.safe_load((out / "H200" / "collectives.yaml").read_text())["runs"]
    assert said["provenance"] == "imported" and said["rows"] == {name: 16, own: 2}
    assert said["imported_from"]["tables"] == {"nccl": "2.29.2", "custom_allreduce": "0.24.0"}
    assert "import aiconfigurator --system h200_sxm" in said["command"] and "Apache" in said["imported_from"]["licence"]
    again = CliRunner().invoke(command, [*arguments, "--out-root", str(out)])
    assert isinstance(again.exception, ConfigError) and "--force" in str(again.exception)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"system": "h201_sxm"}, "unknown system 'h201_sxm'; did you mean 'h200_sxm'"),
        ({"backend": "vlm"}, "unknown back end 'vlm'; did you mean 'vllm'"),
        ({"model": "deepseek-ai/DeepSeek-V32"}, "did you mean 'deepseek-ai/DeepSeek-V3.2'"),
        ({"version": "0.25.0"}, r"no table dsa_context_module of vllm 0\.25\.0; versions that have it: 0\.24\.0"),
        ({"backend": "sglang"}, r"of sglang\. Systems that have one: h200_sxm vllm 0\.24\.0"),
        ({"model": "zai-org/GLM-5-FP8"}, r"no rows of a model with hidden size 6144 and 64 heads"),
        ({"model": "zai-org/GLM-5"}, r"no rows with gemm_type bfloat16; there are fp8_block"),
        ({"tps": (3,)}, "tp 3"),
    ],
)
def test_what_does_not_exist_is_named(root: Path, changed: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, CoverageError), match=message):
        run(root, **changed)


def test_layers_that_reuse_a_selection_need_their_own_rows(root: Path) -> None:
    for table in ("context", "generation"):
        path = root / f"data/h200_sxm/sparse_attention/vllm/0.24.0/dsa_{table}_module_perf.csv"
        path.write_text(path.read_text().replace("deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5-FP8"))
    with pytest.raises(CoverageError, match="no column op_name, so no rows of layers that reuse a selection"):
        run(root, model="zai-org/GLM-5.2-FP8", tps=(1,))


def test_a_table_without_an_axis_is_refused_by_name(root: Path) -> None:
    path = root / "data/h200_sxm/sparse_attention/vllm/0.24.0/dsa_context_module_perf.csv"
    path.write_text(path.read_text().replace(",step,", ",stp,", 1))
    with pytest.raises(ConfigError, match=r"dsa_context_module_perf\.csv: has no column step; it has model, .*stp"):
        run(root)


def test_without_the_package_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"python -m pip install aiconfigurator-core==0\.12\.0"):
        source.systems_root()
    with pytest.raises(ConfigError, match="has no folder data"):
        source.systems_root(tmp_path)


def test_release_candidates_come_before_their_release() -> None:
    versions = ["1.3.0rc20", "1.3.0", "1.3.0rc10", "0.24.0", "0.5.6.post2", "0.5.14"]
    assert sorted(versions, key=source.version_key) == [
        "0.5.6.post2",
        "0.5.14",
        "0.24.0",
        "1.3.0rc10",
        "1.3.0rc20",
        "1.3.0",
    ]


@pytest.mark.parametrize(
    ("model", "modules"),
    [
        ("deepseek-ai/DeepSeek-V3", {"mla_module": 61}),
        ("zai-org/GLM-5.2", {"dsa_module": 21, "dsa_shared_module": 57}),
        ("MiniMaxAI/MiniMax-M3", {"msa_module": 57, "attention": 3}),
        ("meta-llama/Llama-3.1-8B", {"attention": 32}),
    ],
)
def test_modules_of_each_family(model: str, modules: dict[str, int]) -> None:
    counts = {c.name: n for c, n in fold_modules(load_model(model)).components if c.category == "attention"}
    assert counts == modules
