"""What an engine is: something that runs shots on a device and says which kernel took how long."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from profiler.core.errors import AcquisitionError, unknown
from profiler.core.shots import Fill, MoeBatch, Regime, Shot
from profiler.core.types import Category, ModelSpec

__all__ = [
    "Binding",
    "Engine",
    "EngineInfo",
    "EngineOptions",
    "Fill",
    "KernelSample",
    "MoeBatch",
    "PowerTarget",
    "Regime",
    "Rule",
    "Shot",
    "ShotResult",
    "create_engine",
    "find_binding",
    "known_engines",
    "most_repeats",
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to start an engine with. Every engine module has `create(options) -> Engine`.

    model: canonical name; config: the raw HF configuration as stored (nested stays nested); spec: the whole model.
    hardware: canonical GPU name, already checked against the card. tp: tensor-parallel degree whose per-rank shapes
    are emulated on the one card. ep_degrees: expert slices that moe shots will ask for. block_tokens: None lets the
    engine choose. max_model_len and the batch limits are those that the shots respect. execution: "native" asks for the
    engine's own module of the model where it has two; the engine then reports settings["execution"] = "native".
    expert_backend: class of the expert kernels that run slices of ep > 1, or "engine" for what the engine takes there.
    layer_kinds: of earlier runs that this one continues, which it must have too; None lets the engine choose.
    kv_cache_gib: size of the KV cache, of the vllm engine; None lets it take what it finds free.
    """

    model: str
    config: Mapping[str, Any]
    spec: ModelSpec
    hardware: str
    tp: int
    ep_degrees: tuple[int, ...]
    kv_cache_dtype: str
    block_tokens: int | None
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    execution: str = "auto"
    layer_kinds: tuple[str, ...] | None = None
    expert_backend: str = "TritonExperts"
    kv_cache_gib: float | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What ran, recorded in the bundle. All values are plain JSON (str, int, float, bool, None, list, dict).

    versions: package -> version. gpu: name, driver, clocks, power. kv: layout, block_tokens, caches (a list of
    {name, bytes_per_token_layer}) and tokens, the number of KV tokens that fit, or None when there is no limit.
    weights: weight format that was really run ("bf16", "fp8"). layer_kinds: `LayerKind.name` of every layer of the
    stack that one forward pass runs, in order. whole_forward: a shot runs the whole stack, so shots with equal
    batches are run once for all their tables; False when each component is run on its own.
    settings: anything else that changes times (attention backend, environment, score distribution). Read by the
    profiler: mla_decode_threshold_tokens, the longest chunk that the main attention runs as a decode, and
    max_prefills_per_step, beyond which the engine's kernels do not work; dense_prefill, "never" where short prefills
    take the sparse path too; and repeat_rule, whose most_factor says how many times the wanted repeats a shot may be
    timed; absent where there is no such rule.
    """

    name: str
    versions: Mapping[str, str]
    gpu: Mapping[str, Any]
    kv: Mapping[str, Any]
    weights: str
    layer_kinds: tuple[str, ...]
    whole_forward: bool
    settings: Mapping[str, Any] = field(default_factory=dict)


def most_repeats(info: EngineInfo, wanted: int) -> int:
    """The most timed runs of a shot at one look; the repeats of a second look are numbered from there."""
    return wanted * int(info.settings.get("repeat_rule", {}).get("most_factor", 1))


@dataclass(frozen=True, slots=True)
class KernelSample:
    """One kernel under one module in one repeat of one shot.

    module: dotted path of the innermost module that launched it ("model.layers.3.self_attn.indexer"), "" when none.
    kernel: CUDA kernel or operator name. duration_us: GPU time summed over its `launches` in that module and repeat,
    launch gaps excluded.
    """

    shot_index: int
    repeat: int
    module: str
    kernel: str
    duration_us: float
    launches: int


@dataclass(frozen=True, slots=True)
class ShotResult:
    """Everything measured for one shot; `failure` holds the reason (and samples may be empty) when it did not run.

    reached_experts: distinct routed experts that the tokens of a whole pass picked, mean over its layers with experts;
    None where nobody counted.
    """

    shot_index: int
    samples: tuple[KernelSample, ...]
    failure: str | None = None
    reached_experts: float | None = None


@dataclass(frozen=True, slots=True)
class PowerTarget:
    """One kernel class whose power is sampled. phase: "decode" or "prefill".

    module: the path whose calls are repeated inside a pass of `shot`; None repeats an expert shot.
    """

    category: Category
    phase: str
    shot: Shot
    module: str | None


class Engine(Protocol):
    """Runs shots. Created by its module's `create(options)`, which raises AcquisitionError when it cannot start."""

    def info(self) -> EngineInfo: ...

    def run(self, shots: Sequence[Shot], warmup: int, repeats: int) -> Iterator[ShotResult]:
        """Yields one result per shot, as soon as it is complete, in any order.

        Each shot is run `warmup` times untimed and `repeats` times timed, or as often as settings["repeat_rule"]
        says; its repeats are numbered from 0. A shot that fails (out of memory, no
        kernel) yields its failure and the run goes on; when the device is lost, the remaining shots fail too.
        """
        ...

    # An engine may also have `power(targets: Sequence[PowerTarget], seconds: float) -> Mapping[str, Any]`: plain JSON
    # with `samples`, a list of {category, phase, watts, ...}, `idle` and the card's clocks before and after.

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """Binds kernels to a component. The first rule whose patterns both match (re.search) wins.

    module, kernel: regular expressions. name and category: the component, "" standing for the kernel's own name;
    category None means that the kernel is known and deliberately outside the tables, with the reason in `name`
    ("input copies").
    regimes: shots that the rule applies to; empty is all of them.
    stands_in: each module here is one call of the component that ran something else than nearly all of its calls in
    the whole model do, as the first layer's norm that has no residual to add. Where the pass has other calls, the
    component's time is theirs alone.
    """

    module: str
    kernel: str
    category: Category | None
    name: str
    regimes: tuple[Regime, ...] = ()
    stands_in: bool = False


