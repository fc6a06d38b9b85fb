"""The replay as a function of a cluster and a trace."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from profiler.core.errors import ConfigError
from profiler.core.paths import default_bundle_root
from serving.config import Cluster, Overrides, load_cluster
from serving.content import Keys, tells_content
from serving.core.disaggregated import run_disaggregated
from serving.core.loop import AnyGroup, run
from serving.core.pipeline import PipelineGroup
from serving.core.request import NEVER, Request
from serving.core.runlog import RunLog
from serving.core.shape import StepCost
from serving.deployment import Deployed, deploy
from serving.disaggregation import groups_of, wire_of
from serving.result import Result, Sent
from serving.routers import create_router
from serving.traces import OnBadRow, Trace, TraceRequest, read_trace
from serving.watch import Watch

# Step ends are kept in 64 bits; the other half of their range is left for the run itself.
LATEST_NS = 2**62

Progress = Callable[[int, int, int], None]


def replay(
    cluster: Cluster | Path | str,
    trace: Trace | Path | str,
    *,
    bundle_root: Path | str | None = None,
    overrides: Overrides | None = None,
    num_reqs: int = 0,
    on_bad_row: OnBadRow = "error",
    horizon_ns: int | None = None,
    max_concurrency: int | None = None,
    allow_extrapolation: bool = False,
    allow_projected: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    keep_itl: bool = False,
    wrap_cost: Callable[[StepCost], StepCost] | None = None,
    watches: Sequence[Watch] = (),
) -> Result:
    """Replay a trace on a cluster.

    cluster, trace: frozen values, or the paths of their files; `overrides` applies to a cluster file, `num_reqs`
    (first rows only, 0 for all) and `on_bad_row` to a trace file. bundle_root: folder of bundles, by default the
    shipped one. horizon_ns: end of the simulated time, None for no end. max_concurrency: most requests in flight, as
    clients keep it that send the next one when one is done; a request that has to wait arrives then.
    allow_extrapolation: price shapes outside the tables too, and count them. allow_projected: take tables that were
    scaled from another GPU. seed: of the draws of the router, kept with the result. keep_itl: the result keeps every
    time between two tokens, which the peer's CSV lists.
    wrap_cost: puts something in front of every group's cost, to see the steps that it prices. watches: look on.
    progress(requests done, requests, simulated ns) is called after every step.

    Everything is checked before the first step. Raises ConfigError, CoverageError, ContractError or CapacityError
    (profiler.core.errors); a shape outside the tables raises CoverageError from within the run.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency is {max_concurrency}; at least one request must be in flight")
    cluster = cluster if isinstance(cluster, Cluster) else load_cluster(Path(cluster), overrides)
    deployed = _deploy_all(
        cluster, Path(bundle_root) if bundle_root else default_bundle_root(), allow_extrapolation, allow_projected
    )
    longest_tokens = max(one.deployment.limits.max_model_len_tokens for one in deployed)
    if not isinstance(trace, Trace):
        trace = read_trace(
            Path(trace), limit=num_reqs, on_bad_row=on_bad_row, max_prompt_tokens=longest_tokens, sessions=True
        )
    _check_calls(trace)
    log = RunLog(keep_itl=keep_itl)
    groups = [group for one in deployed for group in one.groups]
    if wrap_cost is not None:
        for group in groups:
            if isinstance(group, PipelineGroup):
                raise ConfigError(
                    "steps of pipelines and steps with drafts cannot be taken out of a replay (--trace-steps, chakra)"
                )
            group.cost = wrap_cost(group.cost)

    def observe(now_ns: int, group: AnyGroup) -> None:
        assert progress is not None
        progress(len(log.records), len(trace.requests), now_ns)

    def advance(now_ns: int) -> None:
        for watch in watches:
            watch.advance(now_ns)

    for watch in watches:
        watch.open(groups)
    requests, route = _requests(trace, deployed), create_router(cluster.router, seed)
    seen = observe if progress else None
    before = advance if watches else None
    sent = None
    if cluster.disaggregated:
        wire, source = wire_of(cluster, deployed)
        traffic = run_disaggregated(
            groups_of(deployed, "prefill"),
            groups_of(deployed, "decode"),
            requests,
            route,
            create_router(cluster.router, seed),
            wire,
            log,
            horizon_ns=horizon_ns,
            observe=seen,
            advance=before,
            max_concurrency=max_concurrency,
        )
        sent = Sent(traffic, wire, deployed[0].kv.bytes_per_token, source)
    else:
        run(
            groups,
            requests,
            route,
            log,
            horizon_ns=horizon_ns,
            observe=seen,
            advance=before,
            max_concurrency=max_concurrency,
        )
    for watch in watches:
        watch.close()
    return Result(
        cluster=cluster.name,
        router=cluster.router,
        trace=trace,
        records=tuple(log.records[index] for index in range(len(trace.requests))),
        gaps_ns=log.gaps(),
        deployments=tuple(one.after_run() for one in deployed),
        steps=sum(group.steps for group in groups),
        extrapolated_lookups=sum(one.cost.extrapolated.total() for one in deployed),
        seed=seed,
        horizon_ns=horizon_ns,
        itl_ns=log.itl_ns,
        sent=sent,
        max_concurrency=max_concurrency,
    )


