"""GPU descriptions: configs/hardware/<name>.yaml, found by name or by any alias that drivers and tools use.

A file has `name`, `aliases`, `architecture` and, for each number, a mapping {value, source}; the unit is the suffix of
the key. `links` maps a tier to {bandwidth_gbps, latency_us, source}. `host`, where somebody has measured it, holds what
an engine's step costs the host's thread: see Host.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiler.core.errors import ConfigError, nearest, unknown
from profiler.core.load import read_mapping
from profiler.core.paths import hardware_root

_NUMBERS = ("memory_total_gib", "hbm_gbps", "bf16_tflops", "fp8_tflops", "l2_mib")
_COUNTS = ("sm_count", "gpus_per_node")
_OPTIONAL = ("step_overhead_us", "shared_stream_us", "shared_stream_bf16_us")
_SIGNED = ("shared_stream_bf16_us",)
_KEYS = ("name", "aliases", "architecture", *_NUMBERS, *_COUNTS, "links")
_LINK_KEYS = ("bandwidth_gbps", "latency_us", "source")
_LARGEST = 1e9
TIERS = ("intra_node", "inter_node")
_HOST_PARTS = ("schedule", "prepare", "replay", "sample", "bookkeep", "tokens", "update", "output")
OPTIONAL_HOST_PARTS = ("prepare_prefill", "prepare_behind", "launch_mixed", "piecewise", "launch_components")
_HOST_PREPARED = ("prepare_prefill", "prepare_behind")
_HOST_LAUNCHES = ("launch", "launch_mixed", "piecewise")


@dataclass(frozen=True, slots=True)
class Link:
    """One tier of the interconnect.

    bandwidth_gbps: peak of one GPU in one direction. latency_us: a smallest message between two GPUs through a
    collective library, launch on the device included.
    """

    bandwidth_gbps: float
    latency_us: float
    source: str


@dataclass(frozen=True, slots=True)
class HostPart:
    """A part of the host's work for a step: fixed_us, and per_request_us for every request of its batch."""

    fixed_us: float
    per_request_us: float


@dataclass(frozen=True, slots=True)
class HostLaunch:
    """Launching a pass kernel by kernel or graph by graph: fixed_us, and per_layer_us for every layer."""

    fixed_us: float
    per_layer_us: float