class Binding(Protocol):
    """How one engine's modules and kernels map to components: a module of profiler/engines/bindings.

    FUSED: component -> the component whose kernels also do its work; they share its time, and meta.yaml says so.
    CONTRACT: what the tables are for, "serving" where a binding has no such name.
    """

    FUSED: Mapping[str, str]

    def matches(self, info: EngineInfo) -> bool: ...

    def rules(self, spec: ModelSpec) -> Sequence[Rule]: ...


_PACKAGE = "profiler.engines"


def known_engines() -> tuple[str, ...]:
    """Engine names: modules of this package with the suffix `_engine` removed."""
    package = importlib.import_module(_PACKAGE)
    names = (m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg and m.name != "base")
    return tuple(sorted(name.removesuffix("_engine") for name in names))


def create_engine(name: str, options: EngineOptions) -> Engine:
    """Starts an engine. Raises ConfigError for an unknown name, AcquisitionError when it cannot run here."""
    if name not in known_engines():
        raise unknown("engine", name, known_engines())
    try:
        module = importlib.import_module(f"{_PACKAGE}.{name}_engine")
    except ModuleNotFoundError as error:
        if error.name != f"{_PACKAGE}.{name}_engine":
            raise
        module = importlib.import_module(f"{_PACKAGE}.{name}")
    engine: Engine = module.create(options)
    return engine


def find_binding(info: EngineInfo, contract: str = "serving") -> Binding:
    """The binding of this contract whose `matches` accepts what ran.

    Raises AcquisitionError naming the bindings when none does.
    """
    package = importlib.import_module(f"{_PACKAGE}.bindings")
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__))
    for name in names:
        binding: Any = importlib.import_module(f"{_PACKAGE}.bindings.{name}")
        if getattr(binding, "CONTRACT", "serving") == contract and binding.matches(info):
            found: Binding = binding
            return found
    versions = ", ".join(f"{package} {version}" for package, version in info.versions.items())
    if "execution" in info.settings:
        versions += f", {info.settings['execution']}"
    raise AcquisitionError(
        f"the kernels of engine {info.name} ({versions}) are "
        f"bound by no module of profiler/engines/bindings for contract {contract}; "
        f"there are {', '.join(names)}"
    )
