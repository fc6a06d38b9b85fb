"""What a result costs: prices that the user gives, and energy from power that was measured.

currency: USD
source: quote of 2026-11-02          where the prices are from; shown in every report
per_gpu_hour: {H200: 3.10, B200: 5.20}
pue: 1.3                             facility energy over IT energy; needed for energy
per_kwh: 0.12                        optional: adds the cost of energy, when the GPU price does not contain it
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from profiler.core.errors import ConfigError
from profiler.core.hardware import canonical_name
from profiler.core.load import read_mapping
from serving.config import Positive, Strict, validated

_SECONDS_PER_HOUR = 3600
_JOULES_PER_KWH = 3.6e6


class PriceFile(Strict):
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    source: Annotated[str, Field(min_length=1)]
    per_gpu_hour: Annotated[dict[str, Positive], Field(min_length=1)]
    pue: Annotated[float, Field(ge=1, le=5)] | None = None
    per_kwh: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """per_gpu_hour: by canonical GPU name."""

    currency: str
    source: str
    per_gpu_hour: Mapping[str, float]
    pue: float | None
    per_kwh: float | None


def read_prices(path: Path) -> Prices:
    """Raises ConfigError naming file and key: unknown keys or GPUs, two names of one GPU, an energy price without PUE.

    There are no prices of our own: a GPU without one has no cost.
    """
    file = validated(PriceFile, read_mapping(path), path)
    found: dict[str, float] = {}
    for name, price in file.per_gpu_hour.items():
        try:
            canonical = canonical_name(name)
        except ConfigError as error:
            raise ConfigError(f"{path}: per_gpu_hour: {error}") from None
        if canonical in found:
            raise ConfigError(f"{path}: per_gpu_hour: {name!r} is {canonical}, which has a price already")
        found[canonical] = price
    if file.per_kwh is not None and file.pue is None:
        raise ConfigError(f"{path}: per_kwh needs pue, the facility's energy over the IT equipment's")
    return Prices(file.currency, file.source, found, file.pue, file.per_kwh)


def cost_columns(row: Mapping[str, Any], prices: Prices) -> dict[str, Any]:
    """Cost columns of a result row, empty where the GPU has no price or the row no throughput.

    The GPUs are paid for the whole time, so tokens per unit of money follow from the rate of the run: input and output
    tokens are two views of the same money, not two bills.
    """
    names = (
        "currency",
        "cost_per_hour",
        "output_tokens_per_money",
        "prompt_tokens_per_money",
        "cost_per_million_output_tokens",
    )
    price = prices.per_gpu_hour.get(row["hardware"])
    gpus = row.get("gpus_total") or row["gpus"]
    if price is None:
        return dict.fromkeys(names)
    hourly = price * gpus
    out, prompt = row.get("output_tokens_per_s"), row.get("prompt_tokens_per_s")
    return dict(
        zip(
            names,
            (
                prices.currency,
                hourly,
                out * _SECONDS_PER_HOUR / hourly if out else None,
                prompt * _SECONDS_PER_HOUR / hourly if prompt else None,
                hourly / (out * _SECONDS_PER_HOUR) * 1e6 if out else None,
            ),
            strict=True,
        )
    )


def kernel_watts(meta: Mapping[str, Any]) -> dict[str, float]:
    """Measured watts by kernel category of a bundle: `power: {watts: {dense: 640, ..., collective: 300, other: 95}}`.

    `other` is for time outside kernels and collectives.

    Empty where the bundle has no power samples. Raises ConfigError for values that are no watts.
    """
    power = meta.get("power")
    if power is None:
        return {}
    watts = power.get("watts") if isinstance(power, Mapping) else None
    if not isinstance(watts, Mapping) or not watts:
        raise ConfigError("meta.yaml: power has no watts by kernel category")
    for name, value in watts.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 10_000:
            raise ConfigError(f"meta.yaml: power.watts.{name}: {value!r} is not a number of watts")
    return {str(name): float(value) for name, value in watts.items()}


def step_joules(parts_us: Mapping[str, float], watts: Mapping[str, float]) -> float | None:
    """Energy of one step on one GPU in joules; parts_us: microseconds by kernel category.

    None as soon as a category has no sample: a part that is left out would make the rest look cheap.
    """
    if not watts or any(name not in watts for name in parts_us):
        return None
    return sum(us * 1e-6 * watts[name] for name, us in parts_us.items())


def energy_cost(joules: float, prices: Prices) -> float | None:
    """Price of GPU energy with the facility's share (PUE), None without a price per kWh."""
    if prices.per_kwh is None or prices.pue is None:
        return None
    return joules * prices.pue / _JOULES_PER_KWH * prices.per_kwh
