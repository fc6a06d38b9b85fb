"""Turn a shot into a step of vLLM V1: new requests with cached history, on blocks of their own."""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any


def place_blocks(
    requests: Sequence[tuple[int, int]], block_tokens: int, num_blocks: int
) -> tuple["array[int]", ...] | None:
    """Block ids (int32) per request, disjoint, starting after the null block 0; None when they do not fit.

    requests: (new_tokens, context_tokens). Arrays, since the block table takes half a million ids of a large batch from
    lists one by one; kept for the runs of a shot.
    """
    return _placed(tuple(requests), block_tokens, num_blocks)


@lru_cache(maxsize=32)
def _placed(
    requests: tuple[tuple[int, int], ...], block_tokens: int, num_blocks: int
) -> tuple["array[int]", ...] | None:
    placed: list[array[int]] = []
    first = 1
    for new, context in requests:
        count = -(-(new + context) // block_tokens)
        placed.append(array("i", range(first, first + count)))
        first += count
    return tuple(placed) if first <= num_blocks else None


def scheduler_output(
    requests: Sequence[tuple[int, int]],
    blocks: Sequence["array[int]"],
    tokens: Any,
    finished: set[str],
    tag: str,
) -> Any:
    """A SchedulerOutput that adds every request anew. Returns it; the ids are `<tag>-<row>`.

    tokens: int32 array of at least max(new + context) random token ids, shared by all requests (rows differ by an
    offset, so that batches do not repeat one hidden state).
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    new_requests = []
    scheduled: dict[str, int] = {}
    sampling = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True, detokenize=False)
    for row, ((new, context), ids) in enumerate(zip(requests, blocks, strict=True)):
        request_id = f"{tag}-{row}"
        total = new + context
        offset = (row * 7919) % max(1, len(tokens) - total + 1)
        new_requests.append(
            NewRequestData(
                req_id=request_id,
                prompt_token_ids=tokens[offset : offset + total],
                mm_features=[],
                sampling_params=sampling,
                pooling_params=None,
                block_ids=(ids,),
                num_computed_tokens=context,
                lora_request=None,
            )
        )
        scheduled[request_id] = new
    return SchedulerOutput(
        scheduled_new_reqs=new_requests,
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[0],
        finished_req_ids=finished,
        free_encoder_mm_hashes=[],
    )
