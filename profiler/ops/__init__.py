"""The sparse-attention operators: naive torch versions, and Triton kernels that a CUDA tensor picks.

checks      argument checks, the choice of the path       layers    norms, rotary, gated activations
formats     row layouts of the caches, FP8                 indexer   token scores and their top-k (DSA)
mla         absorbed sparse and dense MLA, prefill         sparse_sdpa   attention over picked rows with sinks
dsa         key stores, plans and the manager              msa       block scores, selection and attention
moe         grouped top-k router, expert GEMM              gqa       grouped-query attention over pages

This package imports torch; nothing of the simulator imports it.
"""
