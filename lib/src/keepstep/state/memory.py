"""Whether a tensor has bytes of its own to be copied."""

from __future__ import annotations

from torch import Tensor

from keepstep.errors import UsageError


def has_memory(tensor: Tensor) -> bool:
    """Whether all elements lie in memory of the tensor's own: not those of a wrapper around other
    tensors, nor of a storage that was made smaller."""
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
    """Raises UsageError that names a tensor without memory: reading it would end the process."""
    if not has_memory(tensor):
        raise UsageError(
            f"{name}: this tensor has no memory of its own for its {tensor.numel()} elements (a"
            " zero tensor, or its storage was resized); keep a clone() of its values"
        )
