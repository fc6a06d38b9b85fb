"""Speculative decoding in cluster files, in the price of a step, and in a replay."""

from dataclasses import replace

import priced
import pytest
import yaml

import serving
from profiler.core.errors import ConfigError, CoverageError
from profiler.core.hardware import load_hardware
from profiler.core.kv import kv_layout
from profiler.core.registry import load_model
from profiler.core.stack import fold
from profiler.core.types import Parallel
from serving.config import load_cluster
from serving.core.shape import StepShape
from serving.cost import build_cost
from serving.cost.speculative import build_speculative
from serving.metrics import summary
from serving.speculation import SpeculativeFile, kernel_notes, speculation_of
from serving.terminal import run_lines
from serving.traces import Trace, TraceRequest

SPEC = load_model(priced.MODEL)
H200 = load_hardware("H200")
DP8 = Parallel(dp=8, ep=8)
ONE = dict(fold(replace(SPEC, layers=SPEC.layers[-1:])).components)
BASE = {"hardware": H200, "spec": SPEC, "parallel": DP8, "max_num_batched_tokens": 4096}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundles")
    priced.bundle(root)
    return root


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return priced.bundle(tmp_path_factory.mktemp("bundle"))


def verifying(requests, keys, tokens, verify_as):
    """A step in which `requests` requests of `keys` keys each, drafts included, verify `tokens` drafts."""
    drafted = StepShape((), requests, requests * (keys + 1), keys + 1, requests * priced.CAP, requests)
    sampled = requests * (1 + tokens)
    if verify_as == "prefill":
        rows = ((1 + tokens, keys - 1 - tokens),) * requests
        return StepShape(rows, 0, 0, 0, 0, sampled, 1, drafted)
    count = requests * (1 + tokens)
    total = requests * sum(keys - row for row in range(1 + tokens))
    return StepShape((), count, total, keys, count * priced.CAP, sampled, 1, drafted)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_is_the_model_and_its_drafts(bundle, tokens):
    """The model on 4 x (1 + k) rows; the MTP layer on the same rows and then k - 1 times on one per request."""
    cost = build_speculative(tokens, "rows", bundle=bundle, **BASE)
    shape = verifying(4, 9000, tokens, "rows")
    plain = build_cost(bundle=bundle, **BASE)
    shapes = [shape] + [None] * 7
    rest = [None] * 7
    idle = (1 + tokens) * 7
    lines = {entry.component: entry for entry in cost.explain(shapes)}
    assert sum(round(entry.us * 1e3) for entry in lines.values()) == cost.step_ns(shapes)

    rows = 4 * (1 + tokens)
    for name, count in ONE.items():
        if name.category != "dense":
            continue
        calls = count + 2 * (name.name == "input_norm")
        own = lines[f"draft 1: {name.name}"]
        assert own.calls == calls
        assert own.us == pytest.approx(calls * priced.token_us(name.name, rows), rel=1e-5)
        if tokens > 1:
            own = lines[f"further drafts: {name.name}"]
            assert own.us == pytest.approx((tokens - 1) * calls * priced.token_us(name.name, 4), rel=1e-4)
    for name in ("index_scores", "index_topk"):
        keys = shape.decode_kv_sum_tokens / rows
        assert lines[f"draft 1: {name}"].us == pytest.approx(priced.decode_us(name, rows, keys), rel=1e-4)
    assert lines["draft 1: lm_head"].us == pytest.approx(priced.token_us("lm_head", 4), rel=1e-4)
    assert lines["lm_head"].us == pytest.approx(priced.token_us("lm_head", rows), rel=1e-5)
    assert lines["draft 1: eh_proj"].provenance == "computed"
    # 2 x 7168 x 7168 weights of two bytes through 4.8 TB/s: bound by memory at so few tokens.
    moved = 2 * 2 * 7168 * 7168 + 2 * rows * 3 * 7168
    assert lines["draft 1: eh_proj"].us == pytest.approx(moved / (H200.hbm_gbps * 1e3), rel=1e-4)
    experts = lines["draft 1: experts"]
    assert experts.us == pytest.approx(
        priced.experts_us(rows + idle, 32 * (1 - (1 - 8 / 256) ** (rows + idle))), rel=1e-5
    )
    target = plain.step_ns([shape._replace(drafted=None), *rest])
    assert cost.target.step_ns(shapes) > target, "a rank without work computes 1 + k dummy tokens, not one"


def test_verification_as_a_prefill_is_another_price(bundle):
    as_rows = build_speculative(3, "rows", bundle=bundle, **BASE)
    as_prefill = build_speculative(3, "prefill", bundle=bundle, **BASE)
    rest = [None] * 7
    rows = as_rows.step_ns([verifying(4, 9000, 3, "rows"), *rest])
    prefill = as_prefill.step_ns([verifying(4, 9000, 3, "prefill"), *rest])
    assert rows != prefill
    assert rows / prefill == pytest.approx(1, abs=0.5)


