"""Bundles of modules: what they hold, and what a step costs from them."""

from pathlib import Path

import priced
import pytest

from profiler.core.bundle import Bundle, Table, make_table, read_bundle, write_bundle
from profiler.core.errors import ConfigError, CoverageError
from profiler.core.hardware import load_hardware
from profiler.core.modules import fold_modules, granularity, module_parts
from profiler.core.registry import load_model
from profiler.core.stack import fold
from profiler.core.types import Category, Parallel
from serving.core.shape import StepShape
from serving.cost import build_cost

SPEC = load_model(priced.MODEL)


def bundle(root: Path, **changes: object) -> Bundle:
    """Closed forms of priced.py for every component of a bundle of modules."""
    rows: dict[Category, list[tuple[str | float, ...]]] = {}
    for one, _ in fold_modules(SPEC).components:
        rows.setdefault(one.category, []).extend(priced._rows(one, SPEC, 8))
    tables: dict[tuple[int, Category], Table] = {(1, c): make_table(c, found) for c, found in rows.items()}
    return read_bundle(write_bundle(root, priced.meta(granularity="module", **changes), tables))


def cost(found: Bundle):  # type: ignore[no-untyped-def]
    parallel = Parallel(dp=8, ep=8)
    return build_cost(
        bundle=found, spec=SPEC, parallel=parallel, hardware=load_hardware("H200"), max_num_batched_tokens=4096
    )


def decode(requests: int, keys: int) -> StepShape:
    total = requests * keys
    return StepShape(
        prefills=(),
        decode_requests=requests,
        decode_kv_sum_tokens=total,
        decode_kv_max_tokens=keys,
        decode_kv_capped_sum_tokens=min(keys, priced.CAP) * requests,
        sampled_sequences=requests,
    )


def test_a_decode_step_is_the_sum_of_its_modules(tmp_path: Path) -> None:
    """One module per layer on the whole context; norms, MLP, experts and head as ever."""
    shape = decode(8, 2048)
    lines = {line.component: line for line in cost(bundle(tmp_path)).explain([shape] * 8)}
    assert lines["dsa_module"].calls == 61
    assert lines["dsa_module"].us == pytest.approx(61 * priced.decode_us("dsa_module", 8, 2048))
    assert not {"sparse_mla", "index_scores", "o_proj", "absorb_q"} & lines.keys()
    assert lines["input_norm"].us == pytest.approx(61 * priced.token_us("input_norm", 8))
    assert {line.provenance for line in lines.values() if line.component == "dsa_module"} == {"measured"}


def test_a_short_prefill_takes_the_module_too(tmp_path: Path) -> None:
    """Modules were timed with the engine's own choice of dense or sparse prefill, so there is no second table."""
    shape = StepShape(
        prefills=((1024, 0),),
        decode_requests=0,
        decode_kv_sum_tokens=0,
        decode_kv_max_tokens=0,
        decode_kv_capped_sum_tokens=0,
        sampled_sequences=1,
    )
    lines = {line.component: line for line in cost(bundle(tmp_path)).explain([shape] + [None] * 7)}
    assert lines["dsa_module"].us == pytest.approx(61 * priced.prefill_us("dsa_module", 1024, 0))


def test_kernels_are_not_taken_for_modules(tmp_path: Path) -> None:
    kernels = priced.bundle(tmp_path / "kernels")
    with pytest.raises(CoverageError, match="dsa_module"):
        cost(Bundle(kernels.path, {**kernels.meta, "granularity": "module"}, kernels.tables))
    with pytest.raises(ConfigError, match="granularity is 'layer', must be one of kernel, module"):
        granularity({"granularity": "layer"})


@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V3", "zai-org/GLM-5.2", "MiniMaxAI/MiniMax-M3", priced.MODEL])
def test_modules_and_their_parts_make_up_the_stack(model: str) -> None:
    """Replacing each module by its kernels gives the components of kernel granularity, counts included."""
    spec = load_model(model)
    whole: dict[object, int] = {}
    from profiler.core.modules import module_kinds

    kinds = module_kinds(spec)
    for component, count in fold_modules(spec).components:
        parts = module_parts(spec, kinds[component.name]) if component.name in kinds else (component,)
        for part in parts:
            whole[part] = whole.get(part, 0) + count
    assert whole == dict(fold(spec).components)
