"""Clients that wait, on an engine whose steps have a linear price: one sees closed forms, more never work off less."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from simulated import LinearCost, engine, group, replayed, request

from serving.core.scheduler import Limits

WIDE = Limits(max_num_seqs=8, max_num_batched_tokens=4096, max_model_len_tokens=1024)
SIZES = st.tuples(st.integers(1, 300), st.integers(1, 20))


@given(
    cost=st.builds(LinearCost, st.integers(1, 10_000), st.integers(0, 50), st.integers(0, 3)),
    sizes=st.lists(SIZES, min_size=1, max_size=12),
)
def test_one_client_sees_every_request_as_if_it_were_alone(cost, sizes):
    requests = [request(i, prompt, output) for i, (prompt, output) in enumerate(sizes)]
    records, _ = replayed([group(engine(limits=WIDE), cost=cost)], requests, max_concurrency=1)
    now_ns = 0
    for (prompt, output), got in zip(sizes, records, strict=True):
        prefill_ns = cost.base_ns + cost.token_ns * prompt + cost.key_ns * (prompt * prompt // 2)
        keys = sum(range(prompt + 1, prompt + output))
        decode_ns = (output - 1) * (cost.base_ns + cost.token_ns) + cost.key_ns * keys
        assert (got.arrival_ns, got.first_token_ns - got.arrival_ns) == (now_ns, prefill_ns)
        now_ns += prefill_ns + decode_ns
        assert got.finish_ns == now_ns


@given(
    cost=st.builds(LinearCost, st.integers(1, 10_000), st.integers(0, 50), st.just(0)),
    prompt=st.integers(1, 400),
    output=st.integers(1, 30),
)
def test_more_clients_work_off_more_until_the_engine_is_full(cost, prompt, output):
    spans_ns = []
    for clients in (1, 2, 4, 8, 16):
        requests = [request(i, prompt, output) for i in range(32)]
        blocks = 40 * WIDE.max_num_seqs
        records, _ = replayed(
            [group(engine(limits=WIDE, num_blocks=blocks), cost=cost)], requests, max_concurrency=clients
        )
        assert all(record.outcome == "finished" for record in records)
        spans_ns.append(max(record.finish_ns for record in records))
        ends = [(record.finish_ns, -1) for record in records]
        moments = sorted([*((record.arrival_ns, 1) for record in records), *ends])
        assert max(itertools.accumulate(change for _, change in moments)) <= clients
    assert spans_ns[:4] == sorted(spans_ns[:4], reverse=True) and len(set(spans_ns[:4])) == 4
    assert spans_ns[4] == spans_ns[3]  # of 16, 8 wait for a place on the engine
