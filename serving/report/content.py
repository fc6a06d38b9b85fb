"""The content of a report: verdict, tables and plots, apart from how they are written."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from serving.report.curves import curves_section, layout_lines
from serving.report.figures import (
    by_layout,
    capacity,
    finished,
    fitting,
    is_projected,
    label,
    layout_of,
    layouts_of,
    pareto,
    provenance,
    refusals,
    verdict,
)
from serving.report.load import amount, load_of, load_text, of_users
from serving.report.parts import Plot, Report, Section, Table, axes, colour, rounded, short
from serving.report.validated import RUNS, error_band_percent, runs_of

Row = Mapping[str, Any]
_SHOWN_LAYOUTS: Final = 6
_MOST_POINTS: Final = 4000


def report_of(header: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Report:
    """The report of a folder of results (serving.sweeps.results.read_results)."""
    rows = [point["row"] for point in points]
    asked = header["sweep"]
    done = [row for row in finished(rows) if load_of(row)]
    with_slo = asked["slo"] is not None
    lines = capacity(rows, with_slo)
    sections: list[Section | None] = [_load(header), *_size_sections(header)]
    if done:
        shown = _shown_points(points, lines)
        sections += [
            _capacity_section(lines, done, with_slo),
            _launch_section(lines[0]["row"]),
            _pareto_section(lines, done),
            curves_section(lines[:_SHOWN_LAYOUTS], done, with_slo),
            _latency_section(shown, done),
            _queue_section(shown, done),
            _step_section(points, done),
        ]
    elif asked["mode"] == "screen":
        sections.append(_screen_section(rows))
    sections += [
        _refused_section(rows),
        _provenance_section(header, points, done),
        _error_section(done),
        _inputs_section(header),
    ]
    return Report(
        title=f"Capacity of {asked['name']}",
        verdict=tuple(verdict(header, rows)),
        projected=any(map(is_projected, done)),
        sections=tuple(section for section in sections if section is not None),
    )


def _load(header: Mapping[str, Any]) -> Section:
    asked = header["sweep"]
    slo = asked["slo"]
    text = [f"Models: {', '.join(asked['models'])}. GPUs: {', '.join(asked['hardware'])}."]
    if asked["workload"]:
        text.append(
            f"Load: {asked['workload']}, {asked['requests']:,} requests per replay, seeds "
            f"{', '.join(map(str, asked['seeds']))}, router {asked['router']}."
        )
    if users := asked.get("concurrencies"):
        text.append(
            f"{', '.join(map(str, sorted(users)))} users over all replicas. All requests are there at the start; each "
            "user has one in flight and sends the next when it is answered. The whole replay counts, with its start "
            "and its end."
        )
    if slo:
        bounds = ", ".join(
            f"{k[:-3].upper()} at most {slo[k]:g} ms" for k in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms") if slo[k]
        )
        who = f"p{slo['percentile']:g} of" if slo["percentile"] else f"{slo['goodput_share']:.1%} of requests keep"
        text.append(f"SLO: {who} {bounds}.")
    return Section("What was asked", tuple(text))


def _size_sections(header: Mapping[str, Any]) -> list[Section]:
    found = header.get("size")
    if not found:
        return []
    tables = tuple(
        Table(tuple(one["columns"]), tuple(tuple(map(str, row)) for row in one["rows"]), frozenset(one["numeric"]))
        for one in found["tables"]
    )
    return [Section("Size", tuple(found["text"]), tables)]


def _capacity_section(lines: Sequence[Mapping[str, Any]], done: Sequence[Row], with_slo: bool) -> Section:
    priced = any(line["cost_per_million_output_tokens"] is not None for line in lines)
    users = of_users(done)
    most, shown_at = ("most users in SLO", "shown at users") if users else ("highest rate in SLO /s", "shown at /s")
    columns = ["layout", "GPUs", "KV tokens", "weights GiB", *([most] if with_slo else []),
               shown_at, "out tok/s", "per GPU", "tok/s of a user", "TTFT p50", "TTFT p99",
               "TPOT p50", "TPOT p99"]  # fmt: skip
    if priced:
        columns.append(f"{done[0].get('currency')} per M output")
    rows = []
    for line in lines:
        row = line["row"]
        cells = [
            label(row, done),
            str(row["gpus_total"]),
            _whole(row["kv_tokens_total"]),
            rounded(row["weights_gib"], 1),
        ]
        if with_slo:
            none = line["highest_load"] is None
            cells.append("none" if none else amount(row) + ("" if line["bounded"] else " or more"))
        cells += [
            amount(row), rounded(line["output_tokens_per_s"], 0),
            rounded(line["output_tokens_per_s_per_gpu"], 1),
            rounded(line["user_tokens_per_s"], 1), rounded(line["ttft_ms_p50"], 0), rounded(line["ttft_ms_p99"], 0),
            rounded(line["tpot_ms_p50"], 1), rounded(line["tpot_ms_p99"], 1),
        ]  # fmt: skip
        if priced:
            cells.append(rounded(line["cost_per_million_output_tokens"], 2))
        rows.append(tuple(cells))
    text = [
        "One line per layout, best first; latencies in milliseconds, means over seeds. KV tokens are those of one "
        "instance's ranks together."
    ]
    if with_slo and users:
        text.append(
            "The most users are the largest number that was run below every number at which a seed breaks the SLO; "
            'where no larger number was run it says "or more".'
        )
    elif with_slo:
        text.append(
            "The highest rate is the highest that was run below every rate at which a seed breaks the SLO; where no "
            'higher rate was run it says "or more".'
        )
    if priced:
        text.append("Cost is of GPUs only, at the prices given, and counts the whole bill against output tokens.")
    else:
        text.append("No prices were given, so there is no cost. Energy: see the provenance of the tables.")
    return Section("Capacity per layout", tuple(text), (Table(tuple(columns), tuple(rows), _right(columns)),))


def _launch_section(row: Row) -> Section:
    """The command that writes the engine's command for a layout, with every setting that the replay had."""
    flags = {
        "hardware": row["hardware"],
        **{name: row[name] for name in ("tp", "pp", "dp", "ep")},
        "max-model-len": row["max_model_len"],
        "kv-dtype": row["kv_dtype"],
        "utilization": f"{row['utilization']:g}",
        "max-num-seqs": row["max_num_seqs"],
        "max-num-batched-tokens": row["max_num_batched_tokens"],
    }
    words = ["python", "-m", "serving", "launch", str(row["model"])]
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    text = [
        "The engine command of the first layout above, checked against its memory, is written by:",
        shlex.join(words),
    ]
    if row.get("risk"):
        text.append(f"It needs --accept-risk: {row['risk']}.")
    return Section("Start it", tuple(text))


