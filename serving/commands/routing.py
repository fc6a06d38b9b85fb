"""`python -m serving routing`: how a gate loads expert-parallel ranks."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import click

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("model")
@click.option("--ep", "ranks", type=click.IntRange(min=1), required=True, help="Expert-parallel ranks.")
@click.option("--gate", default="grouped_topk", show_default=True, help="Name of a file of serving/gates.")
@click.option("--option", "options", multiple=True, metavar="KEY=NUMBER", help="Of the gate, such as exponent=1.2.")
@click.option("--counts", "counts_path", type=_FILE, help="JSON list of a number per expert, for gate histogram.")
@click.option("--picks", "picks_path", type=_FILE, help="JSON lines of expert ids per token, for gate recorded.")
@click.option("--placement", default="linear", show_default=True, help="linear, round_robin, eplb or eplb_global.")
@click.option("--redundant", type=click.IntRange(min=0), default=0, show_default=True, help="Redundant experts (eplb).")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes of the ranks (eplb).")
@click.option("--tokens", default="1,8,64,512,4096", show_default=True, help="Tokens of the group, comma-separated.")
@click.option("--draws", type=click.IntRange(min=1), default=100, show_default=True, help="Batches per count.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--format", "style", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
def command(
    model: str,
    ranks: int,
    gate: str,
    options: tuple[str, ...],
    counts_path: Path | None,
    picks_path: Path | None,
    placement: str,
    redundant: int,
    nodes: int,
    tokens: str,
    draws: int,
    seed: int,
    style: str,
) -> None:
    """Who reaches which rank when the experts of MODEL are spread over --ep ranks.

    Per batch size: the share of tokens that reach a rank, and the busiest rank's (token, expert) pairs and distinct
    experts (mean, and quantiles over the draws) beside the means of all ranks.
    """
    from profiler.core.errors import ConfigError
    from profiler.core.registry import load_model
    from serving.config import Routing
    from serving.expert_load import make_draw
    from serving.expert_placement import make_placement
    from serving.routing import popularity, reach_probability, simulate

    spec = load_model(model)
    if spec.moe is None:
        raise ConfigError(f"{spec.name} has no experts")
    moe, counts = spec.moe, _counts(tokens)
    routing = Routing(gate, tuple(map(_option, options)), counts_path, picks_path, seed=seed)
    draw = make_draw(moe, routing)
    load = popularity(draw, moe.num_experts, seed=seed) if placement.startswith("eplb") else None
    placed = make_placement(
        placement, moe.num_experts, ranks, load=load, redundant=redundant, groups=moe.n_group, nodes=nodes
    )
    try:
        exact: float | None = float(reach_probability(moe, ranks))
    except ConfigError:
        exact = None
    rows = []
    for count in counts:
        found = simulate(draw, placed, count, draws=draws, seed=seed)
        rows.append(
            {
                "tokens": count,
                "reach": found.reach,
                "ranks_per_token": found.ranks_per_token,
                "mean_pairs": found.mean_pairs,
                "busiest_pairs": found.busiest_pairs.mean,
                "busiest_pairs_p50_p90_p99": list(found.busiest_pairs.quantiles),
                "mean_distinct": found.mean_distinct,
                "busiest_distinct": found.busiest_distinct.mean,
                "imbalance": found.imbalance,
            }
        )
    document = {
        "model": spec.name,
        "ep": ranks,
        "gate": gate,
        "placement": placement,
        "experts_per_rank": [len(slots) for slots in placed.slots],
        "reach_independent_groups": exact,
        "loads": rows,
    }
    _WRITERS[style](document)


def _counts(text: str) -> list[int]:
    from profiler.core.errors import ConfigError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--tokens: {text!r} is not a comma-separated list of integers") from None
    if min(counts) < 1:
        raise ConfigError(f"--tokens: {min(counts)} is below 1")
    return counts


def _option(text: str) -> tuple[str, float]:
    from profiler.core.errors import ConfigError

    key, _, value = text.partition("=")
    try:
        return key, float(value)
    except ValueError:
        raise ConfigError(f"--option {text!r}: KEY=NUMBER is needed") from None


def _write_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def _write_csv(document: dict[str, Any]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    names = [name for name in document["loads"][0] if name != "busiest_pairs_p50_p90_p99"]
    writer.writerow([*names, "busiest_pairs_p50", "busiest_pairs_p90", "busiest_pairs_p99"])
    for row in document["loads"]:
        numbers = [row[name] for name in names] + row["busiest_pairs_p50_p90_p99"]
        writer.writerow([f"{value:g}" for value in numbers])


def _write_table(document: dict[str, Any]) -> None:
    sizes = document["experts_per_rank"]
    print(
        f"{document['model']}, ep {document['ep']}, gate {document['gate']}, placement {document['placement']}: "
        f"{min(sizes)} to {max(sizes)} experts per rank"
    )
    if document["reach_independent_groups"] is not None:
        print(f"reach with independent groups and linear placement, exact: {document['reach_independent_groups']:.6f}")
    print(f"{'tokens':>7}{'reach':>8}{'ranks':>7}{'pairs':>10}{'busiest':>10}{'p50':>8}{'p90':>8}{'p99':>8}", end="")
    print(f"{'experts':>9}{'busiest':>9}{'imbalance':>11}")
    for row in document["loads"]:
        p50, p90, p99 = row["busiest_pairs_p50_p90_p99"]
        print(f"{row['tokens']:>7}{row['reach']:>8.4f}{row['ranks_per_token']:>7.2f}{row['mean_pairs']:>10.1f}", end="")
        print(f"{row['busiest_pairs']:>10.1f}{p50:>8.0f}{p90:>8.0f}{p99:>8.0f}", end="")
        print(f"{row['mean_distinct']:>9.2f}{row['busiest_distinct']:>9.2f}{row['imbalance']:>11.3f}")


_WRITERS = {"table": _write_table, "json": _write_json, "csv": _write_csv}
