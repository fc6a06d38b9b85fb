"""Files that are broken: one message with the place, never a traceback and never one of two values."""

from pathlib import Path

import pytest

from profiler.core.errors import ConfigError
from profiler.core.load import atomic_write, read_json, read_mapping, read_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", ":3:1: not valid YAML: key 'a' appears twice"),
        ("a: {value: 1, source: x, value: 2}\n", ":1:26: not valid YAML: key 'value' appears twice"),
        ("a: [1\n", "not valid YAML"),
        ("? [a]\n: 1\n", "unhashable key"),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_broken_yaml(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml") as caught:
        read_yaml(path)
    assert message in str(caught.value)


def test_yaml_anchors_and_merges_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert read_mapping(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "key 'a' appears twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": 1', "x.json:1:8: not valid JSON"),
        ("", "x.json:1:1: not valid JSON"),
    ],
)
def test_broken_json(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_json(path)
    assert message in str(caught.value) and "x.json" in str(caught.value)


def test_a_folder_that_takes_no_files_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "a.csv", tmp_path / ("n" * 300) / "a.csv"):
        with pytest.raises(ConfigError, match=r"a\.csv cannot be written: "), atomic_write(path):
            pass
