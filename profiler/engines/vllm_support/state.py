"""Realistic numbers in place of dummy weights: random weights, random caches.

Dummy weights make every layer nearly constant: routing collapses onto a few experts, all index scores tie, and
near-zero operands draw less power. Normal weights scaled by fan-in keep activations near one, spread the router's
choice over the groups and give distinct index scores.
"""

from math import log2
from typing import Any

SEED = 20261
FP8_STD = 16.0


def randomise_weights(model: Any, seed: int = SEED) -> dict[str, int]:
    """Overwrite every parameter in place; returns how many of each class were written.

    Norm weights become 1 (0 where the norm adds 1 itself, as Gemma's does) and biases 0; embeddings N(0, 1); other
    matrices N(0, 1 / fan_in), fp8 ones as N(0, 16) values with the block scale 2**round(log2(fan_in**-0.5 / 16)).
    Absorbed W_UK_T and W_UV copies are written too.
    """
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    written = {"fp8": 0, "scale": 0, "norm": 0, "bias": 0, "embedding": 0, "matrix": 0, "absorbed": 0}
    shifted = shifted_norms(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            written[_randomise(name, parameter.data, generator)] += 1
            if name in shifted:
                parameter.data.zero_()
        for module in model.modules():
            for attribute in ("W_UK_T", "W_UV"):
                tensor = getattr(module, attribute, None)
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    tensor.normal_(std=tensor.shape[-2] ** -0.5, generator=generator)
                    written["absorbed"] += 1
    torch.cuda.synchronize()
    return written


def shifted_norms(model: Any) -> set[str]:
    """Names of the weights w of norms that scale by 1 + w."""
    return {f"{path}.weight" for path, module in model.named_modules() if "GemmaRMSNorm" in type(module).__name__}


def _randomise(name: str, data: Any, generator: Any) -> str:
    import torch

    leaf = name.rsplit(".", 1)[-1]
    if data.dtype == torch.float8_e4m3fn:
        flat = data.reshape(-1, data.shape[-1]) if data.is_contiguous() else data
        rows = max(1, (1 << 27) // max(1, data.shape[-1]))
        for start in range(0, flat.shape[0], rows):
            part = flat[start : start + rows]
            noise = torch.empty(part.shape, dtype=torch.bfloat16, device=data.device)
            part.copy_(noise.normal_(std=FP8_STD, generator=generator).to(torch.float8_e4m3fn))
        return "fp8"
    if "scale" in leaf:
        # Fan-in of a scaled matrix: scale columns x 128.
        fan_in = data.shape[-1] * 128 if data.dim() >= 2 else 7168
        data.fill_(2.0 ** round(log2(fan_in**-0.5 / FP8_STD)))
        return "scale"
    if "norm" in name and leaf == "weight":
        data.fill_(1.0)
        return "norm"
    if leaf == "bias" or "correction_bias" in leaf or data.dim() < 2:
        data.zero_()
        return "bias"
    if "embed" in name:
        data.normal_(generator=generator)
        return "embedding"
    data.normal_(std=data.shape[-1] ** -0.5, generator=generator)
    return "matrix"


def randomise_caches(caches: dict[str, Any], seed: int = SEED) -> None:
    """Fill KV caches in place: latents N(0, 1); packed index rows random fp8 keys with scales near 1/16.

    A uint8 cache of shape (blocks, block_tokens, 132) holds, per block, block_tokens x 128 fp8 key bytes followed by
    block_tokens fp32 scales; one of width 656 holds, per token, 512 fp8 bytes, 4 fp32 scales and 64 bf16 numbers.
    """
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed + 1)
    for cache in caches.values():
        if cache.dtype == torch.uint8 and cache.shape[-1] == 132:
            _randomise_index_cache(cache, generator)
        elif cache.dtype == torch.uint8 and cache.shape[-1] == 656:
            _randomise_packed_latents(cache, generator)
        else:
            for part in cache.split(4096):
                part.normal_(generator=generator)
    torch.cuda.synchronize()


def _randomise_index_cache(cache: Any, generator: Any) -> None:
    import torch

    blocks, block_tokens, _ = cache.shape
    flat = cache.view(blocks, -1)
    keys = block_tokens * 128
    for start in range(0, blocks, 4096):
        part = flat[start : start + 4096]
        noise = torch.empty((part.shape[0], keys), dtype=torch.bfloat16, device=cache.device)
        values = noise.normal_(std=FP8_STD, generator=generator).to(torch.float8_e4m3fn)
        part[:, :keys] = values.view(torch.uint8)
        scales = torch.empty((part.shape[0], block_tokens), dtype=torch.float32, device=cache.device)
        scales.uniform_(1 / 32, 1 / 8, generator=generator)
        part[:, keys:] = scales.view(torch.uint8)


def _randomise_packed_latents(cache: Any, generator: Any) -> None:
    import torch

    rows = cache.view(-1, 656)
    for start in range(0, rows.shape[0], 1 << 20):
        part = rows[start : start + (1 << 20)]
        count = part.shape[0]
        noise = torch.empty((count, 576), dtype=torch.bfloat16, device=cache.device).normal_(generator=generator)
        part[:, :512] = (noise[:, :512] * FP8_STD).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.full((count, 4), 1 / FP8_STD, dtype=torch.float32, device=cache.device)
        part[:, 512:528] = scales.view(torch.uint8)
        part[:, 528:] = noise[:, 512:].contiguous().view(torch.uint8)
