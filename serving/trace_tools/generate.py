"""Seeded traces: lengths from a distribution or a list, arrivals from a process, shared prefixes, agentic sessions."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from profiler.core.errors import ConfigError
from profiler.core.units import NS_PER_MS
from serving.trace_tools.distributions import Draw
from serving.traces import PrefixHashes, TraceRequest
from serving.traces._arrivals import Arrivals, problem, times_ns


@dataclass(frozen=True, slots=True)
class Prefixes:
    """`count` different prefixes of `tokens` tokens; a request begins with one of them with probability `share`."""

    count: int
    tokens: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Sessions:
    """How an agentic session goes on: its number of calls, the tokens that a call adds after the answer before it, the
    milliseconds that the tool between two calls takes, and the longest prompt (None: none), which ends a session."""

    calls: Draw
    added_tokens: Draw
    tool_ms: Draw
    max_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """rows: requests, or sessions. lengths: (prompt, output) tokens to draw from with replacement, or with `in_order`
    to go through from the start; None where `prompt` and `output` are drawn. block_tokens: of the prefix hashes."""

    rows: int
    arrivals: Arrivals
    prompt: Draw | None = None
    output: Draw | None = None
    lengths: Sequence[tuple[int, int]] | None = None
    in_order: bool = False
    prefixes: Prefixes | None = None
    sessions: Sessions | None = None
    block_tokens: int = 64
    seed: int = 0


def generated(plan: Plan) -> Iterator[TraceRequest]:
    """The requests of a plan; equal plans give equal requests.

    The prompt length is drawn without the shared prefix, which comes on top. The calls of a session hold the whole
    conversation so far, so a call's prompt is the prompt and the answer before it and the added tokens; all of it is
    told by hashes. Raises ConfigError for a plan that contradicts itself.
    """
    _check(plan)
    draws = {what: random.Random(f"{what} {plan.seed}") for what in ("lengths", "prefixes", "sessions")}
    fresh_ids = count(_prefix_blocks(plan))
    rows = zip(islice(times_ns(plan.arrivals), plan.rows), _lengths(plan, draws["lengths"]), strict=False)
    for number, (arrival_ns, (prompt_tokens, output_tokens)) in enumerate(rows):
        shared = _shared(plan, draws["prefixes"])
        if plan.sessions is None:
            yield _request(plan, number, arrival_ns, prompt_tokens, output_tokens, shared)
        else:
            first = prompt_tokens + (plan.prefixes.tokens if shared and plan.prefixes else 0)
            yield from _session(plan, number, arrival_ns, (first, output_tokens), [*shared], fresh_ids, draws)


def _check(plan: Plan) -> None:
    if wrong := problem(plan.arrivals):
        raise ConfigError(wrong)
    if plan.rows < 1:
        raise ConfigError(f"a trace needs at least one request, found {plan.rows}")
    if (plan.lengths is None) == (plan.prompt is None or plan.output is None):
        raise ConfigError("the lengths come from a list, or from a distribution of prompts and one of outputs")
    if plan.lengths is not None and plan.in_order and plan.rows > len(plan.lengths):
        raise ConfigError(f"{plan.rows} requests in the order of a list of {len(plan.lengths)} lengths")
    if plan.prefixes is not None:
        if plan.prefixes.tokens % plan.block_tokens:
            raise ConfigError(
                f"shared prefixes of {plan.prefixes.tokens} tokens are not whole blocks of {plan.block_tokens} tokens"
            )
        if not 0.0 <= plan.prefixes.share <= 1.0:
            raise ConfigError(f"the share of requests with a prefix must be from 0 to 1, found {plan.prefixes.share}")


def _lengths(plan: Plan, draw: random.Random) -> Iterator[tuple[int, int]]:
    if plan.lengths is not None and plan.in_order:
        yield from plan.lengths
    while plan.lengths is not None and not plan.in_order:
        yield plan.lengths[draw.randrange(len(plan.lengths))]
    while plan.prompt is not None and plan.output is not None:
        yield plan.prompt(draw), plan.output(draw)


def _prefix_blocks(plan: Plan) -> int:
    return plan.prefixes.count * plan.prefixes.tokens // plan.block_tokens if plan.prefixes else 0


def _shared(plan: Plan, draw: random.Random) -> range:
    """The block ids of the prefix that a request begins with, empty for none."""
    if plan.prefixes is None or draw.random() >= plan.prefixes.share:
        return range(0)
    blocks = plan.prefixes.tokens // plan.block_tokens
    which = draw.randrange(plan.prefixes.count)
    return range(which * blocks, (which + 1) * blocks)


def _request(
    plan: Plan, number: int, arrival_ns: int, prompt_tokens: int, output_tokens: int, shared: range
) -> TraceRequest:
    prefix = None
    if shared and plan.prefixes:
        prompt_tokens += plan.prefixes.tokens
        prefix = PrefixHashes(tuple(shared), plan.block_tokens, plan.prefixes.tokens)
    return TraceRequest(str(number), arrival_ns, prompt_tokens, output_tokens, prefix=prefix)


def _session(
    plan: Plan,
    number: int,
    arrival_ns: int,
    first: tuple[int, int],
    ids: list[int],
    fresh_ids: Iterator[int],
    draws: dict[str, random.Random],
) -> Iterator[TraceRequest]:
    assert plan.sessions is not None
    draw = draws["sessions"]
    prompt_tokens, output_tokens = first
    tool_duration_ns = 0
    session_id = f"session_{number}"
    for index in range(plan.sessions.calls(draw)):
        if index:
            tool_duration_ns = plan.sessions.tool_ms(draw) * NS_PER_MS
            prompt_tokens += output_tokens + plan.sessions.added_tokens(draw)
            output_tokens = _output(plan, draws["lengths"])
            if plan.sessions.max_prompt_tokens is not None and prompt_tokens > plan.sessions.max_prompt_tokens:
                return
        blocks = (prompt_tokens + output_tokens) // plan.block_tokens
        ids.extend(islice(fresh_ids, blocks - len(ids)))
        yield TraceRequest(
            request_id=f"{session_id}/{index}",
            arrival_ns=arrival_ns,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefix=PrefixHashes(tuple(ids), plan.block_tokens, blocks * plan.block_tokens),
            session_id=session_id,
            call_index=index,
            tool_duration_ns=tool_duration_ns,
        )


def _output(plan: Plan, draw: random.Random) -> int:
    if plan.lengths is not None:
        return plan.lengths[draw.randrange(len(plan.lengths))][1]
    assert plan.output is not None
    return plan.output(draw)


def lengths_of(requests: Iterable[TraceRequest]) -> list[tuple[int, int]]:
    """The (prompt, output) tokens of a trace, to draw from."""
    return [(request.prompt_tokens, request.output_tokens) for request in requests]
