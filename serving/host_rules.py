"""Which rules of the engine's host hold for an instance: its thread, late launches, inputs, the second stream."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from profiler.core.hardware import Hardware, Host
from profiler.core.stack import component_calls
from profiler.core.types import ModelSpec
from serving.config import EngineSettings, Instance
from serving.core.hosted import Behind
from serving.cost import TableCost
from serving.cost.build import Stage
from serving.cost.host import TableHost
from serving.cost.lines import Line, line
from serving.cost.step import part_of

# VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD of vLLM 0.26: steps of more tokens run them one after the other.
_SHARED_STREAM_TOKENS = 256


def table_host_of(
    instance: Instance, hardware: Hardware | None, spec: ModelSpec, largest_graph_tokens: int, asynchronous: bool
) -> TableHost | None:
    """The host as a file of its own or the GPU's has it, unless the cluster file states its time.

    largest_graph_tokens: of the CUDA graphs, 0 without any. None where nobody has measured the host; a pipeline's steps
    and those with drafts have no such rule.
    """
    engine = instance.engine
    host = engine.host or (hardware.host if hardware else None)
    if host is None or engine.host_overhead_us is not None:
        return None
    if instance.parallel.pp > 1 or engine.speculation is not None:
        return None
    return TableHost(
        host=host,
        layers=spec.num_layers,
        first_layers=_first_layers(spec),
        launch_first_layers=_launch_layers(spec, host, _first_layers(spec)),
        launch_layers=_launch_layers(spec, host, spec.num_layers),
        experts_last=spec.layers[-1].mlp == "moe",
        experts_first=spec.layers[_first_layers(spec)].mlp == "moe",
        largest_graph_tokens=largest_graph_tokens,
        compiled=not engine.eager and engine.graph_mode != "FULL_DECODE_ONLY",
        asynchronous=asynchronous,
        waits=waits_for_device(spec),
    )


def waits_for_device(spec: ModelSpec) -> bool:
    """Whether a step with prefills is prepared with a wait for the device, in vLLM 0.26.

    Block-sparse attention counts the keys of its prefills on the device (cu_seqlens_k of MiniMax-M3's
    common/sparse_attention.py) and writes a number of the host's in front of them, a copy from memory that is not
    pinned, before which CUDA waits for all that the stream has.
    """
    return spec.block_sparse


def host_source(engine: EngineSettings, host: TableHost | None) -> str:
    """Where the time of the host is from, for the result."""
    if engine.host_overhead_us is not None:
        return "stated"
    if host is None:
        return "not known"
    return "host file" if engine.host else "hardware file"


def behind_of(priced: Callable[..., Any], spec: ModelSpec, host: TableHost, whole: Any) -> Behind:
    """What the device runs behind late launches. priced: the cost of a stage of the model, as of `build_cost`; whole:
    that of the step."""
    assert isinstance(whole, TableCost)

    @cache
    def last_layers(count: int) -> TableCost:
        cost = priced(stage=Stage(replace(spec, layers=spec.layers[spec.num_layers - count :]), False, True))
        assert isinstance(cost, TableCost)
        return cost

    def from_experts(count: int) -> TableCost:
        """The last layers from the experts of their first one on."""
        layers, rest = last_layers(count), last_layers(count - 1)
        return replace(rest, by_group_tokens=layers.by_group_tokens, padded_experts=layers.padded_experts)

    first = _first_layers(spec)
    others = spec.num_layers - first
    return Behind(
        part_of(whole, last_layers(others)) if first else None,
        from_experts(1) if host.experts_last else last_layers(0),
        part_of(whole, from_experts(others)) if host.experts_first else None,
    )


def inputs_ns(cost: Any) -> int:
    """Of a step's device time what copying its inputs takes, with the gaps between the copies."""
    assert isinstance(cost, TableCost)
    lines = cost.by_tokens.lines(cost.dummy_tokens)
    return round(1e3 * (cost.step_us + sum(one.us for one in lines if one.component == "step_inputs")))


def shared_stream(
    instance: Instance, spec: ModelSpec, hardware: Hardware | None, engine: str
) -> Callable[[int], list[Line]] | None:
    """What vLLM's second stream adds to a step, by its tokens; the tables have shared experts behind the routed ones.

    engine: whose tables they are. None where nobody has measured it; pipelines and steps with drafts have no such rule.
    """
    us = None
    if hardware is not None:
        bf16 = spec.quantization.weights == "bf16"
        us = hardware.shared_stream_bf16_us if bf16 else hardware.shared_stream_us
    if us is None or engine != "vllm" or not instance.engine.shared_stream or not spec.moe:
        return None
    if not spec.moe.num_shared_experts or instance.parallel.pp > 1 or instance.engine.speculation:
        return None
    if us < 0:  # a share of what shared experts take, and every tensor-parallel rank has its part of these
        us /= instance.parallel.tp
    layers = sum(layer.mlp == "moe" for layer in spec.layers)

    def lines(tokens: int) -> list[Line]:
        return [line("shared_stream", layers, us, "hardware file")] if tokens <= _SHARED_STREAM_TOKENS else []

    return lines


def _launch_layers(spec: ModelSpec, host: Host, layers: int) -> float:
    """The first `layers` layers in layers of as many components as those that were launched in `host`."""
    return component_calls(spec, layers) / host.launch_components if host.launch_components else layers


def _first_layers(spec: ModelSpec) -> int:
    """Layers ahead of the first that has another MLP than they; 0 where all have the same."""
    return next((at for at, layer in enumerate(spec.layers) if layer.mlp != spec.layers[0].mlp), 0)
