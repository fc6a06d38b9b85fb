"""One step of a pipeline as a tree by stage, and how long each stage stands still.

A step that is alone passes the stages in turn, and every stage stands still while the others have it. With as many
steps in flight as there are stages, all of the same price, the one that has ended is followed at once by a new one
(serving.core.pipeline). Then of `n` stages the slowest never stands still, or the steps come back only after a whole
passage: in either case n steps end in the longer of the passage of one that is alone and n times the slowest stage.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profiler.core.registry import family
from profiler.core.types import ModelSpec, Parallel
from serving.core.shape import StepShape
from serving.cost.bounds import OUTSIDE, Bounds, calls_by_part
from serving.cost.build import Stage, pipeline_stages
from serving.cost.pipeline import PipelineCost
from serving.cost_tree import LEGEND, WAITING, Node, html_page, mapping, summed, table_text
from serving.explain import Explanation, document, explain, waits_text


@dataclass(frozen=True, slots=True)
class StagedExplanation:
    """root: a step that is alone in the pipeline, stage after stage with what is sent between. stages: each by itself.

    sends_us: the transfer behind each stage, 0 behind the last.
    """

    root: Node
    stages: tuple[Explanation, ...]
    sends_us: tuple[float, ...]

    @property
    def round_us(self) -> float:
        """Until as many steps in flight as there are stages have all ended once: a request's time per token."""
        return max(self.root.us, len(self.stages) * max(one.root.us for one in self.stages))

    @property
    def every_us(self) -> float:
        """From the end of one step to that of the next, with as many in flight as there are stages."""
        return self.round_us / len(self.stages)

    @property
    def alone_waits_us(self) -> tuple[float, ...]:
        """How long each stage stands still for every step, with one in flight."""
        return tuple(self.root.us - one.root.us for one in self.stages)

    @property
    def bubbles_us(self) -> tuple[float, ...]:
        """How long each stage stands still for every step, with as many in flight as there are stages."""
        return tuple(self.every_us - one.root.us for one in self.stages)


def explain_stages(
    cost: PipelineCost,
    shapes: Sequence[StepShape | None],
    bounds: Bounds | None,
    meta: Any,
    spec: ModelSpec,
    parallel: Parallel,
) -> StagedExplanation:
    """The step of a group whose ranks have `shapes`. bounds, meta and errors: as serving.explain.explain; bounds of the
    whole model."""
    stages: list[Explanation] = []
    for stage, priced in zip(pipeline_stages(spec, parallel), cost.stages, strict=True):
        own = replace(bounds, spec=stage.spec) if bounds else None
        found = explain(priced, shapes, own, meta, stage.spec, _parts(stage, meta))
        stages.append(replace(found, root=replace(found.root, name=f"stage {len(stages)}")))
    tokens = max(stages[0].computed_tokens)
    sends = [_send(cost, bounds, number, tokens) for number in range(len(cost.sends))]
    passage = [node for pair in zip((one.root for one in stages), sends, strict=False) for node in pair]
    root = summed("step", [*passage, stages[-1].root], ordered=True)
    return StagedExplanation(root, tuple(stages), (*(node.us for node in sends), 0.0))


def _parts(stage: Stage, meta: Any) -> Mapping[str, Mapping[str, int]]:
    """Calls by part of the model, of which a stage has the embedding or the head only where it is first or last."""
    model = family(stage.spec.family)
    ends = [
        *(model.prologue_components(stage.spec) if stage.first else ()),
        *(model.head_components(stage.spec) if stage.last else ()),
    ]
    return calls_by_part(stage.spec, meta) | {OUTSIDE: dict(Counter(one.name for one in ends))}


def _send(cost: PipelineCost, bounds: Bounds | None, stage: int, tokens: int) -> Node:
    least = bounds.stage_sends(tokens, stage) if bounds else {}
    leaves = []
    for entry in cost.sends[stage].lines(tokens):
        each = least.get(entry.component)
        bound = None if each is None else each * entry.calls
        leaves.append(Node(entry.component, entry.us, entry.calls, bound, entry.provenance))
    return summed(f"send to stage {stage + 1}", leaves, ordered=True)


def staged_document(found: StagedExplanation) -> dict[str, Any]:
    """The explanation as plain values, for JSON."""
    stages = [
        {
            "stage": number,
            "send_us": round(sent, 3),
            "alone_waits_us": round(alone, 3),
            "bubble_us": round(bubble, 3),
        }
        | document(one)
        for number, (one, sent, alone, bubble) in enumerate(
            zip(found.stages, found.sends_us, found.alone_waits_us, found.bubbles_us, strict=True)
        )
    ]
    for stage in stages:
        del stage["tree"]  # the step's has it
    return {
        "step_us": round(found.root.us, 3),
        "in_flight": len(found.stages),
        "step_every_us": round(found.every_us, 3),
        "round_us": round(found.round_us, 3),
        "stages": stages,
        "tree": mapping(found.root),
    }


def staged_text(found: StagedExplanation) -> str:
    """The tree and the stages' waiting as aligned text, 100 columns."""
    count, every = len(found.stages), found.every_us
    lines = [
        *table_text(found.root),
        "",
        f"{count} such steps in flight: one ends every {every:,.1f} us, and each takes {found.round_us:,.1f} us",
        f"{'':10}{'busy us':>13}{'bubble us':>13}{'of its time':>13}{'alone waits us':>17}",
    ]
    for number, one in enumerate(found.stages):
        bubble, alone = found.bubbles_us[number], found.alone_waits_us[number]
        busy = f"{one.root.us:>13,.1f}{bubble:>13,.1f}{bubble / every:>13.1%}"
        lines.append(f"{one.root.name:10}{busy}{alone:>17,.1f}")
    lines += [f"{one.root.name}: {text}" for one in found.stages for text in waits_text(one)]
    return "\n".join(lines)


def staged_page(found: StagedExplanation, title: str) -> str:
    """A self-contained HTML page: flame charts of a step that is alone and of each stage of a full pipeline, and the
    tree as a table."""
    count = len(found.stages)
    charts = [("A step that is alone in the pipeline:", found.root)]
    for number, (one, bubble) in enumerate(zip(found.stages, found.bubbles_us, strict=True)):
        waits = [Node("bubble", bubble, provenance=WAITING)] if bubble > 0 else []
        caption = f"{count} such steps in flight, each step in stage {number}, bubble {bubble:,.1f} us:"
        charts.append((caption, summed(f"stage {number}", [*one.root.children, *waits], ordered=True)))
    intro = (
        f"{found.root.us / 1e3:,.3f} ms alone; with {count} in flight a step ends every {found.every_us / 1e3:,.3f} ms "
        f"and takes {found.round_us / 1e3:,.3f} ms. {LEGEND} White: a stage waits."
    )
    return html_page(title, intro, charts, found.root)
