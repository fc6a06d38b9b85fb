"""A folder of results: a journal that survives a crash, and the table made of it.

sweep.json     what was asked, and the inputs it depends on
points.jsonl   one line per finished point, appended as it finishes; a torn last line is dropped when read
results.csv    (or results.parquet) one row per point and per refused layout, made at the end
"""

import csv
import errno
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from profiler.core.errors import ConfigError, SparsightError, unknown
from profiler.core.load import atomic_write, read_json

JOURNAL: Final = "points.jsonl"
HEADER: Final = "sweep.json"
ANSWER: Final = "size.json"
FORMATS: Final = ("csv", "parquet")


class Journal:
    """The open journal of a folder; `done` are the points that it holds, by key.

    Every line is on disk before `add` returns. Raises ConfigError when the folder holds results of other inputs, and
    SparsightError when the disk takes no more.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.folder = folder
        self.path = folder / JOURNAL
        self._make(header)
        self.done, size = _read(self.path)
        if self.path.exists() and self.path.stat().st_size > size:
            with self.path.open("r+b") as stream:
                stream.truncate(size)
        self._stream: IO[str] | None = None

    def _make(self, header: Mapping[str, Any]) -> None:
        path = self.folder / HEADER
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"--output: {self.folder} is a file, a folder is needed")
        if path.exists():
            stored = read_json(path)
            if differs := [key for key in header if stored.get(key) != json.loads(json.dumps(header[key]))]:
                raise ConfigError(
                    f"{self.folder} holds results of other inputs ({', '.join(differs)} differ); choose another "
                    "--output, or remove that folder to start again"
                )
            return
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise ConfigError(f"--output: {self.folder} is not empty and holds no results; choose another folder")
        try:
            with atomic_write(path) as stream:
                json.dump(header, stream, indent=2)
                stream.write("\n")
        except OSError as error:
            raise disk_error(self.folder, error, 0) from None

    def add(self, key: str, value: Mapping[str, Any]) -> None:
        self.add_all({key: value})

    def add_all(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        lines = [json.dumps({"key": key, **value}, allow_nan=False) + "\n" for key, value in values.items()]
        try:
            if self._stream is None:
                self._stream = self.path.open("a", encoding="utf-8")
            self._stream.writelines(lines)
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise disk_error(self.folder, error, len(self.done)) from None
        self.done.update({key: dict(value) for key, value in values.items()})

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            try:
                stream.close()
            except OSError as error:  # what could not be flushed is tried again by close
                if kind is None:
                    raise disk_error(self.folder, error, len(self.done)) from None


def disk_error(folder: Path, error: OSError, kept: int) -> SparsightError:
    """One message for a disk that takes no more, saying what is kept and how to go on."""
    reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return SparsightError(
        f"{folder}: cannot be written: {reason}; {kept} finished points are kept, the same command goes on from there"
    )


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Points by key and the bytes that hold whole lines. Raises ConfigError for a damaged line before the last."""
    if not path.exists():
        return {}, 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    done: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            value = json.loads(line)
            done[value.pop("key")] = value
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(f"{path}:{number}: not a line of results") from None
    return done, len(whole)


def read_results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was asked and the points of a folder. Raises ConfigError when it holds none."""
    if not (folder / HEADER).is_file():
        raise ConfigError(f"{folder}: holds no results ({HEADER} is missing); give the --output of sweep or size")
    header = read_json(folder / HEADER)
    if not isinstance(header, dict):
        raise ConfigError(f"{folder / HEADER}: the top level must be a mapping")
    if "sweep" not in header:
        raise ConfigError(f"{folder / HEADER}: the key 'sweep' is missing; the file is not one of sweep or size")
    if (folder / ANSWER).is_file():
        header["size"] = read_json(folder / ANSWER)
    elif header.get("command") == "size":
        raise ConfigError(f"{folder}: the search has not ended; the same size command goes on from where it is")
    points, _ = _read(folder / JOURNAL)
    return header, list(points.values())


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every column in the order of its first appearance, longest rows first, so that equal rows give equal columns."""
    names: dict[str, None] = {}
    for row in sorted(rows, key=len, reverse=True):
        names.update(dict.fromkeys(row))
    return list(names)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV with a header; empty cells for None."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns_of(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def write_table(folder: Path, rows: Sequence[Mapping[str, Any]], style: str) -> Path:
    """results.csv or results.parquet, whole or not at all. Raises ConfigError for Parquet without pyarrow."""
    if style not in FORMATS:
        raise unknown("format", style, FORMATS)
    path = folder / f"results.{style}"
    try:
        if style == "csv":
            with atomic_write(path) as stream:
                stream.write(csv_text(rows))
        else:
            _write_parquet(path, rows)
    except OSError as error:
        raise disk_error(folder, error, len(rows)) from None
    return path


def require_parquet() -> None:
    """Raises ConfigError when Parquet cannot be written here."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--format parquet needs pyarrow: pip install 'sparsight[parquet]'; csv needs nothing"
        ) from None


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    names = columns_of(rows)
    part = path.with_name(f".{path.name}.tmp")
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    try:
        pyarrow.parquet.write_table(table, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
