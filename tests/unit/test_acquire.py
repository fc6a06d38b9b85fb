"""Acquisition with an engine that needs no device: publication, failures, resuming, the card, refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiling import SMALL, FakeEngine, each_component, job, quiet, small_root

from profiler import acquire, card
from profiler.core.bundle import read_bundle
from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.registry import load_model
from profiler.core.shots import Shot
from profiler.engines.base import EngineOptions, KernelSample
from profiler.kernels._components import names_of
from profiler.samples import read_runs
from profiler.sweep import batch_of
from profiler.tabulate import variant_name

V32 = "deepseek-ai/DeepSeek-V3.2-Exp"
Start = Callable[..., list[FakeEngine]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return small_root(tmp_path / "models")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Replaces the engine; returns the list that every started engine is appended to."""

    def start(make: Any = each_component, **facts: Any) -> list[FakeEngine]:
        started: list[FakeEngine] = []

        def create(name: str, options: EngineOptions) -> FakeEngine:
            started.append(
                FakeEngine(options, make, **{k: dict(v) if k == "failures" else v for k, v in facts.items()})
            )
            return started[-1]

        monkeypatch.setattr(acquire, "create_engine", create)
        return started

    return start


def test_every_table_of_a_complete_run_is_published_with_its_provenance(
    root: Path, tmp_path: Path, fake: Start
) -> None:
    fake()
    the_job = job(repeats=5)
    target = acquire.prepare(the_job, root)
    run = acquire.measure(the_job, target, 1, quiet)
    folder, acquired = acquire.publish([run], target, the_job, tmp_path / "out")
    acquire.refuse_incomplete([acquired])
    assert folder == tmp_path / "out" / "CPU" / SMALL / "bf16"
    bundle = read_bundle(folder)
    assert {category for _, category in bundle.tables} == set(target.categories[1])
    meta = bundle.meta
    assert (meta["provenance"], meta["contract"], meta["attended_cap_tokens"]) == ("measured", "serving", 2048)
    assert meta["protocol"]["warmup"] == 0 and meta["protocol"]["repeats"] == 5
    assert meta["kv"] == {
        "layout": "bf16",
        "block_tokens": 64,
        "caches": [{"name": "mla_latent", "bytes_per_token_layer": 1152}],
    }
    assert "pstate" not in meta["gpu"]
    # 102 us is the median of 100 .. 104; experts run alone, everything else once per layer of the four.
    (experts,) = set(bundle.table(1, "moe").columns["time_us"])
    assert experts == 102.0
    dense = bundle.table(1, "dense").columns
    layers = dict(zip(dense["layer"], dense["time_us"], strict=True))
    assert (layers["o_proj"], layers["gate_up_proj"], layers["embedding"]) == (25.5, 34.0, 102.0)


def test_a_failed_shot_withholds_its_category_alone(root: Path, tmp_path: Path, fake: Start) -> None:
    fake(failures={"moe ep=1 tokens=64": "out of memory"})
    target = acquire.prepare(job(), root)
    run = acquire.measure(job(), target, 1, quiet)
    folder, acquired = acquire.publish([run], target, job(), tmp_path / "out")
    assert folder is not None
    assert {c for _, c in read_bundle(folder).tables} == set(target.categories[1]) - {"moe"}
    with pytest.raises(
        AcquisitionError, match=r"tp1/moe: 1 of its cells failed, first: moe ep=1 .*: out of memory"
    ) as e:
        acquire.refuse_incomplete([acquired])
    assert e.value.exit_code == 6


def test_nothing_is_written_when_nothing_is_complete(root: Path, tmp_path: Path, fake: Start) -> None:
    fake(failures={"": "no kernel image is available"})
    target = acquire.prepare(job(), root)
    run = acquire.measure(job(), target, 1, quiet)
    folder, acquired = acquire.publish([run], target, job(), tmp_path / "out")
    assert folder is None and not (tmp_path / "out").exists()
    assert set(acquired.refused) == set(target.categories[1])


