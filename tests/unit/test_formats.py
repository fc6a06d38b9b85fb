from pathlib import Path

import pytest
import yaml

from profiler.core.bundle import find_bundle, read_bundle, table_text
from profiler.core.errors import ConfigError
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from profiler.formats.llmservingsim import convert
from serving.core.shape import StepShape
from serving.cost import build_cost

PERF = Path(__file__).resolve().parents[2].parent / "shared" / "recorded" / "perf"
META = {
    "profiler_version": "1.0.0",
    "vllm_version": "0.19.0",
    "cuda_version": "13.0",
    "gpu": "NVIDIA RTX PRO 6000",
    "hardware": "RTXPRO6000",
    "model": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "variant": "bf16-kvfp8",
    "engine_effective": {"block_size": 16},
    "measurement_iterations": 3,
}
FILES = {
    "dense.csv": "layer,tokens,time_us\no_proj,1,2.5\no_proj,4,3.5\n",
    "per_sequence.csv": "layer,sequences,time_us\nlm_head,1,400\n",
    "attention.csv": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,7.5\n16,0,0,0,8.5\n16,0,1,16,9.5\n",
    "moe.csv": "tokens,activated_experts,time_us\n1,8,50\n2,16,130\n",
    "skew.csv": "regime,n,nb,ratio,skew,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us,alpha\n"
    "pure,2,1,0.5,4.0,0,0,128,512,320,40,80,44,0.1\n"
    "pure,2,1,0.5,4.0,0,0,256,1024,640,100,200,130,0.3\n"
    "mixed,2,1,0.5,4.0,16,0,128,512,320,40,80,39,\n",
}


def folder(root: Path, meta: dict[str, object] | None = None, **changed: str) -> Path:
    path = root / "RTXPRO6000" / "Qwen" / "Qwen3-30B-A3B-Instruct-2507" / "bf16-kvfp8"
    (path / "tp1").mkdir(parents=True)
    (path / "meta.yaml").write_text(yaml.safe_dump(meta or META))
    for name, text in (FILES | {f"{key}.csv": text for key, text in changed.items()}).items():
        (path / "tp1" / name).write_text(text)
    return path


def test_stored_bundle_becomes_ours(tmp_path: Path) -> None:
    path = folder(tmp_path)
    assert find_bundle(tmp_path, "RTXPRO6000", "Qwen/Qwen3-30B-A3B-Instruct-2507") == path
    bundle = read_bundle(path)
    assert bundle.meta["provenance"] == "imported" and bundle.meta["contract"] == "serving"
    assert bundle.meta["kv"] == {"layout": "fp8", "block_tokens": 16, "caches": []}
    assert list(bundle.table(1, "attention").rows())[2][:-1] == ("attention", 16, 0, 1, 16, 1, 9.5)
    # Eight experts per token, all of them on the rank.
    assert [row[:-1] for row in bundle.table(1, "moe").rows()] == [
        ("experts", 1, 1, 8.0, 8.0, 50.0),
        ("experts", 1, 2, 16.0, 16.0, 130.0),
    ]
    # alpha of the pure rows: rises (1, 1) and excesses (0.1, 0.3); the mixed one is below zero, hence zero.
    assert bundle.skew[1, "attention"] == ((0, 2, pytest.approx(0.2)), (16, 2, 0.0))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("dense", "layer,tokens,time_us,note\n", r"dense\.csv:1: the header is layer,tokens,time_us,note"),
        ("dense", "layer,tokens,time_us\no_proj,1\n", r"dense\.csv:2: 2 fields"),
        ("dense", "layer,tokens,time_us\no_proj,x,1\n", r"dense\.csv:2: tokens must be an integer"),
        ("attention", "layer,prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n", "attention.*header"),
        (
            "attention",
            "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us\nindexr,16,8,0,0,1,2.0\n",
            r"attention\.csv:2: unknown attention kernel 'indexr'; did you mean 'indexer'",
        ),
        ("skew", FILES["skew.csv"].replace("80,44", "80,?"), r"skew\.csv:2: times must be numbers"),
    ],
)
def test_malformed_tables_are_refused_by_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_bundle(folder(tmp_path, **{name: text}))


def test_incomplete_meta_and_missing_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"meta\.yaml: hardware is missing"):
        read_bundle(folder(tmp_path / "a", {key: value for key, value in META.items() if key != "hardware"}))
    with pytest.raises(ConfigError, match=r"no tp4/\*\.csv"):
        read_bundle(folder(tmp_path / "b"), {4})


def test_experts_of_a_dense_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Llama-3\.1-8B has no experts"):
        read_bundle(folder(tmp_path, META | {"model": "meta-llama/Llama-3.1-8B"}))


def stored(model: str) -> Path:
    if not PERF.is_dir():
        pytest.skip(f"{PERF} is not here")
    return find_bundle(PERF, "RTXPRO6000", model)


