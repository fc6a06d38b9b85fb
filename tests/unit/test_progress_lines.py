"""Progress where stderr is no terminal."""

import pytest

from profiler.commands._options import line_now_and_then


def test_a_line_every_quarter_minute_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, 16.0, 17.0, 40.0, 41.0])
    report = line_now_and_then("model on card", lambda: next(times))
    for done in range(1, 6):
        report(done, 5, "a shot")
    assert capsys.readouterr().err.splitlines() == [
        "model on card: 2 of 5 shots, 16 s",
        "model on card: 4 of 5 shots, 40 s",
        "model on card: 5 of 5 shots, 41 s",
    ]


def test_a_short_run_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter(range(10))
    report = line_now_and_then("model on card", lambda: float(next(times)))
    for done in range(1, 6):
        report(done, 5, "a shot")
    assert capsys.readouterr().err == ""