def _screen_section(rows: Sequence[Row]) -> Section:
    columns = ("layout", "GPUs", "weights GiB", "KV GiB", "KV tokens", "sequences per rank", "verdict")
    cells = tuple(
        (
            label(row, rows), str(row["gpus"]), rounded(row["weights_gib"], 1), rounded(row["kv_available_gib"], 1),
            _whole(row["kv_tokens_total"]), rounded(row["max_concurrency"], 1), row["risk"] or "fits",
        )
        for row in fitting(rows)
    )  # fmt: skip
    return Section("Memory per layout", ("By memory alone, most KV tokens per GPU first.",),
                   (Table(columns, cells, frozenset(range(1, 6))),))  # fmt: skip


def _pareto_section(lines: Sequence[Mapping[str, Any]], done: Sequence[Row]) -> Section:
    front = pareto(done)
    traces: list[dict[str, Any]] = []
    found = by_layout(done)
    groups = [found[layout_of(line["row"])] for line in lines]
    for number, group in enumerate(groups):
        known = [row for row in group if row.get("user_tokens_per_s")][: _MOST_POINTS // len(groups) or 1]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": label(group[0], done),
                "x": [short(row["user_tokens_per_s"]) for row in known],
                "y": [short(row["output_tokens_per_s_per_gpu"]) for row in known],
                "text": [f"{load_text(row)}, seed {row['seed']}" for row in known],
                "marker": {"size": 7, "color": colour(number), "symbol": number % 8},
            }
        )  # fmt: skip
    named = len(traces)
    traces += layout_lines(groups)
    traces.append(
        {
            "type": "scatter", "mode": "lines", "name": "Pareto front", "line": {"color": "#333", "dash": "dot"},
            "x": [short(row["user_tokens_per_s"]) for row in front], "hoverinfo": "skip",
            "y": [short(row["output_tokens_per_s_per_gpu"]) for row in front],
        }
    )  # fmt: skip
    layout = axes("output tokens/s of a user (1 / TPOT p50)", "output tokens/s per GPU") | {"legendRows": named + 1}
    columns = ("layout", "users" if of_users(done) else "requests/s", "tok/s of a user", "out tok/s per GPU")
    table = Table(columns, tuple(
        (label(row, done), amount(row), rounded(row["user_tokens_per_s"], 1),
         rounded(row["output_tokens_per_s_per_gpu"], 1))
        for row in front
    ), frozenset((1, 2, 3)))  # fmt: skip
    text = "Each point is one replay. The dotted line joins those that none beats in both."
    if of_users(done):
        text += " The thin line of a layout goes through the means over its seeds, from few users to many."
    return Section(
        "Throughput per GPU against the speed of a user",
        (text,),
        (table,),
        (Plot("pareto", tuple(traces), layout),),
    )


