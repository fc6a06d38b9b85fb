"""From the routing block of a cluster file to the load of the busiest expert-parallel rank."""

from profiler.core.errors import ConfigError
from profiler.core.types import ModelSpec, MoeDims, Parallel
from serving.config import Routing
from serving.expert_placement import make_placement
from serving.gates import EVEN, Draw, create_gate
from serving.routing import ExpertLoad, expert_load, popularity, read_bias, read_counts, read_picks

_FILES = {"histogram": "counts", "recorded": "picks", "grouped_topk": "bias"}


def routed_load(spec: ModelSpec, parallel: Parallel, routing: Routing, most_tokens: int) -> ExpertLoad | None:
    """The load for steps of up to `most_tokens` tokens of a group; None for the even load, and without ep.

    The eplb placements balance the popularity that the gate itself has, as a balancer would have measured it.

    Raises ConfigError: a gate for a model without experts, an unknown gate, option or placement, a file that does not
    fit the model, more ranks than experts.
    """
    if routing == Routing():
        return None
    copies = redundant_experts(spec, parallel, routing)
    assert spec.moe is not None
    _check_files(routing)
    if routing.gate == EVEN:
        if routing.placement != "linear" or routing.options:
            raise ConfigError("routing: an even load is the same for every placement and has no options; name a gate")
        return None
    draw = make_draw(spec.moe, routing)
    if parallel.ep == 1:
        return None
    load = popularity(draw, spec.moe.num_experts, seed=routing.seed) if routing.placement.startswith("eplb") else None
    placement = make_placement(
        routing.placement,
        spec.moe.num_experts,
        parallel.ep,
        load=load,
        redundant=copies,
        groups=spec.moe.n_group,
        nodes=routing.nodes,
    )
    return expert_load(draw, spec.moe, placement, most_tokens, seed=routing.seed)


def redundant_experts(spec: ModelSpec, parallel: Parallel, routing: Routing) -> int:
    """Copies of experts beyond one of each, over all ranks; every rank holds (experts + copies) / ep.

    Raises ConfigError for a routing of a model without experts, copies that no balancer places, that no rank holds
    whole, or that do not divide over the ranks.
    """
    if routing == Routing():
        return 0
    if spec.moe is None:
        raise ConfigError(f"routing: {spec.name} has no experts")
    copies, experts, ep = routing.redundant, spec.moe.num_experts, parallel.ep
    if not copies:
        return 0
    if not routing.placement.startswith("eplb"):
        raise ConfigError(
            f"routing: redundant {copies} with placement {routing.placement}: copies go to the most loaded experts; "
            "use placement eplb or eplb_global, or redundant 0"
        )
    if ep == 1:
        raise ConfigError(
            f"routing: redundant {copies} with ep 1: every expert is divided over all ranks; use ep "
            f"{parallel.tp * parallel.dp} or redundant 0"
        )
    if over := (experts + copies) % ep:
        raise ConfigError(
            f"routing: redundant {copies}: {experts} experts and {copies} copies do not divide over ep {ep}; "
            f"the nearest that do are {max(0, copies - over)} and {copies + ep - over}"
        )
    return copies


def make_draw(moe: MoeDims, routing: Routing) -> Draw:
    """The gate of a routing block with its files read. Raises ConfigError."""
    _check_files(routing)
    options: dict[str, object] = dict(routing.options)
    if routing.counts_path is not None:
        options["counts"] = read_counts(routing.counts_path, moe)
    if routing.picks_path is not None:
        options["picks"] = read_picks(routing.picks_path, moe)
    if routing.bias_path is not None:
        options["bias"] = read_bias(routing.bias_path, moe)
    return create_gate(routing.gate, moe, options)


def _check_files(routing: Routing) -> None:
    paths = {"counts": routing.counts_path, "picks": routing.picks_path, "bias": routing.bias_path}
    for name, path in paths.items():
        if path is not None and _FILES.get(routing.gate) != name:
            owner = next(gate for gate, file in _FILES.items() if file == name)
            raise ConfigError(f"routing: a {name} file belongs to gate {owner}, the gate is {routing.gate}")
