"""Reading and writing files: safe YAML, JSON with positions in its errors, atomic writes."""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import yaml

from profiler.core.errors import ConfigError

# Errors of a path, not of the disk.
_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)


def read_text(path: Path) -> str:
    """The file's text. Raises ConfigError naming the path when it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, a file is needed") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(f"key {key!r} appears twice")
        result[key] = value
    return result


def read_json(path: Path) -> Any:
    """Parsed JSON. Raises ConfigError with line and column when malformed, or when a key appears twice."""
    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=_no_duplicate_keys)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{path}: not valid JSON: {error}") from None


if TYPE_CHECKING:
    _SafeLoader = yaml.SafeLoader
else:
    # libyaml's parser, where PyYAML has it, reads the meta.yaml of a bundle eight times as fast.
    _SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_SafeLoader):
    """The safe loader, with an error where it would keep the last of two values of one key."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if (key_node.tag, key_node.value) in seen:
                problem = f"key {key_node.value!r} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add((key_node.tag, key_node.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Safe-loaded YAML (no tags that build objects). Raises ConfigError with line and column when malformed, or when a
    key appears twice."""
    text = read_text(path)
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        if error.problem == "exceeded maximum nesting depth":
            raise ConfigError(f"{path}: nested too deeply") from None
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON or YAML file, chosen by its suffix, whose top level is a mapping."""
    value = read_json(path) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: the top level must be a mapping, found {type(value).__name__}")
    return value


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[str]]:
    """A text stream that becomes `path` only when the block ends without an exception.

    Written to a temporary file of the same folder, flushed to disk, then renamed over `path`. Raises ConfigError where
    the folder is missing and cannot be made, or takes no files.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
