"""What links the prefill and the decode instances of a cluster file."""

from collections.abc import Sequence

from profiler.core.errors import ConfigError
from profiler.core.hardware import load_hardware
from serving.config import Cluster, Instance, KvTransfer
from serving.core.disaggregated import Wire
from serving.core.engine import Group
from serving.deployment import Deployed


def groups_of(deployed: Sequence[Deployed], role: str) -> list[Group]:
    """The groups of the instances of a role."""
    groups = [group for one in deployed if one.deployment.role == role for group in one.groups]
    return [group for group in groups if isinstance(group, Group)]


def wire_of(cluster: Cluster, deployed: Sequence[Deployed]) -> tuple[Wire, str]:
    """The link over which each rank receives its cache, and where its numbers are from.

    Raises ConfigError where instances store caches that differ in layout or block length, ranks hold different heads,
    or no file says how fast the link is.
    """
    first = deployed[0]
    for instance, other in zip(cluster.instances[1:], deployed[1:], strict=True):
        mine, theirs = _stored(first), _stored(other)
        if mine != theirs:
            raise ConfigError(
                "prefill and decode instances must store the same cache: "
                f"{_named(cluster.instances[0], first)} in {mine} and {_named(instance, other)} in {theirs}"
            )
    link, source = _link(cluster)
    assert link.bandwidth_gbps is not None and link.latency_us is not None
    return Wire(first.kv.bytes_per_block, link.bandwidth_gbps, round(link.latency_us * 1e3)), source


def _named(instance: Instance, one: Deployed) -> str:
    model = one.deployment.model
    return f"{instance.source.key} ({model})" if instance.source else model


def _stored(one: Deployed) -> str:
    kv = one.kv
    caches = ", ".join(f"{cache.layers} x {cache.name} of {cache.bytes_per_token_layer} bytes" for cache in kv.caches)
    return f"{kv.layout} ({caches}; blocks of {kv.block_tokens} tokens)"


def _link(cluster: Cluster) -> tuple[KvTransfer, str]:
    asked = cluster.kv_transfer
    if asked.bandwidth_gbps is not None and asked.latency_us is not None:
        return asked, "kv_transfer"
    found = []
    for name in sorted({one.hardware for one in cluster.instances}):
        inter = load_hardware(name).links.get("inter_node")
        if inter is None:
            raise ConfigError(
                f"kv_transfer: {name} has no inter-node link in its file; give bandwidth_gbps, latency_us"
            )
        found.append(inter)
    gbps = asked.bandwidth_gbps or min(one.bandwidth_gbps for one in found)
    latency_us = max(one.latency_us for one in found) if asked.latency_us is None else asked.latency_us
    given = [name for name in ("bandwidth_gbps", "latency_us") if getattr(asked, name) is not None]
    return KvTransfer(gbps, latency_us), "hardware file" + (f", kv_transfer.{given[0]}" if given else "")
