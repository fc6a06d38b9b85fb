"""Figures of a set of results that every form of the report shows."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from serving.report.load import by_load, doubts, load_of, load_text, mean_of, of_users

Row = Mapping[str, Any]
_LAYOUT: Final = (
    "model", "hardware", "gpus", "tp", "pp", "dp", "ep", "kv_dtype", "utilization", "max_model_len",
    "max_num_batched_tokens", "max_num_seqs",
)  # fmt: skip
_AVERAGED: Final = (
    "output_tokens_per_s", "output_tokens_per_s_per_gpu", "user_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99",
    "tpot_ms_p50", "tpot_ms_p99", "requests_per_s", "cost_per_million_output_tokens", "output_tokens_per_money",
    "slo_worst_ratio",
)  # fmt: skip
_OUTSIDE: Final = re.compile(r"([^:]+): .* (is outside its table) .*?(--tp \d+|$)")
_SPLIT: Final = ("tp", "pp", "dp", "ep")


def finished(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "done"]


def fitting(rows: Iterable[Row]) -> list[Row]:
    """The layouts of a screen that fit, safe ones first, then by KV tokens per GPU."""
    fits = (row for row in rows if row["status"] == "fits")
    return sorted(fits, key=lambda row: (row["risk"] is not None, -row["kv_tokens_total"] / row["gpus"]))


def layout_of(row: Row) -> tuple[Any, ...]:
    """What names an instance and how often it is there."""
    return (*(row.get(name) for name in _LAYOUT), row.get("replicas") or 1)


def label(row: Row, rows: Sequence[Row] = ()) -> str:
    """A layout in a few words; of the columns that are the same in all `rows` only the split is named."""
    parts = [" ".join(f"{name}{row[name]}" for name in _SPLIT if row[name] != 1 or name in ("tp", "dp"))]
    if varies("model", rows):
        parts.insert(0, str(row["model"]).rsplit("/", 1)[-1])
    if varies("hardware", rows):
        parts.append(str(row["hardware"]))
    if varies("kv_dtype", rows):
        parts.append(f"kv {row['kv_dtype']}")
    if varies("max_num_seqs", rows):
        parts.append(f"seqs {row['max_num_seqs']}")
    if varies("max_num_batched_tokens", rows):
        parts.append(f"batched {row['max_num_batched_tokens']}")
    if varies("max_model_len", rows):
        parts.append(f"len {row['max_model_len']}")
    if varies("utilization", rows):
        parts.append(f"util {row['utilization']:g}")
    if (row.get("replicas") or 1) > 1:
        parts.append(f"x {row['replicas']}")
    if is_projected(row):
        parts.append("projected")
    return ", ".join(parts)


def varies(column: str, rows: Sequence[Row]) -> bool:
    return len({row.get(column) for row in rows}) > 1


def by_layout(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[layout_of(row)].append(row)
    return dict(groups)


def with_throughput(rows: Iterable[Row]) -> list[Row]:
    """Points of a load that have both throughputs, per GPU and of a user."""
    return [row for row in rows if load_of(row) and row["user_tokens_per_s"] and row["output_tokens_per_s_per_gpu"]]


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Points that no other point beats in both output tokens/s per GPU and tokens/s of a user, by the latter."""
    front: list[Row] = []
    best = -1.0
    for row in sorted(
        with_throughput(rows), key=lambda row: (-row["user_tokens_per_s"], -row["output_tokens_per_s_per_gpu"])
    ):
        if row["output_tokens_per_s_per_gpu"] > best:
            front.append(row)
            best = row["output_tokens_per_s_per_gpu"]
    return front[::-1]


def capacity(rows: Sequence[Row], with_slo: bool) -> list[dict[str, Any]]:
    """One line per layout that ran, best first.

    A load is a rate, or a number of users. With an SLO, highest_load is the highest below the lowest at which any seed
    breaks it (None: at none), and the line's figures are those of that load, else of the lowest. Without, those of the
    load with most output. Figures of several seeds are their means.
    """
    lines = []
    for group in by_layout([row for row in finished(rows) if load_of(row)]).values():
        loads = by_load(group)
        broken = [load for load, found in loads.items() if not all(row.get("slo_met") for row in found)]
        kept = [load for load in loads if load < min(broken, default=float("inf"))] if with_slo else []
        shown = (max(kept) if kept else min(loads)) if with_slo else _most_output(loads)
        first = loads[shown][0]
        lines.append(
            {
                "row": first,
                "load": shown,
                "highest_load": max(kept) if kept else None,
                "bounded": bool(kept) and max(kept) < max(loads),
                "seeds": len(loads[shown]),
                **{name: mean_of(loads[shown], name) for name in _AVERAGED},
            }
        )
    return sorted(
        lines, key=lambda line: (-_score(line, with_slo), line["tpot_ms_p50"] or 0.0, str(layout_of(line["row"])))
    )


