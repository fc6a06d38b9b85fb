"""The flags of `trace generate` as a plan."""

from typing import Any

from profiler.core.errors import ConfigError
from serving.trace_tools.cli import AS_IT_IS, Input
from serving.trace_tools.distributions import distribution
from serving.trace_tools.generate import Plan, Prefixes, Sessions, lengths_of
from serving.trace_tools.length_list import read_length_list
from serving.traces._arrivals import Arrivals


def plan_of(given: dict[str, Any]) -> Plan:
    """Raises ConfigError for flags that lack or contradict each other."""
    _needs(given, "prefixes", ("prefix_tokens",))
    _needs(given, "calls", ("added_tokens", "tool_ms"))
    if (given["lengths"] is None) != (given["prompt"] is not None and given["output_tokens"] is not None):
        raise ConfigError("the lengths come from --lengths, or from --prompt and --output-tokens")
    if given["lengths"] is not None and (given["prompt"] or given["output_tokens"]):
        raise ConfigError("--lengths gives prompts and outputs: leave out --prompt and --output-tokens")
    if given["in_order"] and given["lengths"] is None:
        raise ConfigError("--in-order needs --lengths")
    if given["max_prompt_tokens"] is not None and given["calls"] is None:
        raise ConfigError("--max-prompt-tokens ends sessions: it needs --calls")
    if (given["rate"] is None) != (given["process"] == "at-once"):
        raise ConfigError(f"--rate is needed, except for at-once arrivals (found --arrivals {given['process']})")
    if (given["burstiness"] is None) != (given["process"] != "gamma"):
        raise ConfigError("--burstiness is needed for gamma arrivals and for no others")
    lengths = None
    if given["lengths"] is not None:
        lengths = read_length_list(given["lengths"])
        lengths = lengths or lengths_of(Input(given["lengths"], AS_IT_IS).requests())
    sessions = None
    if given["calls"] is not None:
        sessions = Sessions(
            distribution(given["calls"], "--calls"),
            distribution(given["added_tokens"], "--added-tokens"),
            distribution(given["tool_ms"], "--tool-ms", least=0),
            given["max_prompt_tokens"],
        )
    return Plan(
        rows=given["rows"],
        arrivals=Arrivals(given["process"], given["rate"] or 1.0, given["seed"], given["burstiness"] or 1.0),
        prompt=distribution(given["prompt"], "--prompt") if given["prompt"] else None,
        output=distribution(given["output_tokens"], "--output-tokens") if given["output_tokens"] else None,
        lengths=lengths,
        in_order=given["in_order"],
        prefixes=Prefixes(given["prefixes"], given["prefix_tokens"], given["prefix_share"])
        if given["prefixes"]
        else None,
        sessions=sessions,
        block_tokens=given["prefix_block_tokens"],
        seed=given["seed"],
    )


def _needs(given: dict[str, Any], flag: str, others: tuple[str, ...]) -> None:
    for other in others:
        if (given[flag] is None) != (given[other] is None):
            names = [f"--{one.replace('_', '-')}" for one in (flag, *others)]
            raise ConfigError(f"{', '.join(names)} go together")
