"""Host copy: tensors of a running model -> [hostcopy] -> the same tensors as they were, on the host, for a save.

The buffers are allocated once, before the first step, and touched, so that no save waits for memory.  Weights and
optimizer state change only when the optimizer updates them: they are copied beside the next forward and backward pass,
and the training waits just before the update if that is not done by then.
"""

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # (buffer on the host, source)


class HostCopy:
    """One set of buffers: whoever reads the last copy must be done before the next is started."""

    def __init__(self) -> None:
        """No buffers yet."""
        self._buffers: dict[str, Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._pairs: list[Pair] = []

    def prepare(self, tree: Any) -> int:  # noqa: ANN401
        """Allocate the buffers for a tree and touch each page; returns their bytes."""
        _, pairs = self._mirror(tree)
        for buffer, _ in pairs:
            buffer.zero_()
        return sum(buffer.nbytes for buffer, _ in pairs)

    def start(self, tree: Any, changing: Iterable[Tensor]) -> Any:  # noqa: ANN401
        """Begin to copy; returns the tree with buffers in the place of tensors, which finish() fills.

        tree: dicts and lists of tensors and plain values.
        changing: those of its tensors that a forward pass changes; they are copied at once.
        """
        copy, pairs = self._mirror(tree)
        at_once = {tensor.data_ptr() for tensor in changing}
        for buffer, source in pairs:
            if source.data_ptr() in at_once:
                buffer.copy_(source, non_blocking=True)  # on a GPU in order with what the training has queued
        self._pairs = [pair for pair in pairs if pair[1].data_ptr() not in at_once]
        self._copied.clear()
        if any(source.is_cuda for _, source in self._pairs):
            self._start_on_device()
        return copy

    def _start_on_device(self) -> None:
        """Queue the copies on a stream of their own, behind what the training has queued so far."""
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for buffer, source in self._pairs:
                buffer.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def finish(self) -> None:
        """Fill the buffers; called on the thread that reads them."""
        try:
            if self._event is not None:
                self._event.synchronize()
            else:
                for buffer, source in self._pairs:
                    buffer.copy_(source)
        finally:
            self._pairs = []
            self._copied.set()

    def wait(self) -> None:
        """Return when the sources may change; on a GPU the work that is queued from now on waits, not this thread."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        else:
            self._copied.wait()

    def _mirror(self, tree: Any) -> tuple[Any, list[Pair]]:  # noqa: ANN401
        pairs: list[Pair] = []

        def walk(value: Any, path: str) -> Any:  # noqa: ANN401
            if isinstance(value, Tensor):
                pairs.append((self._buffer(path, value), value.detach()))
                return pairs[-1][0]
            if isinstance(value, dict):
                return {key: walk(part, f"{path}/{key}") for key, part in value.items()}
            if isinstance(value, list):
                return [walk(part, f"{path}/{number}") for number, part in enumerate(value)]
            return value

        return walk(tree, ""), pairs

    def _buffer(self, path: str, like: Tensor) -> Tensor:
        kept = self._buffers.get(path)
        if kept is None or (kept.shape, kept.stride(), kept.dtype) != (like.shape, like.stride(), like.dtype):
            # In the order of the source, so that a copy is one move of bytes.
            kept = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[path] = kept
        return kept
