"""Rotary embeddings that attention and indexer share, taken apart so that each has a path of its own."""

import copy
from collections import OrderedDict
from typing import Any

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def separate(model: Any) -> int:
    """Gives every module whose indexer rotates by its own `rotary_emb` a copy as `indexer_rope_emb`; returns how many.

    vLLM caches rotary modules by their arguments, and GLM's indexer rotates as its attention does, so both would be
    one module of one path. Tables of sines and cosines stay shared; hooks do not.
    """
    copies: dict[int, Any] = {}
    separated = 0
    for module in list(model.modules()):
        shared = getattr(module, "indexer_rope_emb", None)
        if shared is None or shared is not getattr(module, "rotary_emb", None):
            continue
        if id(shared) not in copies:
            twin = copy.copy(shared)
            for hooks in _HOOKS:
                twin.__dict__[hooks] = OrderedDict()
            copies[id(shared)] = twin
        module.indexer_rope_emb = copies[id(shared)]
        separated += 1
    return separated
