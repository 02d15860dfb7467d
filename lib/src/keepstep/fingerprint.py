"""Sees that a tensor changed although its version counter did not (`tensor.data.add_(1)`).

Copying lazily is safe only while nobody writes. In-place operations move the version counter that
autograd keeps; writes through `.data` do not. So a few elements of every tensor are compared as
well: the first, the last-but-few, at least 16 of each and one in every 256 KiB. Any dense update
changes them. A sparse write past the counter (through `.data`, numpy, another process) between save
and fence may hide; docs say to wrap such in `checkpointer.mutating()`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SAMPLES = 16
_STRIDE_BYTES = 256 << 10
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """Sample positions of a set of dense tensors; `take` reads them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Prepare views; holds no copy. Tensors must be dense and non-overlapping."""
        groups: dict[tuple[torch.device, int], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            size = tensor.element_size()
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            if size not in _BITS:  # complex128: two doubles
                flat = torch.view_as_real(flat).view(-1)
                size = 8
            stride = max(1, min(flat.numel() // _SAMPLES, _STRIDE_BYTES // size))
            groups.setdefault((tensor.device, size), []).append(flat.view(_BITS[size])[::stride])
        self._groups = list(groups.values())

    def take(self) -> list[Tensor]:
        """The samples now, one small tensor per device and element size."""
        return [torch.cat(group) for group in self._groups]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two readings agree, bit by bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