def test_tables_without_rows_of_a_verification_are_refused(bundle):
    with pytest.raises(
        CoverageError, match=r"no decode rows of .* with decode_query_tokens 4.*verify_as: rows or prefill"
    ):
        build_speculative(3, "table", bundle=bundle, **BASE)


def test_tables_with_rows_of_a_verification_price_it(tmp_path):
    """Rows of four query tokens at 1.5 times the time of one: the attention-like kernels of the model follow them."""
    own = priced.tables(SPEC)
    changed = {}
    for category in ("indexer", "sparse_attention"):
        columns = own[category].columns
        rows = list(zip(*columns.values(), strict=True))
        names = list(columns)
        query, time, requests = (names.index(n) for n in ("decode_query_tokens", "time_us", "decode_requests"))
        more = []
        for row in rows:
            if row[requests]:
                again = list(row)
                again[query], again[time] = 4, 1.5 * row[time]
                more.append(tuple(again))
        changed[category] = priced.make_table(category, rows + more)
    bundle = priced.bundle(tmp_path, changed)
    cost = build_speculative(3, "table", bundle=bundle, **BASE)
    drafted = StepShape((), 8, 8 * 5001, 5001, 8 * priced.CAP, 8)
    shape = StepShape((), 8, 8 * 5000, 5000, 8 * priced.CAP, 32, 4, drafted)
    lines = {entry.component: entry.us for entry in cost.explain([shape] + [None] * 7)}
    for name in ("index_scores", "index_topk"):
        assert lines[name] == pytest.approx(61 * 1.5 * priced.decode_us(name, 8, 5000), rel=1e-5)
        assert lines[f"further drafts: {name}"] == pytest.approx(2 * priced.decode_us(name, 8, 5001), rel=1e-4)
    assert lines["sparse_mla"] == pytest.approx(61 * 1.5 * priced.decode_us("sparse_mla", 8, priced.CAP), rel=1e-5)
    assert lines["embedding"] == pytest.approx(priced.token_us("embedding", 32), rel=1e-4)


def cluster_file(folder, speculative, **engine):
    content = {
        "instances": [
            {
                "model": priced.MODEL, "hardware": "H200", "parallel": {"dp": 8, "ep": 8},
                "engine": {"max_model_len": 4096, "max_num_batched_tokens": 2048, "max_num_seqs": 16,
                           "num_gpu_blocks": 400, "speculative": speculative} | engine,
            }
        ]
    }  # fmt: skip
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_replay_counts_what_was_accepted(tmp_path, bundles):
    rows = tuple(TraceRequest(str(i), i * 3_000_000, 200 + 97 * i % 1500, 40) for i in range(60))
    lengths = {"tokens": 3, "acceptance_lengths": [1.84, 2.50, 2.99, 3.33], "verify_as": "rows", "seed": 5}
    result = serving.replay(cluster_file(tmp_path, lengths), Trace("jsonl", rows), bundle_root=bundles)
    assert [one.emitted_tokens for one in result.records] == [40] * 60
    figures = summary(result)
    drafts = figures["instances"][0]["speculative"]
    assert drafts["asked_rates"][0]["rates"] == pytest.approx([0.84, 0.66, 0.49])
    assert drafts["accepted_by_position"] == pytest.approx([0.84, 0.66, 0.49], abs=0.06)
    assert drafts["mean_acceptance_length"] == pytest.approx(1 + sum(drafts["accepted_by_position"]))
    assert any("priced as 4 decode rows" in note for note in drafts["notes"])
    assert any("tokens per verification" in text for _, text in run_lines(figures))
    again = serving.replay(cluster_file(tmp_path, lengths), Trace("jsonl", rows), bundle_root=bundles)
    assert again.records == result.records
    assert not result.deployments[0].async_scheduling


def test_steps_of_one_request_by_closed_form(tmp_path, bundles):
    """40 tokens: the first from the prefill, then one, or with every draft accepted four, per step."""
    alone = Trace("jsonl", (TraceRequest("0", 0, 300, 40),))
    for rates, steps in (([0.0] * 3, 40), ([1.0] * 3, 1 + 10), ([1.0, 0.0, 0.0], 1 + 20)):
        drafts = {"tokens": 3, "acceptance": rates, "verify_as": "rows"}
        path = cluster_file(tmp_path, drafts, dp_sync_interval=1)
        result = serving.replay(path, alone, bundle_root=bundles)
        assert result.steps == steps
        assert result.records[0].emitted_tokens == 40


def test_the_draft_layer_has_caches_of_its_own():
    """docs: 61 layers of 788 bytes in fp8_ds_mla, and one more for the draft layer."""
    with_layer = kv_layout(SPEC, DP8, "sm90", "fp8_ds_mla", mtp_layers=1)
    assert (with_layer.bytes_per_token, 61 * 788) == (62 * 788, 48_068)