def test_recorded_llama_tables_answer_as_measured() -> None:
    """Shapes of the tables themselves come back as the stored numbers, kernel by kernel."""
    bundle = read_bundle(stored("meta-llama/Llama-3.1-8B"), {1})
    assert len(bundle.table(1, "attention")) == 19364
    spec = load_model("meta-llama/Llama-3.1-8B")
    cost = build_cost(bundle=bundle, spec=spec, parallel=Parallel(), hardware=None, max_num_batched_tokens=2048)

    def attention_us(shape: StepShape) -> float:
        entry = next(entry for entry in cost.explain([shape]) if entry.component == "attention")
        assert entry.calls == 32 and entry.provenance == "imported"
        return entry.us / entry.calls

    assert attention_us(StepShape((), 1, 16, 16, 16, 1)) == pytest.approx(8.35233, abs=1e-4)
    assert attention_us(StepShape((), 128, 128 * 1024, 1024, 0, 128)) == pytest.approx(404.9, abs=0.05)
    assert attention_us(StepShape(((2048, 0),), 0, 0, 0, 0, 1)) == pytest.approx(172.6, abs=0.05)
    assert attention_us(StepShape(((1024, 1024),), 128, 128 * 1024, 1024, 0, 129)) == pytest.approx(888.2, abs=0.05)
    lines = {entry.component: entry for entry in cost.explain([StepShape((), 4, 4000, 1000, 4000, 4)])}
    assert lines["layernorm"].calls == 64
    assert lines["act_fn"].us / 32 == pytest.approx(2.92233, abs=1e-4)
    assert lines["lm_head"].us == pytest.approx(688.287, abs=1e-3)


def test_recorded_tables_of_experts_answer_for_any_slice() -> None:
    bundle = read_bundle(stored("Qwen/Qwen3-30B-A3B-Instruct-2507"), {1})
    spec = load_model("Qwen/Qwen3-30B-A3B-Instruct-2507")
    whole = build_cost(bundle=bundle, spec=spec, parallel=Parallel(), hardware=None, max_num_batched_tokens=2048)

    def experts_us(cost: object, tokens: int, ranks: int) -> float:
        shapes = [StepShape((), tokens, tokens * 100, 100, tokens * 100, tokens)] * ranks
        return next(e.us / e.calls for e in cost.explain(shapes) if e.component == "experts")  # type: ignore[attr-defined]

    # 2,048 tokens of 8 experts reach all 128: the stored cell.
    shape = StepShape(((2048, 0),), 0, 0, 0, 0, 1)
    entry = next(entry for entry in whole.explain([shape]) if entry.component == "experts")
    assert entry.us / entry.calls == pytest.approx(1066.6, rel=1e-3)
    from serving.collectives import Collectives, Tier

    free = Collectives(Tier(1e9, 1e9, 0.0, 0.0, 0.0))
    halves = build_cost(
        bundle=bundle,
        spec=spec,
        parallel=Parallel(dp=2, ep=2),
        hardware=None,
        max_num_batched_tokens=2048,
        collectives=free,
    )
    # Half of the experts on 256 + 256 tokens: as many pairs as 256 tokens alone, on 64 experts.
    assert experts_us(halves, 256, 2) == pytest.approx(472.085, rel=1e-3)


def test_later_columns_give_the_context_back(tmp_path: Path) -> None:
    """prefill_key is context + chunk / 2; sparse kernels clip it at the cap, here 2,048 keys of MiniMax-M3."""
    header = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us"
    rows = (
        *("attention,16,8,0,0,1,8.5", "attention,16,1032,0,0,1,9.5", "attention,0,0,4,512,2,7.0"),
        *("sparse_attention,64,1032,0,0,1,3.0", "sparse_attention,64,2048,0,0,1,4.0", "indexer,64,4128,0,0,1,5.0"),
    )
    stamped = "layer,tokens,time_us,measurement_protocol,measurement_sha256\no_proj,1,2.5,p,abc\n"
    path = folder(
        tmp_path,
        META | {"model": "MiniMaxAI/MiniMax-M3"},
        attention="\n".join((header, *rows)) + "\n",
        moe="ep,tokens,activated_experts,time_us\n8,16,4,30\n",
        dense=stamped,
        skew="layer,requests_json,t_skew_us\n",
    )
    bundle = read_bundle(path)
    assert [row[:-1] for row in bundle.table(1, "attention").rows()] == [
        ("attention", 0, 0, 4, 512, 2, 7.0),
        ("attention", 16, 0, 0, 0, 0, 8.5),
        ("attention", 16, 1024, 0, 0, 0, 9.5),
    ]
    assert [row[1:3] for row in bundle.table(1, "sparse_attention").rows()] == [
        (64, 1000),
        (64, 2016),
        (64, 1_048_576 - 64),
    ]
    assert [row[1:3] for row in bundle.table(1, "indexer").rows()] == [(64, 4096)]
    # Four experts per token, an eighth of the pairs on each of eight ranks.
    assert [row[:-2] for row in bundle.table(1, "moe").rows()] == [("experts", 8, 16, 4.0, 8.0)]
    assert "moe_slices" not in bundle.meta and bundle.meta["left_out"] == [
        "tp1/skew.csv: corrections per kernel are not read"
    ]


def test_a_stored_bundle_is_written_in_our_format(tmp_path: Path) -> None:
    path = folder(tmp_path / "theirs")
    written, tables = convert(path, tmp_path / "ours")
    again = read_bundle(written)
    assert again.meta["provenance"] == "imported" and "MIT" in again.meta["imported_from"]["licence"]
    assert {key: table_text(table) for key, table in again.tables.items()} == {
        key: table_text(table) for key, table in tables.items()
    }
    assert again.skew == read_bundle(path).skew
    assert [row[1:4] for row in again.table(1, "skew").rows()] == [
        ("1x16@0", "1x512 1x128", "joint"),
        ("none", "1x1024 1x256", "fit"),
        ("none", "1x512 1x128", "fit"),
    ]
    with pytest.raises(ConfigError, match="--force"):
        convert(path, tmp_path / "ours")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "meta.yaml").write_text("schema_version: 1\n")
    with pytest.raises(ConfigError, match="not a bundle of LLMServingSim"):
        convert(tmp_path / "other", tmp_path / "ours")
