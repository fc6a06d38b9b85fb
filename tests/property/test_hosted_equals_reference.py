"""Engines with a host: the event-driven group and the program of the specification agree, bit for bit; and what follows
from the rule whatever the numbers."""

from dataclasses import dataclass, replace

import reference.hosted
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from simulated import LinearCost, engine, group, plain_engine, plain_request, replayed, request
from test_core_equals_reference import TIGHT, Case, cases

from serving.core.hosted import Behind, HostedGroup, HostTimes


@dataclass(frozen=True)
class LinearHost:
    """Constants, and some more per request of the rank with most of them."""

    fixed: HostTimes
    per_request_ns: int = 0

    def times(self, shapes):
        most = max((one.decode_requests + len(one.prefills) for one in shapes if one), default=1)
        return HostTimes(*(one + self.per_request_ns * most for one in self.fixed[:4]), *self.fixed[4:])


SOME = st.sampled_from([0, 0, 1, 70, 900, 5_000])
HOSTS = st.builds(
    LinearHost,
    st.builds(HostTimes, SOME, SOME, SOME, SOME, SOME, SOME, st.none() | SOME, SOME),
    st.sampled_from([0, 0, 3, 200]),
)
REST = st.builds(LinearCost, SOME, SOME, st.just(0))
BEHIND = st.none() | st.builds(Behind, st.none() | REST, REST, st.none() | REST)
NO_HOST = LinearHost(HostTimes(0, 0, 0, 0))
COST = LinearCost()


def options(case):
    return {
        "num_blocks": case.num_blocks,
        "block_tokens": case.block_tokens,
        "prefix_caching": case.caching,
        "limits": case.limits,
        "cap_tokens": 8,
        "policy": case.policy,
    }


def requests_of(case, make):
    return [make(i, prompt, out, at, keys, rank) for i, (at, prompt, out, keys, rank) in enumerate(case.rows)]


def of_core(case, host, behind=None, inputs_ns=0):
    engines = [engine(index, asynchronous=case.asynchronous, **options(case)) for index in range(case.ranks)]
    hosted = HostedGroup(engines, COST, host, behind=behind, inputs_ns=inputs_ns, asynchronous=case.asynchronous)
    return replayed([hosted], requests_of(case, request))[0], hosted


def times_of(record):
    return (record.queued_ns, record.scheduled_ns, record.first_token_ns, record.finish_ns, record.preemptions)


@settings(deadline=None, max_examples=300)
@given(cases(), HOSTS, BEHIND, st.sampled_from([0, 0, 40, 1_000]))
@example(Case(((0, 8, 20, (), 0), (0, 8, 20, (), 0), (0, 8, 20, (), 0)), TIGHT, num_blocks=12, asynchronous=True),
         LinearHost(HostTimes(50, 900, 30, 10)), None, 40)  # fmt: skip
def test_the_group_runs_as_the_program(case, host, behind, inputs_ns):
    # Tokens of ranks that step in lockstep are scheduled alike; the order of the ranks is that of the router.
    records, hosted = of_core(case, host, behind, inputs_ns)
    requests = requests_of(case, plain_request)
    engines = [plain_engine(index, **options(case)) for index in range(case.ranks)]
    rest = tuple(behind) if behind else (None, None, None)
    steps = reference.hosted.run(engines, COST, host, case.asynchronous, requests, *rest, inputs_ns)
    for got, asked in zip(records, requests, strict=True):
        finish_ns = asked.token_ns[-1] if asked.outcome == "finished" else None
        expected = (asked.queued_ns, asked.scheduled_ns, asked.token_ns[0] if asked.token_ns else None, finish_ns,
                    asked.preemptions)  # fmt: skip
        assert times_of(got) == expected, f"request {asked.index}"
    assert hosted.steps == len(steps)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_without_any_time_of_the_host_it_is_the_group_without_one(case):
    records, _ = of_core(case, NO_HOST)
    engines = [engine(index, asynchronous=case.asynchronous, **options(case)) for index in range(case.ranks)]
    plain, _ = replayed([group(*engines, cost=COST, asynchronous=case.asynchronous)], requests_of(case, request))
    assert list(map(times_of, records)) == list(map(times_of, plain))


@settings(deadline=None, max_examples=100)
@given(cases(), HOSTS)
def test_a_host_never_makes_the_last_token_come_earlier_than_its_parts(case, host):
    """The thread works for every step, and the device runs every step, one after the other."""
    assume(case.rows)
    records, hosted = of_core(replace(case, ranks=1), host)
    ends = [one.finish_ns for one in records if one.finish_ns is not None]
    assume(ends)
    launched = sum(sum(host.fixed[:3]) for _ in range(hosted.steps))
    assert max(ends) - min(one.queued_ns for one in records) >= launched
