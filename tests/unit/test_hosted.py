"""The host's time in the step clock: closed forms, and the stand-in engine whose every part is known."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import vllm_stand_in as stand_in
from simulated import engine, replayed, request
from test_step_log import FORWARD_US, fake_vllm, played, trace

from profiler.core.hardware import Host, HostLaunch, HostPart
from profiler.core.registry import load_model
from serving.core.hosted import Behind, HostedGroup, HostTimes
from serving.core.scheduler import Limits
from serving.core.shape import StepShape
from serving.cost.host import TableHost
from serving.host_rules import waits_for_device

__all__ = ["fake_vllm"]

WIDE = Limits(max_num_seqs=64, max_num_batched_tokens=1024, max_model_len_tokens=4096)


@dataclass(frozen=True)
class Constant:
    """Every step costs the same on both timelines."""

    device_ns: int
    host: HostTimes

    def step_ns(self, shapes):
        return self.device_ns

    def times(self, shapes):
        return self.host


def hosted(constant, *, asynchronous, limits=WIDE):
    one = engine(limits=limits, asynchronous=asynchronous)
    return HostedGroup([one], constant, constant, asynchronous=asynchronous)


def test_one_after_the_other_without_asynchronous_scheduling():
    """before 10, launch 5, update 3, output 2; the device needs 100 from its first launch on."""
    cost = Constant(100, HostTimes(10, 5, 3, 2))
    (record,), _ = replayed([hosted(cost, asynchronous=False)], [request(output=3)])
    assert (record.first_token_ns, record.finish_ns) == (113, 113 + 2 * 115)
    assert record.itl_p50_ns == 115


def test_a_launch_bound_step_takes_as_long_as_its_launches():
    cost = Constant(100, HostTimes(10, 500, 3, 2))
    (record,), _ = replayed([hosted(cost, asynchronous=False)], [request(output=2)])
    assert (record.first_token_ns, record.finish_ns) == (513, 513 + 515)


def test_a_busy_device_hides_the_host():
    """Launched ahead, a step follows the one before without a gap."""
    cost = Constant(100, HostTimes(10, 5, 3, 2))
    (record,), _ = replayed([hosted(cost, asynchronous=True)], [request(output=9)])
    assert record.first_token_ns == 113 and record.itl_p50_ns == record.itl_p99_ns == 100


def test_a_busy_thread_hides_the_device():
    """Once round: 60 + 70 + 3 + 2, more than the device's 100."""
    cost = Constant(100, HostTimes(60, 70, 3, 2))
    (record,), _ = replayed([hosted(cost, asynchronous=True)], [request(output=9)])
    # The thread launches the second step before it waits for the first.
    assert record.first_token_ns == 2 * 130 + 3 and record.itl_p50_ns == 135


def test_a_request_that_comes_during_the_first_launch_is_in_the_second_step():
    cost = Constant(100, HostTimes(10, 50, 3, 2))
    requests = [request(0, output=5), request(1, output=1, arrival_ns=30), request(2, output=1, arrival_ns=61)]
    records, _ = replayed([hosted(cost, asynchronous=True)], requests)
    assert [record.queued_ns for record in records] == [0, 60, 123]
    assert [record.first_token_ns for record in records] == [123, 213, 313]


