"""vLLM's expert kernels for one rank's slice of the experts, by the class name that the engine itself logs."""

from collections.abc import Callable, Mapping
from typing import Any

from profiler.core.errors import AcquisitionError, unknown

OWN_CHOICE = "engine"
"""Stands for `engine_choice`."""


def slice_kernel(backend: str, routed: Any, local: int, ep: int) -> Any:
    """A FusedMoEKernel of class `backend` over the first `local` experts of vLLM's RoutedExperts module.

    Raises ConfigError for a class that is not known here, AcquisitionError when the weights do not suit it.
    """
    if backend not in KERNELS:
        raise unknown("expert back end", backend, sorted(KERNELS))
    return KERNELS[backend](routed, local, ep)


def engine_choice(routed: Any, ep: int) -> str:
    """The class that vLLM 0.26 takes for these weights under expert parallelism, by its own order of preference.

    Block-scaled fp8 on compute capability 9.0 prefers FlashInfer's CUTLASS experts with ep > 1 and Triton without;
    other weights keep the class of the running engine.
    """
    import torch

    own = type(routed.quant_method.moe_kernel.fused_experts).__name__
    block_scaled = getattr(routed.quant_method, "weight_block_size", None) is not None
    if ep > 1 and block_scaled and torch.cuda.get_device_capability() == (9, 0):
        return "FlashInferExperts"
    return own


def _triton(routed: Any, local: int, ep: int) -> Any:
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

    quant = _block_scales(routed, local) or routed.quant_method.get_fused_moe_quant_config(routed)
    experts = TritonExperts(moe_config=routed.moe_config, quant_config=quant)
    return FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)


def _flashinfer(routed: Any, local: int, ep: int) -> Any:
    """FlashInfer's grouped GEMMs over the bf16 input, which they quantise themselves; halves of w13 stay unswapped,
    which changes results and not times."""
    from dataclasses import replace

    from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import FlashInferExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

    quant = _block_scales(routed, local)
    if quant is None:
        raise AcquisitionError("FlashInferExperts are measured for block-scaled fp8 weights only")
    parallel = replace(routed.moe_config.moe_parallel_config, ep_size=ep, ep_rank=0, use_ep=True)
    config = replace(routed.moe_config, num_local_experts=local, moe_parallel_config=parallel)
    experts = FlashInferExperts(moe_config=config, quant_config=quant)
    return FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)


def _block_scales(routed: Any, local: int) -> Any:
    """Quantisation of the slice's block-scaled fp8 weights; None for other weights."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    method = routed.quant_method
    name = getattr(method, "weight_scale_name", None)
    if name is None:
        return None
    return fp8_w8a8_moe_quant_config(
        w1_scale=getattr(routed, f"w13_{name}")[:local],
        w2_scale=getattr(routed, f"w2_{name}")[:local],
        block_shape=method.weight_block_size,
    )


KERNELS: Mapping[str, Callable[[Any, int, int], Any]] = {"TritonExperts": _triton, "FlashInferExperts": _flashinfer}
