"""Where shipped data lives: the repository when run from a checkout, the installed copy otherwise."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = _PACKAGE.parent


def data_root() -> Path:
    """Folder that holds `configs/` and `workloads/`."""
    return _CHECKOUT if (_CHECKOUT / "configs").is_dir() else _PACKAGE / "_shipped"


def model_config_root() -> Path:
    return data_root() / "configs" / "model"


def hardware_root() -> Path:
    return data_root() / "configs" / "hardware"


def default_bundle_root() -> Path:
    return _PACKAGE / "perf-native"