def _shown_points(points: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first seed's point of each of the best layouts, at the load of its line."""
    wanted = {(layout_of(line["row"]), line["load"], line["row"]["seed"]): place for place, line in enumerate(lines)}
    found = {}
    for point in points:
        row = point["row"]
        if row["status"] != "done":
            continue
        place = wanted.get((layout_of(row), load_of(row), row["seed"]))
        if place is not None and point["detail"]:
            found[place] = point
    return [found[place] for place in sorted(found)][:_SHOWN_LAYOUTS]


def _latency_section(shown: Sequence[Mapping[str, Any]], done: Sequence[Row]) -> Section:
    plots = []
    for name, text in (("ttft", "TTFT, ms"), ("tpot", "TPOT, ms"), ("e2e", "request time, ms")):
        traces = tuple(
            {
                "type": "scatter", "mode": "lines", "name": _at(point["row"], done), "line": {"color": colour(number)},
                "x": point["detail"]["cdf_ms"][name], "y": [one / 100 for one in point["detail"]["cdf_percents"]],
                "showlegend": name == "ttft",
            }
            for number, point in enumerate(shown)
            if name in point["detail"]["cdf_ms"]
        )  # fmt: skip
        layout = axes(text, "share of requests")
        layout["xaxis"]["type"] = "log"
        layout["yaxis"]["range"] = [0, 1]
        layout["legendRows"] = len(shown) if name == "ttft" else 0
        plots.append(Plot(f"cdf_{name}", traces, layout))
    return Section("Latencies", ("Cumulated over the finished requests of the first seed.",), (), tuple(plots))


def _queue_section(shown: Sequence[Mapping[str, Any]], done: Sequence[Row]) -> Section:
    plots = []
    for name, text in (
        ("kv_share", "KV in use, share"),
        ("waiting", "waiting requests"),
        ("running", "running requests"),
    ):
        traces = tuple(
            {
                "type": "scatter", "mode": "lines", "name": _at(point["row"], done), "line": {"color": colour(number)},
                "x": point["detail"]["series"]["time_s"], "y": point["detail"]["series"][name],
                "showlegend": name == "kv_share",
            }
            for number, point in enumerate(shown)
        )  # fmt: skip
        layout = axes("seconds", text)
        layout["yaxis"]["rangemode"] = "tozero"
        layout["legendRows"] = len(shown) if name == "kv_share" else 0
        plots.append(Plot(f"series_{name}", traces, layout))
    queue = (
        "Users wait where there are more of them than the engines run at a time."
        if of_users(done)
        else "A queue that grows to the end means that the rate is above what the layout carries."
    )
    text_ = (
        "All ranks together, reconstructed from the times of the requests: KV grows evenly with a request's prompt and "
        f"output. Shared prefixes are counted once per request, so the true use is at most this. {queue}"
    )
    return Section("KV use and queue over time", (text_,), (), tuple(plots))


def _step_section(points: Sequence[Mapping[str, Any]], done: Sequence[Row]) -> Section | None:
    found = [point for point in points if point["detail"].get("steps")]
    if not found:
        return None
    best = {
        layout_of(line["row"]): place for place, line in enumerate(capacity(done, any(r.get("slo_met") for r in done)))
    }
    found = sorted(found, key=lambda point: best.get(layout_of(point["row"]), len(best)))[:_SHOWN_LAYOUTS]
    plots = []
    text = ["One step's price, largest parts first; parts under 4 % are together as other."]
    for which in ("decode", "prefill"):
        parts: dict[str, list[tuple[str, float]]] = {}
        for point in found:
            name = label(point["row"], done)
            lines = point["detail"]["steps"][which]["lines"]
            total = sum(line["us"] for line in lines)
            for line in lines:
                part = line["name"] if line["us"] >= 0.04 * total else "other"
                parts.setdefault(part, []).append((name, line["us"]))
        ordered = sorted(parts, key=lambda part: (part == "other", -sum(us for _, us in parts[part])))
        traces = tuple(
            {
                "type": "bar", "orientation": "h", "name": part,
                "x": [round(us / 1e3, 4) for us in _summed(parts[part]).values()],
                "y": list(_summed(parts[part])), "marker": {"color": colour(number) if part != "other" else "#bbb"},
            }
            for number, part in enumerate(ordered)
        )  # fmt: skip
        layout = axes("milliseconds", "") | {"barmode": "stack", "height": 40 * len(found)}
        layout["yaxis"] |= {"automargin": True, "autorange": "reversed"}
        plots.append(Plot(f"steps_{which}", traces, layout))
        text.append(
            f"{which}: "
            + "; ".join(f"{label(p['row'], done)}: {p['detail']['steps'][which]['what']}" for p in found)
            + "."
        )
    return Section("Where a step's time goes", tuple(text), (), tuple(plots))


def _summed(parts: Sequence[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, us in parts:
        total[name] = total.get(name, 0.0) + us
    return total


def _refused_section(rows: Sequence[Row]) -> Section:
    found = refusals(rows)
    if not found:
        return Section("What was refused", ("Nothing.",))
    columns = ("points", "kind", "reason", "layouts")
    cells = []
    for kind, reason, group in found:
        cells.append((str(len(group)), kind, reason, layouts_of(group, rows)))
    return Section("What was refused", (), (Table(columns, tuple(cells), frozenset((0,))),))


def _provenance_section(
    header: Mapping[str, Any], points: Sequence[Mapping[str, Any]], done: Sequence[Row]
) -> Section | None:
    if not done:
        return None
    columns = ("GPU", "model", "tables", "provenance", "measured with", "lookups beyond the tables")
    cells = tuple((*found[:5], f"{found[5]:,}") for found in provenance(done))
    text = ["Where the numbers come from. Projected tables are scaled from another card, not measured."]
    text += [f"{name}: {note}." for name, note in header.get("projections", {}).items()]
    text += _energy(header.get("prices"), points, done)
    if prices := header.get("prices"):
        text.append(f"Prices: {prices['source']}.")
    return Section("Provenance", tuple(text), (Table(columns, cells, frozenset((5,))),))


def _energy(prices: Mapping[str, Any] | None, points: Sequence[Mapping[str, Any]], done: Sequence[Row]) -> list[str]:
    """Joules of a decoded token, where the tables have power samples."""
    pue = prices["pue"] if prices else None
    found = []
    for point in points:
        joules = point["detail"].get("steps", {}).get("decode", {}).get("joules_per_token")
        if joules is not None:
            whole = f", {joules * pue:.3g} J with the facility (PUE {pue:g})" if pue else ""
            found.append(f"{label(point['row'], done)} {joules:.3g} J{whole}")
    if not found:
        return [
            "Energy: none is given; it needs power samples of every kernel class that runs, collectives among them, in "
            "the tables."
        ]
    return [f"Energy of a decoded token, GPUs only, from measured power: {'; '.join(found)}."]


def _error_section(done: Sequence[Row]) -> Section | None:
    if not done:
        return None
    names = tuple(RUNS[0].errors_percent)
    rows = tuple((run.run, *(f"{run.errors_percent[name]:+.1f} %" for name in names)) for run in RUNS)
    text = " ".join(
        (
            "Replays against recorded runs of a real engine, with the host's times of the GPU's file.",
            *(_trust(*key) for key in sorted({(str(row["model"]), str(row["hardware"])) for row in done})),
            "Details: docs/validation.md.",
        )
    )
    return Section("How far to trust it", (text,), (Table(("recorded run", *names), rows, frozenset(range(1, 7))),))


def _trust(model: str, hardware: str) -> str:
    """What recordings say of a model on a GPU: those of its own layers there, else all."""
    own = runs_of(model, hardware)
    ttft, ttft_p50, tpot = (error_band_percent(name, own or RUNS) for name in ("TTFT mean", "TTFT p50", "TPOT mean"))
    band = f"mean TTFT within {ttft:g} %, TTFT p50 within {ttft_p50:g} %, mean TPOT within {tpot:g} %"
    if own:
        return f"{model} on {hardware}, of whose layers {len(own)} runs were recorded on one GPU: {band}."
    return f"No run of {model} on {hardware} has been compared with a recording; of all others: {band}, a lower limit."


def _inputs_section(header: Mapping[str, Any]) -> Section:
    rows = [("made by", str(header["made_by"]))]
    rows += [(key, _plain(value)) for key, value in header["sweep"].items()]
    rows += [("workload sha256", str(header["workload_sha256"]))]
    rows += [(f"tables {name}", f"meta.yaml sha256 {digest[:16]}") for name, digest in header["bundles"].items()]
    return Section("Inputs", (), (Table(("input", "value"), tuple(rows)),))


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_plain, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one}" for key, one in value.items() if one is not None)
    return str(value)


def _at(row: Row, rows: Sequence[Row]) -> str:
    at = load_text(row) if of_users([row]) else f"{amount(row)}/s"
    return f"{label(row, rows)} at {at}"


def _right(columns: Sequence[str]) -> frozenset[int]:
    return frozenset(range(1, len(columns)))


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
