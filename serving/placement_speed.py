"""How fast a placement steps, from measured tables: what plan prints beside what fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from profiler.core.bundle import Bundle, find_bundle, variants
from profiler.core.errors import ConfigError, ContractError, CoverageError
from profiler.core.hardware import Hardware
from profiler.core.naming import variant_name
from profiler.core.siblings import tables_model
from profiler.core.types import ModelSpec
from serving.capacity import default_batched_tokens, default_num_seqs
from serving.core.shape import StepShape
from serving.cost import TableCost, build_cost, default_capture_sizes
from serving.degree_tables import read_degrees
from serving.placement import Placement


@dataclass(frozen=True, slots=True)
class Speed:
    """Of all GPUs of a placement together. reason: why there are no numbers, None where there are.

    requests: decoding in the step, all ranks together. decode_step_ms: the step in which each emits a token.
    prefill_tokens_per_s: in steps of full token budgets of new prompts. tables: the bundle, and what its numbers are.
    """

    requests: int = 0
    decode_step_ms: float | None = None
    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    reason: str | None = None
    tables: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """context_tokens: keys of every decoding request. requests: of all ranks together; None is what the KV holds."""

    context_tokens: int
    requests: int | None = None


def speeds(
    spec: ModelSpec,
    hardware: Hardware,
    placements: Sequence[Placement],
    load: Load,
    bundle_root: Path,
    *,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
) -> list[Speed]:
    """A Speed for each placement. Raises ConfigError for a load of no tokens or no requests.

    None of them is an error of the plan: a missing table, a split that is not priced, or a load that does not fit is
    the Speed's reason.
    """
    if load.context_tokens < 1 or (load.requests is not None and load.requests < 1):
        raise ConfigError("a step needs at least one request with at least one token")
    tokens = max_num_batched_tokens or default_batched_tokens(hardware)
    sequences = max_num_seqs or default_num_seqs(hardware)
    found = []
    for placement in placements:
        try:
            found.append(_speed(spec, hardware, placement, load, bundle_root, tokens, sequences))
        except (ConfigError, ContractError, CoverageError) as error:
            found.append(Speed(reason=str(error)))
    return found


def _speed(
    spec: ModelSpec, hardware: Hardware, one: Placement, load: Load, root: Path, tokens: int, sequences: int
) -> Speed:
    if not one.budget.fits:
        return Speed(reason="does not fit")
    dp = one.parallel.dp
    held = min(sequences, one.budget.kv_tokens // load.context_tokens)
    per_rank = held if load.requests is None else -(-load.requests // dp)
    if not held or per_rank > held:
        needed = f"{max(per_rank, 1)} are needed"
        return Speed(reason=f"a rank holds {held} requests of {load.context_tokens:,} tokens at once, {needed}")
    lockstep = spec.moe is not None and dp > 1
    bundle = _bundle(spec, hardware, one, root)
    cost = build_cost(
        bundle=bundle,
        spec=spec,
        parallel=one.parallel if lockstep else replace(one.parallel, dp=1),
        hardware=hardware,
        max_num_batched_tokens=tokens,
        kv=one.budget.layout,
        capture_sizes=default_capture_sizes(sequences),
        step_us=hardware.step_overhead_us or 0.0,
        step_source="hardware file",
    )
    cap = spec.indexer.attended_cap_tokens if spec.indexer else None
    keys = load.context_tokens
    decode = StepShape((), per_rank, per_rank * keys, keys, per_rank * min(keys, cap or keys), per_rank)
    step_s = _step_ns(cost, decode, dp if lockstep else 1) / 1e9
    return Speed(
        requests=per_rank * dp,
        decode_step_ms=step_s * 1e3,
        decode_tokens_per_s=per_rank * dp / step_s,
        prefill_tokens_per_s=_prefill_rate(cost, tokens, min(keys, tokens), dp, lockstep),
        tables=f"{bundle.path.relative_to(root).as_posix()}, {bundle.meta['provenance']}",
    )


def _prefill_rate(cost: TableCost, budget: int, prompt: int, dp: int, lockstep: bool) -> float | None:
    """Tokens per second of whole prompts of `prompt` tokens filling the budget; None where a table ends before."""
    prompts = max(1, budget // prompt)
    shape = StepShape(((prompt, 0),) * prompts, 0, 0, 0, 0, prompts)
    try:
        return 1e9 * prompts * prompt * dp / _step_ns(cost, shape, dp if lockstep else 1)
    except CoverageError:
        return None


def _step_ns(cost: TableCost, shape: StepShape, ranks: int) -> int:
    return cost.step_ns([shape] * ranks)


def _bundle(spec: ModelSpec, hardware: Hardware, one: Placement, root: Path) -> Bundle:
    owner = tables_model(root, hardware.name, spec)
    there = variants(root, hardware.name, owner)
    own = variant_name(spec.quantization.weights, one.budget.layout.layout)
    path = find_bundle(root, hardware.name, owner, own if own in there else None)
    return read_degrees(path, spec, one.parallel)
