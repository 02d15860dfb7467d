"""Checks whether a tensor has memory of its own that can be copied."""

from __future__ import annotations

from torch import Tensor

from keepstep.errors import UsageError


def has_memory(tensor: Tensor) -> bool:
    """Whether all elements lie in memory of the tensor's own.

    They do not for a wrapper around other tensors, or if the storage was made smaller.
    """
    count = tensor.numel()
    if not count:
        return True
    last = tensor.storage_offset()
    if tensor.is_contiguous():
        last += count - 1
    else:
        last += sum((a - 1) * b for a, b in zip(tensor.shape, tensor.stride(), strict=True))
    enough = (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
    return enough and tensor.data_ptr() != 0


def check_memory(tensor: Tensor, name: str) -> None:
    """Raise UsageError, naming the tensor, if it has no memory: reading it would end the
    process.
    """
    if not has_memory(tensor):
        raise UsageError(
            f"{name}: this tensor has no memory of its own for its {tensor.numel()} elements (a"
            " zero tensor, or its storage was resized); keep a clone() of its values"
        )
