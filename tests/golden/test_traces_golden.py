"""Public traces read to their published check values; nothing of these files is in the repository."""

import hashlib
from pathlib import Path

import pytest

from serving.trace_tools.summary import summarise
from serving.trace_tools.write import write_trace
from serving.traces import open_trace, read_trace

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"

# format, sum of input and of output tokens, last arrival in ns; 200 rows each
CHECKS = {
    "mooncake_fast25_conversation_trace.first200.jsonl": ("mooncake", 2_782_179, 71_379, 72_000_000_000),
    "mooncake_fast25_synthetic_trace.first200.jsonl": ("mooncake", 2_663_480, 38_364, 58_501_000_000),
    "AzureLLMInferenceTrace_code.2023.first200.csv": ("azure", 414_215, 4_907, 199_089_585_000),
    "AzureLLMInferenceTrace_conv.2023.first200.csv": ("azure", 180_695, 47_050, 61_263_537_000),
    "vidur_splitwise_conv.first200.csv": ("vidur", 180_695, 47_050, 61_263_537_000),
    "llmservingsim_sharegpt_qwen3-32b_300_sps10.first200.notokens.jsonl": (
        "jsonl",
        170_906,
        135_527,
        18_909_729_446,
    ),
}


def shared(name: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{name} is absent: the public traces are not part of the repository")
    return path


@pytest.mark.parametrize("name", CHECKS)
def test_sums_and_last_arrival(name):
    trace = read_trace(shared(name))
    found = (
        trace.format,
        sum(request.prompt_tokens for request in trace.requests),
        sum(request.output_tokens for request in trace.requests),
        trace.requests[-1].arrival_ns,
    )
    assert len(trace.requests) == 200
    assert found == CHECKS[name]


@pytest.mark.parametrize(
    ("name", "blocks", "unique", "hit_blocks", "hit_tokens", "percent"),
    [
        ("mooncake_fast25_conversation_trace.first200.jsonl", 5_537, 5_215, 322, 164_864, 5.93),
        ("mooncake_fast25_synthetic_trace.first200.jsonl", 5_330, 5_007, 323, 164_803, 6.19),
    ],
)
def test_prefix_hits_of_an_unlimited_cache(name, blocks, unique, hit_blocks, hit_tokens, percent):
    hits = summarise(open_trace(shared(name)).requests)["prefix_hits"]
    assert (hits["block_tokens"], hits["blocks"], hits["unique_blocks"]) == (512, blocks, unique)
    assert (hits["hit_blocks"], hits["hit_tokens"]) == (hit_blocks, hit_tokens)
    assert round(100 * hits["share_of_prompt_tokens"], 2) == percent


def test_vidur_and_azure_tell_the_same_requests():
    azure = read_trace(shared("AzureLLMInferenceTrace_conv.2023.first200.csv")).requests
    assert read_trace(shared("vidur_splitwise_conv.first200.csv")).requests == azure


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith("mooncake")])
def test_mooncake_rows_come_back_byte_by_byte_over_json_lines(tmp_path, name):
    """The public ids number blocks in order of first appearance, as ours do: the way there and back changes nothing."""
    write_trace(tmp_path / "a.jsonl", open_trace(shared(name)).requests, "jsonl")
    write_trace(tmp_path / "b.jsonl", open_trace(tmp_path / "a.jsonl").requests, "mooncake")
    assert (tmp_path / "b.jsonl").read_bytes() == shared(name).read_bytes()


def test_vidur_rows_come_back_as_the_same_values(tmp_path):
    source = shared("vidur_splitwise_conv.first200.csv")
    write_trace(tmp_path / "a.csv", open_trace(source).requests, "vidur")
    ours, theirs = (tmp_path / "a.csv").read_text().splitlines(), source.read_text().splitlines()
    assert ours[0] == theirs[0]
    assert [float(row.split(",")[0]) for row in ours[1:]] == [round(float(row.split(",")[0]), 9) for row in theirs[1:]]
    assert [row.split(",")[1:] for row in ours[1:]] == [row.split(",")[1:] for row in theirs[1:]]


def test_summary_of_the_code_trace_against_counts_made_by_hand():
    path = shared("AzureLLMInferenceTrace_code.2023.first200.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    prompts = sorted(int(row[1]) for row in rows)
    figures = summarise(open_trace(path).requests)
    assert figures["share_within_topk"]["prompt"] == sum(prompt <= 2048 for prompt in prompts) / 200
    assert figures["prompt_tokens"]["p50"] == (prompts[99] + prompts[100]) / 2
    assert figures["prompt_tokens"]["max"] == prompts[-1]
    assert figures["arrivals"]["requests_per_s"] == pytest.approx(200 / 199.089585)
    assert figures["prefix_hits"] is None


def test_reading_changes_no_file():
    for name in CHECKS:
        path = shared(name)
        before = hashlib.sha256(path.read_bytes()).digest()
        read_trace(path)
        assert hashlib.sha256(path.read_bytes()).digest() == before
