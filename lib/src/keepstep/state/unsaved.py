"""Buffers that change while training and are in no checkpoint (`persistent=False`).

`state_dict()` leaves them out, so a restart loses what they have learned, in silence. Most such
buffers are constants or caches. So the first saves of a life are compared: only a buffer that was
changed from one save to the next is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from keepstep.state.leaves import Taken
from keepstep.state.wrappers import unwrap

_SAVES = 8


class UnsavedBuffers:
    """Watches the buffers of all components over the first saves."""

    def __init__(self, components: Mapping[str, Any]) -> None:
        self._buffers = list(_unsaved(components))
        self._marks: list[tuple[int, int] | None] = []
        self._saves = 0

    def changed(self, taken: Taken) -> list[str]:
        """Called at each save: the names of buffers that have changed since the last one, unless
        they are in the state under another name.
        """
        self._saves += 1
        if not self._buffers or self._saves > _SAVES:
            return []
        before, self._marks = self._marks, [_mark(one, name) for _, one, name in self._buffers]
        moved = [
            (path, mark)
            for (path, _, _), mark, was in zip(self._buffers, self._marks, before, strict=False)
            if mark is not None and mark != was
        ]
        if not moved:
            return []
        kept = {leaf.mark[0] for leaf in taken.tensors if leaf.mark}
        return [path for path, mark in moved if mark[0] not in kept]


def _unsaved(components: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module, str]]:
    for component, one in components.items():
        module = unwrap(one)
        if not isinstance(module, nn.Module):
            continue
        for path, part in module.named_modules():
            for name in sorted(part._non_persistent_buffers_set):
                yield ".".join(filter(None, (component, path, name))), part, name


def _mark(part: nn.Module, name: str) -> tuple[int, int] | None:
    buffer = part._buffers.get(name)
    if not isinstance(buffer, Tensor) or buffer.is_inference():
        return None
    try:
        return buffer.data_ptr(), buffer._version
    except (RuntimeError, ValueError):  # a tensor without an address
        return None
