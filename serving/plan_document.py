"""The result of `python -m serving plan` as a document, and its writers: JSON, CSV and tables, all to stdout."""

import csv
import json
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from profiler.core.hardware import Hardware
from profiler.core.kv import KvLayout
from profiler.core.types import ModelSpec, Parallel
from profiler.core.units import GIB
from profiler.core.weights import engine_weights, nominal_weights
from serving.placement import Placement, Plan

if TYPE_CHECKING:
    from serving.placement_speed import Speed

_PIPED_WIDTH = 160
_WIDE = 130

_SPEED_NUMBERS = ("decode_step_ms", "decode_tokens_per_s", "prefill_tokens_per_s")
_SPEED_COLUMNS = ("step_requests", *_SPEED_NUMBERS, "prefill_budget_tokens", "step_tables", "step_reason")
_COLUMNS = (
    "tp",
    "pp",
    "dp",
    "ep",
    "weights_gib",
    "weights_nominal_gib",
    "kv_available_gib",
    "bytes_per_token_per_rank",
    "num_gpu_blocks",
    "kv_tokens_per_rank",
    "kv_tokens_total",
    "max_concurrency",
    "fits",
    "launchable",
    "natural",
    "risk",
    "reason",
    "suggestion",
)


def plan_document(
    spec: ModelSpec,
    gpu: Hardware,
    gpus: int,
    max_model_len: int,
    utilization: float,
    layout: KvLayout,
    gqa_bytes: int,
    result: Plan,
    found_speeds: "Sequence[Speed]" = (),
) -> dict[str, Any]:
    nominal = nominal_weights(spec)
    whole = engine_weights(spec, Parallel(), mtp_layers=0)
    safe = result.largest_safe_dp
    notes = (
        spec.notes,
        layout.notes,
        *(placement.budget.layout.notes for placement in result.placements),
        _unchecked_weights(gpu, result),
    )
    return {
        "model": spec.name,
        "hardware": gpu.name,
        "gpus": gpus,
        "memory_total_gib": gpu.memory_total_gib,
        "memory_source": gpu.sources["memory_total_gib"],
        "utilization": utilization,
        "max_model_len": max_model_len,
        "notes": list(dict.fromkeys(note for found in notes for note in found)),
        "kv": {
            "layout": layout.layout,
            "backend": layout.backend or None,
            "block_tokens": layout.block_tokens,
            "bytes_per_token_per_rank": layout.bytes_per_token,
            "bytes_per_block": layout.bytes_per_block,
            "caches": [
                {
                    "name": cache.name,
                    "bytes_per_token_layer": cache.bytes_per_token_layer,
                    "layers": cache.layers,
                    "tp_sharded": cache.tp_sharded,
                }
                for cache in layout.caches
            ],
            "gqa_bytes_per_token": gqa_bytes,
        },
        "weights": {
            "nominal": {
                "dense_gib": _round(nominal.dense_bytes / GIB),
                "experts_gib": _round(nominal.experts_bytes / GIB),
                "expert_share": _round(nominal.expert_share),
            },
            "engine": {
                "total_gib": _round(whole.total_bytes / GIB),
                **{f"{group}_gib": _round(size / GIB) for group, size in whole.groups.items()},
            },
        },
        "term_sources": {term.name: term.source for p in result.placements for term in p.budget.terms},
        "largest_safe_dp": _degrees(safe) if safe else None,
        "placements": [
            _row(placement) | (_speed(found_speeds[i]) if found_speeds else {})
            for i, placement in enumerate(result.placements)
        ],
        "refused": [
            {
                "tp": refusal.parallel.tp,
                "pp": refusal.parallel.pp,
                "dp": refusal.parallel.dp,
                "ep": refusal.parallel.ep,
                "reason": "; ".join(refusal.reasons),
            }
            for refusal in result.refused
        ],
    }


def _unchecked_weights(gpu: Hardware, result: Plan) -> tuple[str, ...]:
    """A given KV size replaces the budget, so weights that exceed the device would go unnoticed."""
    heaviest = max(placement.weights_gib for placement in result.placements)
    if all(placement.budget.terms for placement in result.placements) or heaviest <= gpu.memory_total_gib:
        return ()
    return (
        f"the KV memory is given, so it alone decides; these weights, up to {heaviest:.1f} GiB per rank, exceed the "
        f"{gpu.memory_total_gib} GiB of {gpu.name}, as when the log is of a checkpoint in a smaller format",
    )