@dataclass(frozen=True, slots=True)
class Host:
    """Time of an engine's thread for one step, in the order in which it works, without its waits for the device.

    schedule, prepare: the batch and its inputs; prepare_prefill: in place of prepare where a step has prefills, with
    per_request_us for every prefill, None where nobody has told one from the other. prepare_behind: what is left of it
    once the device has ended the step before, with models that wait for that (serving.host_rules); None where nobody
    has measured one. Then the layers: replay of one CUDA graph of the whole step, piecewise in graphs of parts of
    layers, or launch of every kernel; launch_mixed where a step has prefills and decodes, whose attention runs one
    after the other. sample, bookkeep: the sampler and the
    batch's books. tokens: from the device's end of the step until the thread has its tokens, were it to wait for
    nothing else. update, output: into the scheduler, and into the outputs of the requests. launch_mixed, piecewise:
    None where nobody has measured it. launch_components: components per layer (of profiler.families) of the layers that
    `launch` counts, of which those of other models have more or fewer; None leaves that out.
    """

    schedule: HostPart
    prepare: HostPart
    replay: HostPart
    sample: HostPart
    bookkeep: HostPart
    tokens: HostPart
    update: HostPart
    output: HostPart
    launch: HostLaunch
    piecewise: HostLaunch | None
    source: str
    prepare_prefill: HostPart | None = None
    launch_mixed: HostLaunch | None = None
    launch_components: float | None = None
    prepare_behind: HostPart | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU and how it is linked to its neighbours.

    architecture: "sm90", or "gfx942" of AMD. memory_total_gib: what the CUDA runtime reports as the device's total
    memory, which is what vLLM multiplies with its utilisation. bf16_tflops and fp8_tflops: dense peaks of the tensor
    cores.
    gpus_per_node: GPUs that share the `intra_node` link. links: by tier, see TIERS. sources: where each number is from.
    step_overhead_us: device time of an engine's step that no kernel table holds. shared_stream_us: what a layer with
    shared experts takes longer with these on a stream of their own, beside the routed ones; shared_stream_bf16_us:
    likewise with bf16 weights, negative where it takes less. host: what a step costs the host. All are None where
    nobody has found it out.
    """

    name: str
    aliases: tuple[str, ...]
    architecture: str
    memory_total_gib: float
    hbm_gbps: float
    bf16_tflops: float
    fp8_tflops: float
    l2_mib: float
    sm_count: int
    gpus_per_node: int
    links: Mapping[str, Link] = field(hash=False)
    sources: Mapping[str, str] = field(hash=False)
    step_overhead_us: float | None = None
    shared_stream_us: float | None = None
    shared_stream_bf16_us: float | None = None
    host: Host | None = None


def known_hardware(root: Path | None = None) -> tuple[str, ...]:
    """Canonical names, sorted."""
    return tuple(sorted(path.stem for path in (root or hardware_root()).glob("*.yaml")))


def canonical_name(text: str, root: Path | None = None) -> str:
    """The canonical name that `text` means: a name or an alias, whatever its case, spaces, hyphens and underscores.

    Raises ConfigError with the known names and the nearest one.
    """
    names: dict[str, str] = {}
    for name in known_hardware(root):
        for alias in (name, *_read(name, root).aliases):
            if (other := names.setdefault(_folded(alias), name)) != name:
                raise ConfigError(f"{(root or hardware_root()) / name}.yaml: alias {alias!r} is also one of {other}")
    if found := names.get(_folded(text)):
        return found
    close = nearest(_folded(text), names)
    error = unknown("GPU", text, known_hardware(root))
    if close and names[close] not in str(error).split("Known:")[0]:
        raise ConfigError(
            f"unknown GPU {text!r}; did you mean {names[close]!r}? Known: {', '.join(known_hardware(root))}."
        )
    raise error


def load_hardware(name_or_alias: str, root: Path | None = None) -> Hardware:
    """The description of a GPU by name, alias or driver name. Raises ConfigError: unknown GPU, malformed file."""
    return _read(canonical_name(name_or_alias, root), root)


def _folded(text: str) -> str:
    return re.sub(r"[\s_-]", "", text.casefold()).removeprefix("nvidia")


def _read(name: str, root: Path | None) -> Hardware:
    path = (root or hardware_root()) / f"{name}.yaml"
    values = read_mapping(path)
    optional = tuple(key for key in _OPTIONAL if key in values)
    _check_keys(path, "", values, (*_KEYS, *optional, *(("host",) if "host" in values else ())))
    if values["name"] != name:
        raise ConfigError(f"{path}: name is {values['name']!r}; it must be the file's, {name!r}")
    aliases = values["aliases"]
    if not isinstance(aliases, list) or not all(isinstance(a, str) and _folded(a) for a in aliases):
        raise ConfigError(f"{path}: aliases must be a list of names, found {aliases!r}")
    if not isinstance(values["architecture"], str) or not re.fullmatch(
        r"sm\d{2,3}|gfx\d{2,3}[0-9a-f]?", values["architecture"]
    ):
        raise ConfigError(f"{path}: architecture is {values['architecture']!r}; it must look like 'sm90' or 'gfx942'")
    numbers, sources = {}, {}
    for key in (*_NUMBERS, *_COUNTS, *optional):
        numbers[key], sources[key] = _sourced(path, key, values[key])
    for key in _COUNTS:
        if numbers[key] != int(numbers[key]):
            raise ConfigError(f"{path}: {key} must be an integer, found {numbers[key]!r}")
    return Hardware(
        name=name,
        aliases=tuple(aliases),
        architecture=values["architecture"],
        **{key: numbers[key] for key in _NUMBERS},
        sm_count=int(numbers["sm_count"]),
        gpus_per_node=int(numbers["gpus_per_node"]),
        links=_links(path, values["links"]),
        sources=sources,
        step_overhead_us=numbers.get("step_overhead_us"),
        shared_stream_us=numbers.get("shared_stream_us"),
        shared_stream_bf16_us=numbers.get("shared_stream_bf16_us"),
        host=host_of(path, values["host"]) if "host" in values else None,
    )


def _check_keys(path: Path, where: str, values: Mapping[str, Any], legal: tuple[str, ...]) -> None:
    prefix = f"{path}: {where}" if where else f"{path}:"
    for key in values:
        if key not in legal:
            raise ConfigError(f"{prefix.rstrip(':')}: {unknown('key', str(key), legal)}")
    if missing := [key for key in legal if key not in values]:
        raise ConfigError(f"{prefix.rstrip(':')}: missing {', '.join(missing)}")


def _positive(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise ConfigError(f"{path}: {key} must be a positive number up to {_LARGEST:g}, found {value!r}")
    return float(value)


def _signed(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ConfigError(f"{path}: {key} must be a number up to {_LARGEST:g} either way, found {value!r}")
    return float(value)


def _sourced(path: Path, key: str, value: Any) -> tuple[float, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: {key} must be a mapping of value and source, found {value!r}")
    _check_keys(path, key, value, ("value", "source"))
    number = _signed(path, key, value["value"]) if key in _SIGNED else _positive(path, key, value["value"])
    return number, _text(path, f"{key}.source", value["source"])


def _text(path: Path, key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{path}: {key} must say where the number is from, found {value!r}")
    return value


def _links(path: Path, value: Any) -> dict[str, Link]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: links must be a mapping of tiers, found {value!r}")
    _check_keys(path, "links", value, TIERS)
    links = {}
    for tier, entry in value.items():
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}: links.{tier} must be a mapping, found {entry!r}")
        _check_keys(path, f"links.{tier}", entry, _LINK_KEYS)
        bandwidth, latency = (_positive(path, f"links.{tier}.{key}", entry[key]) for key in _LINK_KEYS[:2])
        links[tier] = Link(bandwidth, latency, _text(path, f"links.{tier}.source", entry["source"]))
    return links


def load_host(path: Path) -> Host:
    """The host of a YAML file that holds a `host` block, as `python -m serving host --format yaml` prints it.

    Raises ConfigError for an unreadable file and a wrong block.
    """
    value = read_mapping(path)
    _check_keys(path, "the file", value, ("host",))
    return host_of(path, value["host"])


def host_of(path: Path, value: Any) -> Host:
    """The `host` block of a file. Raises ConfigError, with `path`, for wrong keys and numbers."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: host must be a mapping, found {value!r}")
    optional = tuple(name for name in OPTIONAL_HOST_PARTS if name in value)
    _check_keys(path, "host", value, (*_HOST_PARTS, "launch", *optional, "source"))
    parts = {name: HostPart(*_pair(path, name, value[name], "per_request_us")) for name in _HOST_PARTS}
    prepared = {
        one: HostPart(*_pair(path, one, value[one], "per_request_us")) for one in _HOST_PREPARED if one in value
    }
    launches = {
        one: HostLaunch(*_pair(path, one, value[one], "per_layer_us")) for one in _HOST_LAUNCHES if one in value
    }
    return Host(
        **parts,
        prepare_prefill=prepared.get("prepare_prefill"),
        prepare_behind=prepared.get("prepare_behind"),
        launch=launches["launch"],
        launch_mixed=launches.get("launch_mixed"),
        piecewise=launches.get("piecewise"),
        launch_components=_positive(path, "host.launch_components", value["launch_components"])
        if "launch_components" in value
        else None,
        source=_text(path, "host.source", value["source"]),
    )


def _pair(path: Path, name: str, value: Any, slope: str) -> tuple[float, float]:
    """(fixed_us, `slope`), neither negative."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: host.{name} must be a mapping of fixed_us and {slope}, found {value!r}")
    _check_keys(path, f"host.{name}", value, ("fixed_us", slope))
    found = []
    for key in ("fixed_us", slope):
        one = value[key]
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one <= _LARGEST:
            raise ConfigError(f"{path}: host.{name}.{key} must be a number from 0 to {_LARGEST:g}, found {one!r}")
        found.append(float(one))
    return found[0], found[1]
