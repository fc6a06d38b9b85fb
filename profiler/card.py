"""Which device is here, and whether it is the one that tables are asked for."""

import importlib.util
from typing import Final

from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.hardware import canonical_name, known_hardware

CPU: Final = "CPU"


def hardware_name(text: str) -> str:
    """The canonical name of a `--hardware` value: a GPU of configs/hardware by any alias, or CPU.

    Raises ConfigError naming what is known.
    """
    if text.casefold() == CPU.casefold():
        return CPU
    try:
        return canonical_name(text)
    except ConfigError as error:
        raise ConfigError(f"{error} {CPU} measures this machine's processor.") from None


def cuda_device_name() -> str | None:
    """The first CUDA device's own name, None without one. Raises AcquisitionError when torch is not installed."""
    try:
        import torch
    except ImportError:
        raise AcquisitionError("measuring needs torch: pip install 'sparsight[torch]'") from None
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def choose_engine(engine: str, hardware: str) -> str:
    """The engine to run: on a CPU the reference engine, on a GPU vllm where it is installed, unless one is named.

    Raises AcquisitionError when vllm is asked for on a CPU.
    """
    if hardware == CPU:
        if engine not in ("auto", "reference"):
            raise AcquisitionError(f"--hardware CPU is measured by --engine reference, not by {engine!r}")
        return "reference"
    if engine != "auto":
        return engine
    return "vllm" if importlib.util.find_spec("vllm") else "reference"


def check_card(hardware: str) -> None:
    """Refuses, with AcquisitionError naming both, a device that is not the canonical `hardware`."""
    if hardware == CPU:
        return
    device = cuda_device_name()
    if device is None:
        raise AcquisitionError(f"--hardware {hardware}: no CUDA device is visible here, this machine would measure CPU")
    try:
        here = canonical_name(device)
    except ConfigError:
        raise AcquisitionError(
            f"--hardware {hardware}: the card here is {device!r}, which no file of configs/hardware names as an alias "
            f"(known: {', '.join(known_hardware())})"
        ) from None
    if here != hardware:
        raise AcquisitionError(f"--hardware {hardware}: the card here is {device!r}, that is {here}")
