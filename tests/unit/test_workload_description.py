"""Descriptions: what they are fitted from comes back out of them, and what they must not contain does not."""

import random
from pathlib import Path

import numpy as np
import pytest
import yaml

from profiler.core.errors import ConfigError
from serving.trace_tools.distributions import distribution
from serving.trace_tools.generate import Plan, Prefixes, Sessions, generated
from serving.traces import TraceRequest, read_trace
from serving.traces._arrivals import Arrivals
from serving.workload_description import Description, DescriptionFile, fit, read_description, requests_of

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def described(folder, content):
    path = folder / "workload.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_description(path)


def trace(rows=2000, **changes):
    plan = {
        "rows": rows, "arrivals": Arrivals("poisson", 5.0, 1), "prompt": distribution("lognormal:2000:0.8", "p"),
        "output": distribution("lognormal:200:0.5", "o"), "seed": 1,
    }  # fmt: skip
    return list(generated(Plan(**plan | changes)))


def test_poisson_arrivals_and_lognormal_lengths_are_found(tmp_path):
    found = fit(trace(), form="lognormal")
    assert found["arrivals"]["process"] in ("poisson", "gamma")
    assert found["arrivals"].get("burstiness", 1.0) == pytest.approx(1.0, rel=0.12)
    assert found["arrivals"]["rate_per_s"] == pytest.approx(5.0, rel=0.06)
    assert found["lengths"]["prompt_tokens"]["mean"] == pytest.approx(2000, rel=0.06)
    assert found["lengths"]["prompt_tokens"]["sigma"] == pytest.approx(0.8, rel=0.06)
    assert found["lengths"]["output_tokens"]["sigma"] == pytest.approx(0.5, rel=0.06)
    assert abs(found["lengths"]["correlation"]) < 0.07
    described(tmp_path, found)


def test_burstiness_is_the_shape_of_the_gaps():
    found = fit(trace(5000, arrivals=Arrivals("gamma", 5.0, 3, 0.4)))
    assert found["arrivals"]["process"] == "gamma"
    assert found["arrivals"]["burstiness"] == pytest.approx(0.4, rel=0.1)


def test_an_empirical_description_gives_the_lengths_back(tmp_path):
    draw = random.Random(1)
    rows = [
        TraceRequest(str(n), n * 10**8, prompt, round(prompt * 0.1) + draw.randint(1, 20))
        for n, prompt in enumerate(draw.choice([200, 210, 220, 8000, 9000]) for _ in range(3000))
    ]
    again = list(requests_of(described(tmp_path, fit(rows)), 6000, 5))
    before, after = ([[r.prompt_tokens, r.output_tokens] for r in one] for one in (rows, again))
    for percent in (10, 50, 75, 95):
        assert np.percentile(after, percent, axis=0) == pytest.approx(np.percentile(before, percent, axis=0), rel=0.06)
    assert np.mean(after, axis=0) == pytest.approx(np.mean(before, axis=0), rel=0.05)
    assert np.corrcoef(np.array(after).T)[0, 1] > 0.95  # long prompts keep their long outputs


def test_a_profile_is_found_and_drawn_again(tmp_path):
    warp = {"period_s": 400, "weights": [0.5, 1.5]}
    content = {
        "kind": "workload", "version": 1,
        "arrivals": {"process": "poisson", "rate_per_s": 10.0, "diurnal": warp},
        "lengths": {"form": "lognormal", "prompt_tokens": {"mean": 500.0, "sigma": 0.3},
                    "output_tokens": {"mean": 50.0, "sigma": 0.3}},
    }  # fmt: skip
    made = list(requests_of(described(tmp_path, content), 4000, 2))
    arrivals_s = np.array([one.arrival_ns for one in made]) / 1e9
    assert arrivals_s[-1] == pytest.approx(400, rel=0.06)
    assert np.mean(arrivals_s < 200) == pytest.approx(0.25, abs=0.03)
    assert (np.diff(arrivals_s) >= 0).all()
    one_period = [one for one in made if one.arrival_ns < 400e9]
    found = fit(one_period, parts=2)["arrivals"]
    assert found["diurnal"]["weights"] == pytest.approx([0.5, 1.5], abs=0.1)
    assert found.get("burstiness", 1.0) == pytest.approx(1.0, rel=0.12)


def test_shared_prefixes_are_found_and_shared_again(tmp_path):
    rows = trace(1000, prefixes=Prefixes(4, 1024, 0.7))
    found = fit(rows)
    assert found["prefixes"]["count"] == 4 and found["prefixes"]["tokens"] == 1024
    assert found["prefixes"]["share"] == pytest.approx(0.7, abs=0.05)
    again = list(requests_of(described(tmp_path, found), 1000, 9))
    told = [one for one in again if one.prefix]
    assert len(told) / 1000 == pytest.approx(0.7, abs=0.05)
    assert len({one.prefix.ids for one in told}) == 4
    assert np.mean([one.prompt_tokens for one in again]) == pytest.approx(
        np.mean([one.prompt_tokens for one in rows]), rel=0.06
    )