def _most_output(loads: Mapping[float, Sequence[Row]]) -> float:
    return max(loads, key=lambda load: mean_of(loads[load], "output_tokens_per_s") or 0.0)


def _score(line: Mapping[str, Any], with_slo: bool) -> float:
    if with_slo:
        return float((line["highest_load"] or 0.0) / line["row"]["gpus_total"])
    return float(line["output_tokens_per_s_per_gpu"] or 0.0)


def refusals(rows: Iterable[Row]) -> list[tuple[str, str, list[Row]]]:
    """(kind, reason, rows) of what did not run, most frequent reason first. Failed points are among them.

    Points outside the same table are one group, whose reason is that of the first.
    """
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["status"] in ("refused", "failed"):
            reason = str(row["reason"])
            outside = _OUTSIDE.match(reason)
            groups[str(row["kind"]), " ".join(outside.groups()) if outside else reason].append(row)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return [(kind, str(found[0]["reason"]), found) for (kind, _), found in ordered]


def layouts_of(group: Sequence[Row], rows: Sequence[Row]) -> str:
    """The layouts of a group of `rows` in words, the first six of many."""
    names = list(dict.fromkeys(label(row, rows) for row in group))
    return "; ".join(names[:6]) + (f"; {len(names) - 6} more" if len(names) > 6 else "")


def counts(rows: Iterable[Row]) -> Counter[str]:
    return Counter(str(row["status"]) for row in rows)


def is_projected(row: Row) -> bool:
    return row.get("provenance") == "projected"


def provenance(rows: Sequence[Row]) -> list[tuple[str, str, str, str, str, int]]:
    """(hardware, model, variant, provenance, engine, extrapolated lookups) of every table that priced a point."""
    found: Counter[tuple[str, str, str, str, str]] = Counter()
    for row in finished(rows):
        key = tuple(str(row[name]) for name in ("hardware", "model", "variant", "provenance", "table_engine"))
        found[key] += row["extrapolated_lookups"]  # type: ignore[index]
    return [(*key, times) for key, times in sorted(found.items())]


def verdict(header: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """The answer in a few sentences, the first of them the one that matters."""
    if header.get("command") == "size":
        return list(header["size"]["verdict"])
    slo = header["sweep"]["slo"]
    tally = counts(rows)
    if header["sweep"]["mode"] == "screen":
        fits = [row for row in rows if row["status"] == "fits"]
        if not fits:
            return [f"Nothing fits: all {len(rows)} layouts are refused."]
        best = max(fits, key=lambda row: (row["risk"] is None, row["kv_tokens_total"] / row["gpus"]))
        return [
            f"{len(fits)} of {len(rows)} layouts fit. Most KV per GPU: {label(best, rows)} on {best['gpus']} "
            f"{best['hardware']}, {best['kv_tokens_total']:,} tokens{' (risky)' if best['risk'] else ''}."
        ]
    lines = capacity(rows, slo is not None)
    if not lines:
        return [f"No point ran: {tally['refused']} refused, {tally['failed']} failed."]
    return [_best(lines, rows, slo is not None), *doubts(rows)]


def _best(lines: Sequence[Mapping[str, Any]], rows: Sequence[Row], with_slo: bool) -> str:
    best_line = lines[0]
    best = best_line["row"]
    name = f"{label(best, rows)} on {best['gpus_total']} {best['hardware']}"
    mark = " Projected, not measured." if is_projected(best) else ""
    if not with_slo:
        return (
            f"Most output per GPU: {name}, {best_line['output_tokens_per_s_per_gpu']:,.1f} tokens/s per GPU at "
            f"{load_text(best)}.{mark}"
        )
    if best_line["highest_load"] is None:
        near = min(lines, key=lambda line: line["slo_worst_ratio"] or float("inf"))
        ratio = near["slo_worst_ratio"]
        nearest = f"{label(near['row'], rows)} at {load_text(near['row'])}"
        excess = f", {ratio:.2f} times what is allowed" if ratio else ""
        return f"No point keeps the SLO. Nearest: {nearest}, limited by {near['row']['slo_limiting']}{excess}.{mark}"
    if of_users([best]):
        what, note = "Most users", " No larger number was run; the limit may lie above."
    else:
        what, note = "Highest rate", " It is the highest rate that was run; the limit may lie above."
    note = "" if best_line["bounded"] else note
    return f"{what} per GPU within the SLO: {name}, {load_text(best)}.{mark}{note}"
