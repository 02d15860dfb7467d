"""Accelerators as a state meets them: which can be kept, what they are called, their generators.

torch's generic interface (`torch.accelerator`, the module of a device type) answers for all kinds;
"cuda" is ROCm's name, too. How work on one is ordered is `keepstep.save.accelerator`'s.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from keepstep.errors import UsageError


def kind() -> str:
    """The type of the accelerator that torch has here, "cuda" for example; "" where none is."""
    if not torch.accelerator.is_available():
        return ""
    device = torch.accelerator.current_accelerator()
    return "" if device is None else device.type


def module(kind: str) -> Any:
    """`torch.cuda`, `torch.xpu` and so on. Raises RuntimeError for what torch does not know."""
    return torch.get_device_module(kind)


def kind_in_use() -> str:
    """The same, once this process has used it: asking must not be what initialises a device."""
    found = kind()
    return found if found and module(found).is_initialized() else ""


def check_device(device: torch.device, name: str) -> None:
    """Raises UsageError that names a tensor on a device from which nothing can be kept."""
    if device.type != "cpu" and (why := _why_not(device.type)):
        raise UsageError(
            f"{name}: tensors on {device.type!r} cannot be kept: {why}; train on CUDA, ROCm or XPU,"
            " or keep copies on the CPU (a dict of tensor.cpu(), made anew before each save)"
        )


@functools.cache
def _why_not(kind_of_tensor: str) -> str:
    """Empty for an accelerator with what a copy beside the training needs: streams, events, and
    host memory that can be pinned."""
    if kind_of_tensor == "mps":
        return "it has one stream, and no host memory that another process shares can be pinned"
    if kind_of_tensor != kind():
        return f"torch's accelerator here is {kind() or 'none'}"
    try:
        torch.Stream(kind_of_tensor)
        torch.Event(kind_of_tensor)
        torch.empty(1, pin_memory=True)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"torch has no streams, events or pinned memory for it ({error})"
    return ""


# --- names: what the header of an image says of where a tensor lay ---------------------------


def device_name(device: torch.device) -> str:
    """The process's own device has no number: that may be another one in the next life."""
    own = device.type != "cpu" and device.type == kind()
    return (
        device.type
        if own and device.index == module(device.type).current_device()
        else (str(device))
    )


def device_of(name: str | None) -> torch.device:
    """Inverse of `device_name`, as near as this machine comes; the CPU where nothing is known."""
    here = kind()
    if name is None or not here or name.partition(":")[0] != here:
        return torch.device("cpu")
    device = torch.device(name)
    if device.index is None or device.index >= module(here).device_count():
        return torch.device(here, module(here).current_device())
    return device


# --- generators --------------------------------------------------------------------------------


def generator_states() -> dict[str, list[bytes]]:
    """By kind, of every device that this process sees: a model may lie on several, each with a
    generator of its own. Empty where no accelerator is in use."""
    if not (found := kind_in_use()):
        return {}
    devices = module(found)
    count = range(devices.device_count())
    return {found: [bytes(devices.get_rng_state(at).tolist()) for at in count]}


def set_generator(kind: str, state: torch.Tensor, at: int | None = None) -> None:
    """Of one device; None: the current one."""
    if at is None:
        module(kind).set_rng_state(state)
    else:
        module(kind).set_rng_state(state, at)
