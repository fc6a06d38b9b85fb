"""One step's cost as a tree: parts of the model, their kernels and collectives, padding and waiting ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from profiler.core.batch_text import NONE, parse_batch
from profiler.core.errors import ConfigError
from profiler.core.types import ModelSpec
from serving.core.shape import StepShape
from serving.cost.bounds import OUTSIDE, Bounds, calls_by_part
from serving.cost.lines import Line
from serving.cost.step import TableCost

IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Node:
    """`us` microseconds of `calls` calls; bound_us: the least time, None where it is not known for all of it."""

    name: str
    us: float
    calls: int = 0
    bound_us: float | None = None
    provenance: str = ""
    children: tuple["Node", ...] = ()


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
    cost: TableCost, shapes: Sequence[StepShape | None], bounds: Bounds | None, meta: Any, spec: ModelSpec
) -> Explanation:
    """The step of a group whose ranks have `shapes`. Raises CoverageError where a table does not reach.

    bounds: None where no hardware file describes the card; then no line has one.
    """
    if not any(shapes):
        raise ConfigError("every rank is idle: there is no step to explain")
    ranks_ns = cost.ranks_ns(shapes)
    busiest = max(range(len(shapes)), key=lambda rank: ranks_ns[rank])
    lines = cost.explain(shapes)
    least = bounds.by_component(cost, shapes, busiest) if bounds else {}
    total_ns = cost.step_ns(shapes)
    unpadded_ns = replace(cost, capture_sizes=()).step_ns(shapes)
    root = _root(lines, calls_by_part(spec, meta), least, spec)
    return Explanation(
        root=root,
        busiest_rank=busiest,
        tokens=tuple(shape.tokens if shape else 0 for shape in shapes),
        computed_tokens=tuple(cost.computed_tokens(shapes)),
        ranks_us=tuple(ns / 1e3 for ns in ranks_ns),
        padding_us=(total_ns - unpadded_ns) / 1e3,
        waiting_us=(max(ranks_ns) - sum(ranks_ns) / len(ranks_ns)) / 1e3,
    )


def _root(lines: Sequence[Line], parts: dict[str, dict[str, int]], least: dict[str, float], spec: ModelSpec) -> Node:
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
            children.append(_sum(part, own))
    rest = [_leaf(entry, entry.calls, least) for entry in lines if entry.component not in placed]
    return _sum("step", [*sorted(children, key=lambda node: -node.us), *rest])


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


def _sum(name: str, children: Sequence[Node]) -> Node:
    ordered = tuple(sorted(children, key=lambda node: -node.us))
    known = [node.bound_us for node in ordered if node.bound_us is not None]
    return Node(name, sum(node.us for node in ordered), 0, sum(known) if known else None, "", ordered)


def rows(node: Node, depth: int = 0) -> Iterator[tuple[int, Node]]:
    """The tree in reading order with the depth of each node."""
    yield depth, node
    for child in node.children:
        yield from rows(child, depth + 1)


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
        "tree": _mapping(found.root),
    }


def _mapping(node: Node) -> dict[str, Any]:
    content: dict[str, Any] = {"name": node.name, "us": round(node.us, 3)}
    if node.calls:
        content |= {"calls": node.calls, "provenance": node.provenance}
    if node.bound_us is not None:
        content["bound_us"] = round(node.bound_us, 3)
    if node.children:
        content["children"] = [_mapping(child) for child in node.children]
    return content


def tree_text(found: Explanation) -> str:
    """The tree as aligned text, 100 columns."""
    total = found.root.us
    lines = [f"{'':44}{'calls':>6}{'us':>13}{'share':>8}{'bound us':>12}{'reached':>9}  from"]
    for depth, node in rows(found.root):
        bound = "" if node.bound_us is None else f"{node.bound_us:,.1f}"
        reached = "" if node.bound_us is None or not node.us else f"{node.bound_us / node.us:.0%}"
        calls = str(node.calls) if node.calls else ""
        name = "  " * depth + node.name
        share = node.us / total
        row = f"{name:44}{calls:>6}{node.us:>13,.1f}{share:>8.1%}{bound:>12}{reached:>9}  {node.provenance}"
        lines.append(row.rstrip())
    lines.append("")
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
    return "\n".join(lines)


_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 1400px; padding: 0 1rem; color: #1c1e21 }
h1 { font-size: 1.2rem } .flame { border: 1px solid #d0d4da } .flame div { box-sizing: border-box }
.n { display: inline-block; vertical-align: top; overflow: hidden }
.l { padding: 2px 4px; height: 24px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis;
     border-right: 1px solid #fff; border-bottom: 1px solid #fff; font-size: 12px }
.c { display: flex } table { border-collapse: collapse; margin-top: 1rem; font-size: 13px }
td, th { padding: 2px 10px; border-bottom: 1px solid #e3e6ea; text-align: left } td.r { text-align: right }
"""
# Fills by what a line is: grouping, tables, computed, stated.
_FILLS = {"": "#e8ecf1", "computed": "#f3c98b", "stated": "#e6a5a0", "hardware file": "#e6a5a0"}
_TABLE_FILL = "#9ec5e8"


def page(found: Explanation, title: str) -> str:
    """A self-contained HTML page: the step as a flame chart, widths in proportion to time, and the tree as a table."""
    table = "".join(_html_row(depth, node, found.root.us) for depth, node in rows(found.root))
    head = "".join(f"<th>{name}</th>" for name in ("", "calls", "us", "share", "bound us", "from"))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{found.root.us / 1e3:,.3f} ms; padding {found.padding_us:,.1f} us; ranks wait {found.waiting_us:,.1f} us "
        "on average. Blue: from tables. Orange: computed. Red: stated. Hover for the bound.</p>"
        f'<div class="flame">{_flame(found.root, 100.0)}</div><table><tr>{head}</tr>{table}</table></body></html>\n'
    )


def _html_row(depth: int, node: Node, total_us: float) -> str:
    bound = "" if node.bound_us is None else f"{node.bound_us:,.1f}"
    numbers = (str(node.calls or ""), f"{node.us:,.1f}", f"{node.us / total_us:.1%}", bound)
    cells = "".join(f'<td class="r">{number}</td>' for number in numbers)
    name = f'<td style="padding-left:{10 + 18 * depth}px">{escape(node.name)}</td>'
    return f"<tr>{name}{cells}<td>{escape(node.provenance)}</td></tr>"


def _flame(node: Node, width: float) -> str:
    bound = "" if node.bound_us is None else f", bound {node.bound_us:,.1f} us"
    text = escape(
        f"{node.name}: {node.us:,.1f} us{bound}{', ' + node.provenance if node.provenance else ''}", quote=True
    )
    fill = _FILLS.get(node.provenance, _TABLE_FILL)
    inner = "".join(_flame(child, 100.0 * child.us / node.us) for child in node.children) if node.us else ""
    return (
        f'<div class="n" style="width:{width:.4f}%"><div class="l" title="{text}" style="background:{fill}">'
        f"{escape(node.name)}</div>" + (f'<div class="c">{inner}</div>' if inner else "") + "</div>"
    )
