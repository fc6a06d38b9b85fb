"""`python -m serving routing`: how a gate loads expert-parallel ranks."""

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from serving.routing import Spread

# Of a rank, as the results and the table call them.
_QUANTITIES: Final = {"tokens": "tokens", "pairs": "pairs", "distinct": "experts"}
_QUANTILES: Final = "_p50_p90_p99"
_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("model")
@click.option("--ep", "ranks", type=click.IntRange(min=1), required=True, help="Expert-parallel ranks.")
@click.option("--gate", default="grouped_topk", show_default=True, help="Name of a file of serving/gates.")
@click.option("--option", "options", multiple=True, metavar="KEY=NUMBER", help="Of the gate, such as exponent=1.2.")
@click.option("--counts", "counts_path", type=_FILE, help="JSON list of a number per expert, for gate histogram.")
@click.option("--picks", "picks_path", type=_FILE, help="JSON lines of expert ids per token, for gate recorded.")
@click.option("--bias", "bias_path", type=_FILE, help="JSON list of a number per expert, for gate grouped_topk.")
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
    bias_path: Path | None,
    placement: str,
    redundant: int,
    nodes: int,
    tokens: str,
    draws: int,
    seed: int,
    style: str,
) -> None:
    """Who reaches which rank when the experts of MODEL are spread over --ep ranks.

    Per batch size: the share of tokens that reach a rank, how many ranks a token reaches, and of a rank the tokens that
    reach it, its (token, expert) pairs and its distinct experts: the mean of all ranks, and the busiest rank's mean and
    quantiles over the draws, of each quantity on its own. imbalance: mean pairs of the busiest rank over those of all.
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
    routing = Routing(gate, tuple(map(_option, options)), counts_path, picks_path, bias_path, seed=seed)
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
                **_quantity("tokens", found.mean_tokens, found.busiest_tokens),
                **_quantity("pairs", found.mean_pairs, found.busiest_pairs),
                **_quantity("distinct", found.mean_distinct, found.busiest_distinct),
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


def _quantity(name: str, mean: float, busiest: "Spread") -> dict[str, Any]:
    return {
        f"mean_{name}": mean,
        f"busiest_{name}": busiest.mean,
        f"busiest_{name}_p50_p90_p99": list(busiest.quantiles),
    }


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
    flat = [_flat(row) for row in document["loads"]]
    writer.writerow(flat[0])
    for row in flat:
        writer.writerow([f"{value:g}" for value in row.values()])


def _flat(row: dict[str, Any]) -> dict[str, float]:
    """A column for each quantile."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if name.endswith(_QUANTILES):
            parts = _QUANTILES.split("_")[1:]
            flat |= {f"{name.removesuffix(_QUANTILES)}_{part}": one for part, one in zip(parts, value, strict=True)}
        else:
            flat[name] = value
    return flat


def _write_table(document: dict[str, Any]) -> None:
    sizes = document["experts_per_rank"]
    print(
        f"{document['model']}, ep {document['ep']}, gate {document['gate']}, placement {document['placement']}: "
        f"{min(sizes)} to {max(sizes)} experts per rank"
    )
    if document["reach_independent_groups"] is not None:
        print(f"reach with independent groups and linear placement, exact: {document['reach_independent_groups']:.6f}")
    print(f"{'tokens':>7}{'reach':>8}{'ranks':>7}{'imbalance':>11}  {'of a rank':<9}{'mean':>10}", end="")
    print(f"{'busiest':>10}{'p50':>8}{'p90':>8}{'p99':>8}")
    for row in document["loads"]:
        lead = f"{row['tokens']:>7}{row['reach']:>8.4f}{row['ranks_per_token']:>7.2f}{row['imbalance']:>11.3f}"
        for name, label in _QUANTITIES.items():
            p50, p90, p99 = row[f"busiest_{name}{_QUANTILES}"]
            print(f"{lead:33}  {label:<9}{row[f'mean_{name}']:>10.2f}", end="")
            print(f"{row[f'busiest_{name}']:>10.2f}{p50:>8.0f}{p90:>8.0f}{p99:>8.0f}")
            lead = ""


_WRITERS = {"table": _write_table, "json": _write_json, "csv": _write_csv}