def _round(value: float) -> float:
    return round(value, 4)


def _degrees(placement: Placement) -> dict[str, int]:
    parallel = placement.parallel
    return {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, "ep": parallel.ep}


def _row(placement: Placement) -> dict[str, Any]:
    budget = placement.budget
    return {
        **_degrees(placement),
        "weights_gib": _round(placement.weights_gib),
        "weights_nominal_gib": _round(placement.weights_nominal_gib),
        "kv_available_gib": _round(budget.kv_available_gib),
        "bytes_per_token_per_rank": budget.layout.bytes_per_token,
        "num_gpu_blocks": budget.num_gpu_blocks,
        "kv_tokens_per_rank": budget.kv_tokens,
        "kv_tokens_total": placement.kv_tokens_total,
        "max_concurrency": _round(budget.max_concurrency),
        "fits": budget.fits,
        "launchable": placement.launchable,
        "natural": placement.natural,
        "risk": budget.risk,
        "reason": placement.reason,
        "suggestion": placement.suggestion,
        "terms": {name: _round(gib) for name, gib in budget.parts().items()},
    }


def _speed(speed: "Speed") -> dict[str, Any]:
    numbers = {name: getattr(speed, name) for name in _SPEED_NUMBERS}
    rounded = {name: None if value is None else _round(value) for name, value in numbers.items()}
    return {
        "step_requests": speed.requests or None,
        **rounded,
        "prefill_budget_tokens": speed.prefill_budget_tokens,
        "step_tables": speed.tables,
        "step_reason": speed.reason,
    }