BAD = [
    ({"tokens": 0, "acceptance": [0.5]}, r"speculative\.tokens"),
    ({"tokens": 2}, "give one of acceptance"),
    ({"tokens": 1, "acceptance": [0.5], "acceptance_lengths": [1.5]}, "give one of acceptance"),
    ({"tokens": 3, "acceptance": [0.5, 0.4]}, "has 2 values, 3 draft tokens need 3"),
    ({"tokens": 2, "acceptance": [0.5, 0.6]}, "draft 2 is 0.6; it must lie between 0 and 0.5"),
    ({"tokens": 1, "acceptance": [1.2]}, "draft 1 is 1.2"),
    ({"tokens": 1, "acceptance": [float("nan")]}, "draft 1 is nan"),
    # The public table of MiniMax-M3's EAGLE3 drafts falls from seven to eight drafts: 3.52, 3.51.
    (
        {"tokens": 8, "acceptance_lengths": [1.79, 2.39, 2.78, 3.02, 3.21, 3.30, 3.52, 3.51]},
        "draft 7 is 0.22; it must lie between 0 and 0.09",
    ),
    ({"tokens": 1, "acceptance": [0.5], "verify_as": "rowz"}, "verify_as"),
    ({"tokens": 1, "acceptance_file": "absent.csv"}, "absent.csv"),
]


@pytest.mark.parametrize(("speculative", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_settings_name_file_and_key(tmp_path, speculative, message):
    path = cluster_file(tmp_path, speculative)
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r":1: the columns must be"),
        ("context,p1\n1,0.5\n", r":1: the columns must be"),
        ("up_to_context_tokens,p1\n", "no rates"),
        ("up_to_context_tokens,p1\n100,0.5,0.4\n", r":2: 3 fields, 2 expected"),
        ("up_to_context_tokens,p1\n100,x\n", r":2: .* is not a whole number followed by rates"),
        ("up_to_context_tokens,p1\n100,0.5\n100,0.4\n", r":3: up_to_context_tokens must rise"),
        ("up_to_context_tokens,p1,p2\n100,0.5,0.6\n", r":2: the rate of draft 2"),
    ],
)
def test_bad_tables_name_file_and_line(tmp_path, text, message):
    (tmp_path / "rates.csv").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        speculation_of(SpeculativeFile(tokens=1 + ("p2" in text), acceptance_file="rates.csv"), tmp_path)
    assert "rates.csv" in str(caught.value)


def test_rates_by_context(tmp_path):
    (tmp_path / "rates.csv").write_text("up_to_context_tokens,p1,p2\n1000,1,1\n4096,0,0\n")
    file = SpeculativeFile(tokens=2, acceptance_file="rates.csv", verify_as="rows")
    acceptance = speculation_of(file, tmp_path).acceptance
    assert [acceptance.accepted(1, 1, context) for context in (1, 1000, 1001, 9000)] == [2, 2, 0, 0]


def test_rates_that_end_before_the_model_length_are_refused(tmp_path, bundles):
    (tmp_path / "rates.csv").write_text("up_to_context_tokens,p1\n1000,0.9\n")
    path = cluster_file(tmp_path, {"tokens": 1, "acceptance_file": "rates.csv", "verify_as": "rows"})
    trace = Trace("jsonl", (TraceRequest("0", 0, 10, 2),))
    with pytest.raises(ConfigError, match="rates end at contexts of 1000 tokens, max_model_len is 4096"):
        serving.replay(path, trace, bundle_root=bundles)


def test_what_does_not_go_together(tmp_path):
    drafts = {"tokens": 1, "acceptance": [0.5]}
    with pytest.raises(ConfigError, match="async_scheduling with speculative"):
        load_cluster(cluster_file(tmp_path, drafts, async_scheduling=True))
    content = yaml.safe_load(cluster_file(tmp_path, drafts).read_text())
    content["instances"][0]["parallel"]["pp"] = 2
    (tmp_path / "pp.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="speculative with pp 2"):
        load_cluster(tmp_path / "pp.yaml")


def test_notes_on_the_kernels():
    def notes(tokens, verify_as="table", architecture="sm90"):
        file = SpeculativeFile(tokens=tokens, acceptance=[0.5] * tokens, verify_as=verify_as)
        return " | ".join(kernel_notes(speculation_of(file, None), SPEC, architecture))

    assert notes(1) == ""
    assert "4 are split" not in notes(3), "one, two and four query tokens are native"
    assert "3 are split into rows" in notes(2)
    assert "split" not in notes(2, architecture="sm100")
    assert "prefills of 2 tokens" in notes(1, "prefill")
    assert "1 draft layer" in notes(2)