PART = HostPart(0.0, 0.0)
HOST = Host(
    schedule=HostPart(stand_in.Scheduler.SCHEDULE_US, 0.0),
    prepare=HostPart(stand_in.Runner.PREPARE_US, 0.0),
    replay=HostPart(stand_in.Runner.LAUNCH_US, 0.0),
    sample=HostPart(stand_in.Runner.SAMPLE_US, 0.0),
    bookkeep=PART,
    tokens=PART,
    update=HostPart(stand_in.Scheduler.UPDATE_US, 0.0),
    output=HostPart(stand_in.Engine.OUTPUT_US, 0.0),
    launch=HostLaunch(0.0, 0.0),
    piecewise=None,
    source="the stand-in",
)


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_stand_in_engine_takes_as_long(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    """Its host's constants are those of HOST; the device needs 10 us before the layers and 30 behind them."""
    _, _, steps = played(monkeypatch, asynchronous, trace((0.0, 5, 12)))
    host = TableHost(HOST, 6, 512, False, asynchronous)

    class Device:
        def step_ns(self, shapes: object) -> int:
            return round(1e3 * (10.0 + FORWARD_US + 30.0))

    one = engine(limits=WIDE, asynchronous=asynchronous)
    group = HostedGroup([one], Device(), host, asynchronous=asynchronous)
    (record,), _ = replayed([group], [request(prompt=5, output=12)])
    ends_us = [one.updated_s * 1e6 for one in steps]
    ours_us = [end / 1e3 for end in group.times.end_ns]
    theirs = [after - before for before, after in pairwise(ends_us[1:])]
    ours = [after - before for before, after in pairwise(ours_us[1:])]
    # What the device does before the layers it does while the thread launches these: 10 us that the rule waits for.
    assert ours == pytest.approx(theirs, abs=11.0)
    assert record.finish_ns is not None


def test_how_steps_are_launched():
    shape = StepShape(((100, 0),), 3, 30, 10, 30, 4)
    decodes = StepShape((), 3, 30, 10, 30, 3)
    host = Host(
        **{name: HostPart(0.0, 0.0) for name in ("schedule", "prepare", "bookkeep", "tokens", "output")},
        replay=HostPart(90.0, 1.0),
        sample=HostPart(0.0, 0.0),
        update=HostPart(5.0, 0.5),
        launch=HostLaunch(700.0, 2_900.0),
        piecewise=HostLaunch(100.0, 400.0),
        source="here",
    )
    graphs = TableHost(host, 6, 512, False, True)
    assert graphs.times([decodes]) == (93_000, 0, 6_500, 0, 0, 0, None, 0)
    launch_ns = 700_000 + 6 * 2_900_000
    assert graphs.times([shape]) == (0, launch_ns, 7_000, 0, 0, launch_ns, None, 0)
    assert graphs.times([shape, None, decodes]) == graphs.times([shape])
    assert graphs.times([None, decodes]) == graphs.times([decodes])
    assert TableHost(host, 6, 0, False, True).times([decodes]).launch_ns == launch_ns


def test_compiled_layers_are_launched_by_parts_as_far_as_graphs_reach():
    """103 tokens: within 512 the graphs of parts, 100 us and 400 per layer; beyond 64 kernel by kernel."""
    shape = StepShape(((100, 0),), 3, 30, 10, 30, 4)
    decodes = StepShape((), 3, 30, 10, 30, 3)
    host = replace(MIXED, piecewise=HostLaunch(100.0, 400.0))
    within = TableHost(host, 6, 512, True, True, first_layers=2, experts_last=True)
    # The last layer's experts are in the graph behind the last attention, so all of its launch comes before them.
    assert within.times([shape]) == (37_000, 2_500_000, 0, 0, 900_000, 2_500_000, None, 0)
    assert within.times([decodes])[4:6] == (0, 0)
    beyond = replace(within, largest_graph_tokens=64)
    assert beyond.times([shape]) == replace(beyond, compiled=False).times([shape])
    assert beyond.times([shape]).launch_ns == 156_000
    assert replace(beyond, largest_graph_tokens=2).times([decodes]).launch_ns == 125_000
    # Components of other stacks count for what is launched kernel by kernel alone.
    other = replace(within, launch_layers=9.0, launch_first_layers=1.5)
    assert other.times([shape]) == within.times([shape])
    assert replace(other, largest_graph_tokens=0).times([shape])[4:6] == (43_500, round(231_000 - 25_000 * 12 / 51))
    unknown = replace(within, host=replace(host, piecewise=None))
    assert unknown.times([shape]) == (37_000, 0, 0, 0, 0, 0, None, 0)


def test_the_books_wait_for_the_tokens_without_asynchronous_scheduling():
    host = Host(
        **{name: HostPart(1.0, 0.0) for name in ("schedule", "prepare", "replay", "sample", "tokens", "update")},
        bookkeep=HostPart(100.0, 0.0),
        output=HostPart(10.0, 0.0),
        launch=HostLaunch(0.0, 0.0),
        piecewise=None,
        source="here",
    )
    decodes = StepShape((), 3, 30, 10, 30, 3)
    assert TableHost(host, 6, 512, False, True).times([decodes])[:4] == (3_000, 101_000, 2_000, 10_000)
    assert TableHost(host, 6, 512, False, False).times([decodes])[:4] == (3_000, 1_000, 102_000, 10_000)
    added = TableHost(host, 6, 512, False, False, HostPart(4.0, 1.0))
    assert added.times([decodes]).before_ns == 3_000 + 7_000


MIXED = Host(
    **{name: HostPart(0.0, 0.0) for name in ("schedule", "replay", "sample", "bookkeep", "tokens", "update", "output")},
    prepare=HostPart(10.0, 1.0),
    launch=HostLaunch(5.0, 20.0),
    piecewise=None,
    source="here",
    prepare_prefill=HostPart(30.0, 7.0),
    launch_mixed=HostLaunch(6.0, 25.0),
)


def test_prefills_and_steps_of_both_kinds_have_times_of_their_own():
    host = TableHost(MIXED, 6, 512, False, True, first_layers=2)
    decodes = StepShape((), 3, 30, 10, 30, 3)
    prefills = StepShape(((100, 0), (50, 0)), 0, 0, 0, 0, 2)
    both = StepShape(((100, 0),), 3, 30, 10, 30, 4)
    assert host.times([decodes])[:2] == (13_000, 0)
    assert host.times([prefills]) == (44_000, 125_000, 0, 0, 45_000, 125_000, None, 0)
    assert host.times([both]) == (37_000, 156_000, 0, 0, 56_000, 156_000, None, 0)
    # Of two ranks one launches prefills, the other decodes; none launches both.
    assert host.times([prefills, decodes]).launch_ns == 125_000
    with_experts = TableHost(MIXED, 6, 512, False, True, first_layers=2, experts_last=True).times([prefills])
    assert with_experts == (44_000, 125_000, 0, 0, 45_000, 125_000 - round(20_000 * 12 / 51), None, 0)
    untold = TableHost(replace(MIXED, prepare_prefill=None, launch_mixed=None), 6, 512, False, True)
    assert untold.times([both])[:2] == (14_000, 125_000)


def test_a_preparation_that_waits_for_the_device_is_not_hidden_by_it():
    """Every step is launched 20 behind the device's end of the one before, which a busy device hides otherwise. The
    tokens of that come no sooner than the launch of 5 has ended."""
    cost = Constant(100, HostTimes(30, 5, 3, 2, behind_ns=20))
    (record,), _ = replayed([hosted(cost, asynchronous=True)], [request(output=9)])
    assert record.first_token_ns == 130 + 20 + 5 + 3 and record.itl_p50_ns == 120
    # An idle device holds nothing up: one after the other, 30 + 40 + 3 + 2.
    (record,), _ = replayed([hosted(replace(cost, device_ns=40), asynchronous=False)], [request(output=3)])
    assert record.itl_p50_ns == 75


def test_steps_with_prefills_wait_for_the_device_where_a_model_does():
    host = replace(MIXED, prepare_behind=HostPart(30.0, 2.0))
    decodes = StepShape((), 3, 30, 10, 30, 3)
    both = StepShape(((100, 0),), 3, 30, 10, 30, 4)
    assert TableHost(host, 6, 512, False, True).times([both]).behind_ns is None
    waits = TableHost(host, 6, 512, False, True, waits=True)
    assert waits.times([both]).behind_ns == 38_000 and waits.times([decodes]).behind_ns is None
    assert TableHost(MIXED, 6, 512, False, True, waits=True).times([both]).behind_ns == 0
    assert waits_for_device(load_model("MiniMaxAI/MiniMax-M3"))
    assert not waits_for_device(load_model("zai-org/GLM-5-FP8"))


def test_inputs_are_not_copied_before_the_last_launch_of_the_step_before():
    """The first step ends with its launch at 500; the next begins then, not 1,000 before its own launch."""

    class Slow:
        launches_ns = iter((500, 50))

        def times(self, shapes):
            return HostTimes(0, next(self.launches_ns), 0, 0)

    group = HostedGroup([engine()], Constant(100, HostTimes(0, 0, 0, 0)), Slow(), inputs_ns=1_000)
    (record,), _ = replayed([group], [request(prompt=5, output=2)])
    assert (record.first_token_ns, record.finish_ns) == (500, 600)


class Fixed(NamedTuple):
    ns: int

    def step_ns(self, shapes: object) -> int:
        return self.ns


@pytest.mark.parametrize(
    ("kernels", "behind_first", "first", "layers", "expected"),
    [
        (100, 60, 10, 30, 100),  # the device is slower than the launches
        (100, 80, 40, 50, 120),  # it idles among the first layers, and the others hold it up
        (100, 20, 40, 170, 175),  # it idles all along, and runs the head at the end
    ],
)
def test_the_device_ends_no_earlier_than_what_is_launched_late_lets_it(kernels, behind_first, first, layers, expected):
    times = HostTimes(0, layers, 0, 0, first, layers)
    behind = Behind(Fixed(behind_first), Fixed(5))

    class Launching:
        def times(self, shapes: object) -> HostTimes:
            return times

    group = HostedGroup([engine()], Fixed(kernels), Launching(), behind=behind)
    (record,), _ = replayed([group], [request(prompt=5, output=1)])
    assert record.first_token_ns == expected
    assert behind.end_ns(7, HostTimes(0, layers, 0, 0), ()) == 7
    assert Behind(None, Fixed(5)).end_ns(7, times, ()) == 7 + layers + 5


def test_the_device_does_not_run_experts_before_they_are_launched():
    """Two dense layers of 20 us, then four with experts, launched behind 39 of 51 parts of one of them: 40 + 15.3."""
    host = TableHost(MIXED, 6, 512, False, True, first_layers=2, experts_last=True, experts_first=True)
    times = host.times([StepShape(((100, 0), (50, 0)), 0, 0, 0, 0, 2)])
    assert times.experts_ns == times.first_ns + round(20_000 * 39 / 51)
    assert Behind(Fixed(300_000), Fixed(5), Fixed(295_000)).end_ns(0, times, ()) == times.experts_ns + 295_000
    # Attention that takes longer than its launch holds the device up itself.
    assert Behind(Fixed(300_000), Fixed(5), Fixed(200_000)).end_ns(0, times, ()) == times.first_ns + 300_000
    assert host.times([StepShape((), 3, 30, 10, 30, 3)]).experts_ns == 0
