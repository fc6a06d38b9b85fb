"""Whose error bars a report shows."""

from serving.report.content import _error_section
from serving.report.validated import RUNS, error_band_percent, runs_of

V32, M3 = "deepseek-ai/DeepSeek-V3.2-Exp", "MiniMaxAI/MiniMax-M3"
GLM, GLM52 = "zai-org/GLM-5-FP8", "zai-org/GLM-5.2"


def test_runs_are_of_the_model_and_gpu_or_of_the_same_kernels() -> None:
    for model in (V32, GLM, GLM52, M3):
        assert len(runs_of(model, "H200")) == 3 and {run.model for run in runs_of(model, "H200")} == {model}
        assert runs_of(model, "B200") == ()
    assert runs_of("deepseek-ai/DeepSeek-V3.2", "H200") == runs_of(V32, "H200")
    assert runs_of("zai-org/GLM-5.2-FP8", "H200") == runs_of(GLM, "H200")
    # Weights of another format run other products.
    assert runs_of("zai-org/GLM-5", "H200") == runs_of(GLM52, "H200")
    assert runs_of("deepseek-ai/DeepSeek-V3", "H200") == runs_of("nobody/nothing", "H200") == ()


def test_the_band_is_the_largest_of_the_runs() -> None:
    own = runs_of(V32, "H200")
    assert error_band_percent("TTFT mean", own) == max(abs(run.errors_percent["TTFT mean"]) for run in own)
    assert error_band_percent("TTFT mean") == max(abs(run.errors_percent["TTFT mean"]) for run in RUNS)


def test_a_report_says_what_was_recorded_of_each_of_its_models() -> None:
    rows = [{"model": M3, "hardware": "H200"}, {"model": "deepseek-ai/DeepSeek-V3", "hardware": "H200"}] * 2
    section = _error_section(rows)
    assert section is not None and _error_section([]) is None
    (text,) = section.text
    tpot = error_band_percent("TPOT mean", runs_of(M3, "H200"))
    assert f"{M3} on H200, of whose layers 3 runs were recorded on one GPU" in text
    assert f"mean TPOT within {tpot:g} %." in text
    assert text.count("No run of deepseek-ai/DeepSeek-V3 on H200 has been compared") == 1
    (table,) = section.tables
    assert len(table.rows) == len(RUNS)
