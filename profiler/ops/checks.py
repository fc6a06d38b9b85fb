"""Argument checks of the operators: a ValueError names the argument, what it is and what was expected."""

from collections.abc import Sequence
from typing import Literal

import torch

Backend = Literal["auto", "naive", "triton"]


def describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Refuse a tensor of another rank, size, dtype or device.

    `shape` holds a number where the size is fixed and a letter where any size is fine.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: a tensor is needed, found {type(tensor).__name__}")
    wanted = f"({', '.join(str(size) for size in shape)})"
    fits = tensor.dim() == len(shape) and all(
        isinstance(want, str) or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: expected shape {wanted}, found {describe(tensor)}")
    if dtypes and tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected dtype {names}, found {describe(tensor)}")
    if device is not None and not same_device(tensor.device, device):
        raise ValueError(f"{name}: expected a tensor on {device}, found {describe(tensor)}")


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are the same; one without an index ("cuda") is any device of its type."""
    return one.type == other.type and (None in (one.index, other.index) or one.index == other.index)


def check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}: expected a positive integer, found {value!r}")


def is_checked(checked: bool | None, tensor: torch.Tensor) -> bool:
    """Whether to look at tensor values. The default is yes on the CPU and no on a GPU, where looking means a sync."""
    return tensor.device.type == "cpu" if checked is None else checked


def check_range(name: str, values: torch.Tensor, low: int, high: int) -> None:
    """Refuse values outside low .. high - 1. Reads the tensor: call it in the checked mode only."""
    if values.numel() == 0:
        return
    smallest, largest = (int(v) for v in torch.aminmax(values))
    if smallest < low or largest >= high:
        raise ValueError(f"{name}: values {smallest} .. {largest} lie outside {low} .. {high - 1}")


def use_triton(backend: Backend, tensor: torch.Tensor) -> bool:
    """Whether a call runs its Triton kernel: on CUDA unless told otherwise, elsewhere only when asked for."""
    if backend not in ("auto", "naive", "triton"):
        raise ValueError(f"backend: expected 'auto', 'naive' or 'triton', found {backend!r}")
    return tensor.is_cuda if backend == "auto" else backend == "triton"


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP8 = torch.float8_e4m3fn
INTEGERS = (torch.int32, torch.int64)