def test_material_kernels_without_a_component_stop_publication(root: Path, tmp_path: Path, fake: Start) -> None:
    def make(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
        stray = KernelSample(index, repeat, "model.extra", "mystery_kernel", 500.0, 1)
        return [*each_component(index, shot, repeat), stray]

    fake(make)
    target = acquire.prepare(job(categories=("per_sequence",)), root)
    run = acquire.measure(job(categories=("per_sequence",)), target, 1, quiet)
    with pytest.raises(AcquisitionError, match=r"500\.0 us .*model\.extra  mystery_kernel"):
        acquire.publish([run], target, job(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cell_faster_than_the_card_can_be_is_refused(
    root: Path, tmp_path: Path, fake: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that was not counted shows as a head projection above the peak bandwidth of the card."""
    monkeypatch.setattr(card, "cuda_device_name", lambda: "NVIDIA H200")
    name = "deepseek-ai/DeepSeek-V3.2-Exp"
    fake(
        lambda i, s, r: [
            replace(x, duration_us=1.0 if x.kernel == "lm_head" else 50.0) for x in each_component(i, s, r)
        ]
    )
    the_job = job(model=name, hardware="H200", engine="reference", categories=("per_sequence",))
    target = acquire.prepare(the_job)
    run = acquire.measure(the_job, target, 1, quiet)
    _, acquired = acquire.publish([run], target, the_job, tmp_path / "out")
    reason = acquired.refused["per_sequence"][0]
    # 7,168 x 129,280 bf16 weights less 50 MiB of L2 at 4,800 GB/s.
    least = (7_168 * 129_280 * 2 + 2 * (7_168 + 129_280) - 50 * 2**20) / 4_800e3
    assert f"lm_head at sequences=1: 1.00 us, but H200 needs {least:.2f} us" in reason


def test_shots_beyond_the_memory_are_left_out_and_recorded(root: Path, tmp_path: Path, fake: Start) -> None:
    kv = {"layout": "bf16", "block_tokens": 64, "caches": [], "tokens": 4_160}
    engines = fake(kv=kv)
    the_job = job(categories=("indexer",))
    target = acquire.prepare(the_job, root)
    run = acquire.measure(the_job, target, 1, quiet)
    # 4 requests of 2,048 and of 4,096 tokens do not fit; neither is the longest prefill of 64 + 4,096.
    assert [shot.kv_tokens for shot in run.left_out] == [8_192, 16_384]
    assert all(shot.kv_tokens <= 4_160 for shot in engines[0].ran)
    folder, _ = acquire.publish([run], target, the_job, tmp_path / "out")
    assert folder is not None
    assert read_bundle(folder).meta["grid"]["tp1/indexer"]["left_out"] == 2


def test_an_interrupted_run_resumes_where_it_stopped(root: Path, tmp_path: Path, fake: Start) -> None:
    path, target = tmp_path / "s.csv.gz", acquire.prepare(job(), root)
    fake(stop_after=7)
    with pytest.raises(KeyboardInterrupt):
        acquire.measure(job(), target, 1, quiet, save_to=path)
    earlier = acquire.load_samples([path], target)[1]
    assert len(acquire.finished(earlier)) == 7
    engines = fake()
    run = acquire.measure(job(), target, 1, quiet, save_to=path, earlier=earlier)
    assert len(engines[0].ran) == len(run.shots) - 7
    assert not set(engines[0].ran) & acquire.finished(earlier)
    from_memory = acquire.publish([*earlier, run], target, job(), tmp_path / "a")[0]
    from_disk = acquire.publish(read_runs([path]), target, job(), tmp_path / "b")[0]
    assert from_memory is not None and from_disk is not None
    assert read_bundle(from_memory).meta["files"] == read_bundle(from_disk).meta["files"]


FORWARD = ("dense", "indexer", "sparse_attention")
SHORT: dict[str, Any] = {"max_model_len": 3_000, "max_num_batched_tokens": 140, "max_num_seqs": 8, "repeats": 1}


def every_forward_component(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
    """A pass runs every kernel, whichever cells it fills."""
    components = [(c, name) for c in FORWARD for name in names_of(load_model(V32), c)]  # type: ignore[arg-type]
    return [KernelSample(index, repeat, category, name, 100.0 + repeat, 1) for category, name in components]


def test_a_run_cut_short_in_its_finer_part_still_gives_whole_tables(root: Path, tmp_path: Path, fake: Start) -> None:
    coarse, full = job(grid="coarse", categories=FORWARD, **SHORT), job(grid="full", categories=FORWARD, **SHORT)
    fake(every_forward_component)
    first = acquire.measure(coarse, acquire.prepare(coarse, root), 1, quiet)
    target = acquire.prepare(full, root)
    for beyond in (3, -1):
        path = tmp_path / f"{beyond}.csv.gz"
        engines = fake(every_forward_component, stop_after=len(first.shots) + beyond)
        with pytest.raises(KeyboardInterrupt):
            acquire.measure(full, target, 1, quiet, save_to=path)
        coarse_ran = [batch_of(s, True) for s in engines[0].ran[: len(first.shots)]]
        assert set(coarse_ran) <= {batch_of(shot, True) for shot in first.shots}
        folder, acquired = acquire.publish(read_runs([path]), target, full, tmp_path / f"out{beyond}")
        if beyond < 0:
            assert any("not run" in reasons[0] for reasons in acquired.refused.values())
        else:
            acquire.refuse_incomplete([acquired])
            assert folder is not None
            grid = read_bundle(folder).meta["grid"]
            assert grid["tp1/indexer"]["not_run"] > 10 and grid["tp1/dense"]["not_run"] > 0


def test_a_finer_grid_resumes_from_a_coarser_one(root: Path, tmp_path: Path, fake: Start) -> None:
    path = tmp_path / "s.csv.gz"
    coarse, full = job(grid="coarse", categories=FORWARD, **SHORT), job(grid="full", categories=FORWARD, **SHORT)
    fake(every_forward_component)
    first = acquire.measure(coarse, acquire.prepare(coarse, root), 1, quiet, save_to=path)
    target = acquire.prepare(full, root)
    earlier = acquire.load_samples([path], target)[1]
    engines = fake(every_forward_component)
    run = acquire.measure(full, target, 1, quiet, save_to=path, earlier=earlier)
    assert 0 < len(engines[0].ran) == len(run.shots) - len(first.shots)
    _, acquired = acquire.publish(read_runs([path]), target, full, tmp_path / "out")
    acquire.refuse_incomplete([acquired])
    assert "not_run" not in acquired.grid["tp1/indexer"]


def test_a_failed_shot_is_tried_again_and_the_good_result_counts(root: Path, tmp_path: Path, fake: Start) -> None:
    path, target = tmp_path / "s.csv.gz", acquire.prepare(job(), root)
    fake(failures={"moe": "out of memory"})
    first = acquire.measure(job(), target, 1, quiet, save_to=path)
    engines = fake()
    second = acquire.measure(job(), target, 1, quiet, save_to=path, earlier=[first])
    assert {shot.fills[0].category for shot in engines[0].ran} == {"moe"}
    _, acquired = acquire.publish([first, second], target, job(), tmp_path / "out")
    assert not acquired.refused


def test_runs_measured_otherwise_are_not_mixed(root: Path, tmp_path: Path, fake: Start) -> None:
    path, target = tmp_path / "s.csv.gz", acquire.prepare(job(), root)
    fake(stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        acquire.measure(job(), target, 1, quiet, save_to=path)
    earlier = acquire.load_samples([path], target)[1]
    fake()
    with pytest.raises(ConfigError, match="samples of tp 1 are of two kinds: protocol"):
        acquire.measure(job(repeats=9), target, 1, quiet, earlier=earlier)
    fake(versions={"torch": "1"})
    with pytest.raises(ConfigError, match="two kinds: versions"):
        acquire.measure(job(), target, 1, quiet, earlier=earlier)


def test_samples_of_another_model_are_refused(root: Path, tmp_path: Path, fake: Start) -> None:
    path = tmp_path / "s.csv.gz"
    fake()
    acquire.measure(job(), acquire.prepare(job(), root), 1, quiet, save_to=path)
    other = acquire.prepare(job(model="zai-org/GLM-5"))
    with pytest.raises(ConfigError, match=f"model is {SMALL}, zai-org/GLM-5 is asked for"):
        acquire.load_samples([path], other)


def test_tables_that_exist_are_refused_before_measuring(root: Path, tmp_path: Path, fake: Start) -> None:
    engines = fake()
    target = acquire.prepare(job(), root)
    run = acquire.measure(job(), target, 1, quiet)
    acquire.publish([run], target, job(), tmp_path)
    # The same samples again change nothing; a new measurement is refused before it runs.
    acquire.publish([run], target, job(), tmp_path)
    with pytest.raises(ConfigError, match=r"has tp1/attention\.csv, .* already\. --force replaces them"):
        acquire.measure(job(), target, 1, quiet, new_in=tmp_path)
    assert not engines[1].ran


def test_tables_are_added_category_by_category(root: Path, tmp_path: Path, fake: Start) -> None:
    fake()
    for category in ("dense", "moe"):
        one = job(categories=(category,))
        target = acquire.prepare(one, root)
        folder, _ = acquire.publish([acquire.measure(one, target, 1, quiet, new_in=tmp_path)], target, one, tmp_path)
    assert folder is not None
    assert set(read_bundle(folder).tables) == {(1, "dense"), (1, "moe")}


def test_each_degree_gets_its_own_tables(root: Path, tmp_path: Path, fake: Start) -> None:
    fake()
    the_job = job(tps=(1, 2))
    target = acquire.prepare(the_job, root)
    for tp in the_job.tps:
        folder, _ = acquire.publish([acquire.measure(the_job, target, tp, quiet)], target, the_job, tmp_path)
    assert folder is not None
    found = read_bundle(folder).tables
    assert (1, "moe") in found and (2, "moe") not in found and (2, "dense") in found


def test_the_indexer_is_measured_at_one_degree_for_all(root: Path, tmp_path: Path, fake: Start) -> None:
    factor = 1.0

    def make(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
        return [replace(s, duration_us=s.duration_us * factor) for s in each_component(index, shot, repeat)]

    fake(make)
    the_job = job(tps=(1, 2))
    target = acquire.prepare(the_job, root)
    assert "indexer" in target.categories[1] and "indexer" not in target.categories[2]
    runs = {}
    for tp in the_job.tps:
        runs[tp] = acquire.measure(the_job, target, tp, quiet)
        folder, acquired = acquire.publish([runs[tp]], target, the_job, tmp_path)
        acquire.refuse_incomplete([acquired])
    assert folder is not None
    bundle = read_bundle(folder)
    assert bundle.table(2, "indexer").columns == bundle.table(1, "indexer").columns
    assert bundle.meta["grid"]["tp2/indexer"]["from"] == {"tp": 1}
    assert "from" not in bundle.meta["grid"]["tp1/indexer"]
    # Unequal batches of its kernels are compared with the shared table.
    assert "index_scores" in bundle.meta["grid"]["tp2/skew"]["fit"]

    factor = 2.0
    one = job(categories=("indexer",))
    target = acquire.prepare(one, root)
    acquire.publish([acquire.measure(one, target, 1, quiet)], target, one, tmp_path, force=True)
    again = read_bundle(folder)
    assert again.table(1, "indexer").columns["time_us"] != bundle.table(1, "indexer").columns["time_us"]
    assert again.table(2, "indexer").columns == again.table(1, "indexer").columns

    # One that is measured at its own degree stays its own.
    factor = 3.0
    own = job(tps=(2,), categories=("indexer",))
    target = acquire.prepare(own, root)
    acquire.publish([acquire.measure(own, target, 2, quiet)], target, own, tmp_path, force=True)
    assert "from" not in read_bundle(folder).meta["grid"]["tp2/indexer"]
    factor = 1.0
    target = acquire.prepare(one, root)
    acquire.publish([acquire.measure(one, target, 1, quiet)], target, one, tmp_path, force=True)
    last = read_bundle(folder)
    assert last.table(2, "indexer").columns != last.table(1, "indexer").columns


def test_one_degree_by_itself_has_every_table(root: Path) -> None:
    assert "indexer" in acquire.prepare(job(tps=(2,)), root).categories[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "small/Sparce"}, "unknown model 'small/Sparce'; did you mean 'small/Sparse'"),
        ({"hardware": "H20000"}, r"unknown GPU 'H20000'.*CPU measures this machine"),
        ({"block_tokens": 16}, "needs a block size of 64"),
        ({"max_model_len": 1_000_000}, "ends at 163840 positions"),
        ({"tps": (3,)}, "4 attention heads do not divide by tp 3"),
        ({"ep_degrees": (3,)}, "ep 3 does not divide 16 experts"),
        ({"grid": "fine"}, "unknown grid 'fine'"),
        ({"categories": ("mla",)}, "unknown category 'mla'"),
    ],
)
def test_bad_input_is_refused_before_a_device_is_touched(root: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        acquire.prepare(job(**changes), root)


def test_block_selection_refuses_the_default_block() -> None:
    with pytest.raises(ConfigError, match=r"needs a block size of 128.*16 was asked for"):
        acquire.prepare(job(model="MiniMaxAI/MiniMax-M3", hardware="H200", block_tokens=16))


@pytest.mark.parametrize(
    ("hardware", "device", "message"),
    [
        ("H200", "NVIDIA H100 80GB HBM3", r"--hardware H200: the card here is 'NVIDIA H100 80GB HBM3', that is H100"),
        ("H200", "Acme Turbo 9000", r"the card here is 'Acme Turbo 9000', which no file .* names"),
        ("H200", None, "no CUDA device is visible here"),
    ],
)
def test_a_card_other_than_the_one_named_is_refused(
    monkeypatch: pytest.MonkeyPatch, hardware: str, device: str | None, message: str
) -> None:
    monkeypatch.setattr(card, "cuda_device_name", lambda: device)
    with pytest.raises(AcquisitionError, match=message):
        card.check_card(hardware)


def test_the_card_is_recognised_by_its_driver_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "cuda_device_name", lambda: "NVIDIA H200")
    card.check_card("H200")
    assert card.hardware_name("h200_sxm") == "H200" and card.hardware_name("cpu") == "CPU"


def test_engines_are_chosen_by_the_device() -> None:
    assert card.choose_engine("auto", "CPU") == "reference"
    assert card.choose_engine("reference", "H200") == "reference"
    with pytest.raises(AcquisitionError, match="--hardware CPU is measured by --engine reference"):
        card.choose_engine("vllm", "CPU")


@pytest.mark.parametrize(
    ("weights", "layout", "variant"),
    [("fp8", "bf16", "fp8"), ("fp8", "fp8_ds_mla", "fp8-kvfp8_ds_mla"), ("bf16", "bf16", "bf16")],
)
def test_variants_are_named_by_weights_and_layout(weights: str, layout: str, variant: str) -> None:
    assert variant_name(weights, layout) == variant
