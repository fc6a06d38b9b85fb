"""Pages of validated recordings: what is drawn, how steps are chosen, and that nothing of a recording is run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from plotly.offline import get_plotlyjs
from test_validate import recording

from profiler.core.errors import ConfigError
from serving.commands.validate import command
from serving.recording.pages import MOST_POINTS, page_paths, recording_page
from serving.recording.step_errors import PricedStep, by_kind
from serving.recording.validate import Validation, validate

EVIL = "<img src=x onerror=alert(1)>"


def plots(page: str) -> dict[str, list[dict[str, Any]]]:
    """The traces of every plot of the page by the plot's id."""
    found = re.finditer(r'"((?:ttft|tpot|latency|section)\d+)",\s*(?=\[)', page)
    return {one[1]: json.JSONDecoder().raw_decode(page, one.end())[0] for one in found}


def with_steps(one: Validation, steps: list[PricedStep]) -> Validation:
    return replace(one, steps=tuple(steps), device=by_kind(steps, "device"))


def step(index: int, kind: str, recorded_us: float, priced_us: float) -> PricedStep:
    return PricedStep(index, kind, 1, priced_us, (recorded_us, priced_us), None)


def test_the_command_writes_a_page_for_every_recording(tmp_path: Path) -> None:
    paths = [str(recording(tmp_path, scale)) for scale in (1.0, 1.25)]
    folder = tmp_path / "new" / "pages"
    folder.mkdir(parents=True)
    (folder / "one-1.25.html").write_text("an older page")
    result = CliRunner().invoke(command, [*paths, "--html", str(folder)])
    assert result.exit_code == 0, result.output
    assert sorted(one.name for one in folder.iterdir()) == ["one-1.0.html", "one-1.25.html"]
    text = (folder / "one-1.25.html").read_text()
    assert "one-1.25: 1 requests, deepseek-ai/DeepSeek-V3.2-Exp, 6 layers, decode-graphs, vLLM 0.26.0" in text
    assert "<td>decode</td><td>3</td>" in text and "<td>-20.0 %</td>" in text and "Left: every step;" in text
    drawn = plots(text)
    assert list(drawn) == [*(f"{name}{n}" for name in ("ttft", "tpot", "latency") for n in range(3)), "section00",
                           "section01"]  # fmt: skip
    scatter = {one["name"]: one for one in drawn["section00"] if "name" in one}
    assert {name: len(one["x"]) for name, one in scatter.items()} == {"decode: 3": 3, "first: 1": 1}
    for one in scatter.values():
        assert one["y"] == pytest.approx([0.8 * x for x in one["x"]], rel=2e-3)
    errors = {one["name"]: (one["x"], one["y"]) for one in drawn["section01"]}
    assert errors["first"] == (pytest.approx([-20, -20], abs=0.2), [0, 1])
    assert errors["decode"] == (pytest.approx([-20] * 4, abs=0.2), pytest.approx([0, 1 / 3, 2 / 3, 1]))


def test_nothing_is_fetched_and_names_are_escaped(tmp_path: Path) -> None:
    path = recording(tmp_path, 1.0)
    evil = path.rename(path.with_name(EVIL))
    meta = json.loads((evil / "vllm" / "meta.json").read_text()) | {"mode": EVIL, "vllm_version": EVIL}
    (evil / "vllm" / "meta.json").write_text(json.dumps(meta))
    result = CliRunner().invoke(command, [str(evil), "--html", str(tmp_path / "pages")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "pages" / f"{EVIL}.html").read_text()
    own = text.replace(get_plotlyjs(), "")
    assert "<img" not in own and "&lt;img src=x onerror=alert(1)&gt;: 1 requests" in own
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=|@import|url\(", own), "nothing is fetched"


def test_of_many_steps_some_are_drawn_evenly_and_all_are_counted(tmp_path: Path) -> None:
    few = [step(0, "first", 50e3, 40e3), step(1, "mixed", 20e3, 20e3)]
    many = [step(2 + n, "decode", 1e3 + n, (1e3 + n) * (1.5 if n % 4 == 0 else 1.0)) for n in range(4 * MOST_POINTS)]
    text = recording_page(with_steps(validate(recording(tmp_path, 1.0)), [*few, *many]))
    assert f"Left: at most {MOST_POINTS} steps of each kind, evenly chosen;" in text
    scatter, errors = plots(text)["section00"], plots(text)["section01"]
    drawn = next(one for one in scatter if one.get("name") == f"decode: {MOST_POINTS} of {4 * MOST_POINTS:,}")
    assert len(drawn["x"]) == MOST_POINTS
    assert (drawn["x"][0], drawn["x"][-1]) == (1.0, pytest.approx(1.0 + (4 * MOST_POINTS - 1) / 1e3))
    gaps = {round(1e3 * (after - before)) for before, after in zip(drawn["x"], drawn["x"][1:], strict=False)}
    assert gaps == {4, 5}
    share = next(one for one in errors if one["name"] == "decode")
    exact = [y for x, y in zip(share["x"], share["y"], strict=True) if x < 1.0]
    assert max(exact) == pytest.approx(0.75, abs=2 / MOST_POINTS) and share["y"][-1] == 1.0
    lines = [one for one in scatter if one["mode"] == "lines"]
    assert [one["y"][0] / one["x"][0] for one in lines] == pytest.approx([1.1, 0.9, 1.0])
    assert all(one["x"][0] < 1.0 and one["x"][1] > 50.0 for one in lines), (
        "from below the shortest to above the longest"
    )


def test_a_log_without_times_of_the_device_has_no_such_plots(tmp_path: Path) -> None:
    found = validate(recording(tmp_path, 1.0))
    blind = with_steps(found, [replace(one, device_us=None) for one in found.steps])
    text = recording_page(blind)
    assert "Steps on the device" not in text and len(plots(text)) == 9


def test_pages_that_cannot_be_written_are_refused_before_anything_is_replayed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "chat.html").mkdir()
    missing = [tmp_path / "a" / "long", tmp_path / "b" / "long"]
    for recordings, folder, message in (
        (missing[:1], tmp_path / "file", "file is a file, not a folder"),
        (missing[:1], tmp_path / "file" / "below", "file is a file, not a folder"),
        (missing, tmp_path / "pages", r"a/long and .*b/long have the same name, and would share .*long\.html"),
        ([tmp_path / "chat"], tmp_path, r"chat\.html is a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            page_paths(recordings, folder)
        arguments = [*map(str, recordings), "--html", str(folder)]
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert not (tmp_path / "pages").exists()
    assert page_paths(missing[:1], tmp_path / "pages") == [tmp_path / "pages" / "long.html"]
