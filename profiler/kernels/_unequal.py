"""What is known of the kernels that run unequal requests in one launch; see profiler.core.unequal."""

from dataclasses import replace
from typing import Final

from profiler.core.grid import Grid
from profiler.core.grid_work import Work
from profiler.core.launch import Captured, JointLaunch, Passes, Tiles, least_block_us
from profiler.core.types import ModelSpec
from profiler.core.unequal import Together
from profiler.kernels._block_sparse import ScoreWork, TopkWork
from profiler.kernels._flash_attention import DenseWork, GroupedWork
from profiler.kernels._placement import Ran, decode_straight, prefill_straight, prefill_work, steps_of

# vLLM's top-k of decode rows (csrc/topk.cu): up to 8 rows, up to 32 with more shared memory, each row by a group of
# blocks; more rows by one block each.
_TOPK_ROWS: Final = (8, 32)
# Dense MLA reads every context in a pass of its own, so no longer chunk stands for one behind a context.
_APART: Final = frozenset({"mla_dense_prefill"})


def request_steps(name: str, ran: Ran | None) -> tuple[int, ...]:
    """Last numbers of decode requests before the kernel works otherwise, ascending; empty where none is known."""
    return _TOPK_ROWS if name == "index_topk" and ran is not None and ran.tiles else ()


def together_of(name: str, spec: ModelSpec, ran: Ran | None) -> Together | None:
    """What the form `together` needs; None for a kernel that it cannot price."""
    work = _straight(name, ran)
    if work is None:
        return None
    steps = sorted({*steps_of(spec, name), *((work.whole_below,) if work.whole_below else ())})
    return Together(work, tuple(steps), max(work.cap_keys or 0, work.select_beyond))


def tiles_of(name: str, spec: ModelSpec, ran: Ran | None) -> Tiles | Passes | None:
    """What the form `tiles` needs; None for a kernel whose tiles of several requests are not known."""
    work = prefill_straight(name, ran)
    if isinstance(work, DenseWork):
        return Passes(work)
    if not isinstance(work, ScoreWork | TopkWork | GroupedWork):
        return None
    return Tiles(work, max(steps_of(spec, name), default=0))


def sharing_of(form: str | None, name: str, spec: ModelSpec, ran: Ran | None) -> Together | Tiles | Passes | None:
    """Several prefills in the form that a bundle chose; None for `once`."""
    if form == "tiles":
        return tiles_of(name, spec, ran)
    return together_of(name, spec, ran) if form == "together" else None


def launch_of(name: str, ran: Ran | None, prefill: Grid, fixed_us: float) -> JointLaunch | None:
    """What the form `launch` needs; None for a kernel that runs decodes and prefills in launches of their own, or whose
    tiles are not known. prefill: its chunks."""
    work = prefill_straight(name, ran)
    if not isinstance(work, GroupedWork):
        return None
    block_us = least_block_us(prefill, work)
    return JointLaunch(work, block_us, fixed_us) if block_us else None


def captured_of(name: str, ran: Ran | None, tokens: int, keys: int) -> Captured | None:
    """What whole captured decode steps do to a kernel; None where nothing is known. tokens: of the largest one. keys:
    the most of a request."""
    work = decode_straight(name, ran)
    if isinstance(work, TopkWork):
        return Captured(tokens, keys, work)
    return Captured(tokens, keys, None) if isinstance(prefill_straight(name, ran), GroupedWork) else None


def _straight(name: str, ran: Ran | None) -> Work | None:
    """The work of the kernel's queries added up, as if each ran alone."""
    if ran is None or name in _APART:
        return None
    if name == "sparse_mla" and ran.cap_tokens:
        return Work(cap_keys=ran.cap_tokens, whole_below=ran.whole_below)
    work = prefill_work(name, ran)
    return replace(work, wave_queries=1, splits_keys=False, split_pairs=None) if isinstance(work, Work) else None