def _write_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def _write_csv(document: dict[str, Any]) -> None:
    shown = _COLUMNS + (_SPEED_COLUMNS if "step_reason" in document["placements"][0] else ())
    writer = csv.DictWriter(sys.stdout, shown, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(document["placements"])


def _write_table(document: dict[str, Any]) -> None:
    kv, weights = document["kv"], document["weights"]
    nominal = weights["nominal"]
    print(
        f"{document['model']} on {document['gpus']} x {document['hardware']} "
        f"({document['memory_total_gib']} GiB: {document['memory_source']})"
    )
    print(
        f"utilization {document['utilization']:g}, max_model_len {document['max_model_len']:,}, "
        f"KV layout {kv['layout']}, block {kv['block_tokens']} tokens"
    )
    _print_caches(kv)
    print(
        f"weights, nominal (one dtype): dense {nominal['dense_gib']:.1f} GiB, experts {nominal['experts_gib']:.1f} GiB "
        f"({nominal['expert_share']:.1%}); as the engine holds them, unsplit: {weights['engine']['total_gib']:.1f} GiB"
    )
    _print_placements(document["placements"])
    _print_speeds(document["placements"])
    if len(document["placements"]) == 1:
        _print_terms(document["placements"][0]["terms"], document["term_sources"])
    safe = document["largest_safe_dp"]
    if safe and nominal["experts_gib"]:
        print(
            f"max-DP is the natural layout: {nominal['expert_share']:.1%} of the weights are experts, which ep splits "
            f"and tp does not. The largest data parallelism that fits safely: {_spell(safe)}"
        )
    for refusal in document["refused"]:
        print(f"refused: {_spell(refusal)}: {refusal['reason']}")
    for risk in sorted({row["risk"].split("; ", 1)[1] for row in document["placements"] if row["risk"]}):
        print(f"risky: {risk}")


def _print_caches(kv: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(
        "cache", "B/token/layer", "layers", "B/token/rank", "split by tp", title="KV cache", title_justify="left"
    )
    for cache in kv["caches"]:
        size = cache["bytes_per_token_layer"]
        table.add_row(
            cache["name"],
            f"{size:,}",
            str(cache["layers"]),
            f"{size * cache['layers']:,}",
            "yes" if cache["tp_sharded"] else "no",
        )
    table.add_row("sum", "", "", f"{kv['bytes_per_token_per_rank']:,}", "")
    table.add_row("(read as plain GQA, bf16)", "", "", f"{kv['gqa_bytes_per_token']:,}", "")
    _print_table(table)


def _print_placements(rows: list[dict[str, Any]]) -> None:
    """One row each. On a narrow terminal the verdicts with their reasons follow the table, so that no number is cut."""
    from rich.table import Table

    wide = _width() >= _WIDE
    names = ("tp", "pp", "dp", "ep", "weights", "nominal", "KV", "blocks", "tokens", "tokens, all", "seqs")
    shown = names if wide else tuple(name for name in names if name not in ("nominal", "blocks"))
    table = Table(title="placements (GiB and tokens per rank)", title_justify="left", padding=(0, 1 if wide else 0))
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold", ratio=1) if wide else table.add_column("fits", no_wrap=True)
    for row in rows:
        cells = {
            **{name: str(row[name]) for name in ("tp", "pp", "dp", "ep")},
            "weights": f"{row['weights_gib']:.1f}",
            "nominal": f"{row['weights_nominal_gib']:.1f}",
            "KV": f"{row['kv_available_gib']:.1f}",
            "blocks": f"{row['num_gpu_blocks']:,}",
            "tokens": f"{row['kv_tokens_per_rank']:,}",
            "tokens, all": f"{row['kv_tokens_total']:,}",
            "seqs": f"{row['max_concurrency']:.2f}",
        }
        table.add_row(*(cells[name] for name in shown), _verdict(row) if wide else _word(row))
    _print_table(table)
    if not wide:
        for row in rows:
            print(f"{_spell(row)}: {_verdict(row)}")


def _print_speeds(rows: list[dict[str, Any]]) -> None:
    """One row for each placement that the tables price, and what is in the way of the others."""
    if not any("step_reason" in row for row in rows):
        return
    from rich.table import Table

    table = Table(title="steps, all GPUs together", title_justify="left")
    for name in ("tp", "pp", "dp", "ep", "requests", "decode step ms", "decode tok/s", "prefill tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row["step_reason"] is None:
            prefill = row["prefill_tokens_per_s"]
            table.add_row(
                *(str(row[name]) for name in ("tp", "pp", "dp", "ep")),
                f"{row['step_requests']:,}",
                f"{row['decode_step_ms']:.2f}",
                f"{row['decode_tokens_per_s']:,.0f}",
                "-" if prefill is None else f"{prefill:,.0f}",
            )
    if table.row_count:
        _print_table(table)
    for name in dict.fromkeys(row["step_tables"] for row in rows if row["step_tables"]):
        print(f"tables: {name}")
    unfilled: dict[int | None, list[str]] = {}
    for row in rows:
        if row["step_reason"] is None and row["prefill_tokens_per_s"] is None:
            unfilled.setdefault(row["prefill_budget_tokens"], []).append(_spell(row))
    for budget, spelled in unfilled.items():
        way = f"; --max-num-batched-tokens {budget} is the most that has a rate" if budget else ""
        print(
            f"no prefill of {'; '.join(spelled)}: the tables end before the tokens of a full step of all its engines"
            f"{way}"
        )
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["step_reason"]:
            reasons.setdefault(row["step_reason"], []).append(_spell(row))
    for reason, spelled in reasons.items():
        print(f"no step of {'any placement' if len(spelled) == len(rows) > 1 else '; '.join(spelled)}: {reason}")


def _print_terms(terms: dict[str, float], sources: dict[str, str]) -> None:
    from rich.table import Table

    table = Table(title="memory of one rank", title_justify="left")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("from", overflow="fold", ratio=1)
    for name, gib in terms.items():
        table.add_row(name, f"{gib:.2f}", sources.get(name, ""))
    table.add_row("total", f"{sum(terms.values()):.2f}", "")
    _print_table(table)


def _print_table(table: Any) -> None:
    """To stdout, at a fixed width where it is no terminal, so that piped output is the same everywhere."""
    from rich.console import Console

    Console(width=_width(), highlight=False, markup=False).print(table)


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED_WIDTH


def _spell(degrees: dict[str, Any]) -> str:
    return " ".join(f"{name} {degrees[name]}" for name in ("tp", "pp", "dp", "ep"))


def _word(row: dict[str, Any]) -> str:
    return "no" if not row["fits"] else "risky" if row["risk"] else "fits"


def _verdict(row: dict[str, Any]) -> str:
    verdict = _word(row)
    marks = [mark for mark, on in (("max-DP", row["natural"]), ("not launchable by vLLM", not row["launchable"])) if on]
    parts = [verdict, *marks]
    text = ", ".join(parts)
    if verdict != "fits":
        text += f": {row['reason'] if verdict == 'no' else row['risk'].split(', under', 1)[0].removeprefix('risky: ')}"
        text += f"; try {row['suggestion']}" if row["suggestion"] else ""
    return text


WRITERS = {"table": _write_table, "json": _write_json, "csv": _write_csv}
