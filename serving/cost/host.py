"""The host's time of a step, from the numbers of a hardware file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from profiler.core.hardware import Host, HostLaunch, HostPart
from serving.core.hosted import HostTimes
from serving.core.shape import StepShape

NOTHING: Final = HostPart(0.0, 0.0)
# Of a layer's launches those of its routed experts, which are the last: 12 of 51 kernels of a decode step of
# DeepSeek-V3.2 in vLLM 0.26.
EXPERTS_SHARE: Final = 12 / 51


@dataclass(frozen=True, slots=True)
class TableHost:
    """See profiler.core.hardware.Host for the numbers, and serving.core.hosted for what becomes of them.

    first_layers: those ahead of layers of another kind, 0 where all are of one. launch_layers, launch_first_layers: as
    many layers as `host.launch` counted have so many components as all, and as the first; None is their number.
    largest_graph_tokens: of the CUDA graphs, 0 without any. compiled: as far as the graphs reach, steps with prefills
    run in graphs of parts of layers, with the attention between them launched; else they are launched kernel by kernel,
    as all steps beyond the graphs are, compiled or not. Where nobody has measured the former it takes no time: a bound
    from below. experts_last, experts_first: the last layer has experts, the first behind first_layers has. added: more
    work before a step, such as that of a recorder. waits: a step with prefills is prepared with a wait for the device's
    end of the step before.
    """

    host: Host
    layers: int
    largest_graph_tokens: int
    compiled: bool
    asynchronous: bool
    added: HostPart = NOTHING
    first_layers: float = 0
    launch_layers: float | None = None
    launch_first_layers: float | None = None
    experts_last: bool = False
    experts_first: bool = False
    waits: bool = False
    _known: dict[tuple[str, int, int], HostTimes] = field(default_factory=dict, init=False, compare=False, repr=False)

    def times(self, shapes: Sequence[StepShape | None]) -> HostTimes:
        """Of the rank with the most requests, launched as that with the most tokens is."""
        if len(shapes) == 1 and (shape := shapes[0]) is not None:
            prefills, tokens = len(shape.prefills), shape.tokens
            requests, mixed = shape.decode_requests + prefills, bool(prefills and shape.decode_requests)
        else:
            requests = tokens = 1
            prefills, mixed = 0, False
            for one in shapes:
                if one is None:
                    continue
                decodes, chunks = one.decode_requests, len(one.prefills)
                requests = max(requests, decodes + chunks)
                tokens = max(tokens, one.tokens if chunks else decodes * one.decode_query_tokens)
                prefills = max(prefills, chunks)
                mixed = mixed or (chunks > 0 and decodes > 0)
        key = self.launched(tokens, prefills > 0, mixed), requests, prefills
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._of(*key)
        return found

    def launched(self, tokens: int, prefills: bool, mixed: bool) -> str:
        """How a step is launched: "replay" a graph, "piecewise" ones, or every kernel, "launch" or "launch_mixed".

        mixed: prefills and decodes on one rank.
        """
        if tokens <= self.largest_graph_tokens:
            if not prefills:
                return "replay"
            if self.compiled:
                return "piecewise"
        return "launch_mixed" if mixed and self.host.launch_mixed else "launch"

    def _of(self, launched: str, requests: int, prefills: int) -> HostTimes:
        host = self.host

        def us(*parts: HostPart) -> float:
            return sum(part.fixed_us + part.per_request_us * requests for part in parts)

        prepare_us = us(host.prepare)
        if prefills and (more := host.prepare_prefill) is not None:
            prepare_us = more.fixed_us + more.per_request_us * prefills
        behind = (host.prepare_behind or NOTHING) if prefills and self.waits else None
        # The device begins a graph when all of it is launched, and single kernels with the first of them.
        graph: tuple[HostPart, ...] = (host.replay,) if launched == "replay" else ()
        by_layer: HostLaunch | None = None if launched == "replay" else getattr(host, launched)
        one_by_one = launched in ("launch", "launch_mixed")
        layers, first = float(self.layers), self.first_layers
        if one_by_one:
            layers = layers if self.launch_layers is None else self.launch_layers
            first = first if self.launch_first_layers is None else self.launch_first_layers
        layers_us = _launch_us(by_layer, layers)
        # The last layer's experts come behind the launch of their own, or in the graph behind the last attention.
        last_us = by_layer.per_layer_us * EXPERTS_SHARE if by_layer and one_by_one and self.experts_last else 0.0
        first_us, experts_us = _launch_us(by_layer, first), 0.0
        if by_layer and one_by_one and self.experts_first:
            each_us = by_layer.per_layer_us * (layers - first) / (self.layers - self.first_layers)
            experts_us = first_us + each_us * (1.0 - EXPERTS_SHARE)
        # Without asynchronous scheduling the books wait for the tokens.
        ahead, later = ((host.bookkeep,), ()) if self.asynchronous else ((), (host.bookkeep,))
        return HostTimes(
            before_ns=round(1e3 * (prepare_us + us(host.schedule, self.added, *graph))),
            launch_ns=round(1e3 * (layers_us + us(host.sample, *ahead))),
            update_ns=round(1e3 * us(*later, host.tokens, host.update)),
            output_ns=round(1e3 * us(host.output)),
            first_ns=round(1e3 * first_us),
            layers_ns=round(1e3 * (layers_us - last_us)),
            behind_ns=None if behind is None else round(1e3 * us(behind)),
            experts_ns=round(1e3 * experts_us),
        )


def _launch_us(launch: HostLaunch | None, layers: float) -> float:
    return launch.fixed_us + launch.per_layer_us * layers if launch and layers else 0.0