def test_sessions_keep_calls_added_tokens_and_think_time(tmp_path):
    fixed = Sessions(lambda draw: 4, lambda draw: 300, lambda draw: 1500)
    found = fit(trace(60, sessions=fixed))
    assert set(found["sessions"]["calls"]) == {4}
    assert set(found["sessions"]["added_tokens"]) == {300}
    assert set(found["sessions"]["think_ms"]) == {1500}
    again = list(requests_of(described(tmp_path, found), 10, 1))
    assert [one.call_index for one in again] == [0, 1, 2, 3] * 10
    assert {one.tool_duration_ns for one in again if one.call_index} == {1_500_000_000}


def test_no_row_of_the_trace_is_in_the_description():
    rows = trace(500)
    text = yaml.safe_dump(fit(rows))
    exact = {one.prompt_tokens for one in rows if one.prompt_tokens > 1000 and one.prompt_tokens % 100}
    assert len(exact) > 100
    words = set(text.replace("[", " ").replace("]", " ").replace(",", " ").split())
    assert not [value for value in exact if str(value) in words]


def test_equal_seeds_give_equal_requests(tmp_path):
    one = described(tmp_path, fit(trace(200)))
    assert list(requests_of(one, 50, 4)) == list(requests_of(one, 50, 4)) != list(requests_of(one, 50, 5))
    faster = list(requests_of(one, 50, 4, rate_per_s=2 * one.rate_per_s))
    assert faster[-1].arrival_ns == pytest.approx(list(requests_of(one, 50, 4))[-1].arrival_ns / 2, rel=1e-6)


def test_a_public_trace_is_described(tmp_path):
    path = SHARED / "traces" / "AzureLLMInferenceTrace_conv.2023.first200.csv"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    rows = read_trace(path).requests
    found = fit(rows)
    # 199 gaps over the span between the first and the last arrival, to four digits
    rate = 199 / ((rows[-1].arrival_ns - rows[0].arrival_ns) / 1e9)
    assert found["arrivals"]["rate_per_s"] == pytest.approx(rate, rel=1e-3)
    again = list(requests_of(described(tmp_path, found), 4000, 1))
    mean = np.mean([one.prompt_tokens for one in rows])
    assert np.mean([one.prompt_tokens for one in again]) == pytest.approx(mean, rel=0.1)


GOOD = {
    "kind": "workload", "version": 1, "arrivals": {"process": "poisson", "rate_per_s": 1.0},
    "lengths": {"form": "empirical", "bins": [{"share": 1.0, "prompt_tokens": [1, 5], "output_tokens": [2, 3]}]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "trace"}, "kind"),
        ({"arrival": {}}, "did you mean 'arrivals'"),
        ({"arrivals": {"process": "gamma", "rate_per_s": 1.0}}, "burstiness goes with"),
        ({"arrivals": {"process": "poisson", "rate_per_s": 0.0}}, "rate_per_s"),
        ({"lengths": {"form": "empirical"}}, "have bins"),
        ({"lengths": {"form": "lognormal", "bins": GOOD["lengths"]["bins"]}}, "no bins"),
        ({"lengths": {"form": "empirical", "bins": [{"share": 0.5, "prompt_tokens": [1, 5], "output_tokens": [2, 3]}]}},
         "sum to 1"),
        ({"lengths": {"form": "empirical", "bins": [{"share": 1.0, "prompt_tokens": [5, 1], "output_tokens": [2, 3]}]}},
         "ascending"),
        ({"prefixes": {"count": 1, "tokens": 100, "share": 0.5}}, "multiple of 64"),
    ],
)  # fmt: skip
def test_bad_descriptions_name_the_key(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        described(tmp_path, GOOD | changes)


def test_too_little_or_nothing_to_fit_is_said():
    with pytest.raises(ConfigError, match="at least 20"):
        fit(trace(19))
    with pytest.raises(ConfigError, match="all requests arrive at one time"):
        fit([TraceRequest(str(n), 0, 10, 10) for n in range(30)])
    with pytest.raises(ConfigError, match="use empirical"):
        fit([TraceRequest(str(n), n * 10**9, 10, 10) for n in range(30)], form="lognormal")


def test_lognormal_that_misses_its_range_is_one_message():
    spread = {"mean": 10.0, "sigma": 0.1, "min": 900, "max": 901}
    content = GOOD | {"lengths": {"form": "lognormal", "prompt_tokens": spread, "output_tokens": spread}}
    with pytest.raises(ConfigError, match="do not reach"):
        list(requests_of(Description(DescriptionFile.model_validate(content)), 3, 1))
