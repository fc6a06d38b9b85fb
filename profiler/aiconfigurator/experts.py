"""Routed experts: AIConfigurator's rows with the load that the measured rank really had.

A row times rank 0 of `moe_ep_size` ranks on `num_tokens` tokens. Only rows of distribution `balanced` are used: there
token i picks the experts i mod s, i mod s + s, ... with s = ceil(experts / topk), so that the pairs and the distinct
experts of rank 0 can be counted. `power_law` rows come from one unseeded draw per cell, whose load is not known.

Group-limited routing breaks the balance: each token's picks lie in different groups with equal scores, so the groups
of the lowest numbers survive, and the picks that were dropped are filled with the lowest experts of tied score zero.
Rank 0 then computes up to 32 times its fair share (5 at ep 8, 9 at ep 16, 32 at ep 64). Such rows are keyed by the
pairs that they computed, and serve as rows of the larger batch that gives a rank so many pairs. They reach few distinct
experts in small batches; those come from a model of equal experts, top-k and width without groups in the same table
where there is one, times the ratio of the hidden sizes, to which both weights and products are proportional; the own
rows then serve beyond the largest of those batches, at the degrees where they continue them within 25 %.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from profiler.core.types import MoeDims

if TYPE_CHECKING:
    import pandas as pd

COLUMNS: Final = (
    *("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
    *("distribution", "latency"),
)
BALANCED: Final = "balanced"
# How far the time per pair may jump where corrected rows take over from scaled ones.
_SEAM: Final = 0.25

Row = tuple[str, int, int, float, float, float, str]


def balanced_picks(moe: MoeDims, token: int) -> tuple[int, ...]:
    """Experts of a token under the tables' balanced routing, through the model's own group rule."""
    stride = -(-moe.num_experts // moe.topk)
    wanted = list(range(token % stride, moe.num_experts, stride))[: moe.topk]
    if moe.topk_group >= moe.n_group:
        return tuple(wanted)
    size = moe.num_experts // moe.n_group
    in_group = Counter(expert // size for expert in wanted)
    # A group counts its two best scores, here 1 for every wanted expert; ties go to the lowest number.
    groups = sorted(range(moe.n_group), key=lambda group: (-min(2, in_group[group]), group))[: moe.topk_group]
    kept = [expert for expert in wanted if expert // size in groups]
    zeros = [e for group in sorted(groups) for e in range(group * size, (group + 1) * size) if e not in kept]
    return tuple(kept + zeros[: moe.topk - len(kept)])


def rank_load(moe: MoeDims, ep: int, tokens: int) -> tuple[int, int]:
    """(pairs, distinct experts) of rank 0, which holds the first experts, under the tables' balanced routing."""
    local = moe.num_experts // ep
    period = -(-moe.num_experts // moe.topk)
    pairs, reached = 0, set()
    for offset in range(min(period, tokens)):
        mine = [expert for expert in balanced_picks(moe, offset) if expert < local]
        pairs += len(mine) * (tokens // period + (offset < tokens % period))
        reached.update(mine)
    return pairs, len(reached)


def expert_rows(frame: "pd.DataFrame", moe: MoeDims, hidden: int, tp: int, changes: Counter[str]) -> list[Row]:
    """Rows of the table `moe` of one tp, in its column order, times in microseconds. Empty when there are none.

    At tp 1 every expert-parallel degree has rows, above it the experts are cut in width by tp and ep is 1.
    """
    shape = frame[
        (frame["num_experts"] == moe.num_experts) & (frame["topk"] == moe.topk)
        & (frame["inter_size"] == moe.intermediate) & (frame["moe_tp_size"] == tp)
    ]  # fmt: skip
    if tp > 1:
        shape = shape[shape["moe_ep_size"] == 1]
    own = shape[shape["hidden_size"] == hidden]
    changes["power_law_unknown_load"] += int((own["distribution"] != BALANCED).sum())
    grouped = moe.topk_group < moe.n_group
    rows: list[Row] = []
    fair_tokens: dict[int, int] = {}
    if grouped:
        plain = MoeDims(moe.num_experts, moe.topk, moe.intermediate, 0, 0)
        others = sorted({int(h) for h in shape["hidden_size"].unique()} - {hidden}, key=lambda h: abs(h - hidden))
        # 4,096 and 6,144 in today's tables: models without groups. The nearest one is taken.
        for other in others[:1]:
            for ep, tokens, us in _balanced(shape[shape["hidden_size"] == other]):
                pairs, reached = rank_load(plain, ep, tokens)
                rows.append(("experts", ep, tokens, float(reached), float(pairs), us * hidden / other, ""))
                fair_tokens[ep] = max(fair_tokens.get(ep, 0), tokens)
                changes["experts_scaled_from_ungrouped"] += 1
    corrected: dict[int, list[Row]] = {}
    for ep, tokens, us in _balanced(own):
        pairs, reached = rank_load(moe, ep, tokens)
        stands_for = round(pairs * ep / moe.topk) if grouped else tokens
        row = ("experts", ep, stands_for, float(reached), float(pairs), us, "")
        if grouped and (stands_for <= fair_tokens.get(ep, 0) or (fair_tokens and reached < moe.num_experts // ep)):
            changes["experts_grouped_dropped"] += 1
        else:
            corrected.setdefault(ep, []).append(row)
    for ep, found in corrected.items():
        if grouped and not _continues([row for row in rows if row[1] == ep], found):
            changes["experts_grouped_dropped"] += len(found)
            continue
        changes["experts_load_corrected"] += len(found) if grouped else 0
        rows += found
    return _once(rows)


def _continues(scaled: Sequence[Row], corrected: Sequence[Row]) -> bool:
    """True where the time per pair of the corrected rows goes on from that of the scaled ones.

    It does not at large ep: a kernel also moves every token that it is given, and the corrected rows were given few.
    """
    if not scaled:
        return True
    last, first = max(scaled, key=lambda row: row[4]), min(corrected, key=lambda row: row[4])
    return abs(first[5] / first[4] / (last[5] / last[4]) - 1) <= _SEAM


def _balanced(frame: "pd.DataFrame") -> Iterable[tuple[int, int, float]]:
    """(ep, tokens, microseconds) of the balanced rows, ascending."""
    rows = frame[frame["distribution"] == BALANCED]
    columns = (rows[name].tolist() for name in ("moe_ep_size", "num_tokens", "latency"))
    return sorted((int(ep), int(tokens), float(ms) * 1e3) for ep, tokens, ms in zip(*columns, strict=True) if ms > 0)


def _once(rows: Iterable[Row]) -> list[Row]:
    """One row per key, the median of its times."""
    times: dict[tuple[str, int, int, float, float], list[float]] = {}
    for *key, us, _ in rows:
        times.setdefault(tuple(key), []).append(us)  # type: ignore[arg-type]
    return [(*key, sorted(found)[(len(found) - 1) // 2], "") for key, found in times.items()]
