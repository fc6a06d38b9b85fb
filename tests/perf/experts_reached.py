"""How many experts whole passes reached, and what one more of them takes, from their samples; no GPU needed.

    python tests/perf/experts_reached.py --samples SAMPLES.csv.gz [--samples ...] --model MODEL

First, of passes of 5 to 130 tokens, by how much the experts that they reached (counted, mean of the layers) deviate
from those that independent tokens would, in per cent: mean, smallest, largest; of single prompts by the tokens of
their context, of pure decodes and of all others. Then by number of tokens, of all passes but single prompts without a
context: experts expected, the median of those reached, microseconds of all experts of one layer (median), and how these
follow the counts: slope of a straight line in microseconds an expert, and correlation.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import StatisticsError, correlation, linear_regression, mean, median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from profiler.core.even_load import activated_experts  # noqa: E402
from profiler.core.registry import load_model  # noqa: E402
from profiler.core.types import ModelSpec  # noqa: E402
from profiler.engines.base import find_binding  # noqa: E402
from profiler.passes import expert_rows  # noqa: E402
from profiler.samples import read_runs  # noqa: E402
from profiler.visits import latest, one_engine  # noqa: E402

FEW, MANY = 5, 130
# Fewer tokens of context than each of these, and at least the one before.
CONTEXTS = (0, 1, 64, 512, 4096, sys.maxsize)
FEWEST_PASSES = 5


@dataclass(frozen=True, slots=True)
class Pass:
    """requests: (new tokens, context). us: of all experts of one layer."""

    requests: Sequence[tuple[int, int]]
    reached: float
    expected: float
    us: float

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.requests)

    @property
    def kind(self) -> str:
        if all(new == 1 for new, _ in self.requests):
            return "decodes"
        if len(self.requests) > 1:
            return "others"
        context = self.requests[0][1]
        low, high = next((low, high) for low, high in pairwise(CONTEXTS) if low <= context < high)
        if low == 0:
            return "prompts, context 0"
        return f"prompts, context {low} to {high - 1}" if high < sys.maxsize else f"prompts, context {low} and more"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, action="append", required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    spec = load_model(options.model)
    for path in options.samples:
        passes = list(counted(path, spec))
        print(path, *of_contexts(passes), *of_tokens(passes), sep="\n")


def counted(path: Path, spec: ModelSpec) -> Iterator[Pass]:
    """The passes of a file of samples whose experts were counted."""
    runs = read_runs([path])
    info, measured, moe = one_engine(runs), latest(runs), spec.moe
    assert moe is not None
    reached = {i: one.reached_experts for i, one in measured.results.items() if one.reached_experts is not None}
    for row in expert_rows(measured, reached, spec, info, find_binding(info, "serving")):
        shot = measured.shots[row.shot]
        yield Pass(shot.requests, reached[row.shot], activated_experts(moe, 1, shot.new_tokens), row.time_us)


def of_contexts(passes: Sequence[Pass]) -> Iterator[str]:
    """Lines of the first table."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for one in passes:
        if FEW <= one.tokens <= MANY:
            kinds[one.kind].append(100 * (one.reached / one.expected - 1))
    yield f"of {FEW} to {MANY} tokens\tpasses\tmean %\tsmallest\tlargest"
    for kind, errors in sorted(kinds.items(), key=lambda item: (item[0][:7] != "prompts", len(item[0]), item[0])):
        yield f"{kind}\t{len(errors)}\t{mean(errors):+.1f}\t{min(errors):+.1f}\t{max(errors):+.1f}"


def of_tokens(passes: Sequence[Pass]) -> Iterator[str]:
    """Lines of the second table, of numbers of tokens with several passes."""
    groups: dict[int, list[Pass]] = defaultdict(list)
    for one in passes:
        if one.kind != "prompts, context 0":
            groups[one.tokens].append(one)
    yield "tokens\tpasses\texpected\treached\tus\tus an expert\tcorrelation"
    for tokens, own in sorted(groups.items()):
        counts, times = [one.reached for one in own], [one.us for one in own]
        if len(own) < FEWEST_PASSES:
            continue
        try:
            follow = f"{linear_regression(counts, times).slope:.1f}\t{correlation(counts, times):.2f}"
        except StatisticsError:  # all reached as many
            follow = "\t"
        known = f"{own[0].expected:.1f}\t{median(counts):.1f}\t{median(times):.1f}"
        yield f"{tokens}\t{len(own)}\t{known}\t{follow}"


if __name__ == "__main__":
    main()
