"""Batches of unequal requests: their texts, their means, and which kernels they measure."""

import pytest

from profiler.core.batch_text import Batch, batch_text, parse_batch
from profiler.core.errors import ConfigError
from profiler.core.registry import load_model
from profiler.core.shots import Shot
from profiler.kernels import skew
from profiler.kernels._axes import GRIDS, Limits
from profiler.sweep import split_by_prefills

V32 = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
M3 = load_model("MiniMaxAI/MiniMax-M3")
FULL = Limits("full", 1, (1,), 163_840, 16_384, 256)


def used(shots: list[Shot], use: str) -> list[Shot]:
    return [shot for shot in shots if shot.fills[0].key[2] == use]


def test_a_batch_is_written_and_read_back() -> None:
    requests = ((1, 1023), (512, 4096), (1, 65535), (512, 4096), (1, 1023), (1, 0))
    assert batch_text(requests) == ("2x512@4096 1x1@0", "1x65536 2x1024")
    assert parse_batch(*batch_text(requests)) == Batch(((512, 4096), (512, 4096), (1, 0)), (65536, 1024, 1024))
    assert batch_text(((1, 7),)) == ("none", "1x8") and parse_batch("none", "none") == Batch((), ())


@pytest.mark.parametrize(
    ("prefills", "decodes"), [("2x512", "none"), ("none", "0x5"), ("", "none"), ("none", "1x5  1x4")]
)
def test_a_text_of_another_form_is_refused_with_its_place(prefills: str, decodes: str) -> None:
    with pytest.raises(ConfigError, match=r"skew\.csv:7: .* is not a batch"):
        parse_batch(prefills, decodes, "skew.csv:7")


def test_batches_for_the_fit_have_the_mean_of_a_measured_cell() -> None:
    axes = GRIDS["full"]
    shots = used(skew.shots(V32, FULL), "fit")
    assert len(shots) > 40
    for shot in shots:
        lengths = [context + 1 for _, context in shot.requests]
        assert len(lengths) in axes.decode_requests
        assert sum(lengths) % len(lengths) == 0 and sum(lengths) // len(lengths) in axes.decode_kv_tokens
        assert max(lengths) >= 2 * sum(lengths) / len(lengths)


def test_held_out_batches_differ_from_those_of_the_fit_in_number_and_distribution() -> None:
    shots = skew.shots(V32, FULL)
    fitted = {len(shot.requests) for shot in used(shots, "fit")}
    for shot in used(shots, "held_out"):
        assert len(shot.requests) not in fitted and len(set(shot.requests)) > 2


def test_each_prefill_path_is_measured_with_its_own_kernel() -> None:
    shots = skew.shots(V32, FULL)
    for use in ("joint", "prefills"):
        dense = [shot for shot in used(shots, use) if shot.regime == "dense"]
        assert dense and all(shot.fills[0].components == ("mla_dense_prefill",) for shot in dense)
        prefills = [request for shot in dense for request in shot.requests if request[0] > 1]
        assert max(new + context for new, context in prefills) <= 2_048
        sparse = [shot for shot in used(shots, use) if shot.regime == "sparse"]
        assert sparse and all("mla_dense_prefill" not in shot.fills[0].components for shot in sparse)
    assert all(len(used([shot], "joint")) == (len({n > 1 for n, _ in shot.requests}) == 2) for shot in shots)


def test_an_engine_that_runs_one_prefill_a_step_is_given_no_more() -> None:
    shots = skew.shots(M3, FULL)
    kept, left_out = split_by_prefills(shots, 1)
    assert left_out == used(shots, "prefills") and len(kept) + len(left_out) == len(shots)
    assert split_by_prefills(shots, None) == (shots, [])
