"""What is asked of every step that shipped tables price."""

from collections.abc import Iterator
from pathlib import Path

from profiler.core.paths import default_bundle_root
from serving.config import load_cluster
from serving.explain import Node
from serving.explained import explain_instance


def check_step(cluster: Path, batch: str, kernels: set[str]) -> None:
    """A step of the cluster's one instance is measured, has these kernels, and no part of it beats its bound."""
    (instance,) = load_cluster(cluster).instances
    found, title = explain_instance(instance, [batch], default_bundle_root())
    assert "measured" in title
    nodes = list(_leaves(found.root))
    assert kernels <= {node.name for node in nodes}
    for node in nodes:
        hides = node.name == "shared_stream"  # shared experts in part
        assert node.us >= 0 or hides, node
        assert node.bound_us is None or node.us >= 0.95 * node.bound_us, node


def _leaves(node: Node) -> Iterator[Node]:
    if not node.children:
        yield node
    for child in node.children:
        yield from _leaves(child)
