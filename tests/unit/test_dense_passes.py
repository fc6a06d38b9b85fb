"""Several prompts attended densely in one step: their tiles one by one, and what an H200 took."""

import math
from dataclasses import dataclass
from heapq import heapreplace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.core.batch_text import parse_batch
from profiler.core.bundle import read_bundle
from profiler.core.errors import CoverageError
from profiler.core.grid import Grid, Outside, batch_rows, fixed_us, prefill_grid
from profiler.core.launch import Passes, Tiles
from profiler.core.paths import default_bundle_root
from profiler.core.registry import load_model
from profiler.core.unequal import beyond_fixed_us, forms_of
from profiler.kernels._flash_attention import _DENSE_TILE, _PROJECTED, DenseWork, _merge, most_splits
from profiler.kernels._placement import prefill_straight, ran_of
from profiler.kernels._unequal import sharing_of, tiles_of

NAME = "mla_dense_prefill"
PROMPTS = st.lists(st.tuples(st.integers(1, 2047), st.integers(0, 1791)), min_size=1, max_size=6)
WORKS = st.builds(
    DenseWork,
    st.just(132),
    st.sampled_from([8, 16, 64, 128]),
    st.sampled_from([80, 128]),
    st.sampled_from([128, 256]),
    st.sampled_from([256, 448]),
)


def launch_by_hand(work: DenseWork, requests: list[tuple[int, list[int]]]) -> float:
    """Every tile of a launch on the first multiprocessor that is free, then the merge of the parts."""
    longest, most_rows = max(rows[0] for _, rows in requests), max(len(rows) for _, rows in requests)
    most = most_splits(work.heads * most_rows, longest, work.sm_count)
    share = math.ceil(1.1 * work.heads * sum(len(rows) * rows[0] for _, rows in requests) / work.sm_count)
    ends, merged = [0.0] * work.sm_count, [0.0]
    for tokens, rows in requests:
        parts = max(1, min(math.ceil(rows[0] / share), most)) if share else 1
        for blocks in rows:
            for _ in range(work.heads * parts):
                heapreplace(ends, ends[0] + math.ceil(blocks / parts) + _DENSE_TILE)
        merged.append(_merge(tokens * work.heads, parts, work.values) if most > 1 else 0.0)
    return max(ends) + max(*merged, 0.13 / 0.6 * sum(merged))


@settings(max_examples=80, deadline=None)
@given(work=WORKS, prompts=PROMPTS)
def test_a_step_is_its_tiles_in_both_launches(work: DenseWork, prompts: list[tuple[int, int]]) -> None:
    own = [(c, [math.ceil(min(c, r * 128) / work.keys) for r in range(math.ceil(c / 128), 0, -1)]) for c, _ in prompts]
    before = [(c, [math.ceil(k / work.keys)] * math.ceil(c / 128)) for c, k in prompts]
    expected = launch_by_hand(work, own) + (launch_by_hand(work, before) if any(k for _, k in prompts) else 0.0)
    expected += _PROJECTED * work.projected * work.heads * sum(c + k for c, k in prompts)
    assert work.together(prompts) == pytest.approx(expected)


@settings(max_examples=80, deadline=None)
@given(work=WORKS, chunk=st.integers(1, 2048), context=st.integers(0, 1791))
def test_one_prompt_is_the_chunk_itself(work: DenseWork, chunk: int, context: int) -> None:
    assert work.together([(chunk, context)]) == pytest.approx(work.prefill(chunk, context))


@dataclass(frozen=True)
class Shipped:
    """A shipped bundle's table of one degree, and its steps of several prompts: prompts and microseconds."""

    form: Passes
    grid: Grid
    fixed_us: float
    steps: tuple[tuple[tuple[tuple[int, int], ...], float], ...]


def shipped(model: str, tp: int, variant: str = "fp8") -> Shipped:
    spec, bundle = load_model(model), read_bundle(default_bundle_root() / "H200" / model / variant)
    ran = ran_of(bundle.meta, spec, tp)
    form = tiles_of(NAME, spec, ran)
    assert isinstance(form, Passes)
    grid = prefill_grid(
        batch_rows(bundle.table(tp, "attention"), NAME), Outside(NAME, "-"), prefill_straight(NAME, ran)
    )
    columns = bundle.table(tp, "skew").columns
    rows = zip(*(columns[name] for name in ("kernel", "use", "prefills", "time_us")), strict=True)
    mine = [(text, us) for kernel, use, text, us in rows if (kernel, use) == (NAME, "prefills")]
    steps = tuple((parse_batch(str(text), "none").prefills, float(us)) for text, us in mine)
    return Shipped(form, grid, fixed_us(grid), steps)


@pytest.mark.parametrize("model", ["zai-org/GLM-5-FP8", "deepseek-ai/DeepSeek-V3.2-Exp"])
def test_measured_steps_of_tp_8_are_met_better_than_by_parts_with_one_fixed_part(model: str) -> None:
    """Each of the five steps within 17 %: their parts are merged side by side."""
    one = shipped(model, 8)
    assert len(one.steps) == 5
    errors, plain = (
        sorted(
            abs((one.fixed_us + beyond_fixed_us(one.grid, one.fixed_us, form, prompts)) / us - 1)
            for prompts, us in one.steps
        )
        for form in (one.form, None)
    )
    assert errors[4] < 0.175
    assert sum(errors) < 0.7 * sum(plain)


def test_steps_of_every_shipped_table_are_met() -> None:
    """Fitted ones among them: 80 steps of four models."""
    variants = {"zai-org/GLM-5": "bf16", "zai-org/GLM-5.2": "bf16"}
    variants |= {"zai-org/GLM-5-FP8": "fp8", "deepseek-ai/DeepSeek-V3.2-Exp": "fp8"}
    tables = [(model, variant, tp) for model, variant in variants.items() for tp in (1, 2, 4, 8)]
    errors = [
        abs((one.fixed_us + one.form.beyond_fixed_us(one.grid, one.fixed_us, prompts)) / us - 1)
        for model, variant, tp in tables
        for one in (shipped(model, tp, variant),)
        for prompts, us in one.steps
    ]
    assert len(errors) == 80
    assert sum(errors) / len(errors) < 0.086 and max(errors) < 0.215


def test_the_form_is_read_from_the_bundle_and_alone_a_prompt_costs_its_cell() -> None:
    spec = load_model("zai-org/GLM-5-FP8")
    bundle = read_bundle(default_bundle_root() / "H200" / spec.name / "fp8")
    assert forms_of(bundle.meta, 8, NAME).prefills == "tiles"
    assert isinstance(sharing_of("tiles", NAME, spec, ran_of(bundle.meta, spec, 8)), Passes)
    assert sharing_of("once", NAME, spec, ran_of(bundle.meta, spec, 8)) is None
    one = shipped(spec.name, 8)
    alone = one.form.beyond_fixed_us(one.grid, one.fixed_us, [(512, 512)])
    assert alone == pytest.approx(one.grid.at(512, 512) - one.fixed_us)
    with pytest.raises(CoverageError):
        one.form.beyond_fixed_us(one.grid, one.fixed_us, [(512, 512), (512, 90_000)])
    assert not isinstance(tiles_of("index_scores", spec, ran_of(bundle.meta, spec, 8)), Tiles | Passes)
