"""One step's cost as a tree: parts of the model, their kernels and collectives, padding and waiting ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profiler.core.batch_text import NONE, parse_batch
from profiler.core.errors import ConfigError
from profiler.core.types import ModelSpec
from serving.core.shape import StepShape
from serving.cost.bounds import OUTSIDE, Bounds, calls_by_part
from serving.cost.lines import Line
from serving.cost.step import TableCost
from serving.cost_tree import LEGEND, Node, html_page, mapping, summed, table_text

IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Explanation:
    """root: the step. busiest_rank: whose batch it waits for.

    tokens, computed_tokens (with padding), ranks_us: per rank, the last before what all ranks run together.
    padding_us: how much shorter the step would be without padding. waiting_us: mean over ranks of the time that a rank
    waits for the busiest one.
    """

    root: Node
    busiest_rank: int
    tokens: tuple[int, ...]
    computed_tokens: tuple[int, ...]
    ranks_us: tuple[float, ...]
    padding_us: float
    waiting_us: float


def parse_rank(text: str, cap_tokens: int | None) -> StepShape | None:
    """One rank's batch: groups `<count>x<chunk>@<context>` (prefills) and `<count>x<keys>` (decodes), or `idle`.

    Every prefill is taken for its prompt's last chunk, so it emits a token. Raises ConfigError for another form.
    """
    if text.strip() == IDLE:
        return None
    groups = text.split()
    prefills = " ".join(group for group in groups if "@" in group) or NONE
    decodes = " ".join(group for group in groups if "@" not in group) or NONE
    if not groups:
        raise ConfigError("an empty batch; write 32x4096 (decodes), 1x8192@0 (prefills), or idle")
    batch = parse_batch(prefills, decodes, f"batch {text!r}")
    keys = batch.decode_keys
    return StepShape(
        batch.prefills,
        len(keys),
        sum(keys),
        max(keys, default=0),
        sum(k if cap_tokens is None else min(k, cap_tokens) for k in keys),
        len(keys) + len(batch.prefills),
    )


def explain(
    cost: TableCost,
    shapes: Sequence[StepShape | None],
    bounds: Bounds | None,
    meta: Any,
    spec: ModelSpec,
    parts: Mapping[str, Mapping[str, int]] | None = None,
) -> Explanation:
    """The step of a group whose ranks have `shapes`. Raises CoverageError where a table does not reach.

    bounds: None where no hardware file describes the card; then no line has one. parts: calls of each component by part
    of the model, where these are not those of a whole model of `spec`.
    """
    if not any(shapes):
        raise ConfigError("every rank is idle: there is no step to explain")
    ranks_ns = cost.ranks_ns(shapes)
    busiest = max(range(len(shapes)), key=lambda rank: ranks_ns[rank])
    lines = cost.explain(shapes)
    least = bounds.by_component(cost, shapes, busiest) if bounds else {}
    total_ns = cost.step_ns(shapes)
    unpadded_ns = replace(cost, capture_sizes=()).step_ns(shapes)
    root = _root(lines, parts or calls_by_part(spec, meta), least, spec)
    return Explanation(
        root=root,
        busiest_rank=busiest,
        tokens=tuple(shape.tokens if shape else 0 for shape in shapes),
        computed_tokens=tuple(cost.computed_tokens(shapes)),
        ranks_us=tuple(ns / 1e3 for ns in ranks_ns),
        padding_us=(total_ns - unpadded_ns) / 1e3,
        waiting_us=(max(ranks_ns) - sum(ranks_ns) / len(ranks_ns)) / 1e3,
    )


def _root(
    lines: Sequence[Line], parts: Mapping[str, Mapping[str, int]], least: dict[str, float], spec: ModelSpec
) -> Node:
    children = []
    placed: set[str] = set()
    for part, calls in parts.items():
        own = []
        for entry in lines:
            here = calls.get(entry.component, 0) or _collective_calls(entry, part, spec)
            if here:
                placed.add(entry.component)
                own.append(_leaf(entry, here, least))
        if own:
            children.append(summed(part, own))
    rest = [_leaf(entry, entry.calls, least) for entry in lines if entry.component not in placed]
    return summed("step", [*sorted(children, key=lambda node: -node.us), *rest])


def _collective_calls(entry: Line, part: str, spec: ModelSpec) -> int:
    """Calls of a collective in a part of the model: they belong to all layers, to those with experts, or to none."""
    operation, _, what = entry.component.partition(" ")
    if operation not in ("all_reduce", "all_gather", "reduce_scatter", "dispatch", "combine"):
        return 0
    if what in ("embedding", "logits"):
        return entry.calls if part == OUTSIDE else 0
    kinds = {f"{spec.count(kind)} x {kind.name}": kind for kind in spec.kinds}
    if (kind := kinds.get(part)) is None:
        return 0
    if what == "attention":
        return spec.count(kind)
    moe = sum(spec.count(one) for one in spec.kinds if one.mlp == "moe")
    if what == "mlp":
        everywhere = entry.calls == spec.num_layers
        return spec.count(kind) if everywhere or kind.mlp != "moe" else 0
    return spec.count(kind) if kind.mlp == "moe" and entry.calls == moe else 0


def _leaf(entry: Line, calls: int, least: dict[str, float]) -> Node:
    each = least.get(entry.component)
    bound = None if each is None else each * calls
    return Node(entry.component, entry.us * calls / entry.calls, calls, bound, entry.provenance)


def document(found: Explanation) -> dict[str, Any]:
    """The explanation as plain values, for JSON."""
    return {
        "step_us": round(found.root.us, 3),
        "busiest_rank": found.busiest_rank,
        "tokens": list(found.tokens),
        "computed_tokens": list(found.computed_tokens),
        "ranks_us": [round(us, 3) for us in found.ranks_us],
        "padding_us": round(found.padding_us, 3),
        "waiting_us": round(found.waiting_us, 3),
        "tree": mapping(found.root),
    }


def tree_text(found: Explanation) -> str:
    """The tree as aligned text, 100 columns."""
    return "\n".join([*table_text(found.root), "", *waits_text(found)])


def waits_text(found: Explanation) -> list[str]:
    """How long ranks wait for the busiest one, and what padding costs; nothing where there is none."""
    lines = []
    if len(found.ranks_us) > 1:
        lines.append(
            f"busiest rank: {found.busiest_rank} of {len(found.ranks_us)}; the others wait {found.waiting_us:,.1f} us "
            "for it on average"
        )
    if found.computed_tokens[found.busiest_rank] != found.tokens[found.busiest_rank]:
        lines.append(
            f"padding: the busiest rank computes {found.computed_tokens[found.busiest_rank]} tokens for "
            f"{found.tokens[found.busiest_rank]}; without padding the step would be {found.padding_us:,.1f} us shorter"
        )
    return lines


def page(found: Explanation, title: str) -> str:
    """A self-contained HTML page: the step as a flame chart, and the tree as a table."""
    intro = (
        f"{found.root.us / 1e3:,.3f} ms; padding {found.padding_us:,.1f} us; ranks wait {found.waiting_us:,.1f} us "
        f"on average. {LEGEND}"
    )
    return html_page(title, intro, [("", found.root)], found.root)
