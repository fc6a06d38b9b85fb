"""Rotary modules that attention and indexer share are taken apart before ranges are put around them."""

from typing import Any

import torch

from profiler.engines.vllm_support.rotary import separate


class Rotary(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.arange(4.0), persistent=False)
        self.calls: list[int] = []

    def forward(self, positions: int) -> Any:
        self.calls.append(positions)
        return self.cos_sin_cache[positions]


class Attention(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, rotary: Rotary, indexer_rotary: Rotary | None) -> None:
        super().__init__()
        self.rotary_emb, self.indexer_rope_emb = rotary, indexer_rotary


def test_shared_modules_of_all_layers_get_one_copy_with_a_path_and_hooks_of_its_own() -> None:
    rotary = Rotary()
    model = torch.nn.ModuleList(Attention(rotary, rotary) for _ in range(2))
    assert "0.indexer_rope_emb" not in dict(model.named_modules())
    assert separate(model) == 2
    paths = dict(model.named_modules())
    twin = paths["0.indexer_rope_emb"]
    assert twin is model[1].indexer_rope_emb and twin is not rotary
    assert twin.cos_sin_cache.data_ptr() == rotary.cos_sin_cache.data_ptr()
    seen: list[str] = []
    for name in ("0.rotary_emb", "0.indexer_rope_emb"):
        paths[name].register_forward_pre_hook(lambda module, args, name=name: seen.append(name))
        paths[name].register_forward_hook(lambda module, args, output, name=name: seen.append(name), always_call=True)
    assert float(twin(2)) == 2.0 and seen == ["0.indexer_rope_emb"] * 2
    assert float(rotary(3)) == 3.0 and seen[2:] == ["0.rotary_emb"] * 2


def test_modules_apart_and_layers_without_an_indexer_are_left_alone() -> None:
    own = Rotary()
    model = torch.nn.ModuleList([Attention(Rotary(), own), Attention(Rotary(), None)])
    assert separate(model) == 0 and model[0].indexer_rope_emb is own
