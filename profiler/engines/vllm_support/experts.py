"""Run one rank's slice of routed experts through vLLM's own expert kernel, with routing drawn over all experts."""

from typing import Any

SLICE_BACKEND = "TritonExperts"
"""The class that runs a slice of the experts; all experts together run on the engine's own choice."""


class ExpertSlice:
    """The first num_experts / ep experts of a layer behind an expert map, as an EP rank holds them.

    routed: vLLM's RoutedExperts module of one MoE layer (all experts loaded); the slice shares its weights.
    Only the Triton back end of block-scaled fp8 and of bf16 weights is built.
    """

    def __init__(self, routed: Any, num_experts: int, ep: int) -> None:
        import torch

        self.local = num_experts // ep
        self.num_experts = num_experts
        self.routed = routed
        method = routed.quant_method
        w13, w2 = routed.w13_weight, routed.w2_weight
        self.w13, self.w2 = w13[: self.local], w2[: self.local]
        self.expert_map = None
        if ep > 1:
            mapping = torch.full((num_experts,), -1, dtype=torch.int32, device=w13.device)
            mapping[: self.local] = torch.arange(self.local, dtype=torch.int32, device=w13.device)
            self.expert_map = mapping
        if ep == 1:
            self.kernel = method.moe_kernel
        else:
            self.kernel = _triton_kernel(routed, method, self.local)

    def __call__(self, hidden: Any, topk_weights: Any, topk_ids: Any) -> Any:
        """hidden (tokens, hidden) bf16; topk_weights (tokens, k) fp32; topk_ids (tokens, k) int32 global expert ids."""
        return self.kernel.apply(
            hidden_states=hidden,
            w1=self.w13,
            w2=self.w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=self.routed.activation,
            global_num_experts=self.num_experts,
            expert_map=self.expert_map,
            apply_router_weight_on_input=False,
        )


def _triton_kernel(routed: Any, method: Any, local: int) -> Any:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

    name = getattr(method, "weight_scale_name", None)
    if name is None:
        quant = method.get_fused_moe_quant_config(routed)
    else:
        quant = fp8_w8a8_moe_quant_config(
            w1_scale=getattr(routed, f"w13_{name}")[:local],
            w2_scale=getattr(routed, f"w2_{name}")[:local],
            block_shape=method.weight_block_size,
        )
    experts = TritonExperts(moe_config=routed.moe_config, quant_config=quant)
    return FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)
