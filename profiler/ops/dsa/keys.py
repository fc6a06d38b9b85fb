"""Index keys in buffers that grow with each request: simple, and eager only."""

import torch

from profiler.ops.checks import FLOATS, check_tensor, describe

_FIRST_CAPACITY_TOKENS = 64


class IndexKeyStore:
    """The indexer's keys per request and layer, in position order.

    One buffer (capacity, D) per (request, layer), doubled when it is full; a view handed out earlier keeps the keys it
    showed.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, dict[int, torch.Tensor]] = {}
        self._tokens: dict[tuple[str, int], int] = {}

    def check_append(self, request_id: str, layer_idx: int, keys: torch.Tensor, start_pos: int) -> None:
        """Raise the ValueError that `append` would raise; writes nothing."""
        check_tensor("keys", keys, ("n", "D"), FLOATS)
        stored = self.tokens(request_id, layer_idx)
        if not 0 <= start_pos <= stored:
            raise ValueError(
                f"start_pos: {start_pos} leaves a gap, request {request_id!r} has {stored} keys in layer {layer_idx}"
            )
        buffer = self._buffers.get(request_id, {}).get(layer_idx)
        if buffer is not None and (
            buffer.shape[1] != keys.shape[1] or buffer.dtype != keys.dtype or buffer.device != keys.device
        ):
            raise ValueError(f"keys: {describe(keys)} do not match the stored {describe(buffer)}")

    def append(self, request_id: str, layer_idx: int, keys: torch.Tensor, start_pos: int) -> None:
        """Store (n, D) keys at positions start_pos .. start_pos + n - 1.

        start_pos is the stored length, or less to take back rejected tokens: what lies from start_pos on is replaced.
        Raises ValueError for a gap, or keys of another width, dtype or device than those stored.
        """
        self.check_append(request_id, layer_idx, keys, start_pos)
        end = start_pos + keys.shape[0]
        layers = self._buffers.setdefault(request_id, {})
        buffer = layers.get(layer_idx)
        if buffer is None or buffer.shape[0] < end:
            capacity = max(end, _FIRST_CAPACITY_TOKENS, 0 if buffer is None else 2 * buffer.shape[0])
            grown = keys.new_empty(capacity, keys.shape[1])
            if buffer is not None:
                grown[:start_pos] = buffer[:start_pos]
            layers[layer_idx] = buffer = grown
        buffer[start_pos:end] = keys
        self._tokens[request_id, layer_idx] = end

    def history(self, request_id: str, layer_idx: int, length: int) -> torch.Tensor:
        """The first `length` keys of a request, a (length, D) view. Raises ValueError when fewer are stored."""
        stored = self.tokens(request_id, layer_idx)
        if length < 0 or length > stored or request_id not in self._buffers:
            raise ValueError(
                f"length: {length} keys asked of request {request_id!r}, layer {layer_idx}, which has {stored}"
            )
        return self._buffers[request_id][layer_idx][:length]

    def tokens(self, request_id: str, layer_idx: int) -> int:
        """Keys stored for a request and layer, 0 when there are none."""
        return self._tokens.get((request_id, layer_idx), 0)

    def tracked_requests(self) -> set[str]:
        return set(self._buffers)

    def reset(self, request_id: str) -> None:
        """Forget a request's keys but keep its buffers. Nothing happens to a request that is not tracked."""
        for layer_idx in self._buffers.get(request_id, {}):
            self._tokens[request_id, layer_idx] = 0

    def evict(self, request_id: str) -> None:
        """Drop a request's buffers; a request that is not tracked is fine."""
        for layer_idx in self._buffers.pop(request_id, {}):
            del self._tokens[request_id, layer_idx]
