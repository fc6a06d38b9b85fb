"""What the reference engine's calls are built from: a model's per-rank sizes, a device, and weights made on demand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from profiler.core.errors import AcquisitionError
from profiler.core.shots import Shot
from profiler.core.types import ModelSpec
from profiler.core.units import GIB
from profiler.ops.formats import SparseKVFormat

Call = Callable[[], object]
Builder = Callable[["Bench", Shot], Call]

# Distinct random values that every weight is tiled from: drawing billions of normals would take longer than measuring.
_POOL_ELEMENTS = 1 << 20
# Share of the free memory that one tensor may take; the rest is for activations and for other processes.
_MEMORY_SHARE = 0.5


@dataclass(slots=True)
class Bench:
    """One model on one device.

    spec: sizes of one rank. dtype: of weights and activations. weights: tensors by name, until `clear` is called.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kv_format: SparseKVFormat
    seed: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def weight(self, name: str, *shape: int) -> torch.Tensor:
        """The weight `name`, made at its first use: normal values of deviation 1 / sqrt(last dimension).

        Raises AcquisitionError when it does not fit into the free memory.
        """
        if name not in self.weights:
            self.weights[name] = self.random(*shape, scale=shape[-1] ** -0.5, what=f"weights of {name}")
        return self.weights[name]

    def random(self, *shape: int, scale: float = 1.0, what: str = "a tensor") -> torch.Tensor:
        """A tensor tiled from a pool of normal values. Raises AcquisitionError when memory is short."""
        count = int(torch.Size(shape).numel())
        self._check_memory(count * self.dtype.itemsize, what)
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        pool = torch.randn(min(count, _POOL_ELEMENTS), generator=generator).mul_(scale).to(self.device, self.dtype)
        flat = torch.empty(count, device=self.device, dtype=self.dtype)
        whole = count // pool.numel() * pool.numel()
        flat[:whole].view(-1, pool.numel()).copy_(pool)
        flat[whole:].copy_(pool[: count - whole])
        return flat.view(shape)

    def clear(self) -> None:
        self.weights.clear()

    def _check_memory(self, wanted_bytes: int, what: str) -> None:
        free = free_bytes(self.device)
        if wanted_bytes > _MEMORY_SHARE * free:
            raise AcquisitionError(
                f"out of memory: {what} take {wanted_bytes / GIB:.2f} GiB, {free / GIB:.2f} GiB are free"
            )


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated: of the card, or what the kernel calls available. 0 when it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