def _deploy_all(
    cluster: Cluster, bundle_root: Path, allow_extrapolation: bool, allow_projected: bool
) -> list[Deployed]:
    deployed: list[Deployed] = []
    for instance in cluster.instances:
        first_engine = sum(len(one.deployment.engines) for one in deployed)
        deployed.append(deploy(instance, first_engine, bundle_root, allow_extrapolation, allow_projected))
    return deployed


def _requests(trace: Trace, deployed: list[Deployed]) -> Iterator[Request]:
    """Fresh requests, each made when it arrives, whose block keys fit the block size of the engines.

    Raises ConfigError at once when engines with prefix caching have different block sizes and the trace tells contents:
    the content of a block would depend on where a request is routed.
    """
    sizes = {one.deployment.block_tokens for one in deployed if one.deployment.prefix_caching}
    keys = None
    if sizes and tells_content(trace.requests):
        if len(sizes) > 1:
            raise ConfigError(
                f"instances have KV blocks of {', '.join(map(str, sorted(sizes)))} tokens: a trace with token ids "
                "or prefix hashes needs one block size; switch prefix caching off or use requests without them"
            )
        keys = Keys(sizes.pop())
    return _made(trace, keys)


def _made(trace: Trace, keys: Keys | None) -> Iterator[Request]:
    """The requests of the trace; those of a session hang on its first call, each on the one before it."""
    first = before = None
    for index, row in enumerate(trace.requests):
        request = Request(
            index,
            NEVER if row.call_index else row.arrival_ns,
            row.prompt_tokens,
            row.output_tokens,
            keys.of(row) if keys else (),
            row.priority,
            row.session_id,
            row.tool_duration_ns,
        )
        if row.call_index:
            assert before is not None
            before.following = request
        else:
            if first is not None:
                yield first
            first = request
        before = request
    if first is not None:
        yield first


def _check_calls(trace: Trace) -> None:
    """Refuse a call that does not stand behind the call before it, and times that the simulated clock does not hold."""
    before: TraceRequest | None = None
    least_ns = 0
    for row in trace.requests:
        if row.call_index:
            if before is None or (before.session_id, before.call_index) != (row.session_id, row.call_index - 1):
                raise ConfigError(
                    f"request {row.request_id}: call {row.call_index} of session {row.session_id!r} must follow its "
                    f"call {row.call_index - 1} in the trace"
                )
            least_ns += row.tool_duration_ns
        else:
            least_ns = row.arrival_ns
        if least_ns > LATEST_NS:
            raise ConfigError(
                f"request {row.request_id}: arrives {least_ns:,} ns after the start of the trace or later; the "
                f"simulated clock takes arrivals up to {LATEST_NS:,} ns, 146 years"
            )
        before = row
