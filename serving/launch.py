"""The `vllm serve` command of a placement, checked against the memory budget, as shell, compose or Kubernetes."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from profiler.core.errors import CapacityError, ConfigError
from profiler.core.hardware import Hardware
from profiler.core.shard import broken_rules, describe, is_launchable
from profiler.core.types import ModelSpec, Parallel
from serving.capacity import Budget, default_batched_tokens, default_num_seqs, memory_budget, require_fit

PORT: Final = 8000
_RPC_PORT: Final = 13345
_KV_NAMES: Final = {"bf16": "bfloat16", "nvfp4": "nvfp4"}


@dataclass(frozen=True, slots=True)
class Launch:
    """A checked engine. nodes: machines that it spans; arguments: of `vllm serve`, without the node's own."""

    spec: ModelSpec
    hardware: Hardware
    parallel: Parallel
    budget: Budget
    arguments: tuple[str, ...]
    nodes: int

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader has to know before starting it."""
        budget = self.budget
        found = [
            f"checked: {budget.explain()} GiB per rank; {budget.num_gpu_blocks:,} KV blocks of "
            f"{budget.layout.tokens_per_block} tokens, {budget.max_concurrency:.2f} sequences of "
            f"{budget.max_model_len:,} tokens"
        ]
        if budget.risk:
            found.append(budget.risk)
        return tuple(found)


def launch(
    spec: ModelSpec,
    hardware: Hardware,
    parallel: Parallel,
    *,
    model: str | None = None,
    max_model_len: int | None = None,
    kv_dtype: str = "auto",
    block_tokens: int | None = None,
    utilization: float = 0.9,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    accept_risk: bool = False,
) -> Launch:
    """The command of a placement that starts by the memory budget; limits left out are the engine's for the GPU and
    are written down all the same, so that another engine version starts with the same.

    model: what the engine loads, by default the model's name. Raises ConfigError for a split that is illegal or that
    vLLM does not offer, CapacityError when it does not fit, or fits without the headroom and accept_risk is not set.
    """
    if rules := broken_rules(spec, parallel):
        raise ConfigError(f"{spec.name} with {describe(parallel)}: {'; '.join(rules)}")
    if not is_launchable(parallel):
        raise ConfigError(
            f"{describe(parallel)}: vLLM offers expert parallelism off (ep 1) or over all ranks of the group "
            f"(ep {parallel.tp * parallel.dp}), nothing between"
        )
    length = spec.max_position if max_model_len is None else max_model_len
    if max_num_seqs is None:
        max_num_seqs = default_num_seqs(hardware)
    if max_num_batched_tokens is None:
        max_num_batched_tokens = default_batched_tokens(hardware)
    budget = memory_budget(
        spec,
        hardware,
        parallel,
        max_model_len=length,
        kv_dtype=kv_dtype,
        utilization=utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_tokens=block_tokens,
    )
    require_fit(budget)
    if budget.risk and not accept_risk:
        safe = budget.safe_max_model_len
        hint = f"max_model_len {safe} is safe" if safe else "no max_model_len is safe: use more GPUs or a larger tp"
        raise CapacityError(f"{spec.name} with {describe(parallel)}: {budget.risk}; {hint}, or accept the risk")
    nodes = _nodes(hardware, parallel)
    arguments = [
        model or spec.name,
        *("--tensor-parallel-size", str(parallel.tp)),
        *(("--pipeline-parallel-size", str(parallel.pp)) if parallel.pp > 1 else ()),
        *(("--data-parallel-size", str(parallel.dp)) if parallel.dp > 1 else ()),
        *(("--enable-expert-parallel",) if parallel.ep > 1 else ()),
        *("--max-model-len", str(length)),
        *("--block-size", str(budget.layout.block_tokens)),
        *("--kv-cache-dtype", _KV_NAMES.get(kv_dtype, kv_dtype)),
        *("--gpu-memory-utilization", f"{utilization:g}"),
        *("--max-num-seqs", str(max_num_seqs)),
        *("--max-num-batched-tokens", str(max_num_batched_tokens)),
        *("--port", str(PORT)),
    ]
    return Launch(spec, hardware, parallel, budget, tuple(arguments), nodes)


def _nodes(hardware: Hardware, parallel: Parallel) -> int:
    """Machines of one engine; whole data-parallel ranks on each. Raises ConfigError where a rank spans machines."""
    each = hardware.gpus_per_node
    if parallel.gpus <= each:
        return 1
    if parallel.dp > 1 and parallel.tp * parallel.pp <= each:
        local = each // (parallel.tp * parallel.pp)
        if parallel.dp % local == 0:
            return parallel.dp // local
    raise ConfigError(
        f"{describe(parallel)} needs {parallel.gpus} GPUs on machines of {each}: only splits whose data-parallel ranks "
        "fill whole machines are written out; start a Ray cluster for vLLM by hand for others"
    )


def shell(made: Launch) -> str:
    """A script; for several machines one command each, which NODE and HEAD (the first machine's address) choose."""
    lines = ["#!/bin/sh", "set -eu", *(f"# {note}" for note in made.notes)]
    if made.nodes == 1:
        return "\n".join((*lines, _command(["vllm", "serve", *made.arguments]), ""))
    local = made.parallel.dp // made.nodes
    shared = [*made.arguments, "--data-parallel-size-local", str(local), "--data-parallel-rpc-port", str(_RPC_PORT)]
    lines.append(
        f"# On each of {made.nodes} machines: NODE=0..{made.nodes - 1} HEAD=<address of machine 0> sh this-file"
    )
    lines.append(': "${NODE:?number of this machine}" "${HEAD:?address of machine 0}"')
    lines += [
        'if [ "$NODE" -eq 0 ]; then',
        _command(["vllm", "serve", *shared]) + ' --data-parallel-address "$HEAD"',
        "else",
    ]
    lines.append(
        _command(["vllm", "serve", *shared, "--headless"])
        + f' --data-parallel-address "$HEAD" --data-parallel-start-rank "$((NODE * {local}))"'
    )
    return "\n".join((*lines, "fi", ""))


def _command(words: list[str]) -> str:
    """Shell words, an option and its value to a line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(lines)


def compose(made: Launch, image: str) -> str:
    """A compose file of one machine. Raises ConfigError for several."""
    _one_node(made, "compose")
    service = {
        "image": image,
        "command": list(made.arguments),
        "ports": [f"{PORT}:{PORT}"],
        "ipc": "host",
        "volumes": ["huggingface:/root/.cache/huggingface"],
        "environment": {"HF_TOKEN": "${HF_TOKEN:-}"},
        "deploy": {
            "resources": {
                "reservations": {
                    "devices": [{"driver": "nvidia", "count": made.parallel.gpus, "capabilities": ["gpu"]}]
                }
            }
        },
    }
    return _yaml(made, {"services": {"vllm": service}, "volumes": {"huggingface": {}}})


def kubernetes(made: Launch, image: str) -> str:
    """A Deployment and a Service of one machine. Raises ConfigError for several."""
    _one_node(made, "kubernetes")
    name = (
        "vllm-" + "".join(c if c.isalnum() else "-" for c in made.spec.name.rsplit("/", 1)[-1].lower()).strip("-")[:50]
    )
    labels = {"app": name}
    container = {
        "name": "vllm",
        "image": image,
        "args": list(made.arguments),
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": made.parallel.gpus}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 10},
        "startupProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 20, "failureThreshold": 180},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": labels, "ports": [{"port": PORT, "targetPort": PORT}]},
    }
    return _yaml(made, deployment) + "---\n" + _dump(service)


def _one_node(made: Launch, style: str) -> None:
    if made.nodes > 1:
        raise ConfigError(f"--format {style} is for one machine, this engine spans {made.nodes}: use --format shell")


def _yaml(made: Launch, content: dict[str, Any]) -> str:
    return "".join(f"# {note}\n" for note in made.notes) + _dump(content)


def _dump(content: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(content, sort_keys=False, width=110))


def as_json(made: Launch) -> str:
    """The command as a list, for other tools, with the budget behind it."""
    return (
        json.dumps(
            {
                "command": ["vllm", "serve", *made.arguments],
                "gpus": made.parallel.gpus,
                "nodes": made.nodes,
                "num_gpu_blocks": made.budget.num_gpu_blocks,
                "memory_gib": made.budget.parts(),
                "risk": made.budget.risk,
            },
            indent=2,
        )
        + "\n"
    )


STYLES: Final[dict[str, Callable[[Launch, str], str]]] = {
    "shell": lambda made, image: shell(made),
    "compose": compose,
    "kubernetes": kubernetes,
    "json": lambda made, image: as_json(made),
}
