"""Which kernels make up which component, one file per engine and code path.

A module here has `FUSED: Mapping[str, str]`, `matches(info) -> bool` and `rules(spec) -> Sequence[Rule]`
(profiler.engines.base). It needs no GPU and no engine, so samples taken elsewhere are bound again at any time.
"""
