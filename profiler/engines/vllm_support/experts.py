"""Run one rank's slice of routed experts through vLLM's own expert kernel, with routing drawn over all experts."""

from typing import Any

from profiler.engines.vllm_support import expert_backends

SLICE_BACKEND = "TritonExperts"
"""The class that runs a slice of the experts unless told otherwise; all experts together run on the engine's own."""


class ExpertSlice:
    """The first num_experts / ep experts of a layer behind an expert map, as an EP rank holds them.

    routed: vLLM's RoutedExperts module of one MoE layer (all experts loaded); the slice shares its weights.
    backend: class of the experts in `expert_backends.KERNELS`, for ep > 1; ep 1 runs the engine's own kernel.
    """

    def __init__(self, routed: Any, num_experts: int, ep: int, backend: str = SLICE_BACKEND) -> None:
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
            self.kernel = expert_backends.slice_kernel(backend, routed, self.local, ep)

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
