"""The host's time of a step, from the numbers of a hardware file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from profiler.core.hardware import Host, HostLaunch, HostPart
from serving.core.hosted import HostTimes
from serving.core.shape import StepShape

NOTHING: Final = HostPart(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TableHost:
    """See profiler.core.hardware.Host for the numbers, and serving.core.hosted for what becomes of them.

    largest_graph_tokens: of the CUDA graphs, 0 without any. prefills_in_graphs: steps with prefills run in graphs of
    parts of layers, as far as those reach; else they are launched kernel by kernel, as all steps beyond the graphs.
    added: further work before a step, such as that of a recorder.
    """

    host: Host
    layers: int
    largest_graph_tokens: int
    prefills_in_graphs: bool
    asynchronous: bool
    added: HostPart = NOTHING
    _known: dict[tuple[str, int], HostTimes] = field(default_factory=dict, compare=False, repr=False)

    def times(self, shapes: Sequence[StepShape | None]) -> HostTimes:
        """Of the rank with the most requests, launched as that with the most tokens is."""
        if len(shapes) == 1 and (shape := shapes[0]) is not None:
            requests, tokens, prefills = shape.decode_requests + len(shape.prefills), shape.tokens, bool(shape.prefills)
        else:
            some = [shape for shape in shapes if shape]
            requests = max((shape.decode_requests + len(shape.prefills) for shape in some), default=1)
            tokens = max((shape.tokens for shape in some), default=1)
            prefills = any(shape.prefills for shape in some)
        launched = self.launched(tokens, prefills)
        found = self._known.get((launched, requests))
        if found is None:
            found = self._known[launched, requests] = self._of(launched, requests)
        return found

    def launched(self, tokens: int, prefills: bool) -> str:
        """How a step is launched: "replay" a graph, "piecewise" ones, or "launch" every kernel."""
        if tokens > self.largest_graph_tokens or (prefills and not self.prefills_in_graphs):
            return "launch"
        return "piecewise" if prefills else "replay"

    def _of(self, launched: str, requests: int) -> HostTimes:
        host = self.host

        def us(*parts: HostPart) -> float:
            return sum(part.fixed_us + part.per_request_us * requests for part in parts)

        # The device begins a graph when all of it is launched, and single kernels with the first of them.
        graph: tuple[HostPart, ...] = (host.replay,) if launched == "replay" else ()
        layers_us = 0.0
        if launched != "replay":
            by_layer: HostLaunch = (host.piecewise or host.launch) if launched == "piecewise" else host.launch
            layers_us = by_layer.fixed_us + by_layer.per_layer_us * self.layers
        # Without asynchronous scheduling the books wait for the tokens.
        early, late = ((host.bookkeep,), ()) if self.asynchronous else ((), (host.bookkeep,))
        return HostTimes(
            before_ns=round(1e3 * us(host.schedule, host.prepare, self.added, *graph)),
            launch_ns=round(1e3 * (layers_us + us(host.sample, *early))),
            update_ns=round(1e3 * us(*late, host.tokens, host.update)),
            output_ns=round(1e3 * us(host.output)),
        )
