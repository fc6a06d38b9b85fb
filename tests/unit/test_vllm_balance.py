"""Expert loads on random weights: evened by the bias that only the choice sees."""

import pytest

torch = pytest.importorskip("torch")

from profiler.core.errors import AcquisitionError  # noqa: E402
from profiler.core.types import MoeDims  # noqa: E402
from profiler.engines.vllm_support.balance import (  # noqa: E402
    Counter,
    balance,
    distinct_experts,
    even_bias,
    spread_of_loads,
    uncompiled,
)
from profiler.ops.moe import grouped_topk  # noqa: E402

GROUPED = MoeDims(64, 4, 32, 1, 32, n_group=8, topk_group=4, has_bias=True)
PLAIN = MoeDims(32, 2, 32, 1, 32, has_bias=True)


def popular(moe: MoeDims, seed: int = 0) -> "torch.Tensor":
    """Logits of 512 tokens with experts, and a whole group, that every token likes."""
    likes = 0.7 * torch.randn(moe.num_experts, generator=torch.Generator().manual_seed(7))
    likes[: moe.num_experts // 8] += 0.8
    return likes + torch.randn(512, moe.num_experts, generator=torch.Generator().manual_seed(seed))


def spread(logits: "torch.Tensor", moe: MoeDims, bias: "torch.Tensor") -> float:
    _, ids = grouped_topk(logits, moe.topk, n_group=moe.n_group, topk_group=moe.topk_group, bias=bias)
    loads = torch.bincount(ids.flatten(), minlength=moe.num_experts).float()
    return float(loads.std(correction=0) / loads.mean())


@pytest.mark.parametrize("moe", [GROUPED, PLAIN], ids=["grouped", "plain"])
def test_loads_are_even_under_the_bias_that_is_found(moe: MoeDims) -> None:
    logits, none = popular(moe), torch.zeros(moe.num_experts)
    found = even_bias(logits, moe, none)
    assert spread(logits, moe, none) > 0.6 and spread(logits, moe, found) < 0.1
    # Tokens that it was not found on.
    assert spread(popular(moe, seed=1), moe, found) < 0.35
    for bias in (none, found):
        assert spread_of_loads(logits, moe, bias) == pytest.approx(spread(logits, moe, bias))


class Gate(torch.nn.Module):
    """A router as vLLM has it: gives its logits and no bias of its own product."""

    def __init__(self, moe: MoeDims, own_bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(moe.num_experts))
        if own_bias:
            self.e_score_correction_bias = torch.nn.Parameter(torch.zeros(moe.num_experts, dtype=torch.float32))

    def forward(self, x: "torch.Tensor") -> "tuple[torch.Tensor, None]":
        return x @ self.weight, None


class Block(torch.nn.Module):
    def __init__(self, moe: MoeDims, own_bias: bool) -> None:
        super().__init__()
        self.gate = Gate(moe, own_bias)
        if not own_bias:
            self.e_score_correction_bias = torch.nn.Parameter(torch.zeros(moe.num_experts, dtype=torch.bfloat16))


def test_every_router_is_evened_wherever_its_bias_is() -> None:
    model = torch.nn.ModuleList([Block(GROUPED, True), Block(GROUPED, False)])
    batches: list[torch.Tensor] = []

    def run() -> None:
        batches.append(popular(GROUPED, seed=len(batches)))
        for block in model:
            block.gate(batches[-1][:8])  # a small batch beside the large one
            block.gate(batches[-1])

    found = balance(model, GROUPED, run)
    assert (found["routers"], found["tokens"]) == (2, 512)
    biases = [model[0].gate.e_score_correction_bias, model[1].e_score_correction_bias]
    assert found["spread_before"] == pytest.approx(spread(batches[0], GROUPED, torch.zeros(64)), abs=1e-4)
    assert found["spread_before"] > 0.6
    # Evened on the first batch and told of the second, which the second evening made no better for the third:
    # independent tokens spread by 0.35 of a mean of 32.
    told = [spread(batches[1], GROUPED, bias.float()) for bias in biases]
    assert found["spread_after"] == pytest.approx(sum(told) / 2, abs=1e-4)
    for bias, other in zip(biases, told, strict=True):
        assert spread(batches[0], GROUPED, bias.float()) < 0.15 < other < 0.35
    assert not any(block.gate._forward_hooks for block in model)


@pytest.mark.parametrize("likes", [0.0, 0.03, 0.3, 1.0])
def test_the_bias_that_left_other_tokens_most_even_is_kept_the_starts_included(likes: float) -> None:
    """A batch of few tokens is evened to the token and the next one is not: routers that are even enough lose by it."""
    model = torch.nn.ModuleList([Block(GROUPED, True)])
    bias = model[0].gate.e_score_correction_bias
    start = torch.linspace(-1e-4, 1e-4, GROUPED.num_experts)
    bias.data.copy_(start)
    batches: list[torch.Tensor] = []

    def run() -> None:
        noise = torch.randn(512, GROUPED.num_experts, generator=torch.Generator().manual_seed(len(batches)))
        batches.append(noise + likes * torch.linspace(-1, 1, GROUPED.num_experts))
        model[0].gate(batches[-1])

    found = balance(model, GROUPED, run)
    tried = [start]
    for batch in batches[:-1]:
        tried.append(even_bias(batch, GROUPED, tried[-1]))
    spreads = [spread(batch, GROUPED, one) for batch, one in zip(batches, tried, strict=True)]
    least = min(range(len(spreads)), key=spreads.__getitem__)
    assert torch.equal(bias.data, tried[least])
    assert (least == 0) is (likes < 0.1)
    assert found["spread_before"] == pytest.approx(spreads[0], abs=1e-4)
    assert found["spread_after"] == pytest.approx(spreads[least], abs=1e-4)


def test_a_model_whose_routers_did_not_run_is_told() -> None:
    with pytest.raises(AcquisitionError, match="no router with a correction bias ran"):
        balance(torch.nn.ModuleList([Block(PLAIN, True)]), PLAIN, lambda: None)


class Compiled(torch.nn.Module):
    """As vLLM's decorator leaves a module: its call goes past the hooks of what is in it, unless told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.do_not_compile = False

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given) if self.do_not_compile else self.inner.forward(given)


def test_hooks_of_a_compiled_model_are_seen_inside() -> None:
    model, seen = torch.nn.Sequential(Compiled(), torch.nn.Linear(2, 2)), []
    model[0].inner.register_forward_hook(lambda *_: seen.append(1))
    model(torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match="within"), uncompiled(model):
        model(torch.zeros(1, 2))
        raise RuntimeError("within")
    model(torch.zeros(1, 2))
    assert len(seen) == 1 and model[0].do_not_compile is False


def test_experts_of_a_pass_are_counted_as_its_routers_pick_them() -> None:
    model = torch.nn.ModuleList([Block(GROUPED, True), Block(GROUPED, False)])
    biased = model[0].gate.e_score_correction_bias
    biased.data[:16] = 1.0  # its first two groups alone are picked from
    logits = popular(GROUPED)[:5]

    def run() -> None:
        for block in model:
            block.gate(logits)

    def picked(bias: torch.Tensor) -> int:
        _, ids = grouped_topk(logits, GROUPED.topk, n_group=8, topk_group=4, bias=bias)
        return len(set(ids.flatten().tolist()))

    counts = [picked(bias.float()) for bias in (biased, model[1].e_score_correction_bias)]
    assert counts[0] < counts[1] <= 5 * GROUPED.topk and counts[0] <= 16
    assert distinct_experts(logits, GROUPED, biased.float()) == counts[0]
    assert Counter(model, GROUPED).reached(run) == sum(counts) / 2
    assert not any(block.gate._forward_hooks for block in model)


def test_what_cannot_be_counted_is_told_once_and_runs_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    model, ran = torch.nn.ModuleList([Block(GROUPED, True)]), []

    def run() -> None:
        ran.append(1)
        model[0].gate(popular(GROUPED)[:5, :32])  # half of the experts: no router of this model

    model[0].gate.forward = lambda x: (x, None)
    counter = Counter(model, GROUPED)
    assert [counter.reached(run), counter.reached(run)] == [None, None]
    assert len(ran) == 2 and capsys.readouterr().err.count("not counted") == 1
    for without in (None, MoeDims(64, 4, 32, 1, 32)):
        assert Counter(model, without).reached(run) is None
    assert Counter(model, GROUPED).reached(lambda: ran.append(1)) is None
    assert len(ran) == 5
    with pytest.raises(RuntimeError, match="out of memory"):
        Counter(model, GROUPED).reached(broken)


def broken() -> None:
    raise RuntimeError("out of memory")
