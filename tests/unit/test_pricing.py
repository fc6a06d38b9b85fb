"""Prices that the user gives, and energy only where power was measured."""

import pytest
import yaml

from profiler.core.errors import ConfigError
from serving.pricing import cost_columns, energy_cost, kernel_watts, read_prices, step_joules

GOOD = {"currency": "USD", "source": "a quote", "per_gpu_hour": {"NVIDIA H200": 3.0}}


def prices(folder, **changes):
    path = folder / "prices.yaml"
    path.write_text(yaml.safe_dump(GOOD | changes))
    return read_prices(path)


def test_cost_follows_from_the_rate(tmp_path):
    row = {
        "hardware": "H200",
        "gpus": 8,
        "gpus_total": 16,
        "output_tokens_per_s": 1000.0,
        "prompt_tokens_per_s": 8000.0,
    }
    found = cost_columns(row, prices(tmp_path))
    assert found["cost_per_hour"] == 48.0
    assert found["output_tokens_per_money"] == pytest.approx(3.6e6 / 48)
    assert found["prompt_tokens_per_money"] == pytest.approx(28.8e6 / 48)
    assert found["cost_per_million_output_tokens"] == pytest.approx(48 / 3.6)


def test_a_gpu_without_a_price_has_no_cost(tmp_path):
    found = cost_columns({"hardware": "B200", "gpus": 8, "output_tokens_per_s": 1.0}, prices(tmp_path))
    assert set(found.values()) == {None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_gpu_hour": {}}, "per_gpu_hour"),
        ({"per_gpu_hour": {"H200": 0}}, "per_gpu_hour.H200"),
        ({"per_gpu_hour": {"H2OO": 3.0}}, "did you mean 'H200'"),
        ({"per_gpu_hour": {"H200": 3.0, "nvidia-h200": 4.0}}, "has a price already"),
        ({"currency": "dollars"}, "currency"),
        ({"source": ""}, "source"),
        ({"per_kwh": 0.1}, "per_kwh needs pue"),
        ({"pue": 0.9}, "pue"),
        ({"price": 1}, "unknown key"),
    ],
)
def test_bad_price_files_name_the_key(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        prices(tmp_path, **changes)


def test_energy_needs_a_sample_for_every_part(tmp_path):
    watts = kernel_watts({"power": {"watts": {"dense": 600, "moe": 500.0}}})
    assert step_joules({"dense": 1e6, "moe": 2e6}, watts) == pytest.approx(600 + 1000)
    assert step_joules({"dense": 1e6, "collective": 1.0}, watts) is None
    assert step_joules({"dense": 1.0}, kernel_watts({})) is None
    paid = prices(tmp_path, pue=1.5, per_kwh=0.2)
    assert energy_cost(3.6e6, paid) == pytest.approx(0.3)
    assert energy_cost(3.6e6, prices(tmp_path)) is None
    with pytest.raises(ConfigError, match=r"watts\.dense"):
        kernel_watts({"power": {"watts": {"dense": -1}}})
    with pytest.raises(ConfigError, match="no watts"):
        kernel_watts({"power": {}})
