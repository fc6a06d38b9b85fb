"""CUDA graphs: which batch sizes are captured, and how a step is padded to them."""

from collections.abc import Sequence


def padded_tokens(tokens: Sequence[int], capture_sizes: Sequence[int]) -> list[int]:
    """Tokens per rank that a step really computes.

    Every rank runs the CUDA graph that covers the largest rank; when none does, all run without a graph and unpadded
    (vLLM's rule for data-parallel groups, which for one rank is the plain padding to the next captured size).
    capture_sizes ascending; empty means eager.
    """
    largest = max(tokens)
    for size in capture_sizes:
        if size >= largest:
            return [size] * len(tokens)
    return list(tokens)


def default_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that vLLM captures by default: 1, 2, 4, then steps of 8 below 256 and of 16 above.

    They end at twice max_num_seqs, and at 512 at most.
    """
    largest = min(2 * max_num_seqs, 512)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return tuple(size for size in sizes if size <= largest)
