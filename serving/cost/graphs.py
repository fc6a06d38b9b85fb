"""CUDA graphs: which batch sizes are captured, and how a step is padded to them."""

from collections.abc import Sequence


def padding(capture_sizes: Sequence[int]) -> tuple[int, ...]:
    """The tokens that a step really computes, by its number of tokens up to the largest captured size.

    Every rank runs the CUDA graph that covers the largest rank; when none does, all run without a graph and unpadded
    (vLLM's rule for data-parallel groups, which for one rank is the plain padding to the next captured size).
    capture_sizes ascending; empty means eager.
    """
    padded: list[int] = []
    for size in capture_sizes:
        padded += [size] * (size + 1 - len(padded))
    return tuple(padded)


def default_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that vLLM captures by default: 1, 2, 4, then steps of 8 below 256 and of 16 above.

    They end at twice max_num_seqs, and at 512 at most.
    """
    largest = min(2 * max_num_seqs, 512)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return tuple(size for size in sizes if size <= largest)
