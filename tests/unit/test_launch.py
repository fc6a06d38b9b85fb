"""Commands that start: known good and bad configurations of public reports, and files that parse."""

import shlex
from itertools import pairwise

import pytest
import yaml
from click.testing import CliRunner

from profiler.core.errors import CapacityError, ConfigError
from profiler.core.hardware import load_hardware
from profiler.core.paths import model_config_root
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.commands.launch import command
from serving.launch import compose, kubernetes, launch, shell

MODEL = "deepseek-ai/DeepSeek-V3.2-Exp"
DP8 = Parallel(dp=8, ep=8)


@pytest.fixture(scope="module")
def h200():
    return load_hardware("H200")


def made(hardware, parallel=DP8, **changes):
    return launch(load_model(MODEL), hardware, parallel, **{"max_model_len": 81920} | changes)


def flags(text):
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return words[words.index("serve") + 1 :]


def test_the_public_pair_of_runs(h200):
    """docs.gpustack.ai performance lab: on 8 x H200 tp 1 dp 8 ep 8 starts at 81,920 tokens and not at 163,840."""
    assert made(h200, kv_dtype="fp8").budget.fits
    with pytest.raises(CapacityError):
        made(h200, kv_dtype="fp8", max_model_len=163840)


def test_every_setting_is_written_down(h200):
    words = flags(shell(made(h200)))
    given = dict(pairwise(words))
    assert words[0] == MODEL and "--enable-expert-parallel" in words
    assert "--pipeline-parallel-size" not in words
    for name, value in {
        "--tensor-parallel-size": "1", "--data-parallel-size": "8", "--max-model-len": "81920", "--block-size": "64",
        "--kv-cache-dtype": "auto", "--gpu-memory-utilization": "0.9", "--max-num-seqs": "1024",
        "--max-num-batched-tokens": "8192",
    }.items():  # fmt: skip
        assert given[name] == value, name


def test_bf16_has_the_engines_name(h200):
    assert "bfloat16" in flags(shell(made(h200, kv_dtype="bf16")))


def test_what_fits_without_headroom_needs_a_yes(h200):
    tight = {"max_model_len": 150_000}
    with pytest.raises(CapacityError, match="accept the risk"):
        made(h200, **tight)
    assert any("risky" in note for note in made(h200, accept_risk=True, **tight).notes)


def test_illegal_and_not_offered_splits_are_refused(h200):
    with pytest.raises(ConfigError, match="do not divide by tp 3"):
        made(h200, Parallel(tp=3))
    with pytest.raises(ConfigError, match="over all ranks"):
        made(h200, Parallel(tp=2, dp=4, ep=4))


def test_several_machines_get_one_script(h200):
    two = made(h200, Parallel(dp=16, ep=16))
    text = shell(two)
    assert two.nodes == 2 and text.count("vllm serve") == 2
    assert "--headless" in text and '--data-parallel-start-rank "$((NODE * 8))"' in text
    for write in (compose, kubernetes):
        with pytest.raises(ConfigError, match="spans 2"):
            write(two, "image:tag")
    with pytest.raises(ConfigError, match="fill whole machines"):
        made(h200, Parallel(tp=16, ep=16))


def test_compose_and_kubernetes_parse_and_agree_with_the_shell(h200):
    one = made(h200, Parallel(tp=8, ep=8))
    arguments = list(one.arguments)
    assert flags(shell(one)) == arguments
    service = yaml.safe_load(compose(one, "image:tag"))["services"]["vllm"]
    assert service["command"] == arguments and service["image"] == "image:tag"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 8
    deployment, entry = yaml.safe_load_all(kubernetes(one, "image:tag"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == arguments and container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert entry["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_a_path_with_spaces_is_quoted(h200):
    text = shell(made(h200, model="/models/my model; rm -rf /"))
    assert flags(text)[0] == "/models/my model; rm -rf /"


def test_of_a_config_json_the_engine_loads_the_folder(tmp_path):
    text = (model_config_root() / f"{MODEL}.json").read_text()
    for name in ("config.json", "other.json"):
        (tmp_path / name).write_text(text)
    asked = ["--hardware", "H200", "--dp", "8", "--max-model-len", "81920"]
    runner = CliRunner()
    assert flags(runner.invoke(command, [str(tmp_path / "config.json"), *asked]).output)[0] == str(tmp_path)
    other = str(tmp_path / "other.json")
    refused = runner.invoke(command, [other, *asked])
    assert isinstance(refused.exception, ConfigError) and "give it as --model-path" in str(refused.exception)
    assert flags(runner.invoke(command, [other, *asked, "--model-path", "/models/v32"]).output)[0] == "/models/v32"
