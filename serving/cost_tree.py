"""A tree of named times, as plain values, aligned text, and a self-contained page with flame charts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True, slots=True)
class Node:
    """`us` microseconds of `calls` calls; bound_us: the least time, None where it is not known for all of it."""

    name: str
    us: float
    calls: int = 0
    bound_us: float | None = None
    provenance: str = ""
    children: tuple["Node", ...] = ()


def summed(name: str, children: Sequence[Node], *, ordered: bool = False) -> Node:
    """The sum of `children`, longest first unless they are `ordered`. Its bound is that of those that have one."""
    shown = tuple(children) if ordered else tuple(sorted(children, key=lambda node: -node.us))
    known = [node.bound_us for node in shown if node.bound_us is not None]
    return Node(name, sum(node.us for node in shown), 0, sum(known) if known else None, "", shown)


def rows(node: Node, depth: int = 0) -> Iterator[tuple[int, Node]]:
    """The tree in reading order with the depth of each node."""
    yield depth, node
    for child in node.children:
        yield from rows(child, depth + 1)


def mapping(node: Node) -> dict[str, Any]:
    """The tree as plain values, for JSON."""
    content: dict[str, Any] = {"name": node.name, "us": round(node.us, 3)}
    if node.calls:
        content |= {"calls": node.calls, "provenance": node.provenance}
    if node.bound_us is not None:
        content["bound_us"] = round(node.bound_us, 3)
    if node.children:
        content["children"] = [mapping(child) for child in node.children]
    return content


def table_text(root: Node) -> list[str]:
    """The tree as aligned lines, 100 columns."""
    total = root.us
    lines = [f"{'':44}{'calls':>6}{'us':>13}{'share':>8}{'bound us':>12}{'reached':>9}  from"]
    for depth, node in rows(root):
        bound = "" if node.bound_us is None else f"{node.bound_us:,.1f}"
        reached = "" if node.bound_us is None or not node.us else f"{node.bound_us / node.us:.0%}"
        calls = str(node.calls) if node.calls else ""
        name = "  " * depth + node.name
        share = node.us / total
        row = f"{name:44}{calls:>6}{node.us:>13,.1f}{share:>8.1%}{bound:>12}{reached:>9}  {node.provenance}"
        lines.append(row.rstrip())
    return lines


_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 1400px; padding: 0 1rem; color: #1c1e21 }
h1 { font-size: 1.2rem } .flame { border: 1px solid #d0d4da } .flame div { box-sizing: border-box }
.n { display: inline-block; vertical-align: top; overflow: hidden }
.l { padding: 2px 4px; height: 24px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis;
     border-right: 1px solid #fff; border-bottom: 1px solid #fff; font-size: 12px }
.c { display: flex } table { border-collapse: collapse; margin-top: 1rem; font-size: 13px }
td, th { padding: 2px 10px; border-bottom: 1px solid #e3e6ea; text-align: left } td.r { text-align: right }
"""
LEGEND = "Blue: from tables. Orange: computed. Red: stated. Hover for the bound."
WAITING = "waiting"
# Fills by what a line is: grouping, tables, computed, stated, nothing.
_FILLS = {"": "#e8ecf1", "computed": "#f3c98b", "stated": "#e6a5a0", "hardware file": "#e6a5a0", WAITING: "#ffffff"}
_TABLE_FILL = "#9ec5e8"


def html_page(title: str, intro: str, charts: Sequence[tuple[str, Node]], table: Node) -> str:
    """A self-contained page: flame charts, widths in proportion to time, each under its caption, and a tree as a table.

    Charts are as wide as they take long, the longest one over the whole page.
    """
    longest = max(root.us for _, root in charts)
    flames = "".join(
        (f"<p>{escape(caption)}</p>" if caption else "")
        + f'<div class="flame">{_flame(root, 100.0 * root.us / longest)}</div>'
        for caption, root in charts
    )
    body = "".join(_html_row(depth, node, table.us) for depth, node in rows(table))
    head = "".join(f"<th>{name}</th>" for name in ("", "calls", "us", "share", "bound us", "from"))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p>{escape(intro)}</p>"
        f"{flames}<table><tr>{head}</tr>{body}</table></body></html>\n"
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
    # What hides others takes time off and has no width; the table has it.
    drawn = [child for child in node.children if child.us > 0]
    whole = max(node.us, sum(child.us for child in drawn))
    inner = "".join(_flame(child, 100.0 * child.us / whole) for child in drawn) if whole else ""
    return (
        f'<div class="n" style="width:{width:.4f}%"><div class="l" title="{text}" style="background:{fill}">'
        f"{escape(node.name)}</div>" + (f'<div class="c">{inner}</div>' if inner else "") + "</div>"
    )
